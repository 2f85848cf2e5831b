"""Pictures and embeddings for the adapter's tests: as files, as what an encode worker holds, and in our own pool."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save

from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.encoder import EncodedState
from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.trtllm.encoder import TrtllmEncoder
from quartet.engine.trtllm.inputs import InputBuilder
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.media_spans import expand_placeholders
from quartet.media.items import MediaFile, MediaKind, MediaSize
from tests.engine.trtllm.specs import spec_of
from tests.tiny import CHECKPOINT

WAIT_S = 30.0
NUM_TOKENS = 64
PLACEHOLDER_ID = 7


def image_file(picture: Image.Image) -> MediaFile:
    data = io.BytesIO()
    picture.save(data, "PNG")
    return MediaFile(MediaKind.IMAGE, data.getvalue())


def rows_file(rows: torch.Tensor) -> MediaFile:
    return MediaFile(MediaKind.EMBEDDINGS, save({"rows": rows.contiguous()}))


def media_request(
    token_ids: Sequence[int],
    num_tokens: Sequence[int],
    *,
    inputs: Sequence[MediaFile | bytes | None] = (),
    blocks: Sequence[tuple[int, ...]] = (),
    **generation: Any,
) -> EngineRequest:
    """A prefill of a prompt with one placeholder an item, which becomes as many as ``num_tokens`` says."""
    sizes = [MediaSize(media_id=bytes([nth]) * 32, num_tokens=count) for nth, count in enumerate(num_tokens)]
    expanded, spans = expand_placeholders(token_ids, PLACEHOLDER_ID, sizes)
    return EngineRequest(
        id=1,
        kind=RequestKind.PREFILL,
        generation=Generation(prompt_token_ids=expanded, media=spans, **generation),
        media_inputs=tuple(inputs),
        media_blocks=tuple(blocks),
    )


def checkpoint_as(model_type: str, directory: Path) -> str:
    """The tiny model's files in ``directory``, as those of a model of another type."""
    for path in CHECKPOINT.iterdir():
        shutil.copy(path, directory / path.name)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    return str(directory)


def fill(builder: InputBuilder, block_ids: Sequence[int], rows: torch.Tensor) -> None:
    """Put an item into the pool."""
    assert builder.embeddings is not None
    EmbeddingPoolView(builder.embeddings).write(block_ids, rows)


def moved(request: EngineRequest, by: int) -> EngineRequest:
    """The same with its first span elsewhere than its placeholders are."""
    first, *others = request.generation.media
    span = MediaSpan(first.media_id, first.first_position + by, first.num_tokens)
    return replace(request, generation=replace(request.generation, media=(span, *others)))


@asynccontextmanager
async def running_encoder(times: TrtllmTimes | None = None, **changes: Any) -> AsyncIterator[TrtllmEncoder]:
    encoder = TrtllmEncoder(spec_of(**changes), times)
    try:
        await encoder.start()
        yield encoder
    finally:
        await encoder.close()


async def kept(encoder: TrtllmEncoder, holder: int, picture: Image.Image) -> EncodedState:
    """What the encoder keeps of ``picture`` for ``holder``."""
    assert encoder.states is not None
    return await encoder.states.encode(holder, image_file(picture))
