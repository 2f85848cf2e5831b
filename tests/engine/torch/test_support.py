"""Models that would run and give wrong tokens are refused; the error names the reason."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from quartet.engine.torch.support import AttentionShape, check_config, probe_attention
from quartet.errors import InvalidRequestError
from tests.engine.torch.checkpoints import FAMILIES, make_config

_SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
_ROPE = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def small(class_name: str, **changes: Any) -> transformers.PretrainedConfig:
    config: transformers.PretrainedConfig = getattr(transformers, class_name)(**{**_SMALL, **changes})
    return config


def check(config: transformers.PretrainedConfig) -> AttentionShape:
    check_config(config)
    return probe_attention(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_models_are_taken(family: str) -> None:
    assert check(make_config(family)) == AttentionShape(num_layers=3, num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (small("Qwen3NextConfig", **_MOE), "layer 0: linear_attention"),
        (small("MambaConfig"), "layer 0: linear_attention"),
        (small("FalconH1Config"), "layer 0: hybrid"),
        (small("Llama4TextConfig", num_local_experts=2, head_dim=16), "layer 0: chunked_attention"),
        (small("DeepseekV3Config", **_LATENT), "multi-head latent attention"),
        (small("Gemma3nTextConfig", num_kv_shared_layers=2), "KV shared between layers"),
        (small("BloomConfig"), "BloomForCausalLM: its attention cannot be replaced"),
        (small("NemotronConfig"), "NemotronAttention: it keeps keywords from attention"),
        (small("DogeConfig"), "layer 0: attention with attention_mask"),
        (small("DiffLlamaConfig"), "layer 0: 2 attentions, not one"),
        (small("FalconConfig"), "its attention cannot be replaced"),
        (small("T5Config"), "an encoder-decoder model"),
        (transformers.Gemma3Config(), "a multimodal model"),
        (small("LlamaConfig", rope_parameters={"rope_type": "dynamic", **_ROPE}), "rope type dynamic"),
        (
            small(
                "Phi3Config",
                rope_parameters={
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    **_ROPE,
                },
            ),
            "rope type longrope",
        ),
        (small("LlamaConfig", quantization_config={"quant_method": "fp8"}), r"a quantized checkpoint \(fp8 of llama\)"),
        (small("Qwen3Config", quantization_config={"quant_method": "mxfp4"}), r"checkpoint \(mxfp4 of qwen3\)"),
        (small("GptOssConfig", quantization_config={"quant_method": "fp8"}), r"checkpoint \(fp8 of gpt_oss\)"),
        (small("GptOssConfig", quantization_config={"bits": 4}), r"checkpoint \(unnamed of gpt_oss\)"),
    ],
    ids=lambda item: item.model_type if isinstance(item, transformers.PretrainedConfig) else "",
)
def test_other_models_are_refused_by_name(config: transformers.PretrainedConfig, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        check(config)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (small("DeepseekV3Config", **_LATENT), "layer 0: head_dim of queries, keys and values differ"),
        (small("Gemma4TextConfig", num_kv_shared_layers=0), "layer 3: KV heads or head_dim differ from layer 0's"),
        (small("Qwen3NextConfig", **_MOE), "its attention cannot be replaced"),
    ],
    ids=lambda item: item.model_type if isinstance(item, transformers.PretrainedConfig) else "",
)
def test_unsupported_attention_is_refused_even_if_the_configuration_does_not_show_it(
    config: transformers.PretrainedConfig, complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        probe_attention(config)


def test_attention_in_both_directions_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="layer 0"):
        check(make_config("gemma3", use_bidirectional_attention=True))
