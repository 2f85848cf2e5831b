"""The calls of a global router's clients: what a router does at workers, done at pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from quartet.api.answer import AnswerSink
from quartet.api.fleet import Explanation, RankOption
from quartet.api.placement import PlacedChoice, PlacedRequest
from quartet.api.request import AskedStart, ChoiceFinished, Relayed, Usage
from quartet.discovery.base import Rank, Role
from quartet.errors import ServingError
from router.context import RouterContext
from router.explain import explain_logged
from router.fair_queue import Standing
from router.generate import GenerateRun, Pipeline, PlaceCall
from router.global_router.choosing import Namer, PoolChooser, Tries, left_s, prepare_to_relay
from router.global_router.config import GlobalRouterConfig
from router.global_router.grid import PoolChoice
from router.global_router.pools import Chosen, Pools, rank_within
from router.global_router.relay import RelayRun
from router.media.request import UNARY_COPIES
from router.policy.base import Placement
from router.prepare import RouterRequest, run_prepared
from router.request_log import RequestLog
from router.request_trace import RelayTrace

_POLICY = "grid"
_ROLES = {"agg": Role.DECODE, "decode": Role.DECODE, "prefill": Role.PREFILL}


class RelayPipeline(Pipeline):
    """Runs requests at pools."""

    def __init__(self, context: RouterContext, pools: Pools, config: GlobalRouterConfig) -> None:
        """Start without requests."""
        super().__init__(context)
        self._chooser = PoolChooser(pools, config)

    @property
    def pools(self) -> Pools:
        """The pools."""
        return self._chooser.pools

    def _make_run(self, request: RouterRequest, sink: AnswerSink, on_queued: Callable[[], None] | None) -> GenerateRun:
        return RelayRun(request, self.context, self._chooser, sink, self._running.discard, on_queued)

    def _make_place(self, request: RouterRequest) -> PlaceCall:
        return RelayPlace(request, self.context, self._chooser)

    async def explain(self, start: AskedStart) -> Explanation:
        """The pool that would get the request, why not others, and where that pool's router would place it."""

        async def run(request: RouterRequest, standing: Standing) -> Explanation:
            tries = Tries()
            while True:
                chosen = await self._explain_turns.run(
                    standing, lambda: self._chooser.choose(request, failed=tries.avoided)
                )
                try:
                    return await self._explain_at(chosen, request)
                except ServingError as error:
                    # One that has no time to explain would get the request all the same.
                    tries.note(error, chosen.serving, goes_on_if_refused=False)

        return await explain_logged(start, self.context, run, prepare=prepare_to_relay)

    async def _explain_at(self, chosen: Chosen, request: RouterRequest) -> Explanation:
        options = [option for kind, choice in chosen.choices.items() for option in self._explain_pools(kind, choice)]
        inner = await chosen.serving.next_link().explain(request.start, timeout_s=left_s(request))
        namespace = chosen.serving.namespace
        workers = [replace(option, rank=rank_within(namespace, option.rank)) for option in inner.options]
        return replace(inner, policy=f"{_POLICY}, then {inner.policy}", options=(*options, *workers))

    def _explain_pools(self, kind: str, choice: PoolChoice) -> list[RankOption]:
        names = self.pools.namespaces(kind)
        return [
            RankOption(
                rank=Rank(names[option.pool]),
                role=_ROLES[kind],
                is_chosen=option.is_chosen,
                reason=option.why,
            )
            for option in choice.options
        ]


class RelayPlace:
    """One call of Place: a pool's router places the request, and its client streams from that pool's workers."""

    def __init__(self, request: RouterRequest, context: RouterContext, chooser: PoolChooser) -> None:
        """Prepare the call; ``run`` runs it."""
        self._request = request
        self._context = context
        self._chooser = chooser
        self._log = RequestLog(request, context.metrics, path="place", usage=context.usage)
        self._task: asyncio.Task[object] | None = None
        self._abort_error: ServingError | None = None
        self._usages: Sequence[Usage] = ()

    def abort(self, error: ServingError) -> None:
        """End it with ``error``."""
        self._abort_error = error
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> PlacedRequest:
        """Have a pool place every choice; if it can't, the next one. What one has placed expires if nobody takes it up.

        Raises:
            ServingError: no pool places it, or the request is impossible.
        """
        self._task = asyncio.current_task()
        if self._request.trace is not None:
            self._request.trace.name_in_logs()
        try:
            placed = await run_prepared(
                self._request,
                self._context,
                self._place,
                late="was not placed",
                num_copies=UNARY_COPIES,
                prepare=prepare_to_relay,
            )
        except BaseException as error:
            shown = self._abort_error or error
            self._log.write((), shown)
            if shown is error:
                del shown  # its frames know this one
                raise
            raise shown from error
        finally:
            self._task = None  # its error's frames know this
            self._request.forget_prompt()
        finished = [choice.next for choice in placed.choices if isinstance(choice.next, ChoiceFinished)]
        self._log.write(finished, num_given_to_client=len(placed.choices) - len(finished))
        return placed

    async def _place(self, request: RouterRequest) -> PlacedRequest:
        self._log.relayed(len(request.choices), lambda: self._usages)
        num_generated = 0 if request.resume is None else len(request.resume.generated_token_ids)
        pools, tries = self._chooser.pools, Tries()
        trace = None if request.trace is None else request.trace.relays()
        while True:
            chosen = self._chooser.choose(request, num_generated, tries.avoided)
            try:
                return await self._place_at(chosen, request, trace)
            except ServingError as error:
                if trace is not None:
                    trace.failed(error)
                tries.note(error, chosen.serving, goes_on_if_refused=pools.retries_refused)
            pools.note_retry(chosen.serving)

    async def _place_at(self, chosen: Chosen, request: RouterRequest, trace: RelayTrace | None) -> PlacedRequest:
        terms = Relayed(request_id=request.request_id, prefill_namespaces=chosen.prefill)
        traceparent = request.traceparent
        if trace is not None:
            trace.hop(chosen.serving.namespace, 0 if request.resume is None else request.resume.attempt)
            terms, traceparent = replace(terms, sent_at_unix_ns=trace.sent_at_unix_ns), trace.traceparent
        link, timeout_s = chosen.serving.next_link(), left_s(request)
        with self._chooser.pools.relaying(chosen.serving):
            placed = await link.place(
                request.start, request.resume, terms, traceparent=traceparent, timeout_s=timeout_s
            )
        if trace is not None and request.trace is not None:
            trace.phases.end()
            if any(choice.token_ids for choice in placed.choices):
                trace.reply(placed.sent_at_unix_ns, trace.phases.ended_at)
                request.trace.shown(trace.phases.ended_at)
        namer = Namer(chosen.serving.namespace, is_prefilled_elsewhere=bool(chosen.prefill))
        placed = replace(placed, choices=tuple(map(namer.placed, placed.choices)))
        self._usages = [_usage(placed, choice, request.num_resumed_tokens) for choice in placed.choices]
        first = placed.choices[0].placement
        if first is not None:
            self._log.placement = Placement(prefill=first.prefill, decode=first.decode)
        return placed


def _usage(placed: PlacedRequest, choice: PlacedChoice, num_resumed_tokens: int) -> Usage:
    """What a choice has used until its client took it."""
    return Usage(
        num_prompt_tokens=placed.num_prompt_tokens,
        num_cached_tokens=choice.num_cached_tokens,
        num_output_tokens=num_resumed_tokens + len(choice.token_ids),
        num_attempts=choice.num_attempts,
    )
