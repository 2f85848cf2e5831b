"""Explain: runs a request as far as the policy, which says where it would place it.

That costs the router as much as a request that waits for room: the prompt is tokenized and the policy runs. So its
tokens are charged to the tenant like a request's, its files wait for memory in the line of all requests with media, the
policy runs in turn (``ExplainTurns``), and one line is logged.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from quartet.api.fleet import Explanation, RankOption, WorkerState
from quartet.api.request import AskedStart
from quartet.discovery.base import Rank, Role
from quartet.errors import QueueFullError
from quartet.supervision import vital
from quartet.telemetry.logging import FinishedRequest, log_request
from router.attempts import RetryHints, make_queued
from router.context import RouterContext
from router.fair_queue import FairQueue, FairShare, Lane, Standing, Turn
from router.media.request import UNARY_COPIES
from router.policy.base import Option
from router.prepare import Prepare, RouterRequest, run_prepared
from router.request_log import outcome_of
from router.workers import PoolKey, WorkerTable

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

# The policy and the tokens share one event loop: explaining rests four times as long as it computes.
_REST = 4.0

_EXPLAINED = "explained"

# People and their tools explain single requests.
_MAX_WAITING = 256
_RETRY_DELAY_S = 1.0

_ROLES = frozenset({Role.PREFILL, Role.DECODE})


async def explain(start: AskedStart, context: RouterContext, turns: ExplainTurns) -> Explanation:
    """Where one choice of the request would go now if nothing else waited. Books, encodes and runs nothing.

    Raises:
        QueueFullError: too many calls wait for their turn.
        ServingError: the error with which a new request would be refused before it waits for room.
    """

    async def run(request: RouterRequest, standing: Standing) -> Explanation:
        return await turns.run(standing, lambda: _explain(request, context, standing))

    return await explain_logged(start, context, run)


async def explain_logged(
    start: AskedStart,
    context: RouterContext,
    run: Callable[[RouterRequest, Standing], Awaitable[Explanation]],
    *,
    prepare: Prepare | None = None,
) -> Explanation:
    """Prepare one request for ``run``, which explains it in its turn, and log how that ended.

    ``prepare`` is that of ``run_prepared``. Raises as that does.
    """

    async def run_standing(request: RouterRequest) -> Explanation:
        standing = context.admission.standing(
            request.pool.key,
            tenant=start.tenant,
            num_tokens=request.num_prompt_tokens,
            deadline=request.deadline,
        )
        return await run(request, standing)

    request, outcome = RouterRequest(start), _EXPLAINED
    try:
        return await run_prepared(
            request,
            context,
            run_standing,
            late="was not explained",
            encodes=False,
            num_copies=UNARY_COPIES,
            prepare=prepare,
        )
    except BaseException as error:
        outcome = outcome_of(error)
        raise
    finally:
        if request.charge is not None:
            request.charge.settle(0)  # no worker computes them
        _write_log(request, outcome)


class ExplainTurns:
    """Lets Explain calls use the policy one after the other, by fair share, for a fifth of the event loop's time."""

    def __init__(
        self,
        share: FairShare,
        *,
        max_waiting: int = _MAX_WAITING,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """No call waits.

        Args:
            share: the tenants' shares of the router's work; each call is charged its tokens when its turn comes.
            max_waiting: of more calls, the last is refused.
            cpu_clock: the seconds that this thread has computed.
        """
        self._share = share
        self._waiting: FairQueue[Turn] = FairQueue(share)
        self._max_waiting = max_waiting
        self._cpu_clock = cpu_clock
        self._running: Turn | None = None
        self._next: asyncio.TimerHandle | None = None
        self._rests_until = 0.0  # by the loop's clock

    async def run(self, standing: Standing, work: Callable[[], ResultT]) -> ResultT:
        """The result of ``work`` once it is the turn of ``standing``.

        Raises:
            QueueFullError: too many wait, and it is the last of them.
        """
        turn = Turn(standing=standing, placed=asyncio.get_running_loop().create_future())
        self._waiting.add(turn)
        self._waiting.shorten(self._max_waiting, _full_error)
        self._plan_next()
        began_s = self._cpu_clock()
        try:
            await turn.placed
            began_s = self._cpu_clock()
            return work()
        finally:
            if self._running is turn:
                self._running = None
                spent_s = self._cpu_clock() - began_s
                self._rests_until = asyncio.get_running_loop().time() + _REST * spent_s
            else:
                self._waiting.remove(turn)
            self._plan_next()

    def _plan_next(self) -> None:
        if self._running is None and self._next is None and self._waiting:
            self._next = asyncio.get_running_loop().call_at(self._rests_until, self._begin_next)

    @vital
    def _begin_next(self) -> None:
        self._next = None
        turn = next(self._waiting.in_order(_is_kept), None)
        if turn is None:
            return  # all that are left were cancelled, and are about to leave
        self._waiting.serve(turn)
        self._running = turn
        turn.placed.set_result(None)


def _is_kept(_lane: Lane[Turn]) -> bool:
    """No call waits for anything but its turn."""
    return False


def _full_error() -> QueueFullError:
    return QueueFullError("too many requests wait to be explained", retry_delay_s=_RETRY_DELAY_S)


def _write_log(request: RouterRequest, outcome: str) -> None:
    asked = request.asked
    line = FinishedRequest(
        request_id=request.request_id,
        outcome=outcome,
        path="explain",
        tenant=asked.tenant,
        client_request_id=asked.client_request_id,
        num_choices=asked.num_choices,
        tokenize_s=request.tokenize_s,
        total_s=time.monotonic() - request.arrived_at,
    )
    if outcome == _EXPLAINED:
        line.model, line.num_prompt_tokens = request.pool.key.model_name, request.num_prompt_tokens
    log_request(logger, line)


def _explain(request: RouterRequest, context: RouterContext, standing: Standing) -> Explanation:
    admission, pool = context.admission, request.pool.key
    policy = admission.policy
    queued = make_queued(request, context.config, standing, RetryHints())
    pending, snapshot = admission.preview(queued)
    # Copies of the policy decide, so the policy's own turn and random numbers stay as they are. The second copy may not
    # keep the request for a better moment.
    decision = copy.deepcopy(policy).assign([pending], snapshot)
    [now], wait_s = decision.placements, decision.poll_again_in_s
    at_once = copy.deepcopy(policy).assign([replace(pending, binds_at_once=True)], snapshot)
    placement = now or at_once.placements[0]
    chosen = set() if placement is None else {placement.prefills_at, placement.decode}
    options = [_to_rank_option(option, chosen) for option in policy.explain(pending, snapshot)]
    known = {option.rank for option in options}
    reuse = admission.expected_reuse(queued, 0 if placement is None else placement.num_cached_tokens, snapshot.now)
    options += [option for option in _not_ready(pool, context.table) if option.rank not in known]
    return Explanation(
        policy=policy.name,
        model=pool.model_name,
        model_fingerprint=pool.fingerprint,
        num_prompt_tokens=request.num_prompt_tokens,
        num_waiting=admission.num_waiting(pool),
        options=tuple(sorted(options, key=_rank)),
        wait_s=wait_s if now is None and placement is not None else None,
        num_held_tokens=reuse.num_held_tokens,
        num_foreign_tokens=reuse.num_foreign_tokens,
        num_unsalted_tokens=_num_unsalted_tokens(request, context, standing, reuse.num_held_tokens),
    )


def _num_unsalted_tokens(
    request: RouterRequest, context: RouterContext, standing: Standing, num_held_tokens: int
) -> int:
    """Tokens beyond ``num_held_tokens`` that would be found cached if the client had given no salt."""
    if not request.start.cache_salt:
        return 0
    unsalted = make_queued(request, context.config, standing, RetryHints())
    unsalted.sequence_hashes = request.unsalted_hashes()
    _, snapshot = context.admission.preview(unsalted)
    held = context.admission.expected_reuse(unsalted, 0, snapshot.now).num_held_tokens
    return max(held - num_held_tokens, 0)


def _to_rank_option(option: Option, chosen: set[Rank]) -> RankOption:
    return RankOption(
        rank=option.rank,
        role=Role.DECODE if option.is_decode else Role.PREFILL,
        is_chosen=option.rank in chosen,
        num_matched_tokens=option.num_cached_tokens,
        cost=option.cost,
        cost_unit=option.cost_unit,
        terms=option.terms,
        obstacle=option.obstacle,
    )


def _not_ready(pool: PoolKey, table: WorkerTable) -> Iterable[RankOption]:
    """Workers that the policies do not see."""
    for status in table.statuses(time.monotonic()):
        record = status.record
        is_of_pool = PoolKey(record.model_name, record.model_fingerprint) == pool and record.role in _ROLES
        if is_of_pool and status.state is not WorkerState.READY:
            for number in range(record.data_parallel_size):
                rank = Rank(record.worker_id, number)
                yield RankOption(rank=rank, role=record.role, obstacle=f"not ready: {status.state}")


def _rank(option: RankOption) -> tuple[bool, bool, float, str, Rank]:
    """Orders options: chosen ones first, impossible ones last. Costs are comparable within one role."""
    cost = math.inf if option.cost is None else option.cost
    return not option.is_chosen, bool(option.obstacle), cost, option.role, option.rank
