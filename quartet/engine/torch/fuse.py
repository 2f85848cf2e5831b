"""Finds out whether a model's layers can be run by hand, and takes them over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

from quartet.engine.torch.attention import LayerAttention
from quartet.engine.torch.decoder import Decoder, DecoderLayer, HeadShape, Norm
from quartet.engine.torch.linear import Linear, PlainLinear, best_order
from quartet.kvcache.layout import KvLayout

# Their decoder layers were read; another class may compute something else with modules of the same names.
_KNOWN = (
    transformers.LlamaForCausalLM,
    transformers.MistralForCausalLM,
    transformers.Qwen2ForCausalLM,
    transformers.Qwen3ForCausalLM,
)
_MODEL = {"model", "lm_head"}
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def fuse(model: transformers.PreTrainedModel, attentions: Sequence[LayerAttention], layout: KvLayout) -> Decoder | None:
    """Run ``model`` by hand; ``None`` where some part of it is not known to the letter: nothing was changed then.

    Weights that are used together become one tensor, and the model's parameters views of it, so that nothing exists
    twice. Only where they are reordered (``best_order``) the model keeps its own: to be dropped with it.

    Args:
        model: with its weights, and not in training.
        attentions: how each layer calls attention, in order.
        layout: of the block pool.
    """
    whole: Any = model  # whose modules have no types
    if type(model) not in _KNOWN or not _has_exactly(model, _MODEL) or not _has_exactly(whole.model, _DECODER):
        return None
    base = whole.model
    num_heads = base.layers[0].self_attn.q_proj.out_features // layout.head_dim
    shape = HeadShape(num_heads, layout.num_kv_heads, layout.head_dim)
    if not _is_known(whole, attentions, shape):
        return None
    layers = [_take_layer(layer, attention) for layer, attention in zip(base.layers, attentions, strict=True)]
    return Decoder(
        embedding=base.embed_tokens.weight,
        layers=layers,
        norm=_norm(base.norm),
        head=_linear(whole.lm_head, is_shared=whole.lm_head.weight is base.embed_tokens.weight),
        rotary=base.rotary_emb,
        shape=shape,
    )


def _is_known(model: Any, attentions: Sequence[LayerAttention], shape: HeadShape) -> bool:
    base = model.model
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    plain = [attention.index for attention in attentions if not attention.needs_scores]
    if plain != list(range(len(base.layers))) or 2 * base.rotary_emb.inv_freq.numel() != shape.head_dim:
        return False
    if not (_is_norm(base.norm) and _is_linear(model.lm_head) and type(base.embed_tokens) is nn.Embedding):
        return False
    return all(_is_known_layer(layer, shape) for layer in base.layers)


def _is_known_layer(layer: Any, shape: HeadShape) -> bool:
    if not (_has_exactly(layer, _LAYER) and _has_exactly(layer.mlp, _MLP)):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    has_head_norms = _has_exactly(attention, _ATTENTION | _HEAD_NORMS)
    if not (has_head_norms or _has_exactly(attention, _ATTENTION)):
        return False
    head_norms = [attention.q_norm, attention.k_norm] if has_head_norms else []
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *head_norms]
    linears = [*(getattr(attention, name) for name in _ATTENTION), mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if not (all(map(_is_norm, norms)) and all(map(_is_linear, linears)) and _is_silu(mlp.act_fn)):
        return False
    sizes = [attention.q_proj.out_features, attention.k_proj.out_features, attention.v_proj.out_features]
    wanted = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    return sizes == [num * shape.head_dim for num in wanted]


def _has_exactly(module: nn.Module, names: set[str]) -> bool:
    return {name for name, _ in module.named_children()} == names


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _is_silu(module: nn.Module) -> bool:
    return isinstance(module, nn.SiLU) or type(module).__name__ == "SiLUActivation"


def _take_layer(layer: Any, attention: LayerAttention) -> DecoderLayer:
    own, mlp = layer.self_attn, layer.mlp
    has_head_norms = hasattr(own, "q_norm")
    return DecoderLayer(
        attention=attention,
        input_norm=_norm(layer.input_layernorm),
        query_key_value=_join([own.q_proj, own.k_proj, own.v_proj]),
        query_norm=_norm(own.q_norm) if has_head_norms else None,
        key_norm=_norm(own.k_norm) if has_head_norms else None,
        output=_linear(own.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_join([mlp.gate_proj, mlp.up_proj]),
        down=_linear(mlp.down_proj),
    )


def _join(linears: Sequence[nn.Linear]) -> Linear:
    """One product in place of several."""
    weights, biases = (
        [linear.weight for linear in linears],
        [linear.bias for linear in linears if linear.bias is not None],
    )
    bias = _merge(biases) if biases else None
    if order := best_order(weights[0]):
        return order(torch.cat(weights), bias)
    return PlainLinear(_merge(weights), bias)


def _merge(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all, which become views of it."""
    merged = torch.cat([parameter.detach() for parameter in parameters])
    parts = torch.split(merged, [parameter.shape[0] for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return merged


def _linear(linear: nn.Linear, *, is_shared: bool = False) -> Linear:
    """``is_shared``: others need the weight as it is, so that reordering it would be a second copy."""
    weight = linear.weight.detach()
    bias = None if linear.bias is None else linear.bias.detach()
    order = None if is_shared else best_order(weight)
    return PlainLinear(weight, bias) if order is None else order(weight, bias)


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight.detach(), float(norm.variance_epsilon))
