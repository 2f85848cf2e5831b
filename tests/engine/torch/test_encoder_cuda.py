"""The same encoder on a CUDA device: the same embeddings as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quartet.engine.torch.vision_loader import load_vision
from tests.engine.torch.seeing_encoder import encoded, encoder_config, running_encoder
from tests.engine.torch.vision_checkpoints import TINY, Reference, image_file, make_picture, make_vision_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCKS = [9, 3, 17, 4, 1, 30, 31, 2, 40, 41, 42, 43]


@pytest.mark.parametrize("name", ["llava_next_clip", "llava_siglip"])
async def test_embeddings_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    path = make_vision_checkpoint(tmp_path, name)
    picture = make_picture(60, 45)
    async with running_encoder(encoder_config(path, device="cuda:0")) as encoder:
        rows = await encoded(encoder, image_file(picture), BLOCKS)
    assert rows.device == torch.device("cuda:0")
    torch.testing.assert_close(rows.cpu(), Reference(path).features(picture), rtol=1e-3, atol=1e-3)


async def test_half_precision_stays_close() -> None:
    picture = make_picture(200, 120)
    async with running_encoder(encoder_config(TINY, dtype="bfloat16", device="cuda:0")) as encoder:
        rows = await encoded(encoder, image_file(picture), BLOCKS)
    expected = Reference(TINY).features(picture)
    assert rows.dtype == torch.bfloat16
    assert (rows.cpu().float() - expected).norm() <= 0.05 * expected.norm()


def test_the_weights_lie_on_the_device() -> None:
    loaded = load_vision(encoder_config(TINY, device="cuda:0"))
    assert {parameter.device for parameter in loaded.model.parameters()} == {torch.device("cuda:0")}
