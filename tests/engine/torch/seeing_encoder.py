"""Drives torch encoders: on random checkpoints, with a vision tower that waits to be released."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from quartet.engine.encoder import ItemSize
from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.torch import TorchEncoderConfig
from quartet.engine.torch.encoder import TorchEncoder
from quartet.engine.torch.encoder_tower import LoadVision, load_tower
from quartet.engine.torch.vision import Pixels, VisionModel, create_vision
from quartet.media.items import MediaFile
from quartet.transfer.base import EmbeddingMemory

WAIT_S = 30.0
BLOCK_SIZE = 8


def encoder_config(model_path: Path, **changes: Any) -> TorchEncoderConfig:
    options = {"dtype": "float32", "num_threads": 1, "num_blocks": 64, "block_size": BLOCK_SIZE, **changes}
    return TorchEncoderConfig(model_path=str(model_path), **options)


@asynccontextmanager
async def running_encoder(
    config: TorchEncoderConfig,
    embeddings: EmbeddingMemory | None = None,
    load: LoadVision = create_vision,
) -> AsyncIterator[TorchEncoder]:
    encoder = TorchEncoder(config, embeddings, partial(load_tower, load=load))
    try:
        async with asyncio.timeout(WAIT_S):
            await encoder.start()
        yield encoder
    finally:
        async with asyncio.timeout(WAIT_S):
            await encoder.close()


async def encoded(encoder: TorchEncoder, file: MediaFile, block_ids: Sequence[int]) -> torch.Tensor:
    """Encode ``file``, whose size says how many of the blocks it takes; its rows in the pool."""
    num_tokens = (await encoder.size(file)).num_tokens
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    await encoder.encode(file, block_ids[:num_blocks])
    return rows_in(encoder, block_ids[:num_blocks], num_tokens)


def rows_in(encoder: TorchEncoder, block_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
    return EmbeddingPoolView(encoder.embeddings).read(block_ids, 0, num_tokens)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread will bring about."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what is checked has no event
            await asyncio.sleep(0.001)


class GatedVision:
    """A real vision tower whose every run waits until it is released.

    Attributes:
        runs: how many pictures each run had that began.
        sizes: width and height of these pictures.
        num_prepared: pictures that were made into pixels.
        error: what a released run raises, instead of encoding.
        room_width: pictures wider than that, together, take more memory than the device has.
    """

    def __init__(self, vision: VisionModel) -> None:
        self._vision = vision
        self.dtype, self.hidden_size, self.max_item_tokens = vision.dtype, vision.hidden_size, vision.max_item_tokens
        self.runs: list[int] = []
        self.num_prepared = 0
        self.sizes: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self.room_width: int | None = None
        self._passes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_open = threading.Event()
        self._lock = threading.Lock()

    def size(self, height: int, width: int) -> ItemSize:
        return self._vision.size(height, width)

    def pixels(self, picture: Image.Image) -> Pixels:
        pixels = self._vision.pixels(picture)
        with self._lock:
            self.num_prepared += 1
        return pixels

    def encode(self, pictures: Sequence[Pixels]) -> list[torch.Tensor]:
        self.sizes += [(picture.width, picture.height) for picture in pictures]
        self.runs.append(len(pictures))
        if not self._is_open.is_set():
            self._passes.get(timeout=WAIT_S)
        if self.error is not None:
            raise self.error
        if self.room_width is not None and sum(picture.width for picture in pictures) > self.room_width:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._vision.encode(pictures)

    def release(self) -> None:
        """End the run that waits, or else the next one."""
        self._passes.put(None)

    def open(self) -> None:
        """No run waits from here on."""
        self._is_open.set()
        self.release()
