"""A request placed by a router, whose tokens come straight from the decode worker."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from quartet import errors
from quartet.api.answer import Answer
from quartet.api.chat import ChatPrompt
from quartet.api.convert.answer import from_place_response, to_place_request
from quartet.api.convert.request import to_generate_start
from quartet.api.output import ChoiceOutput, OutputSettings, RunningChoices, make_outputs
from quartet.api.placement import PlacedChoice, PlacedRequest
from quartet.api.request import (
    Accepted,
    AnswerPart,
    ChoiceFinished,
    Delta,
    GenerateStart,
    Placed,
    Resume,
)
from quartet.api.text_cache import TextCache
from quartet.client.generate import GenerateRequest
from quartet.client.request import check_size, trace_metadata
from quartet.client.resume import RESUME_TIMEOUT_S
from quartet.client.routers import DEADLINE_GRACE_S, MAX_UNREAD, ClientClosedError, Router, Routers
from quartet.client.workers import DecodeWorkers
from quartet.engine.base import FinishReason
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import ServingError
from quartet.rpc.channels import TlsConfig
from quartet.streams import client
from quartet.streams.client import outcome_in_time
from quartet.streams.messages import DecodeStarted, SignedPlacement
from quartet.text.model_text import ModelText
from quartet.text.parsed import OutputParsing, Parsed


class DirectRequest:
    """One request by ``Place`` and ``Decode``; see ``ClientRequest``."""

    def __init__(self, tools: DirectTools, start: GenerateStart, traceparent: str = "") -> None:
        """Raises ``InvalidRequestError``: a field that its message can't hold."""
        check_size(start, to_generate_start(start))
        self._tools = tools
        self._start = start
        self._traceparent = traceparent
        self._placer = Placer(tools, start, traceparent)
        self._by_router: GenerateRequest | None = None
        self._answer = Answer(max_unread=MAX_UNREAD)
        self._work: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._choices = self._make_choices()

    @property
    def router(self) -> str | None:
        """``host:port`` of the router that last placed it."""
        return self._placer.router if self._by_router is None else self._by_router.router

    @property
    def lost_routers(self) -> Sequence[str]:
        """None, where its tokens come from workers: then a router's end does not break it."""
        return () if self._by_router is None else self._by_router.lost_routers

    async def cancel(self) -> None:
        """Ask for an early end."""
        self._is_cancelled = True
        if self._by_router is not None:
            await self._by_router.cancel()
        elif self._work is not None:
            self._work.cancel()

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Send the request and yield its answer. Raises ``ServingError``."""
        self._placer = Placer(self._tools, self._start, self._traceparent)
        self._choices = self._make_choices()
        work = self._work = asyncio.create_task(self._run(), name="direct request")
        work.add_done_callback(self._settle)
        if self._is_cancelled:
            work.cancel()
        try:
            while (parts := self._answer.take()) is not None:
                for part in parts:
                    yield part
                if not parts:
                    await self._answer.more()
        finally:
            work.cancel()
            await asyncio.wait([work])

    def _make_choices(self) -> RunningChoices:
        return RunningChoices(range(self._start.num_choices), self._answer, self._placer.arrived_at)

    def _settle(self, work: asyncio.Task[None]) -> None:
        """Report to the answer how the work ended."""
        self._choices.settle(work, cancelled=self._accept_cancelled if self._is_cancelled else None)

    async def _run(self) -> None:
        timeout_s = self._start.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._generate()
        except TimeoutError as error:
            raise errors.RequestTimeoutError(f"the request did not end within {timeout_s:g} s") from error

    async def _generate(self) -> None:
        try:
            request, text = await self._placer.place()
        except (errors.MessageTooLargeError, errors.PlaceTooLargeError, NoTextError):
            # Too long to be signed, no room for all choices at once, or no known worker has the tokenizer.
            await self._generate_by_router()
            return
        self._choices.accept(_accepted(request))
        self._choices.outputs = self._make_outputs(request, text)
        if len(request.choices) == 1:
            await self._run_choice(request.choices[0])
            return
        async with asyncio.TaskGroup() as group:
            for placed in request.choices:
                group.create_task(self._run_choice(placed))

    async def _generate_by_router(self) -> None:
        tools = self._tools
        self._by_router = GenerateRequest(
            tools.routers, self._start, self._traceparent, resume_timeout_s=tools.resume_timeout_s
        )
        async with contextlib.aclosing(self._by_router.parts()) as parts:
            async for part in parts:
                match part:
                    case Accepted():
                        self._choices.accept(part)
                    case Placed():
                        self._answer.placed(part.placement)
                    case Delta():
                        parsed = Parsed(part.text, part.reasoning, part.tool_calls)
                        self._answer.add_parsed(part.choice, part.token_offset, part.token_ids, parsed, part.logprobs)
                    case ChoiceFinished():
                        self._choices.finish(part)

    def _make_outputs(self, request: PlacedRequest, text: ModelText | None) -> Mapping[int, ChoiceOutput]:
        return make_outputs(
            [placed.choice for placed in request.choices],
            self._answer,
            self._start.text_options,
            None if text is None else text.tokenizer,
            request.prompt_tail_token_ids,
            OutputSettings(
                num_prompt_tokens=request.num_prompt_tokens,
                arrived_at=self._placer.arrived_at,
                tokenize_s=request.tokenize_s,
                omits_token_ids=self._start.text_options.omit_token_ids,
            ),
            None if text is None else self._parsing(request, text),
        )

    def _parsing(self, request: PlacedRequest, text: ModelText) -> OutputParsing | None:
        """How the answer is parsed, as the router says."""
        placed, prompt = request.parsing, self._start.prompt
        if placed is None or not isinstance(prompt, ChatPrompt):
            return None
        try:
            format = text.output_format(placed.reasoning_parser, placed.tool_call_parser)
        except errors.ConfigError as error:
            message = f"this client can't parse the answer: {error}; text_options.raw_text leaves it as it is"
            raise errors.UnsupportedFieldError(message, field="chat") from error
        return OutputParsing(
            format=format,
            request_id=request.request_id,
            prompt_end=placed.prompt_end,
            tools={tool.name: tool.parameters.value("chat.tools") for tool in prompt.shown_tools},
            streams_arguments=self._start.text_options.stream_tool_arguments,
            allows_parallel_calls=prompt.parallel_tool_calls,
        )

    async def _run_choice(self, placed: PlacedChoice) -> None:
        place_again = partial(self._placer.place_again, placed.choice)
        choice = DirectChoice(self._choices.outputs[placed.choice], self._tools.workers, place_again)
        self._choices.finish(await choice.run(placed))

    def _accept_cancelled(self) -> Accepted:
        """The ``Accepted`` of a request that was cancelled before a router placed it, so no router has named it."""
        return Accepted(request_id=secrets.token_hex(16), choices=(), num_prompt_tokens=0, seed=self._start.seed or 0)


def _accepted(request: PlacedRequest) -> Accepted:
    return Accepted(
        request_id=request.request_id,
        choices=tuple(placed.placement for placed in request.choices if placed.placement is not None),
        num_prompt_tokens=request.num_prompt_tokens,
        seed=request.seed,
        model_fingerprint=request.model_fingerprint,
    )


# One choice of a direct request: workers decode it one after the other, until one ends it.

# As for a router: the worker's queue and the transfer come before its first message.
_START_TIMEOUT_S = 120.0

_STALL_TIMEOUT_S = 60.0

#: Asks a router to place a choice again, given the tokens that it has.
PlaceAgain = Callable[[Sequence[int]], Awaitable[PlacedChoice]]


class DirectChoice:
    """Runs one choice. However ``run`` ends, it leaves nothing at a worker."""

    def __init__(self, output: ChoiceOutput, workers: DecodeWorkers, place_again: PlaceAgain) -> None:
        """``output`` takes the choice's tokens."""
        self._output = output
        self._workers = workers
        self._place_again = place_again
        self._retries = Retries()

    async def run(self, placed: PlacedChoice) -> ChoiceFinished:
        """Generate from ``placed`` to the end.

        Raises:
            ServingError: the last attempt's error, or the router's if no router placed the choice again.
        """
        while True:
            try:
                return self._output.finish(await self._attempt(placed))
            except _AttemptFailedError as failure:
                await asyncio.sleep(self._retries.note(failure.error))
            placed = await self._next_placement()

    async def _next_placement(self) -> PlacedChoice:
        while True:
            try:
                return await self._place_again(self._output.token_ids)
            except ServingError as error:
                pause_s = self._retries.note_refusal(error)
            await asyncio.sleep(pause_s)

    async def _attempt(self, placed: PlacedChoice) -> FinishReason:
        self._note(placed)
        if isinstance(placed.next, ChoiceFinished):
            return placed.next.reason
        is_handed_off = placed.placement is not None and placed.placement.prefill is not None
        return await self._decode(placed.next, _Sink(self._output, is_handed_off=is_handed_off))

    def _note(self, placed: PlacedChoice) -> None:
        output = self._output
        output.num_attempts += placed.num_attempts
        if placed.router_queue_s is not None:
            output.add_time("router_queue_s", placed.router_queue_s)
        if placed.prefill_s is not None:
            output.add_time("prefill_s", placed.prefill_s)
            output.note_prefilled(placed.num_cached_tokens, placed.prefill_queue_s or 0.0)
        if placed.token_ids:
            output.take(len(output.token_ids), placed.token_ids, placed.logprobs, time.monotonic())

    async def _decode(self, placement: SignedPlacement, sink: _Sink) -> FinishReason:
        with self._workers.use(placement.address) as worker:
            # Also for a choice that its first token ended, so that the worker releases its hand-off.
            call = worker.decode.start_signed(placement, sink)
            try:
                if self._output.has_stopped:
                    return FinishReason.STOP_STRING
                finished = await outcome_in_time(
                    call, start_timeout_s=_START_TIMEOUT_S, stall_timeout_s=_STALL_TIMEOUT_S
                )
                if finished is not None:
                    self._output.check_count(finished.num_output_tokens)
            except TimeoutError as error:
                silent = errors.WorkerUnavailableError(f"the worker at {placement.address} gave no token in time")
                raise _AttemptFailedError(silent) from error
            except ServingError as error:
                raise _AttemptFailedError(error) from error
            finally:
                call.cancel()
        return FinishReason.STOP_STRING if finished is None else finished.reason


class _AttemptFailedError(Exception):
    """A decode worker ended an attempt with ``error``."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(str(error))
        self.error = error


class _Sink:
    """Passes the output of a decode to the choice's output."""

    def __init__(self, output: ChoiceOutput, *, is_handed_off: bool) -> None:
        self._output = output
        self._is_handed_off = is_handed_off

    def started(self, started: DecodeStarted) -> None:
        self._output.note_started(started, is_handed_off=self._is_handed_off)

    def take_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Never called: routers refuse them for placed requests."""

    def take(self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float) -> bool:
        return self._output.take(offset, token_ids, logprobs, now)


# What all direct requests of a client share.

#: Models whose text side is kept; that of a large model takes some 100 MB.
_MAX_TEXTS = 8


class DirectTools:
    """Routers to place requests, workers to stream from, and ``texts``: the text sides of their models."""

    def __init__(self, routers: Routers, tls: TlsConfig | None, *, resume_timeout_s: float = RESUME_TIMEOUT_S) -> None:
        """Dial workers with ``tls``; the caller still owns ``routers``. ``resume_timeout_s`` is for ``Generate``."""
        self.routers = routers
        self.resume_timeout_s = resume_timeout_s
        self.workers = DecodeWorkers(tls)
        self.texts: TextCache[str] = TextCache(max_texts=_MAX_TEXTS)

    async def model_text(self, fingerprint: str, addresses: Sequence[str]) -> ModelText:
        """The text side of the model: the one kept here, or from the first worker at ``addresses`` that gives it.

        Raises:
            WorkerUnavailableError: no worker gives it.
            ModelFilesError: the files are invalid.
        """
        return await self.texts.get(fingerprint, lambda: self._fetch(fingerprint, addresses))

    async def close(self) -> None:
        """End all requests at workers."""
        await self.texts.close()
        await self.workers.close()

    async def _fetch(self, fingerprint: str, addresses: Sequence[str]) -> Mapping[str, bytes]:
        failure: ServingError = errors.WorkerUnavailableError("there is no worker to ask")
        for address in dict.fromkeys(addresses):
            try:
                with self.workers.use(address) as worker:
                    return await worker.text_files(fingerprint)
            except errors.ModelFilesError:
                raise
            except ServingError as error:
                failure = error
        raise failure


# Asks routers to place a request, and to place a choice again after an attempt broke.


class NoTextError(Exception):
    """The request ended before a router chose a worker, so there is none to ask for its model's text files."""


class Placer:
    """Places one request.

    Attributes:
        router: ``host:port`` of the router that last placed it.
    """

    def __init__(self, tools: DirectTools, start: GenerateStart, traceparent: str = "") -> None:
        """The request's time runs from now on."""
        self.router: str | None = None
        self.arrived_at = time.monotonic()
        self._tools = tools
        self._start = start
        self._metadata = trace_metadata(traceparent)
        self._request: PlacedRequest | None = None
        self._attempts: dict[int, int] = {}

    async def place(self) -> tuple[PlacedRequest, ModelText | None]:
        """The placement, and the model's text side, which makes its text; ``None`` if no text is wanted.

        Raises:
            NoTextError: another path must make the text.
            ServingError: no router places it, or no worker gives the model's text files.
        """
        retries = Retries()
        while True:
            request = self._request = await self._ask(None)
            try:
                return request, await self._model_text(request)
            except asyncio.CancelledError:
                self._tools.workers.release(request.choices)
                raise
            except ServingError as error:
                failure = error
            self._tools.workers.release(request.choices)
            # The client has shown nothing yet, so the request can start over.
            await asyncio.sleep(retries.note(failure))

    async def place_again(self, choice: int, token_ids: Sequence[int]) -> PlacedChoice:
        """Place ``choice``, which has ``token_ids``, again. Raises ``ServingError``: no router places it."""
        assert self._request is not None, "it was placed before"
        # An attempt without an answer from a router counts too: a worker may still be running it.
        attempt = self._attempts[choice] = self._attempts.get(choice, self._request.attempt) + 1
        resume = Resume(
            request_id=self._request.request_id,
            attempt=attempt,
            seed=self._request.seed,
            choice=choice,
            generated_token_ids=tuple(token_ids),
            model_fingerprint=self._request.model_fingerprint,
        )
        request = await self._ask(resume)
        self._attempts[choice] = max(request.attempt, attempt)
        return request.choices[0]

    async def _ask(self, resume: Resume | None) -> PlacedRequest:
        if self._tools.workers.is_closed:
            raise ClientClosedError

        async def call(router: Router) -> PlacedRequest:
            timeout_s = self._time_left_s()
            message = to_place_request(replace(self._start, timeout_s=timeout_s), resume)
            deadline_s = None if timeout_s is None else timeout_s + DEADLINE_GRACE_S
            response = await router.stub.Place(message, timeout=deadline_s, metadata=self._metadata)
            self.router = router.address
            placed = from_place_response(response)
            if not placed.choices:
                raise errors.ProtocolError("the router placed no choice")
            return placed

        return await self._tools.routers.call(call)

    def _time_left_s(self) -> float | None:
        if self._start.timeout_s is None:
            return None
        left_s = self.arrived_at + self._start.timeout_s - time.monotonic()
        if left_s <= 0:
            raise errors.RequestTimeoutError(f"the request did not end within {self._start.timeout_s:g} s")
        return left_s

    async def _model_text(self, request: PlacedRequest) -> ModelText | None:
        if self._start.text_options.omit_text:
            return None
        fingerprint = request.model_fingerprint
        addresses = [choice.next.address for choice in request.choices if isinstance(choice.next, SignedPlacement)]
        if not addresses and self._tools.texts.known(fingerprint) is None:
            raise NoTextError
        return await self._tools.model_text(fingerprint, addresses)


# What a failed attempt of a direct request means for the next one; pure.

MAX_ATTEMPTS = 5

#: Another placement would end the same way.
_FINAL = (
    *client.FINAL,
    errors.StalledStreamError,
    errors.SignedStartError,
    errors.NoSigningKeyError,
    errors.ModelFilesError,
    ClientClosedError,
)

#: Refusals that may soon pass: the router is full or restarts, or a limit of a minute is used up.
_PASSING = (
    errors.QueueFullError,
    errors.RateLimitedError,
    errors.DrainingError,
    errors.RouterUnavailableError,
    errors.WorkerUnavailableError,
    errors.ModelUnavailableError,
)

#: Longer than between workers: a router takes seconds to restart, and often there is no other.
_FIRST_ROUTER_PAUSE_S, _MAX_ROUTER_PAUSE_S = 0.5, 5.0

#: After a worker that drains.
_MOVE_PAUSE_S = 0.02


class Retries:
    """Counts the failed attempts of one choice."""

    def __init__(self) -> None:
        """Start without failures."""
        self._num_failures = 0

    def note(self, error: ServingError) -> float:
        """Note a failure at a decode worker; returns the seconds to pause before asking for another placement.

        Raises:
            ServingError: ``error``, if another placement would fail too, or too many attempts have failed.
        """
        if isinstance(error, errors.DrainingError):
            return _MOVE_PAUSE_S  # nothing failed: the worker restarts
        self._count(error, is_final=isinstance(error, _FINAL))
        return client.pause_s(error, self._num_failures)

    def note_refusal(self, error: ServingError) -> float:
        """Note that no router placed the choice again; returns the seconds to pause before asking once more.

        Raises:
            ServingError: ``error``, if asking again would fail too, or too many attempts have failed.
        """
        self._count(error, is_final=isinstance(error, _FINAL) or not isinstance(error, _PASSING))
        pause_s = error.retry_delay_s
        if pause_s is None:
            pause_s = _FIRST_ROUTER_PAUSE_S * 2 ** (self._num_failures - 1)
        return min(pause_s, _MAX_ROUTER_PAUSE_S)

    def _count(self, error: ServingError, *, is_final: bool) -> None:
        self._num_failures += 1
        if is_final or self._num_failures >= MAX_ATTEMPTS:
            raise error
