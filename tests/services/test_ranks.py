"""Worker processes of two data-parallel ranks, over gRPC and ZMQ: the rank that is named does the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import grpc
import pytest

from quartet.config import build
from quartet.discovery.base import Role, WorkerRecord
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind, create_registry
from quartet.discovery.file import FileConfig
from quartet.errors import ConfigError, ServingError, UnsupportedFieldError
from quartet.events.kv import KvBatch
from quartet.events.load import NumberedLoad, WorkerLoad
from quartet.events.subscriber import EventSubscriber
from quartet.rpc.channels import create_channel
from quartet.streams.client import DecodeClient, PrefillClient
from quartet.streams.messages import WorkerStart
from quartet.streams.worker_client import WorkerClient
from services.workers.config import WorkerConfig
from services.workers.process import WorkerProcess
from tests import tiny
from tests.kvcache.replica import Replica
from tests.services.stream_workers import WAIT_S, collect, make_start, until
from tests.streams.pulled import PullingDecodeClient

NUM_RANKS = 2
NUM_BLOCKS = 64
PROMPT = tuple(range(300, 370))  # of blocks of 32: two, and six tokens


@dataclass
class RankedWorker:
    """A worker process, and its events as they were received.

    Attributes:
        load: the last report.
        held: by rank, the blocks that its events report.
    """

    record: WorkerRecord
    channel: grpc.aio.Channel
    load: WorkerLoad | None = None
    held: list[Replica] = field(default_factory=lambda: [Replica() for _ in range(NUM_RANKS)])
    broken: list[ServingError] = field(default_factory=list)

    def take_load(self, report: NumberedLoad) -> None:
        self.load = report.load

    def take_kv(self, batch: KvBatch) -> None:
        self.held[batch.data_parallel_rank].apply(batch.events)

    def has_held(self, *num_blocks: int) -> bool:
        return [len(rank.parents) for rank in self.held] == list(num_blocks)

    def decodes(self) -> PullingDecodeClient:
        return PullingDecodeClient(DecodeClient(self.record.worker_id, self.channel, self.broken.append))

    def prefills(self) -> PrefillClient:
        return PrefillClient(self.record.worker_id, self.channel, self.broken.append, lambda _hand_off: None)

    async def num_held_blocks(self) -> list[int]:
        report = await WorkerClient(self.channel).info(WAIT_S)
        return [rank.num_held_blocks for rank in report.load.ranks]


def worker_config(directory: Path, role: Role, discovery: DiscoveryConfig) -> WorkerConfig:
    settings = {
        "worker_id": f"{role}-0",
        "model_path": str(tiny.CHECKPOINT),
        "engine": {
            "kind": "mock",
            "num_blocks": NUM_BLOCKS,
            "data_parallel_size": NUM_RANKS,
            "mock": {"speed_up": 100},
        },
        "drain_timeout_s": 2.0,
    }
    return replace(build(WorkerConfig, settings), discovery=discovery)


@asynccontextmanager
async def serving(directory: Path, role: Role) -> AsyncIterator[RankedWorker]:
    """A worker process whose events are received from the first one on."""
    discovery = DiscoveryConfig(
        kind=DiscoveryKind.FILE, file=FileConfig(directory=directory / f"{role}-discovery", ttl_s=60)
    )
    stop = asyncio.Event()
    running = asyncio.create_task(WorkerProcess(worker_config(directory, role, discovery), role).run(stop))
    registry = create_registry(discovery)
    records: list[WorkerRecord] = []
    async with AsyncExitStack() as stack:
        stack.push_async_callback(registry.close)
        async with asyncio.timeout(WAIT_S):
            while not records and not running.done():
                records = await registry.workers()
        stack.push_async_callback(asyncio.wait, [running])
        stack.callback(stop.set)
        channel = create_channel(records[0].grpc_address, None)
        stack.push_async_callback(channel.close)
        worker = RankedWorker(records[0], channel)
        subscriber = EventSubscriber(worker.take_load, lambda: None, worker.take_kv)
        stack.callback(subscriber.close)
        subscriber.connect(worker.record.events_address)
        await until(lambda: worker.load is not None)
        yield worker
    running.result()


def at_rank(rank: int, start: WorkerStart) -> WorkerStart:
    return replace(start, generation=replace(start.generation, data_parallel_rank=rank))


async def test_the_named_rank_runs_the_request_and_reports_its_load(tmp_path: Path) -> None:
    async with serving(tmp_path, Role.DECODE) as worker:
        assert (worker.record.data_parallel_size, worker.record.num_blocks) == (NUM_RANKS, NUM_BLOCKS)
        answers = []
        for rank, prompt, num_held in ((1, PROMPT, (0, 2)), (0, PROMPT[:40], (1, 2)), (1, PROMPT[::-1], (1, 4))):
            answers.append(await collect(worker.decodes().start(at_rank(rank, make_start(prompt)))))
            await until(partial(worker.has_held, *num_held))
        assert [len(answer) for answer in answers] == [8, 8, 8]
        assert worker.load is not None
        await until(lambda: worker.load is not None and all(rank.num_steps > 0 for rank in worker.load.ranks))
        assert [rank.num_total_blocks for rank in worker.load.ranks] == [NUM_BLOCKS] * NUM_RANKS
        parts = [part async for part in WorkerClient(worker.channel).kv_snapshot(WAIT_S)]
        reported: list[Replica] = [Replica(checks_parents=False) for _ in range(NUM_RANKS)]
        for part in parts:
            reported[part.data_parallel_rank].apply(part.stored)
        assert [rank.parents for rank in reported] == [rank.parents for rank in worker.held]


async def test_a_rank_that_is_not_there_is_refused_naming_the_field(tmp_path: Path) -> None:
    async with serving(tmp_path, Role.DECODE) as worker:
        with pytest.raises(UnsupportedFieldError, match="ranks 0 to 1") as refused:
            await collect(worker.decodes().start(at_rank(2, make_start(PROMPT))))
        assert refused.value.field is not None
        assert refused.value.field.endswith("data_parallel_rank")


@pytest.mark.parametrize(("prefill_rank", "decode_rank"), [(1, 0), (0, 1)])
async def test_blocks_go_from_the_rank_that_has_them_to_the_one_that_decodes(
    tmp_path: Path, prefill_rank: int, decode_rank: int
) -> None:
    async with serving(tmp_path, Role.PREFILL) as prefill, serving(tmp_path, Role.DECODE) as decode:
        whole = await collect(decode.decodes().start(at_rank(1 - decode_rank, make_start(PROMPT))))
        prefilled = await prefill.prefills().start(at_rank(prefill_rank, make_start(PROMPT))).outcome()
        assert prefilled.hand_off is not None
        assert await prefill.num_held_blocks() == [3 * (rank == prefill_rank) for rank in range(NUM_RANKS)]
        start = make_start(PROMPT, generated=[prefilled.token_id], hand_off=prefilled.hand_off)
        # The engine looks at what came: blocks of another rank would end it.
        rest = await collect(decode.decodes().start(at_rank(decode_rank, start)))
        assert [prefilled.token_id, *rest] == whole
        await until(lambda: decode.has_held(2, 2))


def test_the_engine_torch_has_one_rank() -> None:
    with pytest.raises(ConfigError, match=r"^engine.data_parallel_size: the engine torch does not have it"):
        build(WorkerConfig, {"model_path": str(tiny.CHECKPOINT), "engine": {"kind": "torch", "data_parallel_size": 2}})
    with pytest.raises(ConfigError, match=r"^engine.data_parallel_size: must be at least 1"):
        build(WorkerConfig, {"model_path": str(tiny.CHECKPOINT), "engine": {"kind": "mock", "data_parallel_size": 0}})
