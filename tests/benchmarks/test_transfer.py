"""The transfer benchmark moves real blocks between real processes, and its figures are medians of what it saw."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from itertools import pairwise

import pytest

from benchmarks.transfer import Mover, Plan, Sample, Temperature, measure_samples, summarize
from benchmarks.transfer_source import PoolShape, lending
from quartet.kvcache.layout import EmbeddingLayout, EmbeddingsPayload
from quartet.streams.convert.hand_off import from_hand_off
from quartet.transfer.base import PieceCopy, TransferWay
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.v1 import types_pb2
from tests.transfer.cuda_workers import gpu_puller
from tests.transfer.fake_cuda import FakeDriver, FakeHost


def sample(mover: Mover, duration_s: float, temperature: Temperature = Temperature.WARM) -> Sample:
    return Sample(
        temperature=temperature,
        mover=mover,
        size_bytes=10**9,
        duration_s=duration_s,
        cpu_s=0.5,
        source_cpu_s=0.25,
    )


@pytest.mark.parametrize("shape", [PoolShape(8, 1 << 16), PoolShape(8, 1 << 16, holds_embeddings=True)], ids=str)
async def test_both_processes_move_every_way_warm_and_cold(shape: PoolShape) -> None:
    async with asyncio.timeout(50):
        samples = [asdict(sample) async for sample in measure_samples(Plan(shape, 2))]
    seen = sorted((item["temperature"], item["mover"]) for item in samples)
    assert seen == sorted([(temperature, mover) for temperature in Temperature for mover in Mover] * 2)
    assert {item["size_bytes"] for item in samples} == {8 << 16}
    assert all(item["duration_s"] > 0 for item in samples)


async def test_a_pool_on_a_gpu_is_lent_as_workers_lend_theirs() -> None:
    host, shape = FakeHost(num_devices=2), PoolShape(6, 1 << 12)
    driver = FakeDriver(host)
    memory = DeviceMemory(driver, 0, shape.num_blocks, shape.piece_size_bytes)
    async with (
        gpu_puller(host, device=1, num_blocks=shape.num_blocks, layout=shape.kv_layout) as here,
        lending(shape, memory) as lender,
    ):
        for piece, block_id in enumerate(lender.block_ids):
            driver.write(memory.address + block_id * shape.piece_size_bytes, bytes([piece]) * shape.piece_size_bytes)
        hand_off = from_hand_off(types_pb2.HandOff.FromString(bytes.fromhex(lender.offer())))
        result = await here.puller.claim(hand_off).fetch([PieceCopy(piece, piece) for piece in range(6)])
        assert result.way is TransferWay.CUDA_IPC
        assert [here.block(piece) for piece in range(6)] == [bytes([piece]) * (1 << 12) for piece in range(6)]
    memory.close()
    assert host.used_bytes == 0


def test_speeds_are_medians_and_shares_are_taken_within_a_round() -> None:
    samples = [
        # The machine slows down by half from round to round.
        *(sample(Mover.MEMCPY, 0.1), sample(Mover.SHM, 0.2), sample(Mover.GRPC, 1.0)),
        *(sample(Mover.MEMCPY, 0.2), sample(Mover.SHM, 0.4), sample(Mover.GRPC, 2.0)),
        *(sample(Mover.MEMCPY, 0.4), sample(Mover.SHM, 0.8), sample(Mover.GRPC, 4.0)),
        sample(Mover.SHM, 9.0, Temperature.COLD),
    ]
    figures = summarize(samples, Temperature.WARM)
    assert figures.gb_per_s == {"shm": 2.5, "grpc": 0.5, "memcpy": 5.0}
    assert figures.share_of_memcpy == {"shm": 0.5, "grpc": 0.1}
    assert (figures.cpu_s_per_gb["grpc"].puller, figures.cpu_s_per_gb["grpc"].source) == (0.5, 0.25)


def test_blocks_are_used_in_scattered_order() -> None:
    block_ids = PoolShape(64, 1 << 16).scattered(seed=1)
    assert sorted(block_ids) == list(range(64))
    assert sum(after == before + 1 for before, after in pairwise(block_ids)) < 8


def test_embeddings_are_described_as_tokens_of_a_model_of_bfloat16() -> None:
    payload = PoolShape(90, 1 << 18, holds_embeddings=True).payload
    layout = EmbeddingLayout(model_fingerprint="0" * 64, dtype="bfloat16", hidden_size=4096, block_size=32)
    assert payload == EmbeddingsPayload(layout, num_tokens=2880)
    assert (payload.num_pieces, payload.layout.piece_size_bytes) == (90, 1 << 18)
