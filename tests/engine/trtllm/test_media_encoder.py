"""The encode worker's adapter: pictures stay with TensorRT-LLM until one takes them, embeddings lie in our pool."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.engine import catalog
from quartet.engine.encoder import MediaEncoder
from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.settings import EncoderSettings, EngineKind, EngineSettings, EngineSpec
from quartet.engine.trtllm.media_state import read_state
from quartet.errors import (
    ConfigError,
    EngineError,
    InvalidMediaError,
    InvalidRequestError,
    MediaTooLargeError,
    WorkerUnavailableError,
)
from quartet.media.items import MediaFile, MediaKind
from tests.engine.trtllm.media import WAIT_S, checkpoint_as, image_file, kept, rows_file, running_encoder
from tests.engine.trtllm.specs import spec_of
from tests.fakes.conftest import stand_in  # noqa: F401 - a fixture
from tests.fakes.driving import picture
from tests.fakes.installation import installed
from tests.tiny import CHECKPOINT

with installed():
    from tensorrt_llm._stand_in.control import EngineControl, control
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer


def tower() -> EngineControl:
    """The encoder that runs."""
    return control.engines[-1]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread will bring about."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what is checked has no event
            await asyncio.sleep(0.001)


async def test_a_picture_is_kept_until_it_is_taken() -> None:
    async with running_encoder() as encoder:
        file = image_file(picture())
        size = await encoder.size(file)
        assert (size.num_tokens, size.num_pixels) == (64, 96 * 96)
        encoded = await kept(encoder, 1, picture())
        state = read_state(encoded.state)
        assert (state.width, state.height, state.num_tokens) == (96, 96, 64)
        assert encoded.times.queue_s >= 0 < encoded.times.compute_s
        await until(lambda: tower().num_held == 1)
        SharedTensorContainer.from_dict(dict(state.handle)).get_local_view()
        assert encoder.states is not None
        encoder.states.release(1, was_taken=True)
        await until(lambda: tower().num_held == 0)
        stats = encoder.stats()
        assert (stats.num_items, stats.num_steps, stats.num_failed, stats.num_waiting, stats.num_running) == (
            1,
            1,
            0,
            0,
            0,
        )


async def test_a_picture_that_no_worker_took_is_released() -> None:
    async with running_encoder() as encoder:
        assert encoder.states is not None
        for holder, colour in enumerate(("red", "blue", "red")):
            await kept(encoder, holder, picture(colour))
        await until(lambda: tower().num_held == 3)
        for holder in (0, 1, 2, 2, 99):
            encoder.states.release(holder, was_taken=False)
        await until(lambda: tower().num_held == 0)


async def test_a_picture_whose_caller_goes_while_it_is_encoded_is_released() -> None:
    async with running_encoder() as encoder:
        tower().steps.close()
        leaving, waiting = (asyncio.create_task(kept(encoder, holder, picture())) for holder in (1, 2))
        await until(lambda: encoder.stats().num_running + encoder.stats().num_waiting == 2)
        await until(lambda: tower().num_running >= 1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        tower().steps.open()
        async with asyncio.timeout(WAIT_S):
            await waiting
        await until(lambda: tower().num_held == 1)
        assert encoder.stats().num_waiting == 0


async def test_queued_pictures_are_encoded_in_one_batch() -> None:
    async with running_encoder(encoder=EncoderSettings(max_batch_size=4)) as encoder:
        tower().steps.close()
        tasks = [asyncio.create_task(kept(encoder, 0, picture()))]
        await until(lambda: encoder.stats().num_running == 1)
        tasks += [asyncio.create_task(kept(encoder, holder, picture())) for holder in (1, 2, 3, 4)]
        await until(lambda: encoder.stats().num_waiting == 4)
        tower().steps.open()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*tasks)
        assert encoder.stats().num_steps == 2


async def test_a_picture_that_fails_fails_no_other() -> None:
    async with running_encoder() as encoder:
        tower().fail_next_request("CUDA out of memory")
        with pytest.raises(EngineError, match="could not encode"):
            await kept(encoder, 1, picture())
        await kept(encoder, 2, picture())
        assert encoder.is_alive
        assert encoder.stats().num_failed == 1


async def test_the_error_of_a_damaged_picture_names_its_field() -> None:
    async with running_encoder() as encoder:
        file = image_file(picture())
        broken = MediaFile(file.kind, file.data[:-60])
        assert encoder.states is not None
        with pytest.raises(InvalidMediaError) as caught:
            await encoder.states.encode(1, broken)
        assert caught.value.field == "file"
        with pytest.raises(InvalidMediaError):
            await encoder.size(MediaFile(MediaKind.IMAGE, b"x"))


async def test_a_picture_that_becomes_something_else_than_was_announced_fails(tmp_path: Path) -> None:
    async with running_encoder() as encoder:
        states: Any = encoder.states
        object.__setattr__(states._model.sizes, "num_tile_tokens", 49)
        with pytest.raises(EngineError, match="became 64 tokens, not the 49"):
            await kept(encoder, 1, picture())
        await until(lambda: tower().num_held == 0)


async def test_its_death_fails_all_requests() -> None:
    async with running_encoder() as encoder:
        tower().steps.close()
        waiting = asyncio.create_task(kept(encoder, 1, picture()))
        await until(lambda: encoder.stats().num_running == 1)
        tower().die()
        tower().steps.open()
        with pytest.raises(EngineError, match="broke"):
            await waiting
        await until(lambda: not encoder.is_alive)
        with pytest.raises(EngineError, match="broke"):
            await kept(encoder, 2, picture())


async def test_closing_fails_queued_pictures_and_frees_what_is_kept() -> None:
    async with running_encoder() as encoder:
        await kept(encoder, 1, picture())
        tower().steps.close()
        waiting = asyncio.create_task(kept(encoder, 2, picture()))
        await until(lambda: encoder.stats().num_running == 1)
        closing = asyncio.create_task(encoder.close())
        with pytest.raises(WorkerUnavailableError):
            await waiting
        tower().steps.open()
        await closing
        with pytest.raises(WorkerUnavailableError):
            await kept(encoder, 3, picture())
    gc.collect()


async def test_a_failed_load_or_a_missing_feature_fails_the_start() -> None:
    control.fail_next_load(RuntimeError("no such GPU"))
    with pytest.raises(EngineError, match="cannot be started: no such GPU"):
        async with running_encoder():
            pass
    with installed(support_mm_disagg=False), pytest.raises(InvalidRequestError, match="does not hand"):
        async with running_encoder():
            pass


async def test_embeddings_lie_in_our_pool() -> None:
    async with running_encoder(block_size=32, num_embedding_blocks=8) as encoder:
        rows = torch.arange(40 * 256, dtype=torch.float32).view(40, 256)
        file = rows_file(rows)
        assert (await encoder.size(file)).num_tokens == 40
        await encoder.encode(file, (6, 1))
        assert torch.equal(EmbeddingPoolView(encoder.embeddings).read((6, 1), 0, 40), rows)
        with pytest.raises(InvalidMediaError, match="3 blocks"):
            await encoder.encode(file, (1, 2, 3))
        with pytest.raises(MediaTooLargeError):
            await encoder.size(rows_file(torch.zeros(65, 256)))
        assert encoder.embeddings.layout.dtype == "float32"
        assert encoder.stats().num_items == 1


async def taken_kinds(encoder: MediaEncoder) -> frozenset[MediaKind]:
    """What it takes, once it is started; it is closed then."""
    try:
        await encoder.start()
        file = rows_file(torch.ones(3, 256))
        await encoder.encode(file, (0,))
        return encoder.capabilities.kinds
    finally:
        await encoder.close()


@pytest.mark.parametrize("kind", [EngineKind.TRTLLM, EngineKind.TORCH])
async def test_embeddings_alone_take_neither_a_gpu_nor_the_package(kind: EngineKind, tmp_path: Path) -> None:
    settings = EngineSettings(kind=kind, dtype="float32")
    encoder = EncoderSettings(kinds=(MediaKind.EMBEDDINGS,))
    spec = EngineSpec(model_path=checkpoint_as("qwen3_vl", tmp_path), engine=settings, encoder=encoder)
    assert await taken_kinds(catalog.create_media_encoder(spec, None)) == {MediaKind.EMBEDDINGS}
    assert not control.engines


async def test_a_model_whose_pictures_are_unknown_takes_embeddings_only(tmp_path: Path) -> None:
    spec = spec_of()
    unknown = EngineSpec(model_path=checkpoint_as("qwen3_vl", tmp_path), engine=spec.engine, encoder=spec.encoder)
    assert await taken_kinds(catalog.create_media_encoder(unknown, None)) == {MediaKind.EMBEDDINGS}
    asked = EngineSpec(
        model_path=unknown.model_path, engine=spec.engine, encoder=EncoderSettings(kinds=(MediaKind.IMAGE,))
    )
    with pytest.raises(ConfigError, match=r"encoder\.kinds: pictures of models of type qwen3_vl are not supported"):
        await taken_kinds(catalog.create_media_encoder(asked, None))
    sizer = catalog.create_media_sizer(unknown)
    assert (await sizer.size(image_file(picture()))).num_tokens == 0
    assert (await sizer.size(rows_file(torch.ones(3, 256)))).num_tokens == 3


async def test_llama_4_takes_pictures_alone_and_has_no_encode_worker(tmp_path: Path) -> None:
    spec = replace(spec_of(), model_path=checkpoint_as("llama4", tmp_path))
    for kinds in (None, (MediaKind.EMBEDDINGS,)):
        asked = replace(spec, encoder=EncoderSettings(kinds=kinds))
        with pytest.raises(ConfigError, match=r"^encoder\.kinds: embeddings for models of type llama4 are not"):
            await taken_kinds(catalog.create_media_encoder(asked, None))
    assert catalog.create_media_sizer(spec).capabilities.kinds == {MediaKind.IMAGE}
    assert not control.engines


async def test_encode_and_compute_workers_are_of_one_pool() -> None:
    torch_spec = EngineSpec(
        model_path=str(CHECKPOINT),
        engine=EngineSettings(dtype="float32"),
        encoder=EncoderSettings(kinds=(MediaKind.EMBEDDINGS,)),
    )
    rows = catalog.create_media_encoder(torch_spec, None)
    with_tower = catalog.create_media_encoder(
        EngineSpec(model_path=str(CHECKPOINT), engine=torch_spec.engine, encoder=EncoderSettings()), None
    )
    try:
        await rows.start()
        await with_tower.start()
        assert rows.embeddings.layout == with_tower.embeddings.layout
        assert rows.capabilities.preprocessing_fingerprint == with_tower.capabilities.preprocessing_fingerprint
    finally:
        await rows.close()
        await with_tower.close()


def test_engines_without_an_encoder_say_so() -> None:
    mock = EngineSpec(model_path="x", engine=EngineSettings(kind=EngineKind.MOCK), encoder=EncoderSettings())
    with pytest.raises(ConfigError, match="mock encodes no media"):
        catalog.create_media_encoder(mock, None)
    with pytest.raises(ConfigError, match="mock reads no media"):
        catalog.create_media_sizer(mock)
