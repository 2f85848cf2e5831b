"""How fast blocks move from worker to worker, in each way, beside a plain copy in memory.

The source is a process of its own, this one is the puller. They run the transfer plane as workers do: hand-off, claim,
fetch, finish. They use their pools' blocks in scattered order. Every round has each way and memcpy once, one after the
other, so any change in the machine's speed affects all of them alike. Memcpy copies a pool of this process into the one
that is fetched into: that is the most that the machine could do at that moment.

    python -m benchmarks.transfer --json FILE [--long]
"""

from __future__ import annotations

import asyncio
import mmap
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import uvloop

from benchmarks.children import Child, start_child
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.transfer_source import PoolShape, fill
from quartet.discovery.host import host_identity
from quartet.rpc.channels import create_channel
from quartet.streams.convert.hand_off import from_hand_off
from quartet.transfer.base import PieceRun, PoolMemory, TransferWay
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.puller import TransferPuller
from quartet.v1 import types_pb2

_MIB = 1 << 20
_TIMEOUT_S = 300.0
_WAYS = {
    TransferWay.SHM: TransferConfig(ways=(TransferWay.SHM, TransferWay.GRPC)),
    TransferWay.GRPC: TransferConfig(ways=(TransferWay.GRPC,)),
}


class Temperature(StrEnum):
    """Whether connection and mappings were used before.

    ``cold``: connection, handshake and mapping are made for this one fetch; memcpy makes the mapping that it reads.
    """

    WARM = "warm"
    COLD = "cold"


class Mover(StrEnum):
    """What moves the bytes."""

    SHM = "shm"
    GRPC = "grpc"
    MEMCPY = "memcpy"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """All blocks of a pool, moved once.

    Attributes:
        cpu_s: CPU seconds of the receiving process.
        source_cpu_s: CPU seconds of the sending process.
    """

    temperature: Temperature
    mover: Mover
    size_bytes: int
    duration_s: float
    cpu_s: float
    source_cpu_s: float


@dataclass(frozen=True, kw_only=True)
class CpuPerGb:
    """CPU seconds for each gigabyte moved, by side."""

    puller: float
    source: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians over all rounds, by the mover of the bytes.

    Attributes:
        gb_per_s: 1e9 bytes a second, from the claim until the source has released the blocks.
        share_of_memcpy: the same over the memcpy of the same round.
        cpu_s_per_gb: of both processes.
    """

    gb_per_s: Mapping[str, float]
    share_of_memcpy: Mapping[str, float]
    cpu_s_per_gb: Mapping[str, CpuPerGb]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pool, moved again and again."""

    size_bytes: int
    piece_size_bytes: int
    num_rounds: int
    warm: Figures
    cold: Figures


@dataclass(frozen=True, kw_only=True)
class Results(Run):
    """The main run, and ``others`` with other sizes; none in the short form."""

    others: Sequence[Run]


@dataclass(frozen=True)
class Plan:
    """What to move, and how often."""

    shape: PoolShape
    num_rounds: int


_MAIN = Plan(PoolShape(64, _MIB), 9)
_OTHERS = (
    Plan(PoolShape(1024, _MIB // 16), 9),
    Plan(PoolShape(256, _MIB // 4), 9),
    Plan(PoolShape(16, 4 * _MIB), 9),
    Plan(PoolShape(1024, _MIB), 5),
)


def main() -> None:
    """Run the command line."""
    parser = make_parser("transfer", __doc__)
    parser.add_argument("--long", action="store_true", help="also pieces of other lengths, and 1 GiB of blocks")
    arguments = parser.parse_args()
    report = Report("transfer", packages=("numpy",), revision=arguments.commit)
    report.write(uvloop.run(_run(_OTHERS if arguments.long else ())), arguments.json)


def summarize(samples: Sequence[Sample], temperature: Temperature) -> Figures:
    """Medians of the samples with ``temperature``. They have each mover once a round, in the order of the rounds."""
    by_mover = {mover: [s for s in samples if (s.temperature, s.mover) == (temperature, mover)] for mover in Mover}
    rounds = list(zip(*by_mover.values(), strict=True))
    return Figures(
        gb_per_s={
            mover: statistics.median(sample.size_bytes / sample.duration_s / 1e9 for sample in of_mover)
            for mover, of_mover in by_mover.items()
        },
        share_of_memcpy={
            mover: statistics.median(_share(samples, mover) for samples in rounds)
            for mover in Mover
            if mover is not Mover.MEMCPY
        },
        cpu_s_per_gb={
            mover: CpuPerGb(
                puller=statistics.median(sample.cpu_s / sample.size_bytes * 1e9 for sample in of_mover),
                source=statistics.median(sample.source_cpu_s / sample.size_bytes * 1e9 for sample in of_mover),
            )
            for mover, of_mover in by_mover.items()
        },
    )


async def measure_transfer(plan: Plan, line: LiveLine) -> Run:
    """Move the pool. Raises ``RuntimeError``: the source failed, or something else came than it sent."""
    name = f"{plan.shape.size_bytes // _MIB} MiB in pieces of {plan.shape.piece_size_bytes // 1024} KiB"
    samples: list[Sample] = []
    with line.showing(lambda elapsed, _: f"{name}: {elapsed:.0f} s, {_last(samples)}"):
        async with asyncio.timeout(_TIMEOUT_S):
            async for sample in measure_samples(plan):
                samples.append(sample)
    warm, cold = (summarize(samples, temperature) for temperature in Temperature)
    speeds = ", ".join(f"{mover} {speed:.2f}" for mover, speed in warm.gb_per_s.items())
    line.say(f"{name}: warm GB/s: {speeds}; shm {warm.share_of_memcpy[Mover.SHM]:.2f} of memcpy")
    return Run(
        size_bytes=plan.shape.size_bytes,
        piece_size_bytes=plan.shape.piece_size_bytes,
        num_rounds=plan.num_rounds,
        warm=warm,
        cold=cold,
    )


async def measure_samples(plan: Plan) -> AsyncIterator[Sample]:
    """The samples of warm rounds, then of cold ones. Raises as ``measure_transfer`` does."""
    async with start_child("benchmarks.transfer_source", plan.shape) as source:
        await source.read()
        bench = _Bench(plan.shape, source)
        try:
            pullers = {way: bench.new_puller(way) for way in _WAYS}
            for number in range(plan.num_rounds + 1):
                samples = [bench.copy(Temperature.WARM)]
                samples += [await bench.fetch(puller, way, Temperature.WARM) for way, puller in pullers.items()]
                if number > 0:  # the first round warms up
                    for sample in samples:
                        yield sample
            for puller in pullers.values():
                await puller.close()
            for _ in range(plan.num_rounds):
                yield bench.copy(Temperature.COLD)
                for way in _WAYS:
                    puller = bench.new_puller(way)
                    yield await bench.fetch(puller, way, Temperature.COLD)
                    await puller.close()
        finally:
            bench.close()


def _share(samples: Sequence[Sample], mover: Mover) -> float:
    """A mover's speed over memcpy's in one round."""
    duration_s = {sample.mover: sample.duration_s for sample in samples}
    return duration_s[Mover.MEMCPY] / duration_s[mover]


async def _run(others: Sequence[Plan]) -> Results:
    with LiveLine() as line:
        main_run = await measure_transfer(_MAIN, line)
        other_runs = [await measure_transfer(plan, line) for plan in others]
    return Results(**vars(main_run), others=other_runs)


def _last(samples: Sequence[Sample]) -> str:
    if not samples:
        return "starting"
    last = samples[-1]
    return f"{last.temperature} {last.mover} {last.size_bytes / last.duration_s / 1e9:.2f} GB/s"


class _Bench:
    """One pool to fetch into, in each way, and to copy into from another pool of this process."""

    def __init__(self, shape: PoolShape, source: Child) -> None:
        self._shape = shape
        self._source = source
        self._memory = PoolMemory(shape.num_blocks, shape.piece_size_bytes)
        self._local = PoolMemory(shape.num_blocks, shape.piece_size_bytes)
        self._block_ids = shape.scattered(seed=2)
        self._copies = PieceRun(0, self._block_ids)
        for piece, block_id in enumerate(self._block_ids):
            fill(self._local, block_id, piece)
        self._expected = bytes(self._local.view)

    def new_puller(self, way: TransferWay) -> TransferPuller:
        """A puller that has no connection and no mapping yet."""
        puller = TransferPuller(
            lambda address: create_channel(address, None, is_bulk=True), host=host_identity(), config=_WAYS[way]
        )
        puller.attach(self._memory, self._shape.layout)
        return puller

    async def fetch(self, puller: TransferPuller, way: TransferWay, temperature: Temperature) -> Sample:
        """Fetch everything once, and check that it came."""
        offered = await self._source.ask("offer")
        hand_off = from_hand_off(types_pb2.HandOff.FromString(bytes.fromhex(offered["hand_off"])))
        self._clear()
        source_before, before = await self._source_cpu_s(), time.process_time()
        began = time.perf_counter()
        result = await puller.claim(hand_off).fetch(self._copies)
        duration_s = time.perf_counter() - began
        cpu_s, source_cpu_s = time.process_time() - before, await self._source_cpu_s() - source_before
        if result.way is not way or self._memory.view != self._expected:
            raise RuntimeError(f"{way}: something else came than was sent, or by {result.way}")
        return self._sample(temperature, Mover(way), duration_s, cpu_s, source_cpu_s)

    async def _source_cpu_s(self) -> float:
        return float((await self._source.ask("cpu"))["cpu_s"])

    def copy(self, temperature: Temperature) -> Sample:
        """Copy the other pool as a whole: the most that the machine can do."""
        self._clear()
        view = self._local.view
        if temperature is Temperature.COLD:
            view = memoryview(mmap.mmap(self._local.fd, self._shape.size_bytes, prot=mmap.PROT_READ))
        source, destination = np.frombuffer(view, np.uint8), np.frombuffer(self._memory.view, np.uint8)
        before, began = time.process_time(), time.perf_counter()
        np.copyto(destination, source)
        duration_s = time.perf_counter() - began
        return self._sample(temperature, Mover.MEMCPY, duration_s, time.process_time() - before, 0.0)

    def close(self) -> None:
        """Give both pools back."""
        self._memory.close()
        self._local.close()

    def _clear(self) -> None:
        """Zero the pool, so that old bytes can't pass for new ones and every mover finds the same in the CPU caches."""
        np.frombuffer(self._memory.view, np.uint8)[:] = 0

    def _sample(
        self, temperature: Temperature, mover: Mover, duration_s: float, cpu_s: float, source_cpu_s: float
    ) -> Sample:
        return Sample(
            temperature=temperature,
            mover=mover,
            size_bytes=self._shape.size_bytes,
            duration_s=duration_s,
            cpu_s=cpu_s,
            source_cpu_s=source_cpu_s,
        )


if __name__ == "__main__":
    main()
