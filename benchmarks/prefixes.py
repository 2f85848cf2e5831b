"""Shared prefixes on a live fleet: how soon do first tokens come under each policy?

Real processes: a router and four Decode workers with the mock engine. It takes the time that its model says and caches
like any engine. Requests arrive at random times. Each begins with one of twenty prefixes; one worker's cache can't hold
all of them.

    python -m benchmarks.prefixes --json FILE [--policies round_robin,kv_aware] [--seconds 60]
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.stack import Stack
from cli.bench.load import Load, LoadKind
from cli.bench.result import LatencyMs
from cli.bench.run import BenchPlan, Limits, RunObserver, SenderConfig, run_plan
from cli.bench.workload import IntRange, WorkloadConfig
from cli.traces.format import BLOCK_SIZE, TraceRequest
from quartet.client import QuartetClient
from quartet.config import build
from services.topology.topology import Topology

_NUM_WORKERS, _BLOCK_SIZE = 4, 32
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 16, 2047
_TIMEOUT_S = 30.0
_LOG = Path(".run/benchmark-prefixes.log")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests.

    Attributes:
        num_prefixes: number of prefixes, of ``prefix_tokens`` tokens each; every request begins with one, at random.
        min_own_tokens, max_own_tokens: tokens after the prefix, different in each request.
        rate: requests a second, as a Poisson process.
        cache_tokens: tokens that one worker's KV blocks hold.
        warm_up_s: requests of the first so many seconds do not count.
    """

    num_prefixes: int = 20
    prefix_tokens: int = 4096
    min_own_tokens: int = 64
    max_own_tokens: int = 192
    num_output_tokens: int = 32
    rate: float = 16.0
    cache_tokens: int = 65_536
    warm_up_s: float = 15.0
    seconds: float = 60.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """The figures of one policy.

    Attributes:
        ttft_ms: from when a request was due until the client had its first token.
        e2e_ms: from when a request was due until its end.
        reuse_ratio: share of the prompts' tokens that were cached.
        requests_failed: all requests that failed, refused ones included.
        requests_by_worker: requests that each worker decoded, the warm-up's included.
    """

    ttft_ms: LatencyMs
    e2e_ms: LatencyMs
    reuse_ratio: float
    requests_finished: int
    requests_failed: int
    requests_by_worker: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured. Each policy has processes of its own; the policies run one after the other.

    Attributes:
        mean_ttft_ratio: of each policy to ``round_robin``, if that was measured.
    """

    workload: Workload
    policies: Mapping[str, PolicyResult]
    mean_ttft_ratio: Mapping[str, float]


def main() -> None:
    """Run the command line."""
    parser = make_parser("prefixes", __doc__)
    parser.add_argument("--policies", default="round_robin,kv_aware", help="by name, parted by commas")
    parser.add_argument("--seconds", type=float, default=Workload.seconds, help="of load that counts (60)")
    arguments = parser.parse_args()
    workload = Workload(seconds=arguments.seconds)
    report = Report("prefixes", revision=arguments.commit)
    report.write(uvloop.run(measure(workload, arguments.policies.split(","))), arguments.json)


async def measure(workload: Workload, policies: Sequence[str]) -> Results:
    """Measure ``policies``, given by name, one after the other."""
    results: dict[str, PolicyResult] = {}
    with LiveLine() as line:
        for policy in policies:
            async with Stack(_topology(workload, policy), _LOG, line.say) as stack:
                line.say(f"{policy}: {workload.warm_up_s + workload.seconds:.0f} s of load")
                results[policy] = await _load(workload, stack)
            found = results[policy]
            line.say(
                f"{policy}: first token after {found.ttft_ms.mean:.1f} ms (p50 {found.ttft_ms.p50:.1f}, "
                f"p99 {found.ttft_ms.p99:.1f}), {found.reuse_ratio:.2f} reused, {found.requests_failed} failed"
            )
    means_ms = {name: found.ttft_ms.mean or 0.0 for name, found in results.items()}
    base_ms = means_ms.get("round_robin")
    ratios = {name: mean_ms / base_ms for name, mean_ms in means_ms.items()} if base_ms else {}
    return Results(workload=workload, policies=results, mean_ttft_ratio=ratios)


async def _load(workload: Workload, stack: Stack) -> PolicyResult:
    plan = BenchPlan(
        loads=(Load(LoadKind.RATE, workload.rate),),
        limits=Limits(warmup_s=workload.warm_up_s, duration_s=workload.seconds, max_requests=None),
        workload=WorkloadConfig(
            prompt_tokens=IntRange(1, 1),  # the trace sets the lengths of prompts and answers
            output_tokens=IntRange(1, 1),
            ids=IntRange(_FIRST_TOKEN_ID, _LAST_TOKEN_ID),
            trace=make_trace(workload),
        ),
        sender=SenderConfig(timeout_s=_TIMEOUT_S),
        seed=workload.seed,
    )
    async with QuartetClient(stack.router_address) as client:
        [point] = await run_plan(client, plan, RunObserver())
    if point.result.is_interrupted:
        raise asyncio.CancelledError
    metrics = await stack.metrics()
    result = point.result
    return PolicyResult(
        ttft_ms=result.ttft_ms,
        e2e_ms=result.e2e_ms,
        reuse_ratio=result.cached_tokens / result.prompt_tokens,
        requests_finished=result.requests.finished,
        requests_failed=result.requests.failed + result.requests.cut_off,
        requests_by_worker={
            name: round(metrics[name].total("quartet_worker_requests_total")) for name in sorted(stack.worker_addresses)
        },
    )


def make_trace(workload: Workload) -> list[TraceRequest]:
    """Make requests for longer than the load lasts. Those with the same prefix have the same ids for its blocks."""
    rng = random.Random(workload.seed)
    blocks_each, rest = divmod(workload.prefix_tokens, BLOCK_SIZE)
    if rest:
        raise ValueError(f"prefix_tokens: must be a multiple of {BLOCK_SIZE}, not {workload.prefix_tokens}")
    requests = []
    for _ in range(math.ceil(2 * workload.rate * (workload.warm_up_s + workload.seconds)) + 100):
        first = rng.randrange(workload.num_prefixes) * blocks_each
        num_own_tokens = rng.randint(workload.min_own_tokens, workload.max_own_tokens)
        request = TraceRequest(
            arrival_s=0.0,  # the rate sets the times
            num_input_tokens=workload.prefix_tokens + num_own_tokens,
            num_output_tokens=workload.num_output_tokens,
            hash_ids=tuple(range(first, first + blocks_each)),
        )
        requests.append(request)
    return requests


def _topology(workload: Workload, policy: str) -> Topology:
    quiet = {"log": {"level": "warning"}}
    num_blocks = workload.cache_tokens // _BLOCK_SIZE
    settings = {
        # If an etcd answers, the stack uses it; it must not take the workers of another stack for its own.
        "namespace": f"benchmark-prefixes-{os.getpid()}-{policy}",
        "engine": {
            "kind": "mock",
            "block_size": _BLOCK_SIZE,
            "num_blocks": num_blocks,
            "max_model_len": 8192,
            "scheduler": {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
        },
        "router": {"overrides": {**quiet, "policy": {"name": policy}}},
        "workers": [{"role": "decode", "replicas": _NUM_WORKERS, "overrides": quiet}],
    }
    return build(Topology, settings)


if __name__ == "__main__":
    main()
