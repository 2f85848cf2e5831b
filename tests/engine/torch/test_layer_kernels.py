"""The kernels between and of a decoder layer's products compute transformers' formulas; they compile for a Hopper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from quartet.engine.torch.kernels import gemv, layer
from tests.triton_kernels import compile_for_sm90, interpreted

# One rounding more or less of a sum that was added up in another order. The interpreter cuts bfloat16 off.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.fixture
def interpreter() -> Iterator[None]:
    with interpreted(layer, gemv):
        yield


def strided(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random rows that lie apart, with NaN between them."""
    whole = torch.full((shape[0], shape[1] + 5), float("nan"), dtype=dtype)
    whole[:, : shape[1]] = torch.randn(shape)
    return whole[:, : shape[1]]


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    module = Qwen3RMSNorm(len(weight), epsilon)  # type: ignore[no-untyped-call]
    module.weight.data = weight
    with torch.no_grad():
        result: torch.Tensor = module(rows)
    return result


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (3, 100), (0, 64)])
@pytest.mark.parametrize("adds", [False, True])
def test_a_sum_is_normed_as_by_the_module(adds: bool, num_rows: int, width: int, dtype: torch.dtype) -> None:
    hidden, addend, output = (strided(num_rows, width, dtype=dtype) for _ in range(3))
    weight = torch.rand(width).to(dtype) + 0.5
    expected = hidden + addend if adds else hidden.clone()
    layer.add_norm(hidden, addend if adds else None, weight, 1e-3, output)
    assert torch.equal(hidden, expected)
    # In half precision too: all is rounded where the module rounds it. Only float32 sums are in another order.
    check(output, rms_norm(expected, weight, 1e-3))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"), [(4, 2, 16, 4), (9, 3, 20, 3), (1, 1, 2, 1)]
)
def test_heads_are_normed_and_rotated_and_stored_in_their_slots_and_nowhere_else(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    has_norms: bool,
    dtype: torch.dtype,
) -> None:
    num_tokens, num_blocks = 6, 5
    heads = strided(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    before = heads.clone().view(num_tokens, -1, head_dim)
    angles = torch.arange(40)[:, None] * torch.rand(head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    positions = torch.tensor([0, 39, 7, 8, 9, 0], dtype=torch.int32)
    # The last three are of no token, or would be outside of the pool.
    num_slots = num_blocks * block_size
    slots = torch.tensor([num_slots - 1, 0, num_slots // 2, -1, num_slots, -(1 << 40)])
    pool = torch.full((num_blocks, 3, 2, block_size, num_kv_heads, head_dim), 7.0, dtype=dtype)
    weights = [torch.rand(head_dim).to(dtype) + 0.5 for _ in range(2)]
    norms = [(weights[0], 1e-3), (weights[1], 1e-2)] if has_norms else [None, None]
    layer.rotate_and_store(heads, *norms, cos_sin, positions, slots, pool, 1)

    queries, keys, values = before.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if has_norms:
        queries, keys = rms_norm(queries, weights[0], 1e-3), rms_norm(keys, weights[1], 1e-2)
    cos, sin = (part.repeat(1, 2)[positions] for part in cos_sin.split(head_dim // 2, 1))
    queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
    check(heads.view(num_tokens, -1, head_dim)[:, :num_heads], queries)
    assert torch.equal(heads.view(num_tokens, -1, head_dim)[:, num_heads:], before[:, num_heads:])
    expected = torch.full_like(pool, 7.0)
    for token, slot in enumerate(slots[:3].tolist()):
        expected[slot // block_size, 1, :, slot % block_size] = torch.stack((keys[token], values[token]))
    check(pool, expected)
    assert int((pool != 7.0).sum()) == 3 * 2 * num_kv_heads * head_dim


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "width"), [(3, 100), (2, 2100), (0, 8)])
def test_a_gate_is_applied_as_by_the_module(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up, output = strided(num_rows, 2 * width, dtype=dtype), strided(num_rows, width, dtype=dtype)
    layer.multiply_gated(gate_up, output)
    check(output, functional.silu(gate_up[:, :width]) * gate_up[:, width:])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_out", "num_in", "tile"), [(5, 48, (2, 1024)), (9, 110, (8, 32)), (4, 64, (4, 32))])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": True, "bias": True},
        {"norm": True, "gated": True},
        {"adds": True},
        {"gated": True, "bias": True, "adds": True},
    ],
)
def test_a_row_is_multiplied_with_all_that_goes_with_it(
    options: dict[str, bool],
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    tile: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemv, "_tile", lambda *_, **__: tile)
    has_norm, has_bias, is_gated, adds = (options.get(name, False) for name in ("norm", "bias", "gated", "adds"))
    num_rows = 2 * num_out if is_gated else num_out
    row, output = strided(1, num_in, dtype=dtype), strided(1, num_out, dtype=dtype)
    weight = strided(num_rows, num_in, dtype=dtype)
    weight /= num_in**0.5
    bias = torch.randn(num_rows).to(dtype)
    norm_weight = torch.rand(num_in).to(dtype) + 0.5
    rows = rms_norm(row, norm_weight, 1e-3) if has_norm else row
    expected = functional.linear(rows, weight, bias if has_bias else None)
    if is_gated:
        expected = functional.silu(expected[:, :num_out]) * expected[:, num_out:]
    expected = output + expected if adds else expected
    gemv.multiply_row(
        row,
        weight,
        output,
        bias=bias if has_bias else None,
        norm=(norm_weight, 1e-3) if has_norm else None,
        is_gated=is_gated,
        adds=adds,
    )
    check(output, expected)


@pytest.mark.usefixtures("interpreter")
def test_what_does_not_fit_together_is_refused() -> None:
    rows, weight = torch.randn(2, 8), torch.randn(8)
    for run in (
        lambda: layer.add_norm(rows, None, weight[:7], 1e-6, torch.empty(2, 8)),
        lambda: layer.add_norm(rows, rows[:1], weight, 1e-6, torch.empty(2, 8)),
        lambda: layer.multiply_gated(rows, torch.empty(2, 8)),
        lambda: gemv.multiply_row(rows, torch.randn(3, 8), torch.empty(2, 3)),
        lambda: gemv.multiply_row(rows[:1], torch.randn(8, 3).t(), torch.empty(1, 3)),
        lambda: gemv.multiply_row(rows[:1, :0], torch.randn(3, 0), torch.empty(1, 3)),
    ):
        with pytest.raises(AssertionError):
            run()


_QWEN3_8B = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "PADDED_HALF": 64, "BLOCK_SIZE": 16}


def _signature(kernel: Any, constants: Mapping[str, Any], **others: str) -> dict[str, str]:
    """Strides are multiples of 16; what else is a number is in ``others``; all else are pointers."""
    names = [name for name in kernel.arg_names if name not in constants]
    return {name: others.get(name, "i32:16" if name.endswith("_stride") else "*bf16") for name in names}


@pytest.mark.parametrize(
    ("kernel", "constants", "others"),
    [
        (layer._add_norm, {"WIDTH": 4096, "PADDED": 4096, "ADD": True}, {"epsilon": "fp32"}),
        (
            layer._rotate_and_store,
            {**_QWEN3_8B, "HEADS_A_PROGRAM": 8, "NORM": True},
            {
                **dict.fromkeys(("positions", "slots"), "*i32"),
                **dict.fromkeys(("num_positions", "num_slots", "layer_offset"), "i32:16"),
                **dict.fromkeys(("query_epsilon", "key_epsilon"), "fp32"),
            },
        ),
        (layer._multiply_gated, {"WIDTH": 12288, "SIZE": 2048}, {}),
        (
            gemv._multiply_row,
            {"NUM_IN": 4096, "PADDED_IN": 4096, "ROWS": 8, "TURN": 256}
            | {"NORM": True, "BIAS": False, "GATED": False, "ADD": False},
            {"num_out": "i32:16", "epsilon": "fp32"},
        ),
        (
            gemv._multiply_row,
            {"NUM_IN": 4096, "PADDED_IN": 4096, "ROWS": 2, "TURN": 1024}
            | {"NORM": True, "BIAS": True, "GATED": True, "ADD": True},
            {"num_out": "i32:16", "epsilon": "fp32"},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_they_compile_for_a_hopper_without_one(kernel: Any, constants: dict[str, Any], others: dict[str, str]) -> None:
    constants = {**constants, "PDL": True}
    compiled = compile_for_sm90(kernel, _signature(kernel, constants, **others), constants, num_warps=4)
    before, waits, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
    assert waits and "griddepcontrol.launch_dependents" in after
    if kernel is gemv._multiply_row:  # whose first weights are on their way while the kernel before still runs
        assert before.count("ld.global.v4.b32") in (2, 4)
