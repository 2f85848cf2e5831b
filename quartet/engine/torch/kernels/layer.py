"""Kernels for what a decoder layer does between its products: norms, rotary embedding, KV store, gated SiLU.

They round where transformers' modules do: a norm is float32 and becomes the rows' dtype before its weight, and each
product and sum of the rotary embedding and of the gated SiLU becomes that dtype. They run on float32, float16 and
bfloat16.

``pdl`` launches a kernel as a *programmatic dependent launch*: it starts while the one before still runs, and waits
before it touches what that one reads or writes (``gemv.supports_pdl``).
"""
# No `from __future__ import annotations`: Triton's interpreter would not know the constants any more.

from typing import Any

import torch
import triton
import triton.language as tl

#: Heads that one program rotates.
_HEADS_A_PROGRAM = 8
#: Elements of a gated SiLU that one program computes.
_GATED_A_PROGRAM = 2048


def add_norm(
    hidden: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    output: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Add ``addend`` to ``hidden``, in place; put the sum's RMS norm in ``output``.

    All rows are ``[T, W]``, of one dtype; a row's elements lie side by side, rows may be apart.

    Args:
        hidden: stays as it is if nothing is added.
        addend: ``None``: there is none.
        weight: ``[W]``.
        epsilon: is added to the mean of squares.
        output: no part of the others.
        pdl: as programmatic dependent launch.
    """
    rows = hidden if addend is None else addend
    num_rows, width = hidden.shape
    assert rows.shape == hidden.shape == output.shape and weight.shape == (width,), "all rows are as wide as the weight"
    assert hidden.stride(1) == rows.stride(1) == output.stride(1) == weight.stride(0) == 1, "elements lie side by side"
    if num_rows == 0:
        return
    _add_norm[(num_rows,)](
        hidden,
        rows,
        weight,
        output,
        hidden.stride(0),
        rows.stride(0),
        output.stride(0),
        epsilon,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        ADD=addend is not None,
        PDL=pdl,
        **launch_options(num_warps=8 if width >= 2048 else 4, pdl=pdl),
    )


def rotate_and_store(
    heads: torch.Tensor,
    query_norm: tuple[torch.Tensor, float] | None,
    key_norm: tuple[torch.Tensor, float] | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    *,
    pdl: bool = False,
) -> None:
    """Norm and rotate each token's heads: queries in place, keys and values to the pool. ``heads`` keeps old keys.

    Args:
        heads: ``[T, (H + 2 * Hkv) * D]``: queries, keys and values of each token; rows may be apart.
        query_norm: weight ``[D]`` and epsilon of an RMS norm over each query; ``None``: there is none, nor for keys.
        key_norm: the same over each key.
        cos_sin: ``[P, D]``, of the heads' dtype, contiguous: of each position the cosines of ``D / 2`` angles, then
            their sines. Element ``i`` of a head turns with element ``i + D / 2``.
        positions: ``[T]``, integers below ``P``.
        slots: ``[T]``, integers: ``block * block_size + offset`` where keys and values go; a slot outside of the pool,
            such as -1, keeps them from being written.
        pool: ``[num_blocks, num_layers, 2, block_size, Hkv, D]``, contiguous.
        layer: its index in the pool.
        pdl: as programmatic dependent launch.
    """
    num_blocks, num_layers, _, block_size, num_kv_heads, head_dim = pool.shape
    num_tokens, width = heads.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    assert width == (num_heads + 2 * num_kv_heads) * head_dim and num_heads > 0 and heads.stride(1) == 1, "whole heads"
    assert head_dim % 2 == 0 and cos_sin.shape[1] == head_dim and cos_sin.is_contiguous(), "of each head's elements"
    assert len(positions) == len(slots) == num_tokens and 0 <= layer < num_layers and pool.is_contiguous()
    assert (query_norm is None) == (key_norm is None)
    if num_tokens == 0:
        return
    query_weight, query_epsilon = query_norm or (heads, 0.0)
    key_weight, key_epsilon = key_norm or (heads, 0.0)
    num_programs = triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS_A_PROGRAM)
    _rotate_and_store[(num_tokens, num_programs)](
        heads,
        query_weight,
        key_weight,
        cos_sin,
        positions,
        slots,
        pool,
        heads.stride(0),
        cos_sin.shape[0],
        num_blocks * block_size,
        layer * pool.stride(1),
        pool.stride(0),
        query_epsilon,
        key_epsilon,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        HEADS_A_PROGRAM=_HEADS_A_PROGRAM,
        NORM=query_norm is not None,
        PDL=pdl,
        **launch_options(num_warps=4, pdl=pdl),
    )


def multiply_gated(gate_up: torch.Tensor, output: torch.Tensor, *, pdl: bool = False) -> None:
    """Put ``silu(gate) * up`` in ``output``, ``[T, I]``; ``gate_up`` is ``[T, 2 * I]``, gate first."""
    num_rows, width = output.shape
    assert gate_up.shape == (num_rows, 2 * width) and gate_up.stride(1) == output.stride(1) == 1
    if num_rows == 0:
        return
    size = min(_GATED_A_PROGRAM, triton.next_power_of_2(width))
    _multiply_gated[(num_rows, triton.cdiv(width, size))](
        gate_up,
        output,
        gate_up.stride(0),
        output.stride(0),
        WIDTH=width,
        SIZE=size,
        PDL=pdl,
        **launch_options(num_warps=8 if size >= 2048 else 4, pdl=pdl),
    )


def launch_options(*, num_warps: int, pdl: bool) -> dict[str, Any]:
    """What a kernel's launch is given beside its arguments; only GPUs that have it are told of ``pdl``."""
    return {"num_warps": num_warps, "launch_pdl": True} if pdl else {"num_warps": num_warps}


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    hidden,
    addend,
    weight,
    output,
    hidden_stride,
    addend_stride,
    output_stride,
    epsilon,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    is_inside = column < WIDTH
    scale = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype = hidden.dtype.element_ty
    value = tl.load(hidden + row * hidden_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(addend + row * addend_stride + column, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * hidden_stride + column, value.to(dtype), mask=is_inside)
        value = value.to(dtype).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + epsilon)
    normed = normed.to(dtype).to(tl.float32) * scale
    tl.store(output + row * output_stride + column, normed.to(dtype), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(  # type: ignore[no-untyped-def]
    heads,
    query_weight,
    key_weight,
    cos_sin,
    positions,
    slots,
    pool,
    heads_stride,
    num_positions,
    num_slots,
    layer_offset,
    block_stride,
    query_epsilon,
    key_epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_A_PROGRAM: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is some heads of one token; each head is loaded as its two halves, which turn with each other."""
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM_ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_A_PROGRAM + tl.arange(0, HEADS_A_PROGRAM)
    element = tl.arange(0, PADDED_HALF)
    has_element = element < HALF
    is_inside = (head < NUM_ROTATED + NUM_KV_HEADS)[:, None] & has_element[None, :]
    is_query = (head < NUM_HEADS)[:, None]
    is_value = (head >= NUM_ROTATED)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype = heads.dtype.element_ty
    at = heads + token * heads_stride + head[:, None] * HEAD_DIM + element[None, :]
    first = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=is_inside, other=0.0).to(tl.float32)
    normed_first = first
    normed_second = second
    if NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1))[:, None] / HEAD_DIM
        scale = tl.rsqrt(mean + tl.where(is_query, query_epsilon, key_epsilon))
        query_first = tl.load(query_weight + element, mask=has_element, other=0.0).to(tl.float32)[None, :]
        query_second = tl.load(query_weight + HALF + element, mask=has_element, other=0.0).to(tl.float32)[None, :]
        key_first = tl.load(key_weight + element, mask=has_element, other=0.0).to(tl.float32)[None, :]
        key_second = tl.load(key_weight + HALF + element, mask=has_element, other=0.0).to(tl.float32)[None, :]
        normed_first = (first * scale).to(dtype).to(tl.float32) * tl.where(is_query, query_first, key_first)
        normed_second = (second * scale).to(dtype).to(tl.float32) * tl.where(is_query, query_second, key_second)
        normed_first = normed_first.to(dtype).to(tl.float32)
        normed_second = normed_second.to(dtype).to(tl.float32)
    position = tl.load(positions + token).to(tl.int64)
    # Each condition in one: Triton's interpreter takes no vector and a scalar of them.
    has_angle = element < tl.where(position < num_positions, HALF, 0)
    cos = tl.load(cos_sin + position * HEAD_DIM + element, mask=has_angle, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(cos_sin + position * HEAD_DIM + HALF + element, mask=has_angle, other=0.0).to(tl.float32)[None, :]
    turned_first = (normed_first * cos).to(dtype).to(tl.float32) - (normed_second * sin).to(dtype).to(tl.float32)
    turned_second = (normed_second * cos).to(dtype).to(tl.float32) + (normed_first * sin).to(dtype).to(tl.float32)
    tl.store(at, turned_first.to(dtype), mask=is_inside & is_query)
    tl.store(at + HALF, turned_second.to(dtype), mask=is_inside & is_query)
    slot = tl.load(slots + token).to(tl.int64)
    kv_head = tl.where(head < NUM_ROTATED, head - NUM_HEADS, head - NUM_ROTATED)[:, None]
    into = pool + layer_offset + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
    into += tl.where(is_value, BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM, 0) + kv_head * HEAD_DIM + element[None, :]
    first_kept = tl.where((slot >= 0) & (slot < num_slots), NUM_HEADS, NUM_ROTATED + NUM_KV_HEADS)
    is_kept = is_inside & (head >= first_kept)[:, None]
    stored = pool.dtype.element_ty
    tl.store(into, tl.where(is_value, first, turned_first).to(stored), mask=is_kept)
    tl.store(into + HALF, tl.where(is_value, second, turned_second).to(stored), mask=is_kept)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_gated(  # type: ignore[no-untyped-def]
    gate_up,
    output,
    gate_up_stride,
    output_stride,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is ``SIZE`` elements of one row."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    is_inside = column < WIDTH
    gate = tl.load(gate_up + row * gate_up_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + WIDTH + column, mask=is_inside, other=0.0).to(tl.float32)
    dtype = output.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(output + row * output_stride + column, (activated * up).to(dtype), mask=is_inside)
