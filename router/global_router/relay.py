"""The path of a request through the global router: read, choose a pool, pass its answer on, and go on elsewhere.

The pool's router makes the text and finds its end. Here a message of its session is taken apart only into its entries,
one a request, however many tokens each has; they are joined again with those of other pools.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from quartet.api.answer import AnswerSink
from quartet.api.fleet import Explanation, RankOption
from quartet.api.placement import PlacedChoice, PlacedRequest
from quartet.api.request import Accepted, AskedStart, ChoiceFinished, ChoicePlacement, Relayed, Resume
from quartet.api.session_client import SessionCall
from quartet.discovery.base import Rank, Role
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import (
    DrainingError,
    ModelUnavailableError,
    OutOfBlocksError,
    QueueFullError,
    RouterUnavailableError,
    ServingError,
    WorkerUnavailableError,
)
from quartet.text.parsed import Parsed
from router.context import RouterContext
from router.generate import GenerateRun, Pipeline
from router.global_router.config import GlobalRouterConfig
from router.global_router.grid import PoolChoice
from router.global_router.pools import Chosen, Pool, Pools, Wish, rank_within
from router.policy.base import Placement
from router.prepare import (
    RouterRequest,
    check_chat_of_model,
    check_pool,
    find_pool,
    max_sequence_tokens,
    num_output_tokens,
    run_prepared,
    tokenize,
)

# The pool is gone, or can't take requests now: another one may.
_LOST = (RouterUnavailableError, DrainingError, ModelUnavailableError, WorkerUnavailableError)
# The pool refused it for lack of room.
_REFUSED = (QueueFullError, OutOfBlocksError)
_MAX_ATTEMPTS = 8
# Numbers of attempts that one relay leaves for those that the pool's router makes.
_ATTEMPTS_OF_A_RELAY = 1000
_POLICY = "grid"
_ROLES = {"agg": Role.DECODE, "decode": Role.DECODE, "prefill": Role.PREFILL}


class RelayPipeline(Pipeline):
    """Runs requests at pools."""

    def __init__(self, context: RouterContext, pools: Pools, config: GlobalRouterConfig) -> None:
        """Start without requests."""
        super().__init__(context)
        self._pools = pools
        self._config = config

    def _make_run(self, request: RouterRequest, sink: AnswerSink, on_queued: Callable[[], None] | None) -> GenerateRun:
        return RelayRun(request, self, sink, self._running.discard, on_queued)

    async def place(
        self,
        start: AskedStart,
        *,
        resume: Resume | None = None,
        traceparent: str = "",
        relayed: Relayed | None = None,
    ) -> PlacedRequest:
        """Have a pool place the request. Raises ``ServingError``."""

        async def run(request: RouterRequest) -> PlacedRequest:
            chosen = self.choose(request)
            terms = Relayed(request_id=request.request_id, prefill_namespaces=chosen.prefill)
            with self._pools.relaying(chosen.serving):
                link = chosen.serving.next_link()
                placed = await link.place(request.start, request.resume, terms, timeout_s=_left_s(request))
            namer = _Namer(chosen.serving.namespace, is_prefilled_elsewhere=bool(chosen.prefill))
            return replace(placed, choices=tuple(map(namer.placed, placed.choices)))

        request = RouterRequest(start, resume, traceparent, relayed or Relayed())
        return await run_prepared(request, self.context, run, late="was not placed", prepare=prepare_to_relay)

    async def explain(self, start: AskedStart) -> Explanation:
        """The pool that would get the request, why not others, and where that pool's router would place it."""

        async def run(request: RouterRequest) -> Explanation:
            chosen = self.choose(request)
            options = [
                option for kind, choice in chosen.choices.items() for option in self._explain_pools(kind, choice)
            ]
            inner = await chosen.serving.next_link().explain(request.start, timeout_s=_left_s(request))
            namespace = chosen.serving.namespace
            workers = [replace(option, rank=rank_within(namespace, option.rank)) for option in inner.options]
            return replace(inner, policy=f"{_POLICY}, then {inner.policy}", options=(*options, *workers))

        return await run_prepared(
            RouterRequest(start), self.context, run, late="was not explained", prepare=prepare_to_relay
        )

    @property
    def pools(self) -> Pools:
        """The pools."""
        return self._pools

    def choose(self, request: RouterRequest, num_generated: int = 0, failed: set[str] | None = None) -> Chosen:
        """Choose pools for ``request``. Raises ``ModelUnavailableError``."""
        start, config = request.start, self._config
        wish = Wish(
            model=request.pool.key,
            num_tokens=len(request.prompt_token_ids) + num_generated,
            ttft_ms=config.default_ttft_target_ms if start.ttft_target_s is None else 1000 * start.ttft_target_s,
            itl_ms=config.default_itl_target_ms if start.itl_target_s is None else 1000 * start.itl_target_s,
            priority=start.priority,
        )
        return self._pools.choose(wish, failed or ())

    def _explain_pools(self, kind: str, choice: PoolChoice) -> list[RankOption]:
        names = self._pools.namespaces(kind)
        return [
            RankOption(
                rank=Rank(names[option.pool]),
                role=_ROLES[kind],
                is_chosen=option.is_chosen,
                reason=option.why,
            )
            for option in choice.options
        ]


async def prepare_to_relay(request: RouterRequest, context: RouterContext) -> None:
    """Find the request's model, and count its tokens: these decide about its pool. Its media are the pool's matter.

    Raises:
        ServingError: as it would be refused by the pool's router.
    """
    start, resume = request.start, request.resume
    pool = request.pool = find_pool(start, context.table, resume)
    check_pool(start, pool)
    text = request.text = await context.texts.model_text(pool.key)
    check_chat_of_model(start, pool, text)
    began = time.monotonic()
    token_ids = await tokenize(start, text, max_sequence_tokens(pool), context.tokenizing)
    request.tokenize_s = time.monotonic() - began
    num_output_tokens(start, len(token_ids), pool)
    request.prompt_token_ids = token_ids
    request.resume = None if resume is None else resume.read()
    # It is tokenized again where it runs: a chat's answer is parsed only of a chat.
    request.start = replace(start, model=pool.key.model_name, tenant=request.asked.tenant)


@dataclass(slots=True)
class _Progress:
    """What the client has of one choice."""

    token_ids: array[int] = field(default_factory=lambda: array("I"))
    num_text_bytes: int = 0
    num_reasoning_bytes: int = 0
    num_tool_calls: int = 0
    num_argument_bytes: int = 0
    is_placed: bool = False
    has_ended: bool = False
    is_timed: bool = False


@dataclass
class _Tried:
    """What was tried for a choice, or for all of them while they go together.

    Attributes:
        failed: namespaces of pools that are not to be asked again.
        num_lost: by namespace, how often a router of it was lost.
        num_relays: how often pools were asked in vain.
    """

    failed: set[str] = field(default_factory=set)
    num_lost: Counter[str] = field(default_factory=Counter)
    num_relays: int = 0

    def copy(self) -> _Tried:
        """For a choice that goes on alone."""
        return _Tried(set(self.failed), self.num_lost.copy(), self.num_relays)


class RelayRun(GenerateRun):
    """One request, from arrival to the end of all its choices, at one pool after another."""

    def __init__(
        self,
        request: RouterRequest,
        pipeline: RelayPipeline,
        sink: AnswerSink,
        on_end: Callable[[GenerateRun], None],
        on_queued: Callable[[], None] | None = None,
    ) -> None:
        """As ``GenerateRun``."""
        self._pipeline = pipeline
        self._calls: set[SessionCall] = set()
        self._progress = {choice: _Progress() for choice in request.choices}
        self._accepted_terms: Accepted | None = None
        self._num_relays = 0
        super().__init__(request, pipeline.context, sink, on_end, on_queued, prepare=prepare_to_relay)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that its choices have given so far."""
        return sum([len(progress.token_ids) for progress in self._progress.values()])

    def cancel(self) -> None:
        """End it early: the pool's router ends each choice."""
        if not self._calls:
            super().cancel()
            return
        self._is_cancelled = True
        for call in self._calls:
            call.cancel()

    async def _generate(self, request: RouterRequest) -> None:
        self._log.prepared((), num_relayed=len(self._progress))
        if request.resume is not None:
            self._take_resume(request.resume)
        await self._run_leg(None, _Tried())

    def _take_resume(self, resume: Resume) -> None:
        progress = self._progress[resume.choice]
        progress.token_ids.extend(resume.generated_token_ids)
        progress.num_text_bytes, progress.num_reasoning_bytes = resume.num_text_bytes, resume.num_reasoning_bytes
        progress.num_tool_calls, progress.num_argument_bytes = resume.num_tool_calls, resume.num_argument_bytes

    async def _run_leg(self, choice: int | None, tried: _Tried) -> None:
        """Run all choices, or one of them, at one pool after another until they have ended."""
        while True:
            num_generated = 0 if choice is None else len(self._progress[choice].token_ids)
            chosen = self._pipeline.choose(self._request, num_generated, tried.failed)
            try:
                await self._relay(chosen, choice)
                return
            except ServingError as error:
                self._check_retry(error, chosen.serving, tried)
            if self._accepted_terms is None:
                continue
            left = [number for number, progress in self._progress.items() if not progress.has_ended]
            if choice is None and len(left) != 1:
                # From now on each goes its own way: only single choices are resumed.
                async with asyncio.TaskGroup() as group:
                    for number in left:
                        group.create_task(self._run_leg(number, tried.copy()))
                return
            choice = left[0] if choice is None else choice

    def _check_retry(self, error: ServingError, pool: Pool, tried: _Tried) -> None:
        """Note that ``pool`` failed the request. Raises ``error`` if no other may go on."""
        if self._is_cancelled:
            self.cancel_work()  # all legs end so, not only this one
            raise asyncio.CancelledError
        has_output = any(progress.token_ids for progress in self._progress.values())
        is_lost = isinstance(error, _LOST)
        is_refused = isinstance(error, _REFUSED) and not has_output and self._pipeline.pools.retries_to_faster
        tried.num_relays += 1
        if not (is_lost or is_refused) or tried.num_relays >= _MAX_ATTEMPTS:
            raise error
        # Another router of the pool may answer where one was lost.
        tried.num_lost[pool.namespace] += 1
        if not isinstance(error, RouterUnavailableError) or tried.num_lost[pool.namespace] >= len(pool.links):
            tried.failed.add(pool.namespace)
        self._pipeline.pools.note_retry(pool)

    async def _relay(self, chosen: Chosen, choice: int | None) -> None:
        """Run one leg at a pool. Raises ``ServingError``."""
        request, pool = self._request, chosen.serving
        self._num_relays += 1
        text_options = replace(request.start.text_options, omit_token_ids=False)
        start = replace(request.start, timeout_s=_left_s(request), text_options=text_options)
        leg = _Leg(self, pool.namespace, is_prefilled_elsewhere=bool(chosen.prefill))
        with self._pipeline.pools.relaying(pool):
            call = pool.next_link().start(
                start,
                leg,
                resume=self._resume(choice),
                traceparent=request.traceparent,
                relayed=Relayed(request_id=request.request_id, prefill_namespaces=chosen.prefill),
            )
            self._calls.add(call)
            if self._on_queued is not None:
                self._on_queued()
            try:
                await leg.ended
            finally:
                self._calls.discard(call)
                call.cancel()  # harmless after its end
                leg.silence()

    def _resume(self, choice: int | None) -> Resume | None:
        terms, given = self._accepted_terms, self._request.resume
        if choice is None and given is not None:
            choice = given.choice
        if choice is None or (terms is None and given is None):
            return None
        if terms is None:
            return given
        progress = self._progress[choice]
        first_attempt = 0 if given is None else given.attempt
        return Resume(
            request_id=self._request.request_id,
            attempt=first_attempt + _ATTEMPTS_OF_A_RELAY * self._num_relays,
            seed=terms.seed,
            choice=choice,
            generated_token_ids=progress.token_ids,
            num_text_bytes=progress.num_text_bytes,
            num_reasoning_bytes=progress.num_reasoning_bytes,
            num_tool_calls=progress.num_tool_calls,
            num_argument_bytes=progress.num_argument_bytes,
            model_fingerprint=terms.model_fingerprint,
        )

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

    def observe_first_token(self) -> None:
        """A choice's first token has come."""
        metrics = self._context.metrics.for_model(self._request.pool.key.model_name)
        metrics.ttft.observe(time.monotonic() - self._request.arrived_at)


@dataclass(frozen=True)
class _Namer:
    """Gives workers of one pool the names that they have among all.

    Attributes:
        is_prefilled_elsewhere: ranks that prefill have theirs already.
    """

    namespace: str
    is_prefilled_elsewhere: bool

    def named(self, placement: ChoicePlacement) -> ChoicePlacement:
        """``placement`` with these names."""
        prefill = placement.prefill
        if prefill is not None and not self.is_prefilled_elsewhere:
            prefill = rank_within(self.namespace, prefill)
        return replace(placement, prefill=prefill, decode=rank_within(self.namespace, placement.decode))

    def placed(self, choice: PlacedChoice) -> PlacedChoice:
        """The same of a choice that is placed."""
        return choice if choice.placement is None else replace(choice, placement=self.named(choice.placement))


class _Leg:
    """Takes the answer of one pool to a request, or to one choice of it, and passes it on."""

    __slots__ = ("_add", "_namer", "_omits_token_ids", "_progress", "_run", "ended")

    def __init__(self, run: RelayRun, namespace: str, *, is_prefilled_elsewhere: bool) -> None:
        """``ended`` is done with the pool's end, or with its error.

        With ``is_prefilled_elsewhere`` the ranks that prefill have their names among all pools already.
        """
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._run = run
        self._namer = _Namer(namespace, is_prefilled_elsewhere=is_prefilled_elsewhere)
        self._progress = run.progress
        self._omits_token_ids = run.omits_token_ids
        self._add = run.sink.add

    def silence(self) -> None:
        """Nothing that still comes matters."""
        if not self.ended.done():
            self.ended.cancel()

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
            self._run.observe_first_token()
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
        progress = self._progress[choice]
        progress.num_reasoning_bytes += len(parsed.reasoning.encode())
        for call in parsed.tool_calls:
            progress.num_tool_calls = max(progress.num_tool_calls, call.index + 1)
            progress.num_argument_bytes += len(call.arguments.encode())
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


def _left_s(request: RouterRequest) -> float:
    return max(request.deadline - time.monotonic(), 0.001)
