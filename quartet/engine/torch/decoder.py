"""Decoder layers run by hand: the same mathematics as transformers' modules, in fewer and cheaper operations.

For models whose every module is one that this code knows (Llama, Mistral, Qwen2 and Qwen3 and what has their layers):
RMS norm, attention with rotary embedding, RMS norm, gated SiLU. Queries, keys and values come from one product, gate
and up projection from another; residuals are added by the products themselves; wide intermediate results are made for a
few rows at a time, which then are still in the processor's cache; and past its keys and values, the last layer computes
only the rows whose logits are wanted.

``fuse`` checks whether it knows every module of a model, and makes a ``Decoder`` of it; the ``Linear`` classes multiply
with its weights in the order that is fastest on this device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from torch import nn
from torch.nn import functional

from quartet.engine.torch.attention import LayerAttention, Step
from quartet.engine.torch.pool import Buffers, KeysValues
from quartet.kvcache.layout import KvLayout

# The code of these decoder layers was read; another class may compute something else with modules of the same names.
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

#: Rows of a step that a CPU takes through a layer's products at once: their results stay in its L2 cache.
ROWS_ON_CPU = 256


def fuse(model: transformers.PreTrainedModel, attentions: Sequence[LayerAttention], layout: KvLayout) -> Decoder | None:
    """Run ``model`` by hand; ``None``, with the model unchanged, if some part of it is unknown.

    Weights that are used together become one tensor, and the model's parameters become views of it, so that no weight
    exists twice. Only reordered weights (``best_order``) are copies: drop the model then.

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
    parts = DecoderParts(
        embedding=base.embed_tokens.weight,
        layers=layers,
        norm=_norm(base.norm),
        head=_linear(whole.lm_head, is_shared=whole.lm_head.weight is base.embed_tokens.weight),
        rotary=base.rotary_emb,
        shape=shape,
    )
    return Decoder(parts)


class Decoder:
    """A causal language model over the block pool; each call is one step. Called in ``inference_mode``.

    Attributes:
        parts: what it runs.
    """

    def __init__(self, parts: DecoderParts) -> None:
        """Run these."""
        self.parts = parts
        self._embedding = parts.embedding
        self._layers = tuple(parts.layers)
        self._norm = parts.norm
        self._head = parts.head
        self._rotary = parts.rotary
        self._shape = parts.shape
        self._buffers = Buffers(parts.embedding)
        self._max_rows = ROWS_ON_CPU if parts.embedding.device.type == "cpu" else None

    def __call__(self, step: Step) -> torch.Tensor:
        """Write the step's KV to the pool; logits ``[S, V]`` of the rows that sample."""
        batch = step.batch
        hidden = functional.embedding(batch.token_ids[0], self._embedding)
        if batch.media is not None:
            batch.media.put_into(hidden)
        rope = _Rope.at(self._rotary, hidden, batch.positions)
        slices = self._slices(hidden.shape[0])
        sampled = batch.sampled
        for layer in self._layers if sampled is None else self._layers[:-1]:
            heads, fresh = self._project(layer, hidden, rope, step, slices)
            self._add_attention(layer, hidden, heads, fresh, step, slices)
            self._add_mlp(layer, hidden, slices)
        if sampled is None:
            return self._head(self._norm(hidden.index_select(0, batch.last_rows)))
        layer = self._layers[-1]
        heads, fresh = self._project(layer, hidden, rope, step, slices)
        hidden, heads = hidden.index_select(0, sampled.rows), heads.index_select(0, sampled.rows)
        slices = self._slices(hidden.shape[0])
        self._add_attention(layer, hidden, heads, fresh, step, slices, is_sampled=True)
        self._add_mlp(layer, hidden, slices)
        return self._head(self._norm(hidden.index_select(0, sampled.order)))

    def _slices(self, num_rows: int) -> list[slice]:
        return [slice(first, end) for first, end in _cut(num_rows, self._max_rows or max(num_rows, 1))]

    def _project(
        self, layer: DecoderLayer, hidden: torch.Tensor, rope: _Rope, step: Step, slices: Sequence[slice]
    ) -> tuple[torch.Tensor, KeysValues]:
        """Queries, keys and values of all rows, ``[T, H + 2 * Hkv, D]``; writes keys and values to the pool."""
        shape, num_tokens = self._shape, hidden.shape[0]
        num_rotated = shape.num_heads + shape.num_kv_heads
        heads = self._buffers.take("heads", num_tokens, num_rotated + shape.num_kv_heads, shape.head_dim)
        for rows in slices:
            layer.query_key_value.write_to(heads[rows].flatten(1), layer.input_norm(hidden[rows]))
            self._norm_heads(layer, heads[rows])
            rope.rotate(heads[rows, :num_rotated], rows)
        keys_values = heads[:, shape.num_heads :].view(num_tokens, 2, -1, shape.head_dim).transpose(0, 1)
        step.store(layer.attention, keys_values)
        by_head = keys_values.transpose(1, 2)[:, None]
        return heads, KeysValues(by_head[0], by_head[1])

    def _add_attention(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        heads: torch.Tensor,
        fresh: KeysValues,
        step: Step,
        slices: Sequence[slice],
        *,
        is_sampled: bool = False,
    ) -> None:
        """``hidden`` and ``heads`` are of the same rows; ``fresh`` are the whole step's."""
        num_heads, head_dim = self._shape.num_heads, self._shape.head_dim
        query = heads[None, :, :num_heads].transpose(1, 2)
        attended = self._buffers.take("attended", hidden.shape[0], num_heads, head_dim)
        step.attend(layer.attention, query, fresh, attended, is_sampled=is_sampled)
        for rows in slices:
            layer.output.add_to(hidden[rows], attended[rows].flatten(1))

    def _norm_heads(self, layer: DecoderLayer, heads: torch.Tensor) -> None:
        num_heads = self._shape.num_heads
        if layer.query_norm is not None:
            queries = heads[:, :num_heads]
            queries.copy_(layer.query_norm(queries))
        if layer.key_norm is not None:
            keys = heads[:, num_heads : num_heads + self._shape.num_kv_heads]
            keys.copy_(layer.key_norm(keys))

    def _add_mlp(self, layer: DecoderLayer, hidden: torch.Tensor, slices: Sequence[slice]) -> None:
        for rows in slices:
            part = hidden[rows]
            gate, up = layer.gate_up(layer.mlp_norm(part)).chunk(2, dim=1)
            layer.down.add_to(part, functional.silu(gate).mul_(up))


@dataclass(frozen=True, eq=False)
class DecoderParts:
    """The weights of a whole model.

    Attributes:
        embedding: ``[V, hidden_size]``.
        norm: after the last layer.
        head: gives the logits.
        rotary: transformers' module: ``(hidden, position_ids) -> cos, sin``, each ``[1, T, head_dim]``.
    """

    embedding: torch.Tensor
    layers: Sequence[DecoderLayer]
    norm: Norm
    head: Linear
    rotary: torch.nn.Module
    shape: HeadShape


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer's weights, and how it attends.

    Attributes:
        query_norm, key_norm: over each head (Qwen3); ``None`` in models without.
    """

    attention: LayerAttention
    input_norm: Norm
    query_key_value: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class HeadShape:
    """Heads of every layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Norm:
    """RMS norm over the last dimension: ``x / sqrt(mean(x**2) + epsilon) * weight``.

    Attributes:
        weight: ``[W]``.
        epsilon: is added to the mean.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self.weight = weight
        self.epsilon = epsilon
        # The mean's divisor goes into weight and epsilon: four operations instead of seven.
        self._scaled_weight = weight * math.sqrt(weight.numel())
        self._scaled_epsilon = weight.new_tensor(math.sqrt(epsilon * weight.numel()))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The norm of each row, as new memory."""
        if rows.dtype == torch.float64:  # transformers computes it in float32 even then
            normed = functional.rms_norm(rows.float(), self.weight.shape, eps=self.epsilon)
            return normed.double().mul_(self.weight)
        if rows.dtype == torch.float32 and rows.is_cpu:
            length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            return (rows / torch.hypot(length, self._scaled_epsilon)).mul_(self._scaled_weight)
        return functional.rms_norm(rows, self.weight.shape, self.weight, self.epsilon)


class Linear(Protocol):
    """``rows @ weight.T + bias``."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of ``[N, num_in]``: ``[N, num_out]``, new memory."""
        ...

    def write_to(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Put it in ``output``."""
        ...

    def add_to(self, sums: torch.Tensor, rows: torch.Tensor) -> None:
        """Add it to ``sums``, in place."""
        ...


@dataclass(frozen=True, eq=False)
class PlainLinear:
    """With the weight as the model has it, ``[num_out, num_in]``."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of ``[N, num_in]``: ``[N, num_out]``, new memory."""
        return functional.linear(rows, self.weight, self.bias)

    def write_to(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Put it in ``output``."""
        _multiply(output, rows, self.weight.t(), self.bias)

    def add_to(self, sums: torch.Tensor, rows: torch.Tensor) -> None:
        """Add it to ``sums``, in place."""
        sums.addmm_(rows, self.weight.t())
        if self.bias is not None:
            sums.add_(self.bias)


class TransposedLinear:
    """With the weight as ``[num_in, num_out]``, which lies in the order in which a product with few rows reads it.

    Measured on one core with AVX2 and no more, float32, the products of a whole layer: a single row takes 0.57 of
    ``PackedLinear``'s time, 8 to 32 rows 0.9, 256 rows as long; and what it yields goes where it is wanted.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take a copy of ``weight``, ``[num_out, num_in]``, which is not needed any more."""
        self._weight = weight.t().contiguous()
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of ``[N, num_in]``: ``[N, num_out]``, new memory."""
        output = rows.new_empty(rows.shape[0], self._weight.shape[1])
        self.write_to(output, rows)
        return output

    def write_to(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Put it in ``output``."""
        _multiply(output, rows, self._weight, self._bias)

    def add_to(self, sums: torch.Tensor, rows: torch.Tensor) -> None:
        """Add it to ``sums``, in place."""
        sums.addmm_(rows, self._weight)
        if self._bias is not None:
            sums.add_(self._bias)


class PackedLinear:
    """With the weight in the order in which oneDNN's kernels read it, made once instead of at every product.

    The operators are those that ``torch.compile`` emits for frozen weights (``torch/_inductor/mkldnn_lowerings.py``).
    Measured on one core with AVX-512, float32, 32 rows: 1.5 times as fast as the plain one, 8 rows 1.8, 256 rows 1.2.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take a copy of ``weight``, which is not needed any more."""
        self._ops: Any = torch.ops.mkldnn
        # Packed for the largest product: for fewer rows that order is as good, while one packed for a single row isn't.
        self._weight = self._ops._reorder_linear_weight(weight, ROWS_ON_CPU)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of ``[N, num_in]``: ``[N, num_out]``, new memory."""
        output: torch.Tensor = self._ops._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return output

    def write_to(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Put it in ``output``."""
        output.copy_(self(rows))

    def add_to(self, sums: torch.Tensor, rows: torch.Tensor) -> None:
        """Add it to ``sums``, in place."""
        sums.copy_(self._ops._linear_pointwise.binary(rows, sums, self._weight, self._bias, "add"))


def best_order(weight: torch.Tensor) -> type[TransposedLinear] | type[PackedLinear] | None:
    """The order of a copy of ``weight`` that multiplies fastest here; ``None``: its own order is good enough."""
    if weight.device.type != "cpu":
        return None
    if weight.dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return TransposedLinear
    return PackedLinear if _can_pack(weight.dtype) else None


@dataclass(frozen=True)
class _Rope:
    """Rotary embedding of one step's positions; ``cos`` and ``sin`` are ``[T, 1, head_dim]``."""

    cos: torch.Tensor
    sin: torch.Tensor  # its first half negated

    @classmethod
    def at(cls, rotary: torch.nn.Module, hidden: torch.Tensor, positions: torch.Tensor) -> _Rope:
        cos, sin = rotary(hidden, positions)
        half = cos.shape[-1] // 2
        sin[..., :half].neg_()
        return cls(cos[0, :, None], sin[0, :, None])

    def rotate(self, heads: torch.Tensor, rows: slice) -> None:
        """In place; ``heads`` are those of ``rows``."""
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        heads.mul_(self.cos[rows]).addcmul_(swapped, self.sin[rows])


def _cut(num_rows: int, max_rows: int) -> list[tuple[int, int]]:
    return [(first, min(first + max_rows, num_rows)) for first in range(0, num_rows, max_rows)]


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
    """``is_shared``: the weight is used elsewhere as it is, so that reordering it would make a second copy."""
    weight = linear.weight.detach()
    bias = None if linear.bias is None else linear.bias.detach()
    order = None if is_shared else best_order(weight)
    return PlainLinear(weight, bias) if order is None else order(weight, bias)


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight.detach(), float(norm.variance_epsilon))


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ops: Any = torch.ops.mkldnn
    return dtype == torch.float32 or (dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())


def _multiply(output: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is None:
        torch.mm(rows, weight, out=output)
    else:
        torch.addmm(bias, rows, weight, out=output)
