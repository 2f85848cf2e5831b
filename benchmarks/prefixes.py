"""Shared prefixes on a live fleet: how soon do first tokens come by each policy?

Real processes: a router and four Decode workers of the mock engine, which takes the time that its model says and caches
like any engine. Requests begin with one of twenty prefixes, more than one worker's cache holds, and come at random.

    python -m benchmarks.prefixes --json FILE [--policies round_robin,kv_aware] [--seconds 60]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, quantiles

import uvloop

from benchmarks.progress import LiveLine
from benchmarks.report import Report, add_report_argument
from benchmarks.stack import Stack
from quartet.client import Accepted, ChoiceFinished, Delta, QuartetClient, Sampling
from quartet.config import build
from quartet.errors import ServingError
from quartet.telemetry.provenance import write_report
from services.topology.topology import Topology

_NUM_WORKERS, _BLOCK_SIZE = 4, 32
_FIRST_TOKEN_ID, _END_TOKEN_ID = 16, 2048
_TIMEOUT_S = 30.0
_LOG = Path(".run/benchmark-prefixes.log")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is sent.

    Attributes:
        num_prefixes: of ``prefix_tokens`` tokens each; every request begins with one of them, drawn at random.
        min_own_tokens, max_own_tokens: that follow it, different in each request.
        rate: requests a second, by a Poisson process.
        cache_tokens: that one worker's KV blocks hold.
        warm_up_s: requests of so many seconds are sent first and not counted.
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
class Milliseconds:
    """Of all requests that count."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """What one policy made of the workload.

    Attributes:
        ttft_ms: from sending a request to its first token at the client.
        e2e_ms: to its end.
        reuse_ratio: share of the prompts' tokens that were cached.
        requests_failed: all of them are counted, refused ones too.
        requests_by_worker: how many each one decoded.
    """

    ttft_ms: Milliseconds
    e2e_ms: Milliseconds
    reuse_ratio: float
    requests_finished: int
    requests_failed: int
    requests_by_worker: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured, each policy on processes of its own, one after the other.

    Attributes:
        mean_ttft_ratio: of each policy to ``round_robin``, where that was measured.
    """

    workload: Workload
    policies: Mapping[str, PolicyResult]
    mean_ttft_ratio: Mapping[str, float]


@dataclass
class _Tally:
    ttfts_s: list[float] = field(default_factory=list)
    e2es_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_failed: int = 0
    by_worker: dict[str, int] = field(default_factory=dict)

    def result(self) -> PolicyResult:
        return PolicyResult(
            ttft_ms=_milliseconds(self.ttfts_s),
            e2e_ms=_milliseconds(self.e2es_s),
            reuse_ratio=self.num_cached_tokens / self.num_prompt_tokens,
            requests_finished=len(self.e2es_s),
            requests_failed=self.num_failed,
            requests_by_worker=dict(sorted(self.by_worker.items())),
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefixes", description=__doc__.partition("\n")[0])
    add_report_argument(parser)
    parser.add_argument("--policies", default="round_robin,kv_aware", help="by name, parted by commas")
    parser.add_argument("--seconds", type=float, default=Workload.seconds, help="of load that counts (60)")
    arguments = parser.parse_args()
    workload = Workload(seconds=arguments.seconds)
    report = Report("prefixes")
    write_report(report.finish(uvloop.run(measure(workload, arguments.policies.split(",")))), arguments.json)


async def measure(workload: Workload, policies: Sequence[str]) -> Results:
    """Measure the policies of these names, one after the other."""
    results: dict[str, PolicyResult] = {}
    with LiveLine() as line:
        for policy in policies:
            async with Stack(_topology(workload, policy), _LOG, line.say) as stack:
                line.say(f"{policy}: {workload.warm_up_s + workload.seconds:.0f} s of load")
                results[policy] = await _load(workload, stack.router_address)
            found = results[policy]
            line.say(
                f"{policy}: first token after {found.ttft_ms.mean:.1f} ms (p50 {found.ttft_ms.p50:.1f}, "
                f"p99 {found.ttft_ms.p99:.1f}), {found.reuse_ratio:.2f} reused, {found.requests_failed} failed"
            )
    base = results.get("round_robin")
    ratios = {name: found.ttft_ms.mean / base.ttft_ms.mean for name, found in results.items()} if base else {}
    return Results(workload=workload, policies=results, mean_ttft_ratio=ratios)


async def _load(workload: Workload, router: str) -> PolicyResult:
    rng = random.Random(workload.seed)
    prefixes = [_token_ids(rng, workload.prefix_tokens) for _ in range(workload.num_prefixes)]
    tally, warm_up = _Tally(), _Tally()
    async with QuartetClient(router) as client, asyncio.TaskGroup() as group:
        began = time.monotonic()
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(workload.rate)) < workload.warm_up_s + workload.seconds:
            own = _token_ids(rng, rng.randint(workload.min_own_tokens, workload.max_own_tokens))
            prompt = rng.choice(prefixes) + own
            await asyncio.sleep(began + at_s - time.monotonic())
            counted = tally if at_s >= workload.warm_up_s else warm_up
            group.create_task(_send(client, prompt, workload.num_output_tokens, counted))
    return tally.result()


async def _send(client: QuartetClient, prompt: list[int], num_output_tokens: int, tally: _Tally) -> None:
    sampling = Sampling(max_tokens=num_output_tokens, ignore_eos=True)
    began, has_begun = time.monotonic(), False
    try:
        async with client.generate(token_ids=prompt, sampling=sampling, timeout_s=_TIMEOUT_S) as stream:
            async for part in stream:
                if isinstance(part, Delta) and not has_begun:
                    has_begun = True
                    tally.ttfts_s.append(time.monotonic() - began)
                elif isinstance(part, Accepted):
                    worker_id = part.choices[0].decode.worker_id
                    tally.by_worker[worker_id] = tally.by_worker.get(worker_id, 0) + 1
                elif isinstance(part, ChoiceFinished):
                    tally.e2es_s.append(time.monotonic() - began)
                    tally.num_prompt_tokens += part.usage.num_prompt_tokens
                    tally.num_cached_tokens += part.usage.num_cached_tokens
    except ServingError:
        tally.num_failed += 1


def _milliseconds(seconds: Sequence[float]) -> Milliseconds:
    cuts = [1e3 * cut for cut in quantiles(seconds, n=100, method="inclusive")]
    return Milliseconds(mean=1e3 * fmean(seconds), p50=cuts[49], p90=cuts[89], p99=cuts[98])


def _token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_FIRST_TOKEN_ID, _END_TOKEN_ID) for _ in range(count)]


def _topology(workload: Workload, policy: str) -> Topology:
    quiet = {"log": {"level": "warning"}}
    num_blocks = workload.cache_tokens // _BLOCK_SIZE
    settings = {
        # An etcd that answers is used; nobody else's workers may be taken for ours.
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
