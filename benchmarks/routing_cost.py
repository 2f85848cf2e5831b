"""What routing one request costs the router: hashing its blocks, looking them up, choosing and booking a rank.

Only the router's own parts run, in this process, without network: a prompt of 8192 tokens, 100 decode ranks, half of
them computing something, and an index of a million blocks.

    python -m benchmarks.routing_cost --json FILE [--short]
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from prometheus_client import CollectorRegistry

from benchmarks.index_case import BLOCK_SIZE, PROMPT_BLOCKS, Workload, make_record
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from quartet.discovery.base import Rank, Role, WorkerRecord
from quartet.events.load import RankLoad, StepTime, WorkerLoad
from quartet.kvcache.block_hash import sequence_hashes
from quartet.telemetry.metrics import RouterMetrics
from router.admission import Admission, QueuedRequest
from router.config import AdmissionConfig
from router.kv_index.index import PrefixIndex, PromptMatches
from router.policy.base import Pending, Policy
from router.policy.greedy import LeastLoadedPolicy, RoundRobinPolicy
from router.policy.kv_aware import KvAwarePolicy
from router.workers import PoolKey, WorkerTable

_NUM_WORKERS, _POOL_BLOCKS, _PROMPT_TOKENS = 100, 32_768, 8192
_NUM_BLOCKS, _SHORT_NUM_BLOCKS = 1_000_000, 100_000
_NUM_REQUESTS = 300
# Each worker reports 20 times a second and gets one request a second.
_NUM_REPORTS = 20
_STEP_TIME = StepTime(prefill_base_s=0.0165, prefill_s_per_token=1.5e-5, decode_base_s=0.0057)
_OUTPUT_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class PolicyCost:
    """Microseconds of CPU for one request under one policy, means over all requests.

    Attributes:
        snapshot_us: building the snapshot of the ranks for the policy.
        assign_us: the policy's choice, with the look-up if it asks for one.
        total_us: a request's whole way through the queue, ``snapshot`` and ``assign`` included: queue, matches,
            booking, prediction, release. Hashing its blocks is not included.
    """

    snapshot_us: float
    assign_us: float
    total_us: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured; means of CPU time.

    Attributes:
        num_workers, num_blocks, num_prompt_tokens, block_size: the fleet and the index, and the request.
        hash_us: hashing the prompt's blocks, once a request.
        lookup_us: finding which ranks have how many of its blocks.
        report_us: processing one worker's load report.
        routing_us: by policy: ``hash_us`` plus ``total_us``.
    """

    num_workers: int
    num_blocks: int
    num_prompt_tokens: int
    block_size: int
    hash_us: float
    lookup_us: float
    report_us: float
    policies: dict[str, PolicyCost]
    routing_us: dict[str, float]


class _Router:
    """The state of a router process, without any networking."""

    def __init__(self, policy: Policy, index: PrefixIndex, records: Sequence[WorkerRecord]) -> None:
        self.table = WorkerTable("router-benchmark", heartbeat_timeout_s=1e9)
        self.policy = policy
        self.index = index
        self.admission = Admission(self.table, policy, AdmissionConfig(), index, RouterMetrics(CollectorRegistry()))
        self.pool = PoolKey(records[0].model_name, records[0].model_fingerprint)
        self.table.listen(self.admission.wake)
        for record in records:
            self.table.put(record, time.monotonic())
            self.table.connected(record.key, _load(record, 0.0), time.monotonic())

    def report(self, records: Sequence[WorkerRecord], rng: random.Random | None) -> None:
        """Let all workers report: with ``rng``, a random half of them compute something; without it, none do."""
        for record in records:
            step_s = rng.uniform(0.02, 0.2) if rng is not None and rng.random() < 0.5 else 0.0
            self.table.report(_load(record, step_s), time.monotonic())

    def queued(self, pending: Pending) -> QueuedRequest:
        """``pending`` as the queue holds it."""
        return QueuedRequest(standing=self.admission.standing(self.pool), **vars(pending))

    async def route(self, pending: Pending, records: Sequence[WorkerRecord]) -> float:
        """Route one request from arrival to end, in microseconds. If the queue keeps it, all workers become free."""
        began, reports_us = time.thread_time(), 0.0
        admitted = asyncio.create_task(self.admission.admit(self.queued(pending)))
        for _ in range(3):
            await asyncio.sleep(0)
        if not admitted.done():
            reports_us = _cpu_us(partial(self.report, records, None))
        (await admitted).release()
        return 1e6 * (time.thread_time() - began) - reports_us


def main() -> None:
    """Run the command line."""
    parser = make_parser("routing_cost", __doc__)
    parser.add_argument("--short", action="store_true", help="an index of a tenth of the blocks")
    arguments = parser.parse_args()
    report = Report("routing_cost", packages=("xxhash",), revision=arguments.commit)
    num_blocks = _SHORT_NUM_BLOCKS if arguments.short else _NUM_BLOCKS
    report.write(asyncio.run(measure(num_blocks)), arguments.json)


async def measure(num_blocks: int) -> Results:
    """Measure with an index of ``num_blocks``."""
    with LiveLine() as line:
        records = [make_record(f"decode-{number}", Role.DECODE, _POOL_BLOCKS) for number in range(_NUM_WORKERS)]
        workload, index = Workload(num_blocks, _NUM_WORKERS), PrefixIndex()
        for run in workload.runs:
            index.store(Rank(records[run.worker].worker_id), run.parent_hash, run.hashes.tolist())
        pendings = [_pending(prompt) for prompt in workload.prompts(_NUM_REQUESTS)]
        hash_us = _measure_hashing()
        lookup_us = fmean(_cpu_us(partial(_look_up, index, pending)) for pending in pendings)
        line.say(f"hashing {hash_us:.0f} us, look-up {lookup_us:.0f} us")
        policies: dict[str, PolicyCost] = {}
        report_us = 0.0
        for name, policy in _policies().items():
            router = _Router(policy, index, records)
            report_us = _cpu_us(partial(router.report, records, None)) / len(records)
            policies[name] = cost = await _measure_policy(router, pendings, records)
            line.say(
                f"{name}: {cost.total_us:.0f} us a request, {cost.snapshot_us:.0f} of it for the snapshot and "
                f"{cost.assign_us:.0f} for the choice"
            )
    return Results(
        num_workers=_NUM_WORKERS,
        num_blocks=num_blocks,
        num_prompt_tokens=_PROMPT_TOKENS,
        block_size=BLOCK_SIZE,
        hash_us=hash_us,
        lookup_us=lookup_us,
        report_us=report_us,
        policies=policies,
        routing_us={name: hash_us + cost.total_us for name, cost in policies.items()},
    )


async def _measure_policy(router: _Router, pendings: Sequence[Pending], records: Sequence[WorkerRecord]) -> PolicyCost:
    rng = random.Random(1)
    snapshot_us: list[float] = []
    assign_us: list[float] = []
    total_us: list[float] = []
    router.report(records, rng)
    for pending in pendings:
        router.report(rng.sample(records, _NUM_REPORTS), rng)
        shown, snapshot = router.admission.preview(router.queued(pending))
        assign_us.append(_cpu_us(partial(router.policy.assign, [shown], snapshot)))
        router.report(rng.sample(records, _NUM_REPORTS), rng)
        snapshot_us.append(_cpu_us(partial(router.table.snapshot, router.pool, time.monotonic())))
        router.report(rng.sample(records, _NUM_REPORTS), rng)
        total_us.append(await router.route(pending, records))
    return PolicyCost(snapshot_us=fmean(snapshot_us), assign_us=fmean(assign_us), total_us=fmean(total_us))


def _policies() -> dict[str, Policy]:
    return {
        "kv_aware": KvAwarePolicy(random.Random(1)),
        "least_loaded": LeastLoadedPolicy(0, random.Random(1)),
        "round_robin": RoundRobinPolicy(0),
    }


def _measure_hashing() -> float:
    rng = random.Random(1)
    prompts = [[rng.randrange(128_000) for _ in range(_PROMPT_TOKENS)] for _ in range(50)]
    return fmean(_cpu_us(partial(sequence_hashes, prompt, BLOCK_SIZE)) for prompt in prompts)


def _look_up(index: PrefixIndex, pending: Pending) -> dict[Rank, int]:
    return dict(PromptMatches(index, pending.sequence_hashes, BLOCK_SIZE))


def _pending(prompt: Sequence[int]) -> Pending:
    assert len(prompt) == PROMPT_BLOCKS, "of 8192 tokens"
    return Pending(
        num_tokens=_PROMPT_TOKENS,
        num_reserved_tokens=_PROMPT_TOKENS + _OUTPUT_TOKENS,
        num_most_tokens=_PROMPT_TOKENS + _OUTPUT_TOKENS,
        sequence_hashes=prompt,
    )


def _load(record: WorkerRecord, step_s: float) -> WorkerLoad:
    rank = RankLoad(
        num_running=8,
        num_decoding=8,
        num_context_tokens=32_000,
        num_total_blocks=record.num_blocks,
        num_in_use_blocks=1_000,
        max_step_tokens=8_192,
        step_ends_in_s=step_s,
        step_time=_STEP_TIME,
    )
    return WorkerLoad(worker_id=record.worker_id, epoch=record.epoch, ranks=(rank,))


def _cpu_us(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return 1e6 * (time.thread_time() - began)


if __name__ == "__main__":
    main()
