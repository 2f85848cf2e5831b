"""Vision towers of LLaVA-family checkpoints, against what plain transformers makes of the same pictures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import is_torchvision_available

from quartet.engine.encoder import ItemSize
from quartet.engine.torch import TorchEncoderConfig
from quartet.engine.torch.vision import VisionModel, create_vision
from quartet.engine.torch.vision_loader import load_vision
from quartet.errors import ConfigError, EngineError, InvalidRequestError, MediaTooLargeError
from quartet.media.items import MediaGrid
from tests.engine.torch.vision_checkpoints import (
    EDGE,
    FAMILIES,
    HIDDEN_SIZE,
    TINY,
    Reference,
    make_picture,
    make_vision_checkpoint,
    read_processor,
)

# Of every shape that a grid of tiles distinguishes, and of some that it rounds.
SIZES = [
    (24, 24),
    (48, 24),
    (24, 48),
    (72, 24),
    (24, 72),
    (100, 30),
    (31, 97),
    (7, 50),
    (50, 7),
    (1, 40),
    (40, 1),
    (333, 200),
    (200, 333),
    (47, 49),
    (61, 59),
]
# About the edges of one, two and three tiles of 24 pixels, and between and beyond them.
EDGES = (1, 7, 12, 23, 24, 25, 36, 47, 48, 49, 61, 72, 97, 119)
NAMES = [*FAMILIES, "tiny"]
TILED = [name for name, family in FAMILIES.items() if "image_grid_pinpoints" in family.options]


def config(model_path: Path, **changes: Any) -> TorchEncoderConfig:
    return TorchEncoderConfig(model_path=str(model_path), **{"dtype": "float32", "num_threads": 1, **changes})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: TINY if name == "tiny" else make_vision_checkpoint(tmp_path_factory.mktemp(name), name))


@pytest.fixture(scope="module")
def vision(checkpoint: Callable[[str], Path]) -> Callable[[str], VisionModel]:
    return cache(lambda name: create_vision(config(checkpoint(name))))


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda name: Reference(checkpoint(name)))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_as_many_as_the_processor_expands_the_placeholder_to(
    name: str, vision: Callable[[str], VisionModel], reference: Callable[[str], Reference]
) -> None:
    model, expected = vision(name), reference(name)
    numbers = [model.size(height, width).num_tokens for width, height in SIZES]
    assert numbers == [expected.num_tokens(make_picture(width, height)) for width, height in SIZES]
    assert max(numbers) <= model.max_item_tokens


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_of_a_mixed_batch_are_those_of_get_image_features(
    name: str, vision: Callable[[str], VisionModel], reference: Callable[[str], Reference]
) -> None:
    model, expected = vision(name), reference(name)
    pictures = [make_picture(width, height, seed) for seed, (width, height) in enumerate(SIZES)]
    encoded = model.encode([model.pixels(picture) for picture in pictures])
    for picture, rows in zip(pictures, encoded, strict=True):
        torch.testing.assert_close(rows, expected.features(picture), rtol=1e-4, atol=1e-4)
        assert len(rows) == model.size(picture.height, picture.width).num_tokens


@pytest.mark.parametrize("name", NAMES)
def test_pixels_are_the_processors(
    name: str, vision: Callable[[str], VisionModel], reference: Callable[[str], Reference]
) -> None:
    picture = make_picture(61, 37)
    pixels = vision(name).pixels(picture)
    assert torch.equal(pixels.tiles, reference(name).inputs(picture)["pixel_values"].flatten(0, -4))
    assert (pixels.width, pixels.height) == (61, 37)


@pytest.mark.skipif(is_torchvision_available(), reason="with torchvision installed, AutoProcessor prefers that")
@pytest.mark.parametrize("name", NAMES)
def test_the_image_processor_is_what_autoprocessor_has(name: str, checkpoint: Callable[[str], Path]) -> None:
    expected = read_processor(checkpoint(name)).image_processor
    ours = load_vision(config(checkpoint(name))).image_processor
    assert type(ours) is type(expected)
    assert ours.to_dict() == expected.to_dict()


@pytest.mark.parametrize("name", TILED)
def test_tokens_are_as_many_as_the_processor_counts_for_any_shape(
    name: str, checkpoint: Callable[[str], Path], vision: Callable[[str], VisionModel]
) -> None:
    sizes = [(height, width) for height in EDGES for width in EDGES]
    counted = read_processor(checkpoint(name), backend="pil")._get_num_multimodal_tokens(image_sizes=sizes)
    assert [vision(name).size(height, width).num_tokens for height, width in sizes] == counted.num_image_tokens


@pytest.mark.parametrize("name", TILED)
def test_pictures_of_a_grid_differ_in_tokens(name: str, vision: Callable[[str], VisionModel]) -> None:
    """Else the tests above would not see a wrong size."""
    assert len({vision(name).size(height, width).num_tokens for width, height in SIZES}) >= 6


def test_one_tile_is_a_grid_of_patches(vision: Callable[[str], VisionModel]) -> None:
    assert vision("tiny").size(10, 300) == ItemSize(64, MediaGrid(8, 8))
    assert vision("llava_next_clip").size(10, 300).grid is None


def test_the_largest_picture_fills_max_item_tokens(vision: Callable[[str], VisionModel]) -> None:
    model = vision("llava_next_clip")
    assert (
        max(model.size(height, width).num_tokens for height in EDGES for width in EDGES)
        == model.max_item_tokens
        == 16 + 8 * 8 + 8
    )


def test_a_picture_that_preprocessing_would_blow_up_is_refused(vision: Callable[[str], VisionModel]) -> None:
    """Its shorter edge would become 24 pixels, and its longer one 24 million."""
    with pytest.raises(MediaTooLargeError, match="scaled to 576000000 pixels") as caught:
        vision("llava_clip").size(1, 1_000_000)
    assert caught.value.field == "file"
    vision("llava_next_clip").size(1, 1_000_000)  # is scaled to fit a few tiles


def test_only_what_pictures_go_through_is_kept(checkpoint: Callable[[str], Path]) -> None:
    loaded = load_vision(config(checkpoint("llava_next_clip")))
    tops = {name.split(".")[0] for name, _ in loaded.model.named_parameters()}
    assert tops == {"vision_tower", "multi_modal_projector", "image_newline"}
    assert (loaded.hidden_size, loaded.dtype) == (HIDDEN_SIZE, "float32")


def test_auto_is_the_checkpoints_dtype() -> None:
    assert load_vision(config(TINY, dtype="auto")).dtype == "bfloat16"


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("inner", ["", "vision_model."])
@pytest.mark.parametrize("name", ["llava_clip", *TILED])
def test_keys_of_older_checkpoints_are_found(
    prefix: str, inner: str, name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    def renamed(key: str) -> str:
        key = key.removeprefix("model.")
        if key.startswith("vision_tower.") and not key.startswith("vision_tower.vision_model."):
            key = f"vision_tower.{inner}{key.removeprefix('vision_tower.')}"
        return key if key.startswith(("lm_head", "language_model")) else prefix + key

    shutil.copytree(checkpoint(name), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({renamed(key): value for key, value in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load_vision(config(tmp_path))
    expected = load_vision(config(checkpoint(name))).model.state_dict()
    assert loaded.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in loaded.model.state_dict().items())


def test_no_picture_of_onevision_fills_more_than_max_item_tokens(vision: Callable[[str], VisionModel]) -> None:
    """Those of the largest grid are shrunk, so others fill more: of its 64 patches, to those of two tiles."""
    model = vision("llava_onevision_siglip")
    assert model.size(48, 48).num_tokens == 16 + 5 * 5 + 5
    counts = [model.size(height, width).num_tokens for height in EDGES for width in EDGES]
    assert max(counts) == model.size(48, 24).num_tokens == 16 + 8 * 4 + 8
    assert max(counts) <= model.max_item_tokens == 16 + 38 + 12


@pytest.mark.parametrize("lost", ["multi_modal_projector.linear_2.bias", "image_newline"])
def test_a_missing_tensor_is_named(lost: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llava_next_clip"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not key.endswith(lost)}
    assert len(kept) == len(tensors) - 1
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match=f"1 missing keys: {lost}"):
        load_vision(config(tmp_path))


def test_a_tensor_of_another_shape_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llava_clip"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    [key] = [key for key in tensors if key.endswith("linear_1.weight")]
    tensors[key] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match="linear_1"):
        load_vision(config(tmp_path))


def edited(source: Path, directory: Path, **changes: Any) -> TorchEncoderConfig:
    """A copy whose config.json says otherwise."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, **changes}))
    return config(directory)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "mistral3"}, "a model of type mistral3"),
        ({"model_type": "llava_onevision", "vision_aspect_ratio": "square"}, "vision_aspect_ratio square"),
        ({"vision_config": {"model_type": "pixtral"}}, "a vision tower of type pixtral"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bitsandbytes of llava"),
        ({"model_type": "no such model"}, "config.json cannot be used"),
    ],
)
def test_models_that_it_cannot_run_are_refused_by_type(
    changes: dict[str, Any], complaint: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        load_vision(edited(checkpoint("llava_clip"), tmp_path, **changes))
    assert caught.value.field == "model"


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    ).save_pretrained(tmp_path)
    with pytest.raises(InvalidRequestError, match="a model of type llama,"):
        load_vision(config(tmp_path))


def test_a_checkpoint_without_an_image_processor_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint("llava_clip") / name, tmp_path)
    with pytest.raises(InvalidRequestError, match="its image processor cannot be used") as caught:
        load_vision(config(tmp_path))
    assert caught.value.field == "model"


def test_an_image_processor_that_does_not_fit_the_tower_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint("llava_clip"), tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "processor_config.json").read_text())
    content["image_processor"]["do_center_crop"] = False
    (tmp_path / "processor_config.json").write_text(json.dumps(content))
    with pytest.raises(InvalidRequestError, match=f"makes tiles of 3 x {EDGE} x {3 * EDGE}") as caught:
        create_vision(config(tmp_path))
    assert caught.value.field == "model"


@pytest.mark.parametrize("name", TILED)
def test_an_image_processor_of_other_grids_is_refused(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Else a picture would come in more tiles, or fewer, than the model expects."""
    with pytest.raises(InvalidRequestError, match="cuts pictures to other grids than the model") as caught:
        create_vision(edited(checkpoint(name), tmp_path, image_grid_pinpoints=[[EDGE, 2 * EDGE]]))
    assert caught.value.field == "model"


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="there is no cuda:99 here") as caught:
        load_vision(config(TINY, device="cuda:99"))
    assert caught.value.field == "device"


@pytest.mark.parametrize("name", ["max_batch_size", "max_pixels", "max_item_tokens", "block_size", "num_blocks"])
def test_a_configuration_that_cannot_be_run_with_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: must be at least 1"):
        config(TINY, **{name: 0})


@pytest.mark.parametrize("name", ["tiny", "llava_next_clip"])
def test_settings_of_the_image_processor_can_be_replaced(name: str, checkpoint: Callable[[str], Path]) -> None:
    path, picture = checkpoint(name), make_picture(61, 59)
    kwargs = {"image_mean": [0.9, 0.1, 0.5], "do_convert_rgb": True}
    changed = create_vision(config(path, processor_kwargs=kwargs)).pixels(picture).tiles
    own: Any = read_processor(path).image_processor
    expected = torch.as_tensor(own(images=picture, return_tensors="np", **kwargs)["pixel_values"])
    torch.testing.assert_close(changed, expected.flatten(0, -4))
    assert not torch.equal(changed, create_vision(config(path)).pixels(picture).tiles)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"smell": 1}, "smell: CLIPImageProcessorPil does not have it; it has crop_size, "),
        ({"image_mean": "red"}, "fails"),
    ],
)
def test_settings_that_the_image_processor_cannot_have_are_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        load_vision(config(TINY, processor_kwargs=kwargs))
    assert caught.value.field == "mm_processor_kwargs"
