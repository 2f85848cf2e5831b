"""The torch encoder: pictures of every format and files of embeddings end up in the pool as they should."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from quartet.engine.encoder import EncoderCapabilities
from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.torch import TorchEncoderConfig, create_encoder
from quartet.engine.torch.encoder import TorchEncoder
from quartet.engine.torch.encoder_tower import Tower, load_tower
from quartet.engine.torch.vision import create_vision
from quartet.errors import (
    EngineError,
    InvalidMediaError,
    InvalidRequestError,
    MediaTooLargeError,
    ServingError,
    WorkerUnavailableError,
)
from quartet.kvcache.layout import EmbeddingLayout
from quartet.media.items import MediaFile, MediaKind
from quartet.media.media_id import preprocessing_fingerprint
from quartet.transfer.base import EmbeddingMemory, PoolMemory
from tests.engine.torch.seeing_encoder import BLOCK_SIZE, WAIT_S, encoded, encoder_config, running_encoder
from tests.engine.torch.vision_checkpoints import (
    HIDDEN_SIZE,
    TINY,
    Reference,
    image_file,
    make_picture,
    make_vision_checkpoint,
)

BLOCKS = [9, 3, 17, 4, 1, 30, 31, 2, 40, 41, 42, 43]  # in no order, as blocks are


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: make_vision_checkpoint(tmp_path_factory.mktemp(name), name))


def embeddings_file(tensor: torch.Tensor, **others: torch.Tensor) -> MediaFile:
    return MediaFile(MediaKind.EMBEDDINGS, save({"embeddings": tensor, **others}, {"format": "pt"}))


async def test_the_tiny_models_embeddings_are_those_of_transformers() -> None:
    picture = make_picture(200, 120)
    async with running_encoder(encoder_config(TINY)) as encoder:
        rows = await encoded(encoder, image_file(picture), BLOCKS)
    torch.testing.assert_close(rows, Reference(TINY).features(picture), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("width", "height"), [(24, 24), (60, 24), (20, 90), (200, 150)])
async def test_a_picture_of_many_tiles_fills_its_blocks_in_order(
    width: int, height: int, checkpoint: Callable[[str], Path]
) -> None:
    picture = make_picture(width, height)
    async with running_encoder(encoder_config(checkpoint("llava_next_clip"))) as encoder:
        rows = await encoded(encoder, image_file(picture), BLOCKS)
    expected = Reference(checkpoint("llava_next_clip")).features(picture)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("format", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 95}), ("GIF", {})]
)
async def test_every_format_is_the_same_picture(
    format: str, options: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    picture = make_picture(2, 2).resize((60, 40))  # smooth, so that a lossy format keeps it
    if format == "GIF":
        picture = picture.quantize().convert("RGB")
    async with running_encoder(encoder_config(checkpoint("llava_next_clip"))) as encoder:
        rows = await encoded(encoder, image_file(picture, format, **options), BLOCKS)
        expected = await encoded(encoder, image_file(picture), BLOCKS)
    tolerance = 0.1 if format == "JPEG" else 1e-5
    assert (rows - expected).abs().max() <= tolerance * expected.abs().max()


async def test_the_size_of_a_file_gives_the_pixels_that_decoding_makes(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(encoder_config(checkpoint("llava_next_clip"))) as encoder:
        assert (await encoder.size(image_file(make_picture(60, 40)))).num_pixels == 60 * 40
        assert (await encoder.size(embeddings_file(torch.zeros(3, HIDDEN_SIZE)))).num_pixels == 0


async def test_a_picture_that_lies_on_its_side_is_put_upright(checkpoint: Callable[[str], Path]) -> None:
    picture = make_picture(60, 40)
    exif = picture.getexif()
    exif[0x0112] = 6  # to be turned clockwise
    async with running_encoder(encoder_config(checkpoint("llava_next_clip"))) as encoder:
        rows = await encoded(encoder, image_file(picture, exif=exif), BLOCKS)
        expected = await encoded(encoder, image_file(picture.rotate(-90, expand=True)), BLOCKS)
        unturned = await encoded(encoder, image_file(picture), BLOCKS)
    torch.testing.assert_close(rows, expected)
    assert rows.shape != unturned.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
async def test_embeddings_are_written_as_they_are(dtype: torch.dtype, checkpoint: Callable[[str], Path]) -> None:
    rows = torch.randn(13, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    async with running_encoder(encoder_config(checkpoint("llava_clip"))) as encoder:
        assert torch.equal(await encoded(encoder, embeddings_file(rows), BLOCKS), rows.float())


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        (embeddings_file(torch.zeros(2, HIDDEN_SIZE + 1)), r"not of shape \[num_tokens, 32\]"),
        (embeddings_file(torch.zeros(0, HIDDEN_SIZE)), "not of shape"),
        (embeddings_file(torch.zeros(1, 2, HIDDEN_SIZE)), "not of shape"),
        (embeddings_file(torch.zeros(2, HIDDEN_SIZE, dtype=torch.float64)), "none of F32, F16, BF16"),
        (embeddings_file(torch.zeros(2, HIDDEN_SIZE), more=torch.zeros(1)), "2 tensors, not one"),
        (MediaFile(MediaKind.EMBEDDINGS, b"1234567"), "too short"),
        (MediaFile(MediaKind.EMBEDDINGS, struct.pack("<Q", 1 << 40) + b"{}"), "would have 1099511627776 bytes"),
        (MediaFile(MediaKind.EMBEDDINGS, struct.pack("<Q", 2) + b"{"), "would have 2 bytes"),
        (MediaFile(MediaKind.EMBEDDINGS, struct.pack("<Q", 2) + b"{{"), "no JSON"),
        (MediaFile(MediaKind.EMBEDDINGS, struct.pack("<Q", 40_000) + b"[" * 40_000), "no JSON"),
        (MediaFile(MediaKind.EMBEDDINGS, struct.pack("<Q", 2) + b"[]"), "no JSON object"),
        (MediaFile(MediaKind.EMBEDDINGS, struct.pack("<Q", 2) + b"{}"), "0 tensors, not one"),
        (MediaFile(MediaKind.EMBEDDINGS, embeddings_file(torch.zeros(2, HIDDEN_SIZE)).data[:-1]), "not the 256 bytes"),
        (
            MediaFile(MediaKind.EMBEDDINGS, embeddings_file(torch.zeros(2, HIDDEN_SIZE)).data + b"x"),
            "not the 256 bytes",
        ),
        (MediaFile(MediaKind.IMAGE, b"no picture"), "no PNG, JPEG, WebP or GIF"),
    ],
)
async def test_a_bad_header_is_refused_in_a_sentence(
    file: MediaFile, complaint: str, checkpoint: Callable[[str], Path]
) -> None:
    async with running_encoder(encoder_config(checkpoint("llava_clip"))) as encoder:
        for call in (encoder.size(file), encoder.encode(file, [0])):
            with pytest.raises(InvalidMediaError, match=complaint) as caught:
                await call
            assert caught.value.field == "file"
        assert encoder.is_alive


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30])
async def test_numbers_that_the_pool_cannot_hold_are_refused(number: float, checkpoint: Callable[[str], Path]) -> None:
    rows = torch.zeros(3, HIDDEN_SIZE)
    rows[2, 5] = number
    async with running_encoder(encoder_config(checkpoint("llava_clip"), dtype="float16")) as encoder:
        assert (await encoder.size(embeddings_file(rows))).num_tokens == 3  # its header is fine
        with pytest.raises(InvalidMediaError, match="not all of its numbers are finite in float16") as caught:
            await encoder.encode(embeddings_file(rows), [0])
        assert caught.value.field == "file"


async def test_too_large_an_item_is_refused(checkpoint: Callable[[str], Path]) -> None:
    config = encoder_config(checkpoint("llava_next_clip"), max_item_tokens=40, max_pixels=5000)
    async with running_encoder(config) as encoder:
        assert encoder.capabilities.max_item_tokens == 40
        for file, complaint in (
            (embeddings_file(torch.zeros(41, HIDDEN_SIZE)), "41 tokens, one item may have 40"),
            (image_file(make_picture(48, 48)), "fills 88 tokens, one item may fill 40"),
            (image_file(make_picture(100, 51)), "5000"),
        ):
            for call in (encoder.size(file), encoder.encode(file, [0])):
                with pytest.raises(MediaTooLargeError, match=complaint) as caught:
                    await call
                assert caught.value.field == "file"
        assert (await encoder.size(embeddings_file(torch.zeros(40, HIDDEN_SIZE)))).num_tokens == 40


async def test_a_picture_that_does_not_fill_its_blocks_is_refused(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(encoder_config(checkpoint("llava_clip"))) as encoder:
        for block_ids in ([0], [0, 1, 2]):
            with pytest.raises(InvalidMediaError, match="fills 16 tokens"):
                await encoder.encode(image_file(make_picture(24, 24)), block_ids)


async def test_a_damaged_picture_harms_no_other(checkpoint: Callable[[str], Path]) -> None:
    whole = image_file(make_picture(50, 50))
    cut = MediaFile(MediaKind.IMAGE, whole.data[: len(whole.data) // 2])
    async with running_encoder(encoder_config(checkpoint("llava_clip"))) as encoder:
        with pytest.raises(InvalidMediaError) as caught:
            await encoder.encode(cut, [0, 1])
        assert caught.value.field == "file"
        await encoder.encode(whole, [0, 1])
        stats = encoder.stats()
        assert (stats.num_items, stats.num_failed, stats.num_running, stats.num_waiting) == (1, 1, 0, 0)


async def test_the_encoder_describes_its_model_and_pool(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llava_clip")
    files = {name: (path / name).read_bytes() for name in ("config.json", "processor_config.json")}
    async with running_encoder(encoder_config(path)) as encoder:
        assert encoder.capabilities == EncoderCapabilities(
            kinds=frozenset({MediaKind.IMAGE, MediaKind.EMBEDDINGS}),
            model_fingerprint=model_fingerprint(path, "float32"),
            preprocessing_fingerprint=preprocessing_fingerprint(files),
            max_item_tokens=16,
        )
        assert encoder.embeddings.layout == layout(path)
        assert encoder.embeddings.memory.num_blocks == 64


def layout(path: Path, block_size: int = BLOCK_SIZE) -> EmbeddingLayout:
    return EmbeddingLayout(
        model_fingerprint=model_fingerprint(path, "float32"),
        dtype="float32",
        hidden_size=HIDDEN_SIZE,
        block_size=block_size,
    )


async def test_a_pool_that_was_given_is_written_to_and_left_open(checkpoint: Callable[[str], Path]) -> None:
    own = layout(checkpoint("llava_clip"))
    pool = EmbeddingMemory(own, PoolMemory(8, own.piece_size_bytes))
    async with running_encoder(encoder_config(checkpoint("llava_clip"), num_blocks=1), pool) as encoder:
        assert encoder.embeddings is pool
        await encoder.encode(image_file(make_picture(24, 24)), [5, 7])
    assert [block for block in range(8) if any(pool.memory.piece(block))] == [5, 7]
    assert pool.memory.fd >= 0
    pool.memory.close()


async def test_its_own_pool_is_closed(checkpoint: Callable[[str], Path]) -> None:
    async with running_encoder(encoder_config(checkpoint("llava_clip"))) as encoder:
        memory = encoder.embeddings.memory
        assert memory.fd >= 0
    assert memory.fd < 0
    with pytest.raises(WorkerUnavailableError):
        _ = encoder.embeddings


async def test_closing_waits_for_no_load_and_what_that_brings_is_freed(checkpoint: Callable[[str], Path]) -> None:
    began, go_on = threading.Event(), threading.Event()
    loaded: list[Tower] = []

    def load(config: TorchEncoderConfig, embeddings: EmbeddingMemory | None) -> Tower:
        began.set()
        assert go_on.wait(WAIT_S)
        loaded.append(load_tower(config, embeddings, load=create_vision))
        return loaded[0]

    encoder = TorchEncoder(encoder_config(checkpoint("llava_clip")), None, load)
    starting = asyncio.create_task(encoder.start())
    assert await asyncio.to_thread(began.wait, WAIT_S)
    await encoder.close()
    assert not starting.done()
    go_on.set()
    with pytest.raises(WorkerUnavailableError):
        await starting
    assert loaded[0].memory.memory.fd < 0


async def failed_start(encoder: TorchEncoder, error: type[ServingError], complaint: str) -> ServingError:
    with pytest.raises(error, match=complaint) as caught:
        await encoder.start()
    assert not encoder.is_alive
    await encoder.close()
    return caught.value


async def test_a_pool_of_another_layout_is_refused(checkpoint: Callable[[str], Path]) -> None:
    other = layout(checkpoint("llava_clip"), block_size=2 * BLOCK_SIZE)
    pool = EmbeddingMemory(other, PoolMemory(8, other.piece_size_bytes))
    encoder = TorchEncoder(encoder_config(checkpoint("llava_clip")), pool)
    await failed_start(encoder, EngineError, "block_size=8.*block_size=16")
    pool.memory.close()


async def test_a_pool_too_small_for_one_item_is_refused(checkpoint: Callable[[str], Path]) -> None:
    encoder = TorchEncoder(encoder_config(checkpoint("llava_next_clip"), num_blocks=10))
    error = await failed_start(encoder, InvalidRequestError, "10 blocks hold 80 tokens, one item may fill 88")
    assert error.field == "num_blocks"


async def test_start_refuses_a_folder_without_a_model(tmp_path: Path) -> None:
    encoder = TorchEncoder(encoder_config(tmp_path))
    error = await failed_start(encoder, InvalidRequestError, "holds no config.json")
    assert error.field == "model"


def test_nothing_of_torch_is_imported_before_start() -> None:
    program = (
        "import sys\n"
        "from quartet.engine.torch import TorchEncoderConfig, create_encoder\n"
        "create_encoder(TorchEncoderConfig(model_path='nowhere'))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


async def test_create_encoder_makes_one() -> None:
    encoder = create_encoder(encoder_config(TINY))
    await encoder.start()
    assert (await encoder.size(image_file(make_picture(5, 5)))).num_tokens == 64
    await encoder.close()
