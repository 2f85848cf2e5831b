"""Explain: runs a request as far as the policy, which says where it would place it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable
from dataclasses import replace

from quartet.api.fleet import Explanation, RankOption, WorkerState
from quartet.api.request import GenerateStart
from quartet.discovery.base import Rank, Role
from router.attempts import RetryHints, make_queued
from router.context import RouterContext
from router.fair_queue import Standing
from router.policy.base import Option
from router.prepare import RouterRequest, run_prepared
from router.workers import PoolKey, WorkerTable

_ROLES = frozenset({Role.PREFILL, Role.DECODE})


async def explain(start: GenerateStart, context: RouterContext) -> Explanation:
    """Where one choice of the request would go now if nothing else waited. Books, encodes and runs nothing.

    Raises:
        ServingError: the error with which a new request would be refused before it waits for room.
    """

    async def run(request: RouterRequest) -> Explanation:
        return _explain(request, context)

    return await run_prepared(RouterRequest(start), context, run, late="was not explained", encodes=False)


def _explain(request: RouterRequest, context: RouterContext) -> Explanation:
    admission, pool = context.admission, request.pool.key
    policy = admission.policy
    queued = make_queued(request, context.config, Standing(pool=pool), RetryHints())
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
    options += [option for option in _not_ready(pool, context.table) if option.rank not in known]
    return Explanation(
        policy=policy.name,
        model=pool.model_name,
        model_fingerprint=pool.fingerprint,
        num_prompt_tokens=request.num_prompt_tokens,
        num_waiting=admission.num_waiting(pool),
        options=tuple(sorted(options, key=_rank)),
        wait_s=wait_s if now is None and placement is not None else None,
    )


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
