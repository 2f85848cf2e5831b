"""Loads the vision part of a LLaVA checkpoint: tower, projector and newline, without its language model."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    LlamaConfig,
    LlavaModel,
    LlavaNextModel,
    LlavaNextVideoModel,
    LlavaOnevisionModel,
    PretrainedConfig,
    PreTrainedModel,
    VipLlavaModel,
)
from transformers.image_processing_backends import PilBackend

from quartet.engine.torch.config import TorchEncoderConfig
from quartet.engine.torch.loader import check_device, load_weights, random_weights, read_model_config
from quartet.engine.torch.support import quantization_method
from quartet.errors import InvalidRequestError

_LOG = logging.getLogger(__name__)
#: Towers whose rows of patches are separated by tokens of their own in the prompt: a run of placeholders can't do that.
_TOWERS_OF_ROWS = ("pixtral",)
# Of a picture with which a changed image processor is tried.
_TRIED_EDGE = 32
#: Of LLaVA-OneVision.
_ASPECT_RATIO = re.compile(r"anyres_max_([1-9][0-9]*)")


@dataclass(frozen=True)
class LoadedVision:
    """A vision model and its image processor.

    Attributes:
        hidden_size: of the embeddings, as the language model takes them.
        max_grid_tiles: a picture cut into parts is shrunk to about so many tiles' tokens; ``None``: never.
        dtype: of weights and embeddings, by its PyTorch name.
    """

    model: PreTrainedModel
    image_processor: PilBackend
    hidden_size: int
    max_grid_tiles: int | None
    dtype: str


def load_vision(config: TorchEncoderConfig) -> LoadedVision:
    """Load the checkpoint that ``config`` names onto its device. Runs no code from the checkpoint, downloads nothing.

    Raises:
        InvalidRequestError: field ``model``: this encoder can't run it; ``device``: this machine does not have it;
            ``mm_processor_kwargs``: the image processor does not have it.
        EngineError: files are missing or damaged, or their tensors are not the model's.
    """
    started_at = time.monotonic()
    check_device(config.device)
    directory = Path(config.model_path)
    model_config = _read_config(config)
    image_processor = _read_image_processor(directory, config.processor_kwargs)
    hidden_size = int(model_config.text_config.hidden_size)
    model: Any = _load_weights(config, model_config)
    model.train(False)
    model.to(torch.device(config.device))
    _LOG.info("loaded the vision tower of %s in %.1f s", config.model_path, time.monotonic() - started_at)
    return LoadedVision(
        model=model,
        image_processor=image_processor,
        hidden_size=hidden_size,
        max_grid_tiles=_max_grid_tiles(model_config),
        dtype=str(next(model.multi_modal_projector.parameters()).dtype).removeprefix("torch."),
    )


def _without_language_model(model_class: Any) -> Any:
    """The class without its language model, which is neither built nor read from a checkpoint."""

    class Vision(model_class):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = (r"language_model\.", r"^lm_head\.")

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.language_model = torch.nn.Identity()

    return Vision


# Models that also take videos are given pictures only.
_MODELS = {
    "llava": _without_language_model(LlavaModel),
    "llava_next": _without_language_model(LlavaNextModel),
    "llava_next_video": _without_language_model(LlavaNextVideoModel),
    "vipllava": _without_language_model(VipLlavaModel),
    "llava_onevision": _without_language_model(LlavaOnevisionModel),
}


def _read_config(model: TorchEncoderConfig) -> PretrainedConfig:
    config = read_model_config(model)
    if config.model_type not in _MODELS:
        raise _refusal(f"a model of type {config.model_type}, only {', '.join(_MODELS)}")
    if config.vision_config.model_type in _TOWERS_OF_ROWS:
        raise _refusal(f"a vision tower of type {config.vision_config.model_type}: its pictures are rows of tokens")
    _max_grid_tiles(config)  # before minutes are spent on weights
    if method := quantization_method(config):
        raise _refusal(f"a quantized checkpoint ({method} of {config.model_type})")
    return config


def _max_grid_tiles(config: PretrainedConfig) -> int | None:
    if config.model_type != "llava_onevision":
        return None
    named = _ASPECT_RATIO.fullmatch(str(config.vision_aspect_ratio))
    if named is None:
        raise _refusal(f"vision_aspect_ratio {config.vision_aspect_ratio}, only anyres_max_N")
    return int(named[1])


def _read_image_processor(directory: Path, kwargs: Mapping[str, object]) -> PilBackend:
    """The checkpoint's own, with ``kwargs`` in place of settings of its own.

    Always on Pillow: pixels must not depend on whether torchvision is installed.
    """
    own = _load_image_processor(directory, {})
    if not kwargs:
        return own
    processor: Any = own
    known = sorted(processor.valid_kwargs.__annotations__)
    if unknown := sorted(set(kwargs) - set(known)):
        message = f"{unknown[0]}: {type(own).__name__} does not have it; it has {', '.join(known)}"
        raise InvalidRequestError(message, field="mm_processor_kwargs")
    try:
        processor = _load_image_processor(directory, kwargs)
        processor(images=Image.new("RGB", (_TRIED_EDGE, _TRIED_EDGE)), return_tensors="np")
    except Exception as error:  # a processor may raise any type for a value of another
        raise InvalidRequestError(f"the image processor fails with it: {error}", field="mm_processor_kwargs") from error
    return processor  # type: ignore[no-any-return]


def _load_image_processor(directory: Path, kwargs: Mapping[str, object]) -> PilBackend:
    try:
        auto: Any = AutoImageProcessor  # whose methods are not typed
        processor = auto.from_pretrained(
            directory, **{**kwargs, "backend": "pil", "local_files_only": True, "trust_remote_code": False}
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise InvalidRequestError(f"{directory}: its image processor cannot be used: {error}", field="model") from error
    if not isinstance(processor, PilBackend):
        raise _refusal(f"the image processor {type(processor).__name__}, which does not work on Pillow alone")
    return processor


def _load_weights(config: TorchEncoderConfig, model_config: PretrainedConfig) -> PreTrainedModel:
    # The language model is built and then dropped; in its real size that would take minutes and gigabytes.
    model_config.text_config = LlamaConfig(
        vocab_size=1,
        hidden_size=model_config.text_config.hidden_size,  # the projector's output, and the newline's width
        num_hidden_layers=0,
        intermediate_size=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model_class = _MODELS[model_config.model_type]
    if config.random_seed is None:
        return load_weights(model_class.from_pretrained, config, model_config)
    return random_weights(model_class._from_config, config, model_config)


def _refusal(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the torch encoder cannot run {what}", field="model")
