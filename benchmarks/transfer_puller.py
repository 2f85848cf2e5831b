"""The receiving side of ``benchmarks.transfer``, in a process of its own, with the source as its child.

It answers with the samples of each round, and then with ``None``. Every round has each way and memcpy once, one after
the other, so any change in the machine's speed affects all of them alike.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np
import uvloop

from benchmarks.children import Child, answer, argument, start_child
from benchmarks.transfer_source import PoolShape, fill
from quartet.discovery.host import host_identity
from quartet.rpc.channels import create_channel
from quartet.streams.convert.hand_off import from_hand_off
from quartet.transfer.base import PieceCopy, PoolMemory, TransferWay
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.puller import TransferPuller
from quartet.v1 import types_pb2

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


class _Bench:
    """One pool to fetch into, in each way, and to copy into from another pool of this process."""

    def __init__(self, shape: PoolShape, source: Child) -> None:
        self._shape = shape
        self._source = source
        self._memory = PoolMemory(shape.num_blocks, shape.piece_size_bytes)
        self._local = PoolMemory(shape.num_blocks, shape.piece_size_bytes)
        self._block_ids = shape.scattered(seed=2)
        self._copies = [PieceCopy(piece, block_id) for piece, block_id in enumerate(self._block_ids)]
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


def main() -> None:
    """Measure a pool of the shape that is the first argument, in as many rounds as the second says."""
    uvloop.run(_run(PoolShape(**argument(0)), argument(1)))


async def _run(shape: PoolShape, num_rounds: int) -> None:
    async with start_child("benchmarks.transfer_source", shape) as source:
        await source.read()
        bench = _Bench(shape, source)
        await _run_warm(bench, num_rounds)
        await _run_cold(bench, num_rounds)
    answer(None)


async def _run_warm(bench: _Bench, num_rounds: int) -> None:
    pullers = {way: bench.new_puller(way) for way in _WAYS}
    for number in range(num_rounds + 1):
        samples = [bench.copy(Temperature.WARM)]
        samples += [await bench.fetch(puller, way, Temperature.WARM) for way, puller in pullers.items()]
        if number > 0:  # the first round warms up
            answer([asdict(sample) for sample in samples])
    for puller in pullers.values():
        await puller.close()


async def _run_cold(bench: _Bench, num_rounds: int) -> None:
    for _ in range(num_rounds):
        samples = [bench.copy(Temperature.COLD)]
        for way in _WAYS:
            puller = bench.new_puller(way)
            samples.append(await bench.fetch(puller, way, Temperature.COLD))
            await puller.close()
        answer([asdict(sample) for sample in samples])


if __name__ == "__main__":
    main()
