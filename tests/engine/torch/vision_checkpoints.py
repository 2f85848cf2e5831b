"""Tiny LLaVA-family models with random weights, as Hugging Face checkpoints, and what transformers makes of them."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from quartet.media.items import MediaFile, MediaKind

TINY = Path(__file__).parents[3] / "models" / "tiny" / "checkpoint"
HIDDEN_SIZE = 32
EDGE = 24
PATCH_SIZE = 6
_PINPOINTS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": EDGE,
    "patch_size": PATCH_SIZE,
    "initializer_range": 0.2,
}
_CROPPED = {"size": {"shortest_edge": EDGE}, "crop_size": {"height": EDGE, "width": EDGE}}


class OnevisionPictures(transformers.LlavaOnevisionProcessor):
    """Transformers' processor without its part for videos, which cannot be made without torchvision."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        num_image_tokens: int | None = None,
        vision_feature_select_strategy: str | None = None,
        vision_aspect_ratio: str = "anyres_max_9",
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            image_processor,
            tokenizer,
            num_image_tokens=num_image_tokens,
            vision_feature_select_strategy=vision_feature_select_strategy,
            vision_aspect_ratio=vision_aspect_ratio,
        )


@dataclass(frozen=True)
class Family:
    """What a checkpoint is made of; names are of classes in transformers."""

    model: str
    tower: str
    processor: Any
    image_processor: Any
    options: dict[str, Any]
    has_cls: bool = True


FAMILIES = {
    "llava_clip": Family("Llava", "CLIPVisionConfig", transformers.LlavaProcessor, CLIPImageProcessorPil, {}),
    "llava_siglip": Family(
        "Llava",
        "SiglipVisionConfig",
        transformers.LlavaProcessor,
        SiglipImageProcessorPil,
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        has_cls=False,
    ),
    "llava_next_clip": Family(
        "LlavaNext",
        "CLIPVisionConfig",
        transformers.LlavaNextProcessor,
        LlavaNextImageProcessorPil,
        {"image_grid_pinpoints": _PINPOINTS},
    ),
    # Its own processor cannot be made without torchvision, which its part for videos wants; it counts as this one.
    "llava_next_video_clip": Family(
        "LlavaNextVideo",
        "CLIPVisionConfig",
        transformers.LlavaNextProcessor,
        LlavaNextImageProcessorPil,
        {"image_grid_pinpoints": _PINPOINTS},
    ),
    "vipllava_clip": Family(
        "VipLlava",
        "CLIPVisionConfig",
        transformers.LlavaProcessor,
        CLIPImageProcessorPil,
        {"vision_feature_layer": [-2, 1]},
    ),
    "llava_onevision_siglip": Family(
        "LlavaOnevision",
        "SiglipVisionConfig",
        OnevisionPictures,
        LlavaOnevisionImageProcessorPil,
        {"image_grid_pinpoints": _PINPOINTS, "vision_aspect_ratio": "anyres_max_2"},
        has_cls=False,
    ),
}


def make_vision_config(family: Family, **changes: Any) -> Any:
    """The configuration of a family's tiny model."""
    tower = {"vision_use_head": False} if "Siglip" in family.tower else {}
    return getattr(transformers, f"{family.model}Config")(
        text_config=transformers.LlamaConfig(
            vocab_size=2048,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        ),
        vision_config=getattr(transformers, family.tower)(**_TOWER, **tower),
        image_token_index=7,
        **{**family.options, **changes},
    )


def make_vision_checkpoint(directory: Path, name: str) -> Path:
    """Save a model of that family, with its processor; all random weights from a fixed seed."""
    family = FAMILIES[name]
    torch.manual_seed(7)
    model = getattr(transformers, f"{family.model}ForConditionalGeneration")(make_vision_config(family))
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases are zero at first, and the newline small: they would not be tested
            torch.nn.init.normal_(parameter, mean=1.0, std=0.5)
    model.save_pretrained(directory)
    if family.processor is OnevisionPictures:
        options = {
            "num_image_tokens": (EDGE // PATCH_SIZE) ** 2,
            "vision_aspect_ratio": model.config.vision_aspect_ratio,
        }
    else:
        options = {"patch_size": PATCH_SIZE, "num_additional_image_tokens": int(family.has_cls)}
    processor = family.processor(
        image_processor=_make_image_processor(family),
        tokenizer=transformers.AutoTokenizer.from_pretrained(TINY),
        vision_feature_select_strategy=getattr(model.config, "vision_feature_select_strategy", "default"),
        **options,
    )
    processor.save_pretrained(directory)
    return directory


def read_processor(model_path: Path, **options: Any) -> Any:
    """What a user of transformers would call."""
    config = transformers.AutoConfig.from_pretrained(model_path)
    processor: Any = OnevisionPictures if config.model_type == "llava_onevision" else transformers.AutoProcessor
    return processor.from_pretrained(model_path, **options)


def _make_image_processor(family: Family) -> Any:
    if family.image_processor is SiglipImageProcessorPil:
        return SiglipImageProcessorPil(size={"height": EDGE, "width": EDGE})
    if family.image_processor is LlavaOnevisionImageProcessorPil:
        return LlavaOnevisionImageProcessorPil(size={"height": EDGE, "width": EDGE}, image_grid_pinpoints=_PINPOINTS)
    pinpoints = {"image_grid_pinpoints": _PINPOINTS} if family.image_processor is LlavaNextImageProcessorPil else {}
    return family.image_processor(**_CROPPED, **pinpoints)


class Reference:
    """A checkpoint as a user of plain transformers without torchvision has it."""

    def __init__(self, model_path: Path) -> None:
        self._processor: Any = read_processor(model_path, backend="pil")
        auto: Any = transformers.AutoModelForImageTextToText
        self._model = auto.from_pretrained(model_path, dtype=torch.float32)

    def inputs(self, picture: Image.Image) -> Any:
        """What the processor makes of a prompt with that picture."""
        return self._processor(text="<|image|>", images=picture, return_tensors="pt")

    def num_tokens(self, picture: Image.Image) -> int:
        """To how many the processor expands the placeholder."""
        return int((self.inputs(picture)["input_ids"] == 7).sum())

    @torch.inference_mode()
    def features(self, picture: Image.Image) -> torch.Tensor:
        """What the language model gets in place of the placeholders: ``[num_tokens, hidden_size]``."""
        inputs = self.inputs(picture)
        sizes = {"image_sizes": inputs["image_sizes"]} if "image_sizes" in inputs else {}
        [features] = self._model.get_image_features(pixel_values=inputs["pixel_values"], **sizes).pooler_output
        return torch.as_tensor(features)


def make_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB picture of noise."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def image_file(picture: Image.Image, format: str = "PNG", **options: Any) -> MediaFile:
    """The picture as a file of that format."""
    data = io.BytesIO()
    picture.save(data, format, **options)
    return MediaFile(MediaKind.IMAGE, data.getvalue())
