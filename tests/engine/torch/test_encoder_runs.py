"""Which items share a run of the tower, and how calls end: batching, fairness, cancelling, dying, closing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from quartet.engine.encoder import EncodeTimes
from quartet.engine.torch import TorchEncoderConfig
from quartet.engine.torch.encoder import TorchEncoder
from quartet.engine.torch.encoder_jobs import Stage as JobStage
from quartet.engine.torch.vision import create_vision
from quartet.errors import EngineError, InvalidMediaError, MediaTooLargeError, WorkerUnavailableError
from quartet.media.items import MediaFile, MediaKind
from tests.engine.torch.seeing_encoder import (
    WAIT_S,
    GatedVision,
    encoded,
    encoder_config,
    rows_in,
    running_encoder,
    until,
)
from tests.engine.torch.vision_checkpoints import image_file, make_picture, make_vision_checkpoint

NUM_TOKENS = 16  # of a picture: two blocks of eight
MAX_BATCH_SIZE = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("llava_clip"), "llava_clip")


@dataclass
class Stage:
    """An encoder whose tower waits at each run."""

    encoder: TorchEncoder
    vision: GatedVision

    def encode(self, number: int) -> asyncio.Task[EncodeTimes]:
        """Encode picture ``number``, known by its width, into two blocks of its own."""
        return asyncio.create_task(self.encoder.encode(picture(number), blocks(number)))

    async def begin_run(self) -> asyncio.Task[EncodeTimes]:
        """Picture 0 in a run that waits."""
        task = self.encode(0)
        await self.runs_begun(1)
        return task

    async def runs_begun(self, number: int) -> None:
        await until(lambda: len(self.vision.runs) == number)

    async def ready(self, number: int) -> None:
        """Until so many calls wait for nothing but the tower."""
        await until(lambda: sum(job.stage is JobStage.READY for job in self.encoder._jobs._jobs) == number)

    def width_order(self) -> list[int]:
        return [width - 24 for width, _ in self.vision.sizes]


def picture(number: int) -> MediaFile:
    return image_file(make_picture(24 + number, 24, seed=number))


def blocks(number: int) -> list[int]:
    return [2 * number + 1, 2 * number]


@asynccontextmanager
async def gated(checkpoint: Path, max_batch_size: int = MAX_BATCH_SIZE) -> AsyncIterator[Stage]:
    gates: list[GatedVision] = []

    def load(config: TorchEncoderConfig) -> GatedVision:
        gates.append(GatedVision(create_vision(config)))
        return gates[0]

    config = encoder_config(checkpoint, max_batch_size=max_batch_size)
    async with running_encoder(config, load=load) as encoder:
        try:
            yield Stage(encoder, gates[0])
        finally:
            gates[0].open()


async def ended(*tasks: asyncio.Task[EncodeTimes]) -> list[EncodeTimes | BaseException]:
    async with asyncio.timeout(WAIT_S):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_items_queued_when_the_tower_becomes_free_run_in_one_batch_in_order(checkpoint: Path) -> None:
    async with gated(checkpoint) as stage:
        tasks = [await stage.begin_run(), *(stage.encode(number) for number in range(1, 8))]
        await stage.ready(7)
        stats = stage.encoder.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_steps, stats.num_items) == (1, 7, 0, 0)
        stage.vision.release()
        await stage.runs_begun(2)
        assert stage.encoder.stats().num_steps == 1
        assert stage.encoder.stats().slowest_item_s > 0
        stage.vision.release()
        await stage.runs_begun(3)
        stage.vision.release()
        assert all(isinstance(times, EncodeTimes) for times in await ended(*tasks))
        stats = stage.encoder.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_steps, stats.num_items) == (0, 0, 3, 8)
        assert stage.vision.runs == [1, 4, 3]
        # Two worker threads may finish in either order, so only runs are in order.
        order = stage.width_order()
        assert order[0] == 0
        assert order[1:] == sorted(order[1:])

        together = [rows_in(stage.encoder, blocks(number), NUM_TOKENS) for number in range(8)]
        stage.vision.open()
        alone = [await encoded(stage.encoder, picture(number), blocks(number)) for number in range(8)]
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
        assert not torch.equal(alone[0], alone[1])


async def test_no_more_is_prepared_than_two_runs_take(checkpoint: Path) -> None:
    async with gated(checkpoint, max_batch_size=1) as stage:
        tasks = [await stage.begin_run(), *(stage.encode(number) for number in range(1, 6))]
        await stage.ready(2)
        stage.vision.release()
        await stage.runs_begun(2)
        await stage.ready(2)
        assert stage.vision.num_prepared == 4
        stage.vision.open()
        await ended(*tasks)
        assert stage.vision.runs == [1] * 6


async def test_times_separate_queueing_from_computing(checkpoint: Path) -> None:
    async with gated(checkpoint) as stage:
        began_at = time.monotonic()
        first, second = await stage.begin_run(), stage.encode(1)
        await stage.ready(1)
        held_s = -time.monotonic()
        await asyncio.to_thread(time.sleep, 0.05)  # the second waits at least this long, because the tower is busy
        held_s += time.monotonic()
        stage.vision.open()
        times = await ended(first, second)
        took_s = time.monotonic() - began_at
        assert isinstance(times[0], EncodeTimes)
        assert isinstance(times[1], EncodeTimes)
        assert times[0].queue_s >= 0
        assert times[1].queue_s >= held_s
        assert times[0].compute_s >= held_s
        assert times[1].queue_s + times[1].compute_s <= took_s
        assert times[0].queue_s + times[0].compute_s <= took_s


async def test_a_damaged_picture_leaves_the_others_their_run(checkpoint: Path) -> None:
    async with gated(checkpoint) as stage:
        first = await stage.begin_run()
        damaged = MediaFile(MediaKind.IMAGE, picture(1).data[:-200])
        bad = asyncio.create_task(stage.encoder.encode(damaged, blocks(1)))
        good = stage.encode(2)
        [error] = await ended(bad)
        assert isinstance(error, InvalidMediaError)
        await stage.ready(1)
        stage.vision.open()
        await ended(first, good)
        assert stage.width_order() == [0, 2]


async def test_a_call_that_waits_is_dropped_when_it_is_cancelled(checkpoint: Path) -> None:
    async with gated(checkpoint) as stage:
        first, second, third = await stage.begin_run(), stage.encode(1), stage.encode(2)
        await stage.ready(2)
        second.cancel()
        [outcome] = await ended(second)  # while the tower is still at the first
        assert isinstance(outcome, asyncio.CancelledError)
        assert stage.encoder.stats().num_waiting == 1
        stage.vision.open()
        await ended(first, third)
        assert stage.width_order() == [0, 2]
        assert not any(stage.encoder.embeddings.memory.piece(blocks(1)[0]))
        assert stage.encoder.stats().num_failed == 0


async def test_a_call_that_is_not_prepared_is_dropped_when_it_is_cancelled(checkpoint: Path) -> None:
    async with gated(checkpoint, max_batch_size=1) as stage:
        tasks = [await stage.begin_run(), *(stage.encode(number) for number in range(1, 5))]
        await stage.ready(2)
        tasks[4].cancel()
        await ended(tasks[4])
        stage.vision.open()
        await ended(*tasks)
        assert stage.width_order() == [0, 1, 2, 3]
        assert stage.vision.num_prepared == 4


async def test_a_call_in_the_tower_is_cancelled_only_once_nothing_writes_for_it(checkpoint: Path) -> None:
    async with gated(checkpoint) as stage:
        task = await stage.begin_run()
        for _ in range(3):  # a caller that cancels again waits as well
            task.cancel()
            await asyncio.wait([task], timeout=0.01)
            assert not task.done()
        stage.vision.release()
        [outcome] = await ended(task)
        assert isinstance(outcome, asyncio.CancelledError)
        assert any(stage.encoder.embeddings.memory.piece(blocks(0)[0]))
        stats = stage.encoder.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_items) == (0, 0, 1)


async def test_items_that_do_not_fit_into_the_device_at_once_run_alone(checkpoint: Path) -> None:
    async with gated(checkpoint) as stage:
        first, *tasks = [await stage.begin_run(), *(stage.encode(number) for number in range(1, 4))]
        await stage.ready(3)
        stage.vision.room_width = 24 + 2
        stage.vision.open()
        outcomes = await ended(first, *tasks)
        assert [type(outcome) for outcome in outcomes] == [EncodeTimes] * 3 + [MediaTooLargeError]
        assert isinstance(outcomes[3], MediaTooLargeError)
        assert outcomes[3].field == "file"
        assert stage.vision.runs == [1, 3, 1, 1, 1]
        stats = stage.encoder.stats()
        assert (stats.num_running, stats.num_steps, stats.num_items, stats.num_failed) == (0, 2, 3, 1)
        assert not any(stage.encoder.embeddings.memory.piece(blocks(3)[0]))

        assert stage.encoder.is_alive
        stage.vision.room_width = None
        together = [rows_in(stage.encoder, blocks(number), NUM_TOKENS) for number in (1, 2)]
        alone = [await encoded(stage.encoder, picture(number), blocks(number + 3)) for number in (1, 2)]
        torch.testing.assert_close(together, alone)


async def test_a_cancelled_call_ends_when_the_device_has_no_room_for_it(checkpoint: Path) -> None:
    async with gated(checkpoint) as stage:
        task = await stage.begin_run()
        task.cancel()
        stage.vision.room_width = 0
        stage.vision.open()
        [outcome] = await ended(task)
        assert isinstance(outcome, asyncio.CancelledError)
        stage.vision.room_width = None
        await encoded(stage.encoder, picture(1), blocks(1))


async def test_a_tower_that_breaks_is_the_end(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with gated(checkpoint) as stage:
        tasks = [await stage.begin_run(), stage.encode(1)]
        await stage.ready(1)
        stage.vision.error = RuntimeError("the device fell off the bus")
        stage.vision.release()
        outcomes = await ended(*tasks)
        assert [type(outcome) for outcome in outcomes] == [EngineError, EngineError]
        assert not stage.encoder.is_alive
        with pytest.raises(EngineError):
            await stage.encoder.encode(picture(2), blocks(2))
        stats = stage.encoder.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_failed, stats.num_items) == (0, 0, 2, 0)
    assert "the encoder is lost" in caplog.text


async def test_a_cancelled_call_ends_when_the_tower_breaks(checkpoint: Path) -> None:
    async with gated(checkpoint) as stage:
        task = await stage.begin_run()
        task.cancel()
        stage.vision.error = RuntimeError("broken")
        stage.vision.release()
        [outcome] = await ended(task)
        assert isinstance(outcome, asyncio.CancelledError)


async def test_closing_fails_queued_calls_and_waits_for_the_running_batch(checkpoint: Path) -> None:
    async with gated(checkpoint) as stage:
        running, waiting = await stage.begin_run(), stage.encode(1)
        await stage.ready(1)
        close = asyncio.create_task(stage.encoder.close())
        [outcome] = await ended(waiting)
        assert isinstance(outcome, WorkerUnavailableError)
        assert not close.done()
        stage.vision.open()
        [outcome] = await ended(running)
        assert isinstance(outcome, EncodeTimes)
        async with asyncio.timeout(WAIT_S):
            await close
            await stage.encoder.close()  # again
        with pytest.raises(WorkerUnavailableError):
            await stage.encoder.encode(picture(2), blocks(2))
        stats = stage.encoder.stats()
        assert (stats.num_items, stats.num_failed, stats.num_waiting) == (1, 1, 0)


async def test_closing_gives_a_tower_that_hangs_up(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.engine.torch.encoder._CLOSE_TIMEOUT_S", 0.01)
    async with gated(checkpoint) as stage:
        running = await stage.begin_run()
        async with asyncio.timeout(WAIT_S):
            await stage.encoder.close()
        [outcome] = await ended(running)
        assert isinstance(outcome, WorkerUnavailableError)
        monkeypatch.undo()
        stage.vision.open()


async def test_closing_before_the_start_ends(checkpoint: Path) -> None:
    encoder = TorchEncoder(encoder_config(checkpoint))
    async with asyncio.timeout(WAIT_S):
        await encoder.close()
    with pytest.raises(WorkerUnavailableError):
        await encoder.encode(picture(0), blocks(0))


async def test_the_event_loop_goes_on_while_the_tower_works(checkpoint: Path) -> None:
    async with gated(checkpoint) as stage:
        task = await stage.begin_run()
        async with asyncio.timeout(WAIT_S):
            assert (await stage.encoder.size(picture(1))).num_tokens == NUM_TOKENS
        assert not task.done()
        stage.vision.open()
        await ended(task)
