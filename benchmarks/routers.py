"""Several routers on one live fleet: how soon do first tokens come, and what does it cost that routers tell each other?

Real processes: routers, and eight Decode workers with the mock engine, which takes the time that its model says.
Bursts of prompts that have nothing in common come at once, each to a router drawn at random. Each number of routers is
measured twice: as they are, and silent, with nothing told, as routers that share nothing. What one start costs that is
told and heard is measured apart, in one process.

    python -m benchmarks.routers --json FILE [--routers 1,2,4,8] [--bursts 40]
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, cast

import uvloop
import yaml

from benchmarks.index_case import make_record
from benchmarks.processes import process_cpu_s
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.stack import Stack
from quartet.client import Delta, QuartetClient, Sampling
from quartet.config import build
from quartet.discovery.base import Role
from quartet.discovery.create import DiscoveryConfig, create_registry
from quartet.events.bookings import BookedStart, RouterBookings
from quartet.events.load import RankLoad, WorkerLoad
from quartet.events.publisher import BookingsPublisher
from quartet.events.subscriber import EventSubscriber
from router.workers import WorkerTable
from services.topology.launch import free_port
from services.topology.topology import ProcessPlan, Topology

_NUM_WORKERS, _BLOCK_SIZE = 8, 32
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 16, 2047
_READY_TIMEOUT_S, _TIMEOUT_S = 60.0, 60.0
_NUM_TOLD = 3_000
_DIRECTORY = Path(".run")
_LOG = _DIRECTORY / "benchmark-routers.log"
# A router that tells nothing. Others then see what it sends only in load reports.
_SILENT = """
from router.__main__ import main
from router.peers import PeerBookings
PeerBookings.note = lambda self, start: None
main()
"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests.

    Attributes:
        bursts: how many bursts count; one more goes before them.
        burst_size: requests of a burst, ``interval_s`` after the last burst.
        prompt_tokens: least and most of a prompt.
        speed_up: of the mock engine: prompts take long, and processes little of the machine's CPU.
    """

    bursts: int = 40
    burst_size: int = 8
    interval_s: float = 1.5
    prompt_tokens: tuple[int, int] = (400, 3_000)
    num_output_tokens: int = 4
    speed_up: float = 0.1
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class FleetResult:
    """The figures of one number of routers.

    Attributes:
        ttft_ms_mean, ttft_ms_p50, ttft_ms_p99: from when the burst was due until the client had the first token.
        ttft_ratio: ``ttft_ms_mean`` over one router's.
        router_cpu_ms: CPU time of all routers together, by request.
    """

    num_routers: int
    is_silent: bool
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    ttft_ratio: float
    router_cpu_ms: float
    requests_finished: int
    requests_failed: int


@dataclass(frozen=True, kw_only=True)
class TellingCost:
    """CPU time in microseconds of a start that goes alone, medians.

    Attributes:
        tell_us: of the router that sent it.
        hear_us: of one that is told, from the event loop's waking on.
    """

    tell_us: float
    hear_us: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured, one number of routers after the other, on one fleet."""

    workload: Workload
    num_workers: int
    telling: TellingCost
    fleets: Sequence[FleetResult]


def main() -> None:
    """Run the command line."""
    parser = make_parser("routers", __doc__)
    parser.add_argument("--routers", default="1,2,4,8", help="numbers of routers, parted by commas (1,2,4,8)")
    parser.add_argument("--bursts", type=int, default=Workload.bursts, help=f"that count ({Workload.bursts})")
    arguments = parser.parse_args()
    report = Report("routers", revision=arguments.commit)
    numbers = [int(number) for number in arguments.routers.split(",")]
    report.write(uvloop.run(measure(Workload(bursts=arguments.bursts), numbers)), arguments.json)


async def measure(workload: Workload, numbers: Sequence[int]) -> Results:
    """Measure each of ``numbers`` of routers; the first one's mean time to first token is the measure of the others."""
    found: list[FleetResult] = []
    telling = await measure_telling(_NUM_TOLD)
    discovery = dict[str, Any]()  # as the workers have it in the end: etcd may be started with them

    def adapt(plan: ProcessPlan) -> ProcessPlan:
        discovery.update(cast(Mapping[str, Any], plan.settings["discovery"]))
        return plan

    with LiveLine() as line:
        async with Stack(_topology(workload), _LOG, line.say, adapt=adapt):
            for number in numbers:
                for is_silent in (False, True) if number > 1 else (False,):
                    async with _routers(discovery, number, is_silent=is_silent) as routers:
                        base_ms = found[0].ttft_ms_mean if found else None
                        prompts = make_prompts(workload, len(found))
                        found.append(await _load(workload, prompts, routers, base_ms, is_silent=is_silent))
                    last = found[-1]
                    line.say(
                        f"{number} {'silent ' if is_silent else ''}routers: first token after "
                        f"{last.ttft_ms_mean:.0f} ms ({last.ttft_ratio:.2f}), {last.router_cpu_ms:.2f} ms of CPU"
                    )
    return Results(workload=workload, num_workers=_NUM_WORKERS, telling=telling, fleets=found)


async def measure_telling(num_starts: int) -> TellingCost:
    """Tell of ``num_starts`` starts at one worker, each when the last one has been heard."""
    record = make_record("decode-0", Role.DECODE, num_blocks=16_384)
    table = WorkerTable("router-b", heartbeat_timeout_s=_TIMEOUT_S)
    table.put(record, time.monotonic())
    ranks = (RankLoad(num_total_blocks=record.num_blocks),)
    load = WorkerLoad(worker_id=record.worker_id, epoch=record.epoch, ranks=ranks)
    table.connected(record.key, load, time.monotonic())
    heard = asyncio.Event()

    def hear(bookings: RouterBookings) -> None:
        table.hear(bookings, time.monotonic())
        heard.set()

    publisher = BookingsPublisher("127.0.0.1", router_id="router-a")
    subscriber = EventSubscriber(lambda _load: None, lambda: None, on_bookings=hear)
    tell_us, hear_us = list[float](), list[float]()
    try:
        subscriber.connect(publisher.endpoint)
        async with asyncio.timeout(_TIMEOUT_S):
            while not heard.is_set():  # what is published before they are connected reaches nobody
                publisher.publish([BookedStart(record.worker_id, record.epoch, 0, 1, 1_000, 40)])
                await asyncio.sleep(0.01)
            for number in range(2, num_starts + 2):
                heard.clear()
                began = time.thread_time()
                publisher.publish([BookedStart(record.worker_id, record.epoch, 0, number, 1_000, 40)])
                told = time.thread_time()
                await heard.wait()
                tell_us.append(1e6 * (told - began))
                hear_us.append(1e6 * (time.thread_time() - told))
    finally:
        subscriber.close()
        publisher.close()
    return TellingCost(tell_us=median(tell_us), hear_us=median(hear_us))


async def _load(
    workload: Workload,
    prompts: Sequence[Sequence[list[int]]],
    routers: Mapping[str, int],
    base_ms: float | None,
    *,
    is_silent: bool,
) -> FleetResult:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(QuartetClient(address)) for address in routers]
        await _burst(workload, clients, prompts[0])
        began_cpu_s = sum(map(process_cpu_s, routers.values()))
        bursts = []
        began = time.monotonic()
        for number, burst in enumerate(prompts[1:]):
            await asyncio.sleep(max(began + number * workload.interval_s - time.monotonic(), 0.0))
            bursts.append(asyncio.create_task(_burst(workload, clients, burst)))
        outcomes = [each for task in bursts for each in await task]
        cpu_s = sum(map(process_cpu_s, routers.values())) - began_cpu_s
    ttft_ms = [1e3 * ttft_s for ttft_s in outcomes if ttft_s is not None]
    percentiles = quantiles(ttft_ms, n=100)
    mean_ms = mean(ttft_ms)
    return FleetResult(
        num_routers=len(routers),
        is_silent=is_silent,
        ttft_ms_mean=mean_ms,
        ttft_ms_p50=percentiles[49],
        ttft_ms_p99=percentiles[98],
        ttft_ratio=1.0 if base_ms is None else mean_ms / base_ms,
        router_cpu_ms=1e3 * cpu_s / len(outcomes),
        requests_finished=len(ttft_ms),
        requests_failed=len(outcomes) - len(ttft_ms),
    )


def make_prompts(workload: Workload, fleet: int) -> list[list[list[int]]]:
    """The prompts of all bursts, the one that does not count first.

    Each ``fleet`` gets the same lengths, and tokens that the workers have cached for no other.
    """
    lengths, tokens = random.Random(workload.seed), random.Random(fleet)
    return [
        [
            tokens.choices(range(_FIRST_TOKEN_ID, _LAST_TOKEN_ID + 1), k=lengths.randint(*workload.prompt_tokens))
            for _ in range(workload.burst_size)
        ]
        for _ in range(workload.bursts + 1)
    ]


async def _burst(
    workload: Workload, clients: Sequence[QuartetClient], prompts: Sequence[list[int]]
) -> list[float | None]:
    """By request of a burst that comes now, seconds to its first token; ``None``: it failed."""
    due = time.monotonic()
    rng = random.Random(len(prompts[0]))
    asked = (_ask(rng.choice(clients), prompt, workload, due) for prompt in prompts)
    return await asyncio.gather(*asked)


async def _ask(client: QuartetClient, token_ids: list[int], workload: Workload, due: float) -> float | None:
    sampling = Sampling(max_tokens=workload.num_output_tokens, ignore_eos=True)
    ttft_s = None
    stream = client.generate(token_ids=token_ids, sampling=sampling, timeout_s=_TIMEOUT_S)
    async for part in stream:
        if ttft_s is None and isinstance(part, Delta):
            ttft_s = time.monotonic() - due
    return ttft_s


@asynccontextmanager
async def _routers(discovery: Mapping[str, Any], number: int, *, is_silent: bool) -> AsyncIterator[Mapping[str, int]]:
    """So many routers beside the topology's own, which gets nothing: their process ids, by address."""
    command = ["-c", _SILENT] if is_silent else ["-m", "router"]
    processes, addresses = [], []
    with _LOG.open("a", encoding="utf-8") as log:
        try:
            for each in range(number):
                address = f"127.0.0.1:{free_port()}"
                settings = {
                    "server": {"address": address},
                    "http_address": f"127.0.0.1:{free_port()}",
                    "discovery": discovery,
                    "drain_timeout_s": 1.0,
                    "log": {"level": "warning"},
                }
                file = _DIRECTORY / f"benchmark-router-{each}.yaml"
                file.write_text(yaml.safe_dump(settings), encoding="utf-8")
                processes.append(
                    await asyncio.create_subprocess_exec(
                        sys.executable, *command, "--config", str(file), stdout=log, stderr=log
                    )
                )
                addresses.append(address)
            await _await_listed(discovery, set(addresses))
            yield {address: process.pid for address, process in zip(addresses, processes, strict=True)}
        finally:
            for process in processes:
                process.terminate()
            await asyncio.gather(*(process.wait() for process in processes))


async def _await_listed(discovery: Mapping[str, Any], addresses: set[str]) -> None:
    """Until discovery lists these routers and no others but the topology's, and each knows all workers."""
    registry = create_registry(build(DiscoveryConfig, {**discovery}))
    try:
        async with asyncio.timeout(_READY_TIMEOUT_S):
            async for routers in registry.watch_routers():
                listed = {record.grpc_address for record in routers}
                if addresses <= listed and len(listed) == len(addresses) + 1:
                    break
            for address in addresses:
                async with QuartetClient(address) as client:
                    async for workers in client.watch_workers():
                        if sum(worker.state == "ready" for worker in workers) == _NUM_WORKERS:
                            break
    finally:
        await registry.close()


def _topology(workload: Workload) -> Topology:
    quiet = {"log": {"level": "warning"}}
    settings = {
        "namespace": f"benchmark-routers-{os.getpid()}",
        "engine": {
            "kind": "mock",
            "block_size": _BLOCK_SIZE,
            "num_blocks": 16_384,
            "max_model_len": 16_384,
            "mock": {"speed_up": workload.speed_up},
            "scheduler": {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
        },
        "router": {"overrides": quiet},
        "workers": [{"role": "decode", "replicas": _NUM_WORKERS, "overrides": quiet}],
    }
    return build(Topology, settings)


if __name__ == "__main__":
    main()
