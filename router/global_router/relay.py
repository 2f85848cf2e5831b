"""The path of a request through the global router: read, choose a pool, pass its answer on, and go on elsewhere.

The pool's router makes the text and finds its end. Here a message of its session is taken apart only into its entries,
one a request, however many tokens each has; they are joined again with those of other pools.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quartet.api.answer import AnswerSink
from quartet.api.request import (
    Accepted,
    ChoiceFinished,
    ChoicePlacement,
    Relayed,
    Resume,
    TimeBreakdown,
    Usage,
)
from quartet.api.session_client import SessionCall
from quartet.api.shown import ShownChoice
from quartet.engine.base import FinishReason
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import ModelUnavailableError, RequestCancelledError, ServingError
from quartet.text.parsed import Parsed
from router.context import RouterContext
from router.generate import GenerateRun
from router.global_router.choosing import Namer, PoolChooser, Tries, left_s, prepare_to_relay
from router.global_router.pools import Chosen, Pool
from router.policy.base import Placement
from router.prepare import RouterRequest
from router.request_trace import RelayTrace

# Numbers of attempts that one relay leaves for those that the pool's router makes.
_ATTEMPTS_OF_A_RELAY = 1000
# A pool that works ends what is cancelled long before that.
_CANCEL_TIMEOUT_S = 1.0


@dataclass(slots=True)
class _Progress(ShownChoice):
    """What the client has of one choice. ``is_timed``: its first token was observed."""

    is_timed: bool = False


class RelayRun(GenerateRun):
    """One request, from arrival to the end of all its choices, at one pool after another."""

    def __init__(
        self,
        request: RouterRequest,
        context: RouterContext,
        chooser: PoolChooser,
        sink: AnswerSink,
        on_end: Callable[[GenerateRun], None],
        on_queued: Callable[[], None] | None = None,
    ) -> None:
        """As ``GenerateRun``; ``chooser`` says where it runs."""
        self._chooser = chooser
        self._calls: set[SessionCall] = set()
        self._progress = {choice: _Progress() for choice in request.choices}
        self._accepted_terms: Accepted | None = None
        self._num_relays = 0
        self._give_up_timer: asyncio.TimerHandle | None = None
        super().__init__(request, context, sink, on_end, on_queued, prepare=prepare_to_relay)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that its choices have given so far, without those that its client brought."""
        num_tokens = sum([len(progress.token_ids) for progress in self._progress.values()])
        return max(num_tokens - self._request.num_resumed_tokens, 0)

    def cancel(self) -> None:
        """End it early: the pool's router ends each choice. If that does not answer, each ends here."""
        self._is_cancelled = True
        if not self._calls:
            self._give_up()
            return
        for call in self._calls:
            call.cancel()
        if self._give_up_timer is None:
            self._give_up_timer = asyncio.get_running_loop().call_later(_CANCEL_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        """No pool has ended what was cancelled: each choice ends with what the client has of it."""
        if self._work is None or self._work.done():
            return
        if self._choices.is_accepted:
            for choice, progress in self._progress.items():
                if not progress.has_ended:
                    self.finish_leg(self._cancelled_end(choice, progress))
        self.cancel_work()

    def _usages(self) -> Sequence[Usage]:
        """What its choices have used so far, as far as their client has it."""
        ended = {finished.choice: finished.usage for finished in self._choices.finished}
        return [ended.get(choice) or self._usage(progress) for choice, progress in self._progress.items()]

    def _usage(self, progress: _Progress) -> Usage:
        terms = self._accepted_terms
        return Usage(
            num_prompt_tokens=len(self._request.prompt_token_ids) if terms is None else terms.num_prompt_tokens,
            num_cached_tokens=0,
            num_output_tokens=len(progress.token_ids),
            num_attempts=self._num_relays,
        )

    def _cancelled_end(self, choice: int, progress: _Progress) -> ChoiceFinished:
        time_breakdown = TimeBreakdown(total_s=time.monotonic() - self._request.arrived_at)
        return ChoiceFinished(
            choice=choice, reason=FinishReason.CANCELLED, usage=self._usage(progress), time=time_breakdown
        )

    def _forget(self, error: BaseException | None) -> None:
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
        super()._forget(error)

    async def _generate(self, request: RouterRequest) -> None:
        self._log.relayed(len(self._progress), self._usages)
        if request.resume is not None:
            self._progress[request.resume.choice].take(request.resume)
        await self._run_leg(None, Tries(), None if request.trace is None else request.trace.relays())

    async def _run_leg(self, choice: int | None, tries: Tries, trace: RelayTrace | None) -> None:
        """Run all choices, or one of them, at one pool after another until they have ended."""
        while True:
            chosen = await self._choose(choice, tries)
            try:
                await self._relay(chosen, choice, trace)
                return
            except ServingError as error:
                if trace is not None:
                    trace.failed(error)
                self._check_retry(error, chosen.serving, tries)
            if self._accepted_terms is None:
                continue
            left = [number for number, progress in self._progress.items() if not progress.has_ended]
            if choice is None and len(left) != 1:
                # From now on each goes its own way: only single choices are resumed.
                async with asyncio.TaskGroup() as group:
                    for number in left:
                        group.create_task(self._run_leg(number, tries.copy(), self._own_trace(trace)))
                return
            choice = left[0] if choice is None else choice

    def _own_trace(self, trace: RelayTrace | None) -> RelayTrace | None:
        """Of a choice that goes on alone, after a relay of all."""
        return None if trace is None or self._request.trace is None else self._request.trace.relays_alone(trace)

    async def _choose(self, choice: int | None, tries: Tries) -> Chosen:
        """Choose where all choices, or one of them, run next. Raises ``ModelUnavailableError``.

        An answer that has begun waits for pools without room if no other can take it.
        """
        num_generated = self._num_generated(choice)
        try:
            return self._chooser.choose(self._request, num_generated, tries.avoided)
        except ModelUnavailableError:
            if not (tries.refused and self._has_output):
                raise
        await self._context.sleep(tries.refusal_pause_s)
        self._check_not_cancelled()
        tries.refused.clear()
        return self._chooser.choose(self._request, num_generated, tries.failed)

    @property
    def _has_output(self) -> bool:
        """Whether the client has any tokens."""
        return any(progress.token_ids for progress in self._progress.values())

    def _num_generated(self, choice: int | None) -> int:
        """Tokens that a pool is given beside the prompt: of ``choice``, or of the one that the client resumed."""
        if choice is None:
            return max(len(progress.token_ids) for progress in self._progress.values())
        return len(self._progress[choice].token_ids)

    def _check_retry(self, error: ServingError, pool: Pool, tries: Tries) -> None:
        """Note that ``pool`` failed the request. Raises ``error`` if no other may go on."""
        self._check_not_cancelled()
        pools = self._chooser.pools
        # What its client has is lost if it ends here, so then it goes on without being told to.
        tries.note(error, pool, goes_on_if_refused=pools.retries_refused or self._has_output)
        pools.note_retry(pool)

    def _check_not_cancelled(self) -> None:
        if self._is_cancelled:
            self._give_up()  # all legs end so, not only this one
            raise asyncio.CancelledError

    async def _relay(self, chosen: Chosen, choice: int | None, trace: RelayTrace | None) -> None:
        """Run one leg at a pool. Raises ``ServingError``."""
        request, pool = self._request, chosen.serving
        self._num_relays += 1
        text_options = replace(request.start.text_options, omit_token_ids=False)
        start = replace(request.start, timeout_s=left_s(request), text_options=text_options)
        leg, resume = _Leg(self, pool.namespace, is_prefilled_elsewhere=bool(chosen.prefill)), self._resume(choice)
        terms, traceparent = (
            Relayed(request_id=request.request_id, prefill_namespaces=chosen.prefill),
            request.traceparent,
        )
        if trace is not None:
            trace.hop(pool.namespace, 0 if resume is None else resume.attempt)
            terms, traceparent = replace(terms, sent_at_unix_ns=trace.sent_at_unix_ns), trace.traceparent
        with self._chooser.pools.relaying(pool):
            call = pool.next_link().start(start, leg, resume=resume, traceparent=traceparent, relayed=terms)
            self._calls.add(call)
            if self._on_queued is not None:
                self._on_queued()
            try:
                await leg.ended
            finally:
                if trace is not None:
                    self._trace_leg(trace, call, leg)
                self._calls.discard(call)
                # Harmless after its end. Else nothing more comes, whether the pool still answers or not.
                call.drop(RequestCancelledError("the request has ended"))

    def _trace_leg(self, trace: RelayTrace, call: SessionCall, leg: _Leg) -> None:
        """A leg has ended, well or badly: the first tokens that came with it were on their way."""
        for choice, shown_at in leg.first_tokens_at.items():
            trace.reply(call.first_sent_at_unix_ns.get(choice, 0), shown_at)
        if sys.exception() is None:
            trace.phases.end()

    def _resume(self, choice: int | None) -> Resume | None:
        terms, given = self._accepted_terms, self._request.resume
        if choice is None and given is not None:
            choice = given.choice
        if choice is None or (terms is None and given is None):
            return None
        if terms is None:
            return given
        first_attempt = 0 if given is None else given.attempt
        attempt = first_attempt + _ATTEMPTS_OF_A_RELAY * self._num_relays
        return self._progress[choice].resume(choice, attempt, terms, self._request.request_id)

    # What comes from the pool.

    def accept_leg(self, accepted: Accepted) -> None:
        """A pool placed the request, or its end came before."""
        first = self._accepted_terms is None
        if accepted.choices:
            if self._request.held is not None:
                self._request.held.leave()
            self._accepted_terms = self._accepted_terms or accepted
            self._log.placement = Placement(prefill=accepted.choices[0].prefill, decode=accepted.choices[0].decode)
        if first and not self._choices.is_accepted:
            for one in accepted.choices:
                self._progress[one.choice].is_placed = True
            self._choices.accept(accepted)
        else:
            for one in accepted.choices:
                self.placed_leg(one)

    def placed_leg(self, placement: ChoicePlacement) -> None:
        """A pool placed a choice; the client learns of the first placement only."""
        progress = self._progress[placement.choice]
        if not progress.is_placed:
            progress.is_placed = True
            self._sink.placed(placement)

    def finish_leg(self, finished: ChoiceFinished) -> None:
        """A choice has ended."""
        self._progress[finished.choice].has_ended = True
        self._choices.finish(finished)

    @property
    def sink(self) -> AnswerSink:
        """Takes the answer."""
        return self._sink

    @property
    def progress(self) -> dict[int, _Progress]:
        """What the client has of each choice."""
        return self._progress

    @property
    def omits_token_ids(self) -> bool:
        """Whether the client wants text only."""
        return self._request.start.text_options.omit_token_ids

    def first_token(self, at: float) -> None:
        """A choice's first token has come."""
        request = self._request
        self._context.metrics.for_model(request.pool.key.model_name).ttft.observe(at - request.arrived_at)
        if request.trace is not None:
            request.trace.shown(at)


class _Leg:
    """Takes the answer of one pool to a request, or to one choice of it, and passes it on."""

    __slots__ = ("_add", "_namer", "_omits_token_ids", "_progress", "_run", "ended", "first_tokens_at")

    def __init__(self, run: RelayRun, namespace: str, *, is_prefilled_elsewhere: bool) -> None:
        """``ended`` is done with the pool's end, or with its error.

        ``first_tokens_at`` has, by choice, when its first token came, if that was in this leg.

        With ``is_prefilled_elsewhere`` the ranks that prefill have their names among all pools already.
        """
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._run = run
        self._namer = Namer(namespace, is_prefilled_elsewhere=is_prefilled_elsewhere)
        self._progress = run.progress
        self.first_tokens_at: dict[int, float] = {}
        self._omits_token_ids = run.omits_token_ids
        self._add = run.sink.add

    def accept(self, accepted: Accepted) -> None:
        """The first of the choices is placed."""
        self._run.accept_leg(replace(accepted, choices=tuple(map(self._namer.named, accepted.choices))))

    def placed(self, placement: ChoicePlacement) -> None:
        """One more choice is placed."""
        self._run.placed_leg(self._namer.named(placement))

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Take more of one choice; called for each entry of the pool's messages."""
        progress = self._progress[choice]
        if not progress.is_timed:
            progress.is_timed = True
            self.first_tokens_at[choice] = now = time.monotonic()
            self._run.first_token(now)
        progress.token_ids.extend(token_ids)
        if text:
            progress.num_text_bytes += len(text) if text.isascii() else len(text.encode())
        if self._omits_token_ids:
            if not (text or logprobs):
                return
            token_ids = ()
        self._add(choice, token_offset, token_ids, text, logprobs)

    def add_parsed(
        self,
        choice: int,
        token_offset: int,
        token_ids: Sequence[int],
        parsed: Parsed,
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Take reasoning and tool calls of one choice."""
        self._progress[choice].add_parsed(parsed.reasoning, parsed.tool_calls)
        self._run.sink.add_parsed(choice, token_offset, token_ids, parsed, logprobs)

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Take those of the prompt."""
        self._run.sink.add_prompt_logprobs(logprobs)

    def finish(self, finished: ChoiceFinished) -> None:
        """One choice has ended."""
        self._run.finish_leg(finished)

    def end(self, error: BaseException | None = None) -> None:
        """The pool's answer is complete, or failed."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
