"""Tiny models with random weights, saved as Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 199
SLIDING_WINDOW = 8

# Weights this wide, unlike the usual 0.02, leave clear distances between logits.
_INIT_STD = 0.1
_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": _INIT_STD,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = {
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

#: Families by name: configuration class and what it needs beside the common part.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3_rope": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": SLIDING_WINDOW}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "query_pre_attn_scalar": 32, **_SLIDING}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, **_MOE}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 0.5, **_SLIDING}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **_SLIDING}),
}

#: The token that stands for pictures in the models that see.
PLACEHOLDER_ID = VOCAB_SIZE - 1

_TOWER = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_NEXT = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
#: Models that see by name: configuration class, what it needs, the tower's and the language model's family.
SEEING_FAMILIES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "llava_clip_llama": ("LlavaConfig", {}, "CLIPVisionConfig", "llama"),
    "llava_siglip_qwen2": (
        "LlavaConfig",
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        "SiglipVisionConfig",
        "qwen2",
    ),
    "llava_clip_gemma3": ("LlavaConfig", {}, "CLIPVisionConfig", "gemma3"),
    "llava_next_mistral": ("LlavaNextConfig", _NEXT, "CLIPVisionConfig", "mistral"),
    "llava_next_video_llama": ("LlavaNextVideoConfig", _NEXT, "CLIPVisionConfig", "llama"),
    "vipllava_llama3_rope": (
        "VipLlavaConfig",
        {"vision_feature_layers": [-2, -1], "tie_word_embeddings": True},
        "CLIPVisionConfig",
        "llama3_rope",
    ),
    # Of so few tiles' tokens that pictures of the largest grid are shrunk.
    "llava_onevision_qwen2": (
        "LlavaOnevisionConfig",
        {**_NEXT, "vision_aspect_ratio": "anyres_max_2"},
        "SiglipVisionConfig",
        "qwen2",
    ),
}


def make_config(family: str, **changes: Any) -> transformers.PretrainedConfig:
    """The configuration of a family's tiny model."""
    class_name, own = FAMILIES[family]
    config: transformers.PretrainedConfig = getattr(transformers, class_name)(**{**_BASE, **own, **changes})
    return config


def make_seeing_config(family: str, **changes: Any) -> transformers.PretrainedConfig:
    """The configuration of a tiny model that sees."""
    class_name, own, tower, text = SEEING_FAMILIES[family]
    config: transformers.PretrainedConfig = getattr(transformers, class_name)(
        **{
            "vision_config": getattr(transformers, tower)(**_TOWER),
            "text_config": make_config(text),
            "image_token_index": PLACEHOLDER_ID,
            **own,
            **changes,
        }
    )
    return config


def make_checkpoint(
    directory: Path, config: transformers.PretrainedConfig, dtype: torch.dtype = torch.float64, **saving: Any
) -> Path:
    """Save a model of this configuration with random weights from a fixed seed."""
    torch.manual_seed(7)
    sees = hasattr(config, "vision_config")
    auto: Any = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = auto.from_config(config).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "_proj.bias")):  # zero at first: they would not be tested
            torch.nn.init.normal_(parameter, std=1.0)
    model.save_pretrained(directory, **saving)
    return directory
