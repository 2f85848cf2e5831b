"""Tokens of pictures by arithmetic: those that the vision tower makes, for every shape that a grid distinguishes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quartet.engine.torch.config import TorchEncoderConfig
from quartet.engine.torch.vision import VisionModel, create_vision
from quartet.engine.trtllm.media_model import PictureSizes, read_picture_sizes
from quartet.errors import InvalidRequestError, MediaTooLargeError
from tests.engine.torch.test_vision import SIZES
from tests.engine.torch.vision_checkpoints import make_vision_checkpoint
from tests.tiny import CHECKPOINT

MAX_PIXELS = 100_000
NAMES = ["llava_clip", "llava_siglip", "llava_next_clip", "tiny"]
LLAVA_1_6 = {
    "model_type": "llava_next",
    "vision_feature_select_strategy": "default",
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}
LLAVA_1_6_PICTURES = {
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
    "image_grid_pinpoints": LLAVA_1_6["image_grid_pinpoints"],
}


@cache
def checkpoint(name: str, directory: Path) -> Path:
    return CHECKPOINT if name == "tiny" else make_vision_checkpoint(directory / name, name)


@cache
def tower(path: Path) -> VisionModel:
    return create_vision(
        TorchEncoderConfig(model_path=str(path), dtype="float32", num_threads=1, max_pixels=MAX_PIXELS)
    )


def sizes_of(path: Path) -> PictureSizes:
    config = json.loads((path / "config.json").read_text())
    processor = path / "preprocessor_config.json"
    if not processor.is_file():  # newer releases write it into the processor's file
        processor = path / "processor_config.json"
    pictures = json.loads(processor.read_text())
    return read_picture_sizes(config, pictures.get("image_processor", pictures), max_pixels=MAX_PIXELS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_fills_as_many_tokens_as_the_tower_makes(name: str, directory: Path) -> None:
    path = checkpoint(name, directory)
    sizes, vision = sizes_of(path), tower(path)
    for height, width in [*SIZES, (1, 1), (2, 150), (320, 240)]:
        ours, theirs = sizes.size(height, width), vision.size(height, width)
        assert (ours.num_tokens, ours.grid) == (theirs.num_tokens, theirs.grid), (height, width)
    assert sizes.max_item_tokens == vision.max_item_tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_that_grows_too_large_on_the_way_is_refused_as_the_tower_does_it(name: str, directory: Path) -> None:
    path = checkpoint(name, directory)
    for height, width in [(400, 300), (2, 900), (1, 174), (1, 173)]:
        outcomes = []
        for model in (sizes_of(path), tower(path)):
            try:
                outcomes.append(model.size(height, width).num_tokens)
            except MediaTooLargeError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1], (height, width)


def test_the_published_model_fills_what_is_known_of_it() -> None:
    sizes = read_picture_sizes(LLAVA_1_6, LLAVA_1_6_PICTURES, max_pixels=16_777_216)
    # By transformers' LlavaNextProcessor: a square picture has four parts, with a newline after each of 48 rows.
    assert sizes.size(672, 672).num_tokens == 576 + 48 * 48 + 48
    assert sizes.max_item_tokens == 2928


@pytest.mark.parametrize(
    ("changes", "pictures", "words"),
    [
        ({"model_type": "llama4"}, {}, "model type 'llama4'"),
        ({"vision_config": {"model_type": "pixtral"}}, {}, "vision tower 'pixtral'"),
        ({"vision_feature_select_strategy": "full"}, {}, "a row for the whole"),
        ({"vision_feature_select_strategy": "none"}, {}, "vision_feature_select_strategy 'none'"),
        ({"image_grid_pinpoints": [[336, 700]]}, {}, "whole tiles"),
        ({"image_grid_pinpoints": []}, {}, "whole tiles"),
        ({}, {"image_grid_pinpoints": [[336, 336]]}, "other grids"),
        ({}, {"crop_size": {"height": 224, "width": 224}}, "336 x 336"),
        ({"vision_config": {"image_size": -1}}, {}, "image_size"),
    ],
)
def test_a_model_whose_picture_sizes_cannot_be_counted_is_refused_by_name(
    changes: dict[str, Any], pictures: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        read_picture_sizes({**LLAVA_1_6, **changes}, {**LLAVA_1_6_PICTURES, **pictures}, max_pixels=1000)
    assert caught.value.field == "model"
