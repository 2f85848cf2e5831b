"""The product of one row with a weight, as fast as memory gives the weight: for steps of one sequence.

cuBLAS reads weights at 2.4 to 4.2 TB/s there, of the 4.55 that an H200 has (Qwen3-8B's shapes, bfloat16). Here each
program has its first weights on their way before the kernel before it has ended (*programmatic dependent launch*), and
what a decoder layer does before and after a product goes with it: RMS norm, bias, gated SiLU, residual.
"""
# No `from __future__ import annotations`: Triton's interpreter would not know the constants any more.

import torch
import triton
import triton.language as tl

from quartet.engine.torch.kernels.layer import launch_options

#: Compute capability from which on GPUs have programmatic dependent launch.
_PDL_CAPABILITY = (9, 0)


def supports_pdl(device: torch.device) -> bool:
    """Whether kernels can be launched with ``pdl`` there."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _PDL_CAPABILITY


def multiply_row(
    row: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    is_gated: bool = False,
    adds: bool = False,
    pdl: bool = False,
) -> None:
    """Put ``row @ weight.T + bias`` in ``output``.

    Sums are float32; results are rounded where transformers' modules round them, one after the other.

    Args:
        row: ``[1, K]``; no part of ``output``.
        weight: ``[N, K]``, of the row's dtype; rows may be apart.
        output: ``[1, N]``.
        bias: ``[N]``.
        norm: weight ``[K]`` and epsilon of an RMS norm of ``row`` that comes first.
        is_gated: ``weight`` and ``bias`` are of ``2 * N`` rows, the gate's and then the others, and
            ``silu(gate) * other`` is the result.
        adds: to ``output``, in place.
        pdl: as programmatic dependent launch: nothing before it may still write ``weight``, ``bias`` or ``norm``.
    """
    num_out, num_in = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    assert row.shape == (1, num_in) and output.shape == (1, num_out) and num_in > 0, "one row, of the weight's width"
    assert row.stride(1) == weight.stride(1) == output.stride(1) == 1, "elements lie side by side"
    assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())
    assert norm is None or (norm[0].shape == (num_in,) and norm[0].is_contiguous())
    if num_out == 0:
        return
    rows_a_program, turn = _tile(num_out, num_in, is_gated=is_gated)
    _multiply_row[(triton.cdiv(num_out, rows_a_program),)](
        row,
        weight if norm is None else norm[0],
        weight,
        weight if bias is None else bias,
        output,
        weight.stride(0),
        num_out,
        0.0 if norm is None else norm[1],
        NUM_IN=num_in,
        PADDED_IN=triton.next_power_of_2(num_in),
        ROWS=rows_a_program,
        TURN=turn,
        NORM=norm is not None,
        BIAS=bias is not None,
        GATED=is_gated,
        ADD=adds,
        PDL=pdl,
        **launch_options(num_warps=4, pdl=pdl),
    )


def _tile(num_out: int, num_in: int, *, is_gated: bool) -> tuple[int, int]:
    """Rows of the weight that one program multiplies, and elements of each that it reads in one turn.

    The best for Qwen3-8B's products on an H200: gate and up 2 of each x 1,024, output 2 x 2,048, down 4 x 512, queries
    with keys and values, and the head 8 x 256. Few short rows want many programs.
    """
    if is_gated:
        rows, turn = 2, 1024
    elif num_out > 4096:
        rows, turn = 8, 256
    elif num_in > 2 * num_out:
        rows, turn = 4, 512
    else:
        rows, turn = 2, 2048
    return rows, min(turn, triton.next_power_of_2(num_in))


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_row(  # type: ignore[no-untyped-def]
    row,
    norm_weight,
    weight,
    bias,
    output,
    weight_stride,
    num_out,
    epsilon,
    NUM_IN: tl.constexpr,
    PADDED_IN: tl.constexpr,
    ROWS: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is ``ROWS`` elements of the output; it asks for each turn's weights one turn ahead."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_inside = index < num_out
    read = tl.minimum(index, num_out - 1).to(tl.int64)  # rows past the last one read the last one again
    column = tl.arange(0, TURN)
    has_column = (column < NUM_IN)[None, :]
    at = weight + read[:, None] * weight_stride + column[None, :]
    other_at = weight + (read + num_out)[:, None] * weight_stride + column[None, :]
    weights = tl.load(at, mask=has_column, other=0.0)
    if GATED:
        other_weights = tl.load(other_at, mask=has_column, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype = output.dtype.element_ty
    if NORM:
        whole = tl.arange(0, PADDED_IN)
        elements = tl.load(row + whole, mask=whole < NUM_IN, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(elements * elements, 0) / NUM_IN + epsilon)
    sums = tl.zeros([ROWS, TURN], tl.float32)
    other_sums = tl.zeros([ROWS, TURN], tl.float32)
    for first in range(0, NUM_IN, TURN):
        has_next = (first + TURN + column < NUM_IN)[None, :]
        next_weights = tl.load(at + (first + TURN), mask=has_next, other=0.0)
        if GATED:
            next_other_weights = tl.load(other_at + (first + TURN), mask=has_next, other=0.0)
        is_in_row = first + column < NUM_IN
        factor = tl.load(row + first + column, mask=is_in_row, other=0.0).to(tl.float32)
        if NORM:
            factor = (factor * scale).to(dtype).to(tl.float32)
            factor *= tl.load(norm_weight + first + column, mask=is_in_row, other=0.0).to(tl.float32)
            factor = factor.to(dtype).to(tl.float32)
        sums += weights.to(tl.float32) * factor[None, :]
        weights = next_weights
        if GATED:
            other_sums += other_weights.to(tl.float32) * factor[None, :]
            other_weights = next_other_weights
    result = tl.sum(sums, 1)
    if BIAS:
        result += tl.load(bias + read).to(tl.float32)
    if GATED:
        other = tl.sum(other_sums, 1)
        if BIAS:
            other += tl.load(bias + num_out + read).to(tl.float32)
        result = result.to(dtype).to(tl.float32)
        result = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32) * other.to(dtype).to(tl.float32)
    if ADD:
        result = result.to(dtype).to(tl.float32) + tl.load(output + index, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(output + index, result.to(dtype), mask=is_inside)
