"""An answer that outlives its router: another one goes on after what its caller has."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import NoReturn, TypeAlias

from quartet.api.convert.request import to_generate_start
from quartet.api.request import (
    MAX_ATTEMPT,
    Accepted,
    AnswerPart,
    ChoiceFinished,
    ChoicePlacement,
    Delta,
    GenerateStart,
    Placed,
    Resume,
    TimeBreakdown,
    Usage,
)
from quartet.api.shown import ShownChoice
from quartet.client.routers import Candidates, ClientClosedError, Router, RouterLostError, Routers
from quartet.engine.base import FinishReason
from quartet.engine.sampling import PromptLogprobs
from quartet.errors import (
    DrainingError,
    ModelUnavailableError,
    ProtocolError,
    QueueFullError,
    RateLimitedError,
    RequestTimeoutError,
    RouterUnavailableError,
    ServingError,
    WorkerUnavailableError,
)
from quartet.v1 import router_pb2

#: Seconds for which an answer waits for a router that goes on with it. One restarts within a few.
RESUME_TIMEOUT_S = 10.0

#: The longest that one may be told to wait: hours later nobody reads it.
MAX_RESUME_TIMEOUT_S = 3600.0

#: Routers that one choice may lose, the first included; then it fails. It may be why they are gone.
MAX_LOST_ROUTERS = 3

#: The router is gone, or goes. What a router itself says of a request, another one would say too.
LOST = (RouterLostError, DrainingError)

# A router that refuses with one of these may take the choice soon, and another one at once.
_PASSING = (
    RouterUnavailableError,
    DrainingError,
    ModelUnavailableError,
    WorkerUnavailableError,
    QueueFullError,
    RateLimitedError,
)

# Nobody knows how many attempts a lost router has made, or a router over several pools behind it.
_ATTEMPTS_OF_A_ROUTER = 1_000_000
_MAX_ASKED = MAX_ATTEMPT // _ATTEMPTS_OF_A_ROUTER

# Between two rounds through all routers.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0

#: Asks one router to go on with one choice. Raises ``ServingError``.
Leg: TypeAlias = "Callable[[Router, Resume], AsyncGenerator[AnswerPart, None]]"


@dataclass(slots=True)
class _Choice(ShownChoice):
    """One choice.

    Attributes:
        first_token_s: from the start to its first token; ``None``: none came.
        num_resumed: times that a router was asked to go on with it. One that was never reached was not asked.
        num_broken: routers that had begun with it and were lost.
    """

    first_token_s: float | None = None
    num_resumed: int = 0
    num_broken: int = 0


class AnswerSoFar:
    """What the caller of one request has.

    Attributes:
        is_begun: something came.
        lost_routers: ``host:port`` of the routers that were lost meanwhile.
    """

    def __init__(self, start: GenerateStart) -> None:
        """Nothing came yet."""
        self.is_begun = False
        self.lost_routers: tuple[str, ...] = ()
        self._started_at = time.monotonic()
        self._timeout_s = start.timeout_s
        self._omits_token_ids = start.text_options.omit_token_ids
        self._accepted: Accepted | None = None
        self._has_prompt_logprobs = False
        self._choices = [_Choice() for _ in range(start.num_choices)]

    def start(self) -> None:
        """The request is sent: its time runs from now on."""
        self._started_at = time.monotonic()

    @property
    def is_accepted(self) -> bool:
        """Whether it can be resumed: a router has named it."""
        return self._accepted is not None

    def num_tokens(self, choice: int) -> int:
        """Tokens of a choice that the caller has."""
        return len(self._choices[choice].token_ids)

    @property
    def open_choices(self) -> Sequence[int]:
        """Choices that have not ended."""
        return [number for number, choice in enumerate(self._choices) if not choice.has_ended]

    def has_ended(self, choice: int) -> bool:
        """Whether the caller has the end of a choice."""
        return self._choices[choice].has_ended

    def time_left_s(self) -> float | None:
        """Of the request's time; ``None``: it has no limit. Raises ``RequestTimeoutError``."""
        if self._timeout_s is None:
            return None
        left_s = self._started_at + self._timeout_s - time.monotonic()
        if left_s <= 0:
            raise RequestTimeoutError(f"the request did not end within {self._timeout_s:g} s")
        return left_s

    def take(self, part: AnswerPart) -> bool:
        """Take one more part; returns whether the caller gets it. Raises ``ProtocolError``: of no choice."""
        self.is_begun = True
        if type(part) is not Delta:
            self._take_rare(part)
            return True
        try:
            shown = self._choices[part.choice]
        except IndexError:
            raise self._no_choice(part.choice) from None
        token_ids, text = part.token_ids, part.text
        if token_ids:
            if not shown.token_ids:
                shown.first_token_s = time.monotonic() - self._started_at
            shown.token_ids.extend(token_ids)
        if text:
            shown.num_text_bytes += len(text) if text.isascii() else len(text.encode())
        if part.reasoning or part.tool_calls:
            shown.add_parsed(part.reasoning, part.tool_calls)
        if self._omits_token_ids:
            part.token_ids = ()
            return bool(text or part.logprobs or part.reasoning or part.tool_calls)
        return True

    def resume(self, choice: int) -> Resume:
        """How a router goes on with ``choice``: another attempt than those that were ``asked``."""
        assert self._accepted is not None, "a router has named it"
        shown = self._choices[choice]
        attempt = _ATTEMPTS_OF_A_ROUTER * (shown.num_resumed + 1)
        return shown.resume(choice, attempt, self._accepted, self._accepted.request_id)

    def can_resume(self, choice: int) -> bool:
        """Whether there is a number left for another attempt."""
        return self._choices[choice].num_resumed < _MAX_ASKED

    def asked(self, choice: int) -> None:
        """A router may have got what ``resume`` gave."""
        self._choices[choice].num_resumed += 1

    def take_resumed(self, part: AnswerPart, resume: Resume) -> AnswerPart | None:
        """Take a part of a choice's ``resume``; returns what the caller gets of it. Raises ``ProtocolError``."""
        match part:
            case Accepted():
                placements = [placement for placement in part.choices if placement.choice == resume.choice]
                return self._place(placements[0]) if placements else None
            case Placed():
                return self._place(part.placement)
            case PromptLogprobs():
                if self._has_prompt_logprobs:
                    return None
            case Delta() | ChoiceFinished():
                self._check(part, resume)
        if not self.take(part):
            return None
        return self._mended(part, resume) if isinstance(part, ChoiceFinished) else part

    def lose(self, router: Router, choices: Sequence[int]) -> None:
        """``router``, which had begun with ``choices``, is lost."""
        self.lost_routers = tuple(dict.fromkeys((*self.lost_routers, router.address)))
        for number in choices:
            self._choices[number].num_broken += 1

    def cancelled(self, choice: int) -> ChoiceFinished:
        """The end of a choice that was cancelled while no router had it."""
        assert self._accepted is not None, "a router has named it"
        shown = self._choices[choice]
        shown.has_ended = True
        usage = Usage(
            num_prompt_tokens=self._accepted.num_prompt_tokens,
            num_cached_tokens=0,
            num_output_tokens=len(shown.token_ids),
            num_attempts=shown.num_broken,
        )
        times = TimeBreakdown(first_token_s=shown.first_token_s, total_s=time.monotonic() - self._started_at)
        return ChoiceFinished(choice=choice, reason=FinishReason.CANCELLED, usage=usage, time=times)

    def _choice(self, number: int) -> _Choice:
        if number >= len(self._choices):
            raise self._no_choice(number)
        return self._choices[number]

    def _no_choice(self, number: int) -> ProtocolError:
        return ProtocolError(f"the router answered for choice {number} of {len(self._choices)}")

    def _take_rare(self, part: AnswerPart) -> None:
        match part:
            case Accepted():
                self._accepted = part
                for placement in part.choices:
                    self._choice(placement.choice).is_placed = True
            case Placed():
                self._choice(part.placement.choice).is_placed = True
            case PromptLogprobs():
                self._has_prompt_logprobs = True
            case ChoiceFinished():
                self._choice(part.choice).has_ended = True

    def _place(self, placement: ChoicePlacement) -> Placed | None:
        """The caller learns where a choice was placed at first, no more."""
        shown = self._choice(placement.choice)
        if shown.is_placed:
            return None
        shown.is_placed = True
        return Placed(placement=placement)

    def _check(self, part: Delta | ChoiceFinished, resume: Resume) -> None:
        num_tokens = len(self._choices[resume.choice].token_ids)
        if part.choice != resume.choice:
            raise ProtocolError(f"the router went on with choice {part.choice}, not {resume.choice}")
        if isinstance(part, Delta) and part.token_ids and part.token_offset != num_tokens:
            raise ProtocolError(f"the router went on with token {part.token_offset}, not {num_tokens}")

    def _mended(self, finished: ChoiceFinished, resume: Resume) -> ChoiceFinished:
        """``finished`` with what its router could not know: it saw only its own part of the answer."""
        shown, usage, times = self._choices[resume.choice], finished.usage, finished.time
        usage.num_attempts = max(usage.num_attempts - resume.attempt, 0) + shown.num_broken
        usage.num_output_tokens = max(usage.num_output_tokens, len(shown.token_ids))
        times.total_s = time.monotonic() - self._started_at
        if shown.first_token_s is not None:
            times.first_token_s = shown.first_token_s
        return finished


def to_resumable_start(start: GenerateStart, resume_timeout_s: float) -> router_pb2.GenerateStart:
    """The message of ``start``: token ids that its caller does not want come too, since it takes them to resume it.

    Raises:
        InvalidRequestError: a field that no message can hold.
    """
    if start.text_options.omit_token_ids and resume_timeout_s:
        start = replace(start, text_options=replace(start.text_options, omit_token_ids=False))
    return to_generate_start(start)


class Resumption:
    """Goes on with an answer at one router after another."""

    def __init__(self, routers: Routers, answer: AnswerSoFar, *, timeout_s: float) -> None:
        """The answer waits for ``timeout_s`` seconds, at most, for a router that goes on with it; 0: it never does."""
        self._routers = routers
        self._answer = answer
        self._timeout_s = timeout_s
        self._cancelled = asyncio.Event()
        self._waits: set[asyncio.Timeout] = set()

    def cancel(self) -> None:
        """Choices that no router has end here."""
        self._cancelled.set()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())

    async def parts(self, leg: Leg, router: Router, error: ServingError) -> AsyncGenerator[AnswerPart, None]:
        """The rest, by ``leg``, of the answer that ``router`` began and broke with ``error``.

        Raises:
            ServingError: ``error``, if it can't be resumed, or why no other router goes on.
        """
        if not (self._answer.is_accepted and self._timeout_s and isinstance(error, LOST)):
            raise error
        self._routers.avoid(router)
        choices = self._answer.open_choices
        if not choices:  # it was lost between the last choice's end and its own
            return
        self._answer.lose(router, choices)
        parts = self._merged(leg, choices, error) if len(choices) > 1 else self._parts_of(leg, choices[0], error)
        async with aclosing(parts):
            async for part in parts:
                yield part

    async def _merged(self, leg: Leg, choices: Sequence[int], error: ServingError) -> AsyncGenerator[AnswerPart, None]:
        """The parts of several choices as they come: from now on each goes its own way, as only single ones resume."""
        sources = [self._parts_of(leg, choice, error) for choice in choices]
        next_parts = {asyncio.ensure_future(anext(source, None)): source for source in sources}
        try:
            while next_parts:
                done, _ = await asyncio.wait(next_parts, return_when=asyncio.FIRST_COMPLETED)
                for next_part in done:
                    source = next_parts.pop(next_part)
                    if (part := next_part.result()) is not None:
                        yield part
                        next_parts[asyncio.ensure_future(anext(source, None))] = source
        finally:
            for next_part in next_parts:
                next_part.cancel()
            await asyncio.gather(*next_parts, return_exceptions=True)
            for source in sources:
                await source.aclose()

    async def _parts_of(self, leg: Leg, choice: int, error: ServingError) -> AsyncGenerator[AnswerPart, None]:
        answer, tries, candidates = self._answer, Tries(self._timeout_s), self._routers.candidates()
        tries.lost(error, answer.num_tokens(choice))
        while not self._cancelled.is_set():
            if (router := await self._reach(candidates, tries)) is None:
                await self._pause(tries)
                candidates = self._routers.candidates()
                continue
            if not answer.can_resume(choice):
                tries.give_up()
            end, resume = _LegEnd(is_reached=router.is_connected), answer.resume(choice)
            async with aclosing(self._parts_at(leg(router, resume), resume, end)) as parts:
                async for part in parts:
                    yield part
            if end.may_have_asked(router):
                answer.asked(choice)
            if end.error is None or answer.has_ended(choice):
                return
            tries.failed(end.error)
            if end.is_begun:
                answer.lose(router, [choice])
                candidates = self._routers.candidates()
            if end.is_loss(router):
                self._routers.avoid(router)
                tries.lost(end.error, answer.num_tokens(choice))
        yield answer.cancelled(choice)

    async def _reach(self, candidates: Candidates, tries: Tries) -> Router | None:
        """The next router that can be asked; ``None``: each was, or the choice is cancelled.

        Raises ``ServingError``: the choice's time is up, or the request's, or the client was closed.
        """
        router: Router | None = None
        try:
            async with self._in_time(tries):
                async for router in candidates:
                    try:
                        await router.connect()
                    except ClientClosedError:
                        raise
                    except RouterUnavailableError as error:
                        tries.failed(error)
                    else:
                        return router
        except TimeoutError:
            if not self._cancelled.is_set():
                self._answer.time_left_s()
                if router is not None:
                    tries.failed(RouterUnavailableError(f"no router answers at {router.address} in time"))
                tries.give_up()
        return None

    @asynccontextmanager
    async def _in_time(self, tries: Tries) -> AsyncIterator[None]:
        """End what waits within once time is up, or at a cancel. Raises ``TimeoutError``; ``RequestTimeoutError``."""
        left_s, request_left_s = tries.left_s, self._answer.time_left_s()
        if request_left_s is not None:
            left_s = min(left_s, request_left_s)
        async with asyncio.timeout(left_s) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    async def _parts_at(
        self, parts: AsyncGenerator[AnswerPart, None], resume: Resume, end: _LegEnd
    ) -> AsyncGenerator[AnswerPart, None]:
        """What a router goes on with, of its ``parts``; ``end`` has its error, unless no other could do better."""
        try:
            async with aclosing(parts):
                async for part in parts:
                    end.is_begun = True
                    if (shown := self._answer.take_resumed(part, resume)) is not None:
                        yield shown
        except ClientClosedError:
            raise
        except _PASSING as error:
            if end.is_begun and not isinstance(error, LOST):
                raise
            end.error = error

    async def _pause(self, tries: Tries) -> None:
        if self._cancelled.is_set():
            return
        seconds, left_s = tries.pause_s(), self._answer.time_left_s()
        if left_s is not None:
            seconds = min(seconds, left_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._cancelled.wait()


@dataclass(slots=True)
class _LegEnd:
    """How one router ended its part of a choice.

    Attributes:
        is_reached: there was a connection to it.
        error: ``None``: with the end of the choice.
        is_begun: it had given something.
    """

    is_reached: bool
    error: ServingError | None = None
    is_begun: bool = False

    def may_have_asked(self, router: Router) -> bool:
        """Whether the choice may have got to ``router``."""
        return self.is_reached or self.is_begun or router.is_connected or not isinstance(self.error, RouterLostError)

    def is_loss(self, router: Router) -> bool:
        """Whether the choice may be why ``router`` is gone."""
        # Where a proxy says that it has no router, the connection stays.
        is_gone = self.is_reached and isinstance(self.error, RouterLostError) and not router.is_connected
        return self.is_begun or is_gone


class Tries:
    """What one choice has tried since it was lost."""

    def __init__(self, timeout_s: float) -> None:
        """It is given up ``timeout_s`` seconds after the last loss."""
        self._timeout_s = timeout_s
        self._num_lost = self._num_pauses = self._num_tokens = 0
        self._give_up_at = 0.0
        self._loss: ServingError | None = None
        self._error: ServingError | None = None

    def lost(self, error: ServingError, num_tokens: int) -> None:
        """One more router is lost, or drains; the choice has so many tokens. The time to find another begins.

        Raises ``error`` if enough are.
        """
        # A drain is no failure, unless it is all that a router ever does.
        is_failure = not isinstance(error, DrainingError) or num_tokens == self._num_tokens
        self._num_lost += is_failure
        if self._num_lost >= MAX_LOST_ROUTERS:
            raise error
        self._loss = self._error = error
        self._num_tokens, self._num_pauses = num_tokens, 0
        self._give_up_at = time.monotonic() + self._timeout_s

    def failed(self, error: ServingError) -> None:
        """A router could not be reached, or refused with ``error``."""
        self._error = error

    @property
    def left_s(self) -> float:
        """Seconds until it is given up; below 0: it should be."""
        return self._give_up_at - time.monotonic()

    def pause_s(self) -> float:
        """Seconds until the next round. Raises what the last one ended with if time is up."""
        # All that one router ran are lost, or refused, at the same time: let them not ask at the same time.
        pause_s = min(_FIRST_PAUSE_S * 2.0**self._num_pauses, _MAX_PAUSE_S) * random.uniform(0.5, 1.0)
        if self._error is not None and self._error.retry_delay_s is not None:
            pause_s += self._error.retry_delay_s
        self._num_pauses += 1
        if pause_s > self.left_s:
            self.give_up()
        return pause_s

    def give_up(self) -> NoReturn:
        """Raise why no router goes on."""
        assert self._loss is not None and self._error is not None, "something was lost"
        if self._error is not self._loss and isinstance(self._error, RouterUnavailableError):
            message = f"{self._loss.message}; since then {self._error.message}"
            raise RouterUnavailableError(message) from self._error
        raise self._error
