"""One side of ``benchmarks.gpu_pull``, a process of its own: the owner of a pool, or the reader that fetches from it.

Both sides can decode streams meanwhile, on an engine in the same process. The parent gives orders, objects whose field
``do`` is the name of a method of ``_Owner`` or ``_Reader``; the other fields are its arguments.
"""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeAlias

import numpy as np
import torch
import uvloop

from benchmarks.children import answer, argument, orders
from benchmarks.gpu_pull import OWNER, StreamsPlan
from benchmarks.transfer_source import Lender, PoolShape, lending
from quartet.discovery.host import host_identity
from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.sampling import Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.engine.torch import TorchEngineConfig, create_runner
from quartet.rpc.channels import create_channel
from quartet.streams.convert.hand_off import from_hand_off
from quartet.transfer.base import PieceRun, PoolMemory
from quartet.transfer.config import TransferConfig
from quartet.transfer.cuda.driver import cuda_driver
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.reader import CudaReader
from quartet.transfer.grpc.puller import TransferPuller
from quartet.transfer.shm import ShmReader
from quartet.v1 import types_pb2

_Memory: TypeAlias = PoolMemory | DeviceMemory

_CPU = "cpu"
# As workers have it, so that the event loop lags no more behind the engine's thread than there.
_SWITCH_INTERVAL_S = 0.0005


class Streams:
    """Streams that decode on an engine of this process until it is closed.

    Attributes:
        steps_s: seconds of each step since ``clear`` in which all streams got one token, and nothing else happened.
    """

    def __init__(self, plan: StreamsPlan) -> None:
        """Load nothing before ``start``."""
        self.steps_s: list[float] = []
        self._plan = plan
        self._config = TorchEngineConfig(**plan.engine)
        bounds = SchedulerConfig(max_num_seqs=plan.num_streams)
        self._engine = StepEngine(lambda: create_runner(self._config), bounds, kinds=frozenset({RequestKind.DECODE}))
        self._streams: dict[int, int] = {}  # by request
        self._num_requests = 0
        self._settled = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model, and return once all streams decode. Raises ``ServingError``."""
        await self._engine.start()
        for stream in range(self._plan.num_streams):
            share = (stream + 1) / self._plan.num_streams
            self._submit(stream, max(2, round(share * self._plan.num_output_tokens)))
        self._reading = asyncio.create_task(self._read())
        settling = asyncio.create_task(self._settled.wait())
        await asyncio.wait({self._reading, settling}, return_when=asyncio.FIRST_COMPLETED)
        if self._reading.done():
            self._reading.result()

    @property
    def is_stepping(self) -> bool:
        """Whether the engine takes a step."""
        return bool(self._engine.turns())

    def clear(self) -> None:
        """Forget the steps so far."""
        self.steps_s = []

    async def close(self) -> None:
        """End the streams and the engine."""
        await self._engine.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    async def _read(self) -> None:
        num_left, last_at = self._plan.num_settling_steps, time.perf_counter()
        async for step in self._engine.outputs():
            if step.failed:
                raise step.failed[0].error
            for finished in step.finished:
                self._submit(self._streams.pop(finished.id), self._plan.num_output_tokens)
            if not step.ids:
                continue
            now = time.perf_counter()
            if len(step.ids) == self._plan.num_streams and not step.started:
                self.steps_s.append(now - last_at)
                num_left -= 1
                if not num_left:
                    self._settled.set()
            last_at = now

    def _submit(self, stream: int, num_output_tokens: int) -> None:
        self._num_requests += 1
        self._streams[self._num_requests] = stream
        # Few ids are needed: prompts differ from their first block on.
        prompt = random.Random(stream).choices(range(16, 1024), k=self._plan.num_prompt_tokens)
        sampling = Sampling(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)
        self._engine.submit(
            EngineRequest(
                id=self._num_requests,
                kind=RequestKind.DECODE,
                generation=Generation(prompt_token_ids=tuple(prompt), sampling=sampling),
            )
        )


class _Side:
    """What both sides do."""

    def __init__(self, device: str, exits: AsyncExitStack) -> None:
        self._device = device
        self._exits = exits
        self._pool = AsyncExitStack()
        self._streams: Streams | None = None

    async def decode(self, plan: Mapping[str, Any]) -> None:
        """Start the streams; returns once all decode."""
        self._streams = Streams(StreamsPlan(**plan))
        self._exits.push_async_callback(self._streams.close)
        await self._streams.start()

    async def clear(self) -> None:
        """Forget the steps so far."""
        if self._streams is not None:
            self._streams.clear()

    async def steps(self) -> Sequence[float]:
        """Seconds of each step since ``clear``."""
        return [] if self._streams is None else self._streams.steps_s

    def _decodes(self) -> bool:
        return self._streams is not None and self._streams.is_stepping

    async def drop_pool(self) -> None:
        """Give the pool back."""
        await self._pool.aclose()
        self._pool = AsyncExitStack()

    def _make_pool(self, shape: PoolShape) -> _Memory:
        memory: _Memory
        if self._device == _CPU:
            memory = PoolMemory(shape.num_blocks, shape.piece_size_bytes)
        else:
            index = torch.device(self._device).index
            memory = DeviceMemory(cuda_driver(), index, shape.num_blocks, shape.piece_size_bytes)
        self._pool.callback(memory.close)
        return memory


class _Owner(_Side):
    """Lends its pool."""

    _lender: Lender

    async def make_pool(self, shape: Mapping[str, Any]) -> str:
        """Make a pool and lend it; returns the handle by which the GPU's driver opens it, in hexadecimal digits."""
        pool = PoolShape(**shape)
        memory = self._make_pool(pool)
        self._lender = await self._pool.enter_async_context(lending(pool, memory))
        for words, expected in _patterns(memory, self._device, self._lender.block_ids):
            words.copy_(expected)
        _synchronize(self._device)
        return memory.handle.hex() if isinstance(memory, DeviceMemory) else ""

    async def offer(self, count: int) -> Sequence[str]:
        """Hand-offs of all blocks, each for one pull."""
        return [self._lender.offer() for _ in range(count)]


class _Reader(_Side):
    """Fetches into its pool."""

    _memory: _Memory
    _puller: TransferPuller
    _block_ids: Sequence[int]
    _copies: PieceRun

    def __init__(self, device: str, exits: AsyncExitStack) -> None:
        super().__init__(device, exits)
        self._copy_s = _timed_copies(ShmReader if device == _CPU else CudaReader)

    async def make_pool(self, shape: Mapping[str, Any]) -> None:
        """Make a pool, zeroed, and a puller into it."""
        pool = PoolShape(**shape)
        memory = self._memory = self._make_pool(pool)
        _words(memory, self._device).zero_()
        _synchronize(self._device)
        puller = self._puller = TransferPuller(
            lambda address: create_channel(address, None, is_bulk=True), host=host_identity(), config=TransferConfig()
        )
        self._pool.push_async_callback(puller.close)
        puller.attach(memory, pool.layout, self._decodes)
        self._block_ids = pool.scattered(seed=2)
        self._copies = PieceRun(0, self._block_ids)

    async def plain_copies(self, handle: str, count: int) -> Sequence[float]:
        """Seconds of each of ``count`` copies of the whole pool as one piece: the owner's, or on a CPU one here."""
        if isinstance(self._memory, DeviceMemory):
            return await asyncio.to_thread(copy_on_gpu, self._memory, bytes.fromhex(handle), count)
        local = PoolMemory(self._memory.num_blocks, self._memory.piece_size_bytes)
        source, target = (np.frombuffer(pool.view, np.uint8) for pool in (local, self._memory))
        local.close()  # the mapping lives on
        seconds = [_seconds(functools.partial(np.copyto, target, source)) for _ in range(count)]
        target[:] = 0
        return seconds

    async def pull(self, hand_offs: Sequence[str]) -> Sequence[Mapping[str, object]]:
        """Pull each of ``hand_offs`` as a whole: by which way, how long, and how much of that its copying took."""
        return [await self._pull_one(bytes.fromhex(hand_off)) for hand_off in hand_offs]

    async def check(self) -> None:
        """Raise ``RuntimeError`` unless the pool has the owner's bytes."""
        for words, expected in _patterns(self._memory, self._device, self._block_ids):
            if not torch.equal(words, expected):
                raise RuntimeError("something else came than was sent")

    async def _pull_one(self, message: bytes) -> Mapping[str, object]:
        hand_off = from_hand_off(types_pb2.HandOff.FromString(message))
        self._copy_s.clear()
        began = time.perf_counter()
        result = await self._puller.claim(hand_off).fetch(self._copies)
        duration_s = time.perf_counter() - began
        return {"way": result.way, "duration_s": duration_s, "copy_s": sum(self._copy_s)}


def main() -> None:
    """Follow orders until the standard input ends."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    uvloop.run(_serve(argument(0), argument(1)))


async def _serve(role: str, device: str) -> None:
    if device == _CPU:
        torch.set_num_threads(1)
    async with AsyncExitStack() as exits:
        side = (_Owner if role == OWNER else _Reader)(device, exits)
        exits.push_async_callback(side.drop_pool)
        answer("ready")
        async for order in orders():
            answer(await getattr(side, order.pop("do"))(**order))


def _words(memory: _Memory, device: str) -> torch.Tensor:
    """``[num_blocks, piece_size_bytes / 8]`` int64: the pool."""
    if isinstance(memory, PoolMemory):
        whole = torch.frombuffer(memory.view, dtype=torch.int64)
    else:
        whole = torch.as_tensor(memory, device=device).view(torch.int64)
    return whole.view(memory.num_blocks, -1)


def _patterns(memory: _Memory, device: str, block_ids: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each block, in the order of ``block_ids``, and what is in it: no two words of a sequence are equal."""
    words = _words(memory, device)
    columns = torch.arange(words.shape[1], device=device)
    for piece, block_id in enumerate(block_ids):
        yield words[block_id], columns + piece * len(columns)


def _synchronize(device: str) -> None:
    if device != _CPU:
        torch.cuda.synchronize(device)


def copy_on_gpu(memory: DeviceMemory, handle: bytes, count: int) -> list[float]:
    """Seconds of each of ``count`` copies of another process's whole pool, opened by ``handle``, into ``memory``."""
    driver = memory.driver
    driver.bind(memory.device)
    source, stream, event = driver.open(handle), driver.create_stream(), driver.create_event()

    def copy() -> None:
        driver.copy(memory.address, source, memory.size_bytes, stream)
        driver.record(event, stream)
        driver.wait(event)

    seconds = [_seconds(copy) for _ in range(count)]
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    driver.close(source)
    return seconds


def _timed_copies(reader: type[Any]) -> list[float]:
    """Where all readers of this class note the seconds of their copies from now on."""
    seconds: list[float] = []
    copy = reader.copy

    @functools.wraps(copy)
    async def timed(self: Any, *args: Any) -> None:
        began = time.perf_counter()
        await copy(self, *args)
        seconds.append(time.perf_counter() - began)

    setattr(reader, "copy", timed)  # noqa: B010 - a method is replaced, which mypy would not let an assignment do
    return seconds


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
