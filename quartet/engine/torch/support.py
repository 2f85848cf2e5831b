"""Checks whether the torch engine can run a model, on a model without weights, before anything is loaded.

Every layer must be one attention, full or sliding, whose keys and values fit the block pool, and must hand them to the
registered attention function unchanged. A model that keeps other state (state-space or convolution layers), shares KV
between layers or masks in other ways would run and give wrong tokens: it is refused, and the error names the layer or
feature.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from quartet.errors import InvalidRequestError

_PROBE = "quartet_probe"
_NUM_PROBE_TOKENS = 3
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Frequencies of "dynamic" and "longrope" depend on the longest sequence of the batch.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# The one quantized form that is loaded: ``quartet.engine.torch.mxfp4``.
_DEQUANTIZED = ("mxfp4", "gpt_oss")
_POSITION_IDS = "position_ids"  # models pass this tensor along, and attention may ignore it


@dataclass(frozen=True)
class AttentionShape:
    """What every layer writes to the KV cache for one token: K and V of ``[num_kv_heads, head_dim]``."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def check_config(config: PretrainedConfig) -> None:
    """Refuse a model whose configuration already shows that it can't run.

    Raises:
        InvalidRequestError: field ``model``.
    """
    if config.is_encoder_decoder:
        raise refusal("an encoder-decoder model")
    if config.get_text_config() is not config:
        raise refusal(f"a multimodal model ({config.model_type})")
    method = quantization_method(config)
    if method is not None and (method, config.model_type) != _DEQUANTIZED:
        raise refusal(f"a quantized checkpoint ({method} of {config.model_type})")
    if getattr(config, "kv_lora_rank", None):
        raise refusal("multi-head latent attention (kv_lora_rank)")
    if getattr(config, "num_kv_shared_layers", None):
        raise refusal(f"KV shared between layers (num_kv_shared_layers = {config.num_kv_shared_layers})")
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _LAYER_TYPES:
            raise refusal(f"layer {layer}: {kind}")
    for rope_type in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if rope_type not in _ROPE_TYPES:
            raise refusal(f"rope type {rope_type}")


def quantization_method(config: PretrainedConfig) -> str | None:
    """How the weights of a checkpoint are quantized, as its configuration calls it; ``None``: they aren't."""
    own = getattr(config, "quantization_config", None)
    if own is None:
        return None
    return str((isinstance(own, dict) and own.get("quant_method")) or "unnamed")


def probe_attention(config: PretrainedConfig) -> AttentionShape:
    """Run a few tokens through the model on the ``meta`` device and check what reaches attention.

    Raises:
        InvalidRequestError: field ``model``; a layer that this engine cannot serve.
    """
    model = _build_on_meta(config)
    ids = torch.zeros(1, _NUM_PROBE_TOKENS, dtype=torch.long, device="meta")
    calls: list[_Call] = []
    with torch.inference_mode():
        model(input_ids=ids, position_ids=ids, use_cache=False, paged=calls)
    num_layers = int(config.num_hidden_layers)
    _check_layers_called(calls, num_layers, type(model).__name__)
    for call in calls:
        _check_call(call, calls[0], config)
    _, num_kv_heads, _, head_dim = calls[0].key_shape
    return AttentionShape(num_layers, num_kv_heads, head_dim)


def refusal(what: str) -> InvalidRequestError:
    """The error for a model or feature that can't be run."""
    return InvalidRequestError(f"the torch engine cannot run {what}", field="model")


@dataclass(frozen=True)
class _Call:
    """How one layer called attention."""

    layer: int | None
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    sliding_window: int | None
    is_causal: bool
    tensors: frozenset[str] = field(default=frozenset())  # names of tensors passed beside q, k, v


def _record(  # the interface's signature: transformers passes these by name
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: list[_Call] | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if paged is None:
        raise refusal(f"{type(module).__name__}: it keeps keywords from attention")
    tensors = {**others, "attention_mask": attention_mask}
    call = _Call(
        layer=getattr(module, "layer_idx", None),
        query_shape=tuple(query.shape),
        key_shape=tuple(key.shape),
        value_shape=tuple(value.shape),
        sliding_window=sliding_window,
        is_causal=bool(getattr(module, "is_causal", True)),
        tensors=frozenset(name for name, value in tensors.items() if isinstance(value, torch.Tensor)),
    )
    paged.append(call)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(_PROBE, _record)


def _build_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM  # whose methods are not typed
        # The one dtype that the experts' grouped_mm takes in every version, also on meta.
        # A copy of the configuration, in which the dtype would be noted.
        model: PreTrainedModel = auto.from_config(copy.deepcopy(config), dtype=torch.bfloat16, trust_remote_code=False)
    # Whether its attention goes through AttentionInterface; there is no public name for it.
    if not model._supports_attention_backend:
        raise refusal(f"{type(model).__name__}: its attention cannot be replaced")
    if getattr(model, "_is_stateful", False):
        raise refusal(f"{type(model).__name__}: layers that keep state other than keys and values")
    model.set_attn_implementation(_PROBE)
    model.train(False)
    return model


def _check_layers_called(calls: list[_Call], num_layers: int, name: str) -> None:
    called = [call.layer for call in calls]
    for layer in range(num_layers):
        if called.count(layer) != 1:
            raise refusal(f"{name}, layer {layer}: {called.count(layer)} attentions, not one")
    if len(calls) != num_layers:
        raise refusal(f"{name}: {len(calls)} attentions in {num_layers} layers")


def _check_call(call: _Call, first: _Call, config: PretrainedConfig) -> None:
    where = f"layer {call.layer}"
    if call.key_shape != call.value_shape or call.query_shape[3] != call.key_shape[3]:
        raise refusal(f"{where}: head_dim of queries, keys and values differ (latent attention?)")
    if call.query_shape[1] % call.key_shape[1]:
        raise refusal(f"{where}: query heads are no multiple of KV heads")
    if call.key_shape != first.key_shape:
        raise refusal(f"{where}: KV heads or head_dim differ from layer {first.layer}'s")
    if not call.is_causal:
        raise refusal(f"{where}: attention that is not causal")
    if unknown := call.tensors - {_POSITION_IDS}:
        raise refusal(f"{where}: attention with {', '.join(sorted(unknown))}")
    layer_types = getattr(config, "layer_types", None)
    if layer_types and (layer_types[call.layer or 0] == "sliding_attention") != (call.sliding_window is not None):
        raise refusal(f"{where}: {layer_types[call.layer or 0]} with window {call.sliding_window}")


def _rope_types(parameters: dict[str, Any]) -> list[str]:
    """Rope types of one parameter set, or of one set a layer type."""
    if "rope_type" in parameters:
        return [parameters["rope_type"]]
    return [item["rope_type"] for item in parameters.values() if isinstance(item, dict) and "rope_type" in item]
