"""Two engines with their pools on fake GPUs: what the one computed is what the other continues, by cuda_ipc."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from quartet.discovery.host import host_identity
from quartet.engine.base import EngineRequest, Failed, Finished, FinishReason, Prefilled, RequestKind
from quartet.engine.runner import SampledToken, ScheduledChunk
from quartet.engine.step_engine import StepEngine
from quartet.errors import RequestCancelledError, TransferError
from quartet.kvcache.layout import BlocksPayload
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.grpc.puller import TransferPuller
from tests.engine.consumer import Consumer, StartEngine
from tests.engine.fakes import WAIT_S, FakeRunner, expected_output, make_request
from tests.transfer.cuda_workers import GpuSource, gpu_source
from tests.transfer.fake_cuda import FakeDriver, FakeHost
from tests.transfer.workers import CONFIG, open_channel

PROMPT = range(10)


class GpuRunner(FakeRunner):
    """Computes in the memory of a fake GPU, and refuses to go on from wrong KV there."""

    def __init__(self, host: FakeHost, device: int) -> None:
        super().__init__()
        self.device_memory = DeviceMemory(FakeDriver(host, (device,)), 0, self.num_blocks, self.layout.piece_size_bytes)
        self.memory = self.device_memory  # type: ignore[assignment]  # the host's copy is for a step alone

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        memory, driver = self.device_memory, self.device_memory.driver
        assert isinstance(driver, FakeDriver)
        block_ids = {block_id for chunk in chunks for block_id in chunk.running.seq.block_table}
        for block_id in block_ids:
            address = memory.address + block_id * memory.piece_size_bytes
            self._memory.piece(block_id)[:] = driver.read(address, memory.piece_size_bytes)
        sampled = super().run(chunks)
        for block_id in block_ids:
            driver.write(memory.address + block_id * memory.piece_size_bytes, bytes(self._memory.piece(block_id)))
        return sampled

    def close(self) -> None:
        super().close()
        self.device_memory.close()


@dataclass
class Pair:
    """A Prefill and a Decode worker, as far as hand-offs go."""

    prefill: StepEngine
    prefilling: Consumer
    source: GpuSource
    decode: StepEngine
    decoding: Consumer
    puller: TransferPuller

    async def offer(self, prompt: Sequence[int] = PROMPT) -> EngineRequest:
        """Have ``prompt`` prefilled; the request that decodes it."""
        self.prefill.submit(request := make_request(prompt, kind=RequestKind.PREFILL))
        prefilled = await self.prefilling.wait_terminal(request)
        assert isinstance(prefilled, Prefilled)
        payload = BlocksPayload(self.source.layout, prefilled.num_tokens)
        hand_off = self.source.source.offer(request.id, prefilled.block_ids, payload)
        return make_request(prompt, generated=[prefilled.token_id], hand_off=hand_off)

    async def until_free(self) -> None:
        """Neither engine has a block in use or held."""
        async with asyncio.timeout(WAIT_S):
            for engine in (self.prefill, self.decode):
                while (stats := engine.stats()[0]).num_in_use_blocks or stats.num_held_blocks:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)


@asynccontextmanager
async def pair(start_engine: StartEngine, host: FakeHost, *, devices: tuple[int, int] = (0, 1)) -> AsyncIterator[Pair]:
    puller = TransferPuller(open_channel, host=host_identity(), config=CONFIG)
    prefill_runner, decode_runner = (GpuRunner(host, device) for device in devices)
    prefill, decode = await start_engine(prefill_runner), await start_engine(decode_runner, puller=puller)
    async with gpu_source(host, memory=prefill_runner.device_memory, layout=prefill_runner.layout) as source:
        source.on_end = prefill.release
        yield Pair(prefill, Consumer(prefill), source, decode, Consumer(decode), puller)
        await decode.close()
        await puller.close()
        await prefill.close()
    assert host.used_bytes == 0
    assert host.faults == []


@pytest.mark.parametrize("devices", [(0, 0), (0, 1)])
async def test_the_tokens_are_right_and_no_block_stays(start_engine: StartEngine, devices: tuple[int, int]) -> None:
    async with pair(start_engine, FakeHost(2), devices=devices) as workers:
        for prompt in (PROMPT, range(30, 50), PROMPT):  # the last one is cached at both ends
            request = await workers.offer(prompt)
            workers.decode.submit(request)
            assert await workers.decoding.wait_terminal(request) == Finished(request.id, FinishReason.LENGTH, 4)
            assert workers.decoding.tokens[request.id] == expected_output(request.generation)[1:]
        await workers.until_free()


async def test_blocks_of_a_cancelled_request_stay_until_the_copies_have_ended(start_engine: StartEngine) -> None:
    host = FakeHost(2)
    async with pair(start_engine, host) as workers:
        host.pause()
        workers.decode.submit(request := await workers.offer())
        driver = workers.decode.memory.driver  # type: ignore[union-attr]
        async with asyncio.timeout(WAIT_S):
            while not driver.count("wait"):  # noqa: ASYNC110  # a thread calls it
                await asyncio.sleep(0.001)
        workers.decode.cancel(request.id)
        await workers.decoding.wait_seen()
        assert workers.decode.stats()[0].num_in_use_blocks == 3
        assert request.id not in workers.decoding.terminal
        host.resume()
        ended = await workers.decoding.wait_terminal(request)
        assert isinstance(ended, Failed)
        assert type(ended.error) is RequestCancelledError
        await workers.until_free()


async def test_between_gpus_that_cannot_peer_one_request_fails_and_the_next_ones_are_staged(
    start_engine: StartEngine,
) -> None:
    async with pair(start_engine, FakeHost(2, peers=False)) as workers:
        workers.decode.submit(request := await workers.offer())
        ended = await workers.decoding.wait_terminal(request)
        assert isinstance(ended, Failed)
        assert type(ended.error) is TransferError
        await workers.until_free()
        for prompt in (PROMPT, range(30, 50)):
            workers.decode.submit(request := await workers.offer(prompt))
            assert await workers.decoding.wait_terminal(request) == Finished(request.id, FinishReason.LENGTH, 4)
            assert workers.decoding.tokens[request.id] == expected_output(request.generation)[1:]
        await workers.until_free()
