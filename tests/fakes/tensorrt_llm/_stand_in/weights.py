"""The model itself: transformers on the CPU, always in float32, whatever ``dtype`` asks for."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensorrt_llm._stand_in.prompt import PreparedPrompt
from tensorrt_llm._stand_in.spool import GoneError
from tensorrt_llm._torch.shared_tensor import SharedTensorContainer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
)
from transformers.models.auto.processing_auto import AutoProcessor

Layers = list[tuple[torch.Tensor, torch.Tensor]]
_loading = threading.Lock()


class Weights:
    """A checkpoint, ready to compute; shared by the engines of this process; none changes it."""

    def __init__(self, path: str, *, is_dummy: bool) -> None:
        self.path = path
        self.config = AutoConfig.from_pretrained(path)
        self.has_vision = hasattr(self.config, "vision_config")
        auto: Any = AutoModelForImageTextToText if self.has_vision else AutoModelForCausalLM
        if is_dummy:
            torch.manual_seed(0)
            self.model = auto.from_config(self.config, dtype=torch.float32).eval()
        else:
            self.model = auto.from_pretrained(path, dtype=torch.float32).eval()
        text = self.config.get_text_config()
        self.vocab_size, self.max_seq_len = int(text.vocab_size), int(text.max_position_embeddings)
        self.image_token_id = int(self.config.image_token_id) if self.has_vision else None
        self._adapted: dict[str, Any] = {}

    def features_of(self, prompt: PreparedPrompt) -> torch.Tensor | None:
        """Return what goes in place of a prompt's placeholders, one row each; an encoder's are taken."""
        if prompt.handles:
            try:
                return torch.cat([SharedTensorContainer.from_dict(one).get_local_view() for one in prompt.handles])
            except GoneError as error:
                raise GoneError(f"an encoder's embedding is gone: {error}") from error
        if prompt.pixel_values is not None:
            return torch.cat(self.encode(prompt.pixel_values))
        return prompt.features

    def prefill(
        self, prompt: PreparedPrompt, adapter_path: str | None = None, *, all_logits: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Compute a prompt; logits [1 or num_tokens, vocabulary] and the cache of its KV."""
        with torch.inference_mode():
            ids = torch.tensor([prompt.token_ids])
            is_item = torch.tensor([[prompt.is_item(token_id) for token_id in prompt.token_ids]])
            embeddings = self.model.get_input_embeddings()(ids.masked_fill(is_item, 0))
            features = self.features_of(prompt)
            if features is not None:
                embeddings[is_item] = features.to(embeddings.dtype)
            cache = DynamicCache()
            return self._forward(embeddings, cache, adapter_path, 0 if all_logits else 1), cache

    def decode(self, token_ids: Sequence[int], cache: Any, adapter_path: str | None = None) -> torch.Tensor:
        """Compute the next tokens after ``cache``, which grows; logits [1, vocabulary]."""
        with torch.inference_mode():
            embeddings = self.model.get_input_embeddings()(torch.tensor([list(token_ids)]))
            return self._forward(embeddings, cache, adapter_path, 1)

    def encode(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        """Run the vision tower: one tensor [num_tokens, hidden size] for each picture of [num_pictures, 3, H, W]."""
        with torch.inference_mode():
            return list(self.model.get_image_features(pixel_values=pixel_values).pooler_output)

    def _forward(self, embeddings: torch.Tensor, cache: Any, adapter_path: str | None, num_logits: int) -> torch.Tensor:
        model = self.model if adapter_path is None else self._with_adapter(adapter_path)
        output = model(inputs_embeds=embeddings, past_key_values=cache, use_cache=True, logits_to_keep=num_logits)
        logits: torch.Tensor = output.logits[0]
        return logits

    def _with_adapter(self, path: str) -> Any:
        """Return a copy of the model with the LoRA adapter in ``path`` (Hugging Face PEFT's files) merged in."""
        if path not in self._adapted:
            model = copy.deepcopy(self.model)
            settings = json.loads((Path(path) / "adapter_config.json").read_text(encoding="utf-8"))
            tensors = load_file(Path(path) / "adapter_model.safetensors")
            modules = {_short(name): module for name, module in model.named_modules()}
            for name, down in tensors.items():
                if ".lora_A." in name:
                    up = tensors[name.replace(".lora_A.", ".lora_B.")]
                    module = modules[_short(name.partition(".lora_A.")[0])]
                    module.weight.data += (up @ down).float() * (settings["lora_alpha"] / settings["r"])
            self._adapted[path] = model
        return self._adapted[path]


def _short(name: str) -> str:
    """A module's name from its layer on: checkpoints of one model differ in what stands before."""
    return name[name.find("layers.") :] if "layers." in name and "vision" not in name else name


def layers_of(cache: Any) -> Layers:
    """Return a cache's keys and values, layer by layer."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def cache_of(layers: Layers) -> Any:
    """Make a cache of keys and values."""
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache


def copy_of(cache: Any) -> Any:
    """Return a cache of its own with the same KV."""
    return cache_of([(keys.clone(), values.clone()) for keys, values in layers_of(cache)])


def load_weights(path: str, *, is_dummy: bool = False) -> Weights:
    """Return a checkpoint's weights, read once in a process."""
    with _loading:
        return _load_weights(path, is_dummy)


@lru_cache
def _load_weights(path: str, is_dummy: bool) -> Weights:
    return Weights(path, is_dummy=is_dummy)


@lru_cache
def load_tokenizer(path: str) -> Any:
    """Return a checkpoint's tokenizer."""
    return AutoTokenizer.from_pretrained(path)


@lru_cache
def load_image_processor(path: str) -> Any:
    """Return what makes a picture into a tower's input."""
    processors: Any = AutoProcessor
    return processors.from_pretrained(path).image_processor


def end_id_of(path: str) -> int | None:
    """Return the end id that a checkpoint's generation settings name."""
    try:
        ids: Any = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        return None
    first: int | None = ids[0] if isinstance(ids, list) else ids
    return first
