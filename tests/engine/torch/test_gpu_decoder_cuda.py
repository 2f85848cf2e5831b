"""Layers run by kernels on a CUDA device: the kernels, whole steps, CUDA graphs of them, and the engine's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quartet.engine.torch.config import TorchEngineConfig
from quartet.engine.torch.decoder import Decoder
from quartet.engine.torch.runner import TorchRunner
from tests.engine.torch.checkpoints import make_checkpoint, make_config
from tests.engine.torch.driving import run_all, torch_engine
from tests.engine.torch.oracle import Oracle
from tests.engine.torch.test_fuse import BY_HAND
from tests.engine.torch.test_gpu_decoder import (
    BLOCK_SIZE,
    DECODING,
    MIXED,
    NONE_SAMPLES,
    NUM_BLOCKS,
    ONE_ROW,
    Sizes,
    compare_steps,
    make_chunks,
)
from tests.engine.torch.test_layer_kernels import rms_norm
from tests.engine.torch.test_oracle import NUM_TOKENS, greedy, ragged_prompts

gpu_decoder = pytest.importorskip("quartet.engine.torch.gpu_decoder", reason="Triton is not installed")
gemv = pytest.importorskip("quartet.engine.torch.kernels.gemv", reason="Triton is not installed")
layer = pytest.importorskip("quartet.engine.torch.kernels.layer", reason="Triton is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Checkpoints = Callable[[str], Path]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Of the largest value: one or two roundings.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
#: Of the largest logit, after the layers of a tiny model.
STEP_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}
#: How much less than the best logit a greedy token's may be, of logits of about 2; a wrong token's is lower by about 2.
GAP = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.2}


@pytest.fixture(params=[False, True], ids=["", "pdl"])
def pdl(request: pytest.FixtureRequest) -> bool:
    if request.param and not gemv.supports_pdl(torch.device("cuda:0")):
        pytest.skip("this GPU has no programmatic dependent launch")
    return bool(request.param)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((actual - expected).abs().max()) <= TOLERANCE[actual.dtype] * float(expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4096, 3584, 100])
def test_kernels_one_after_the_other_compute_a_row_of_an_mlp(width: int, dtype: torch.dtype, pdl: bool) -> None:
    """Each reads what the one before wrote, which with ``pdl`` may still run when it begins."""
    torch.manual_seed(0)
    between = 3 * width
    hidden, addend = random(1, width, dtype=dtype), random(1, width, dtype=dtype)
    weight = random(width, dtype=dtype)
    gate_up = random(2 * between, width, dtype=dtype) / width**0.5
    down = random(width, between, dtype=dtype) / between**0.5
    bias = random(2 * between, dtype=dtype)
    output, gated = torch.empty_like(hidden), hidden.new_empty(1, between)
    separate, gated_separately = hidden.new_empty(1, 2 * between), hidden.new_empty(1, between)
    expected = hidden + addend
    for _ in range(20):
        layer.add_norm(hidden, addend, weight, 1e-6, output, pdl=pdl)
        gemv.multiply_row(output, gate_up, separate, bias=bias, pdl=pdl)
        layer.multiply_gated(separate, gated_separately, pdl=pdl)
        gemv.multiply_row(hidden, gate_up, gated, bias=bias, norm=(weight, 1e-6), is_gated=True, pdl=pdl)
        before = hidden.clone()
        gemv.multiply_row(gated, down, hidden, adds=True, pdl=pdl)
        check(output, rms_norm(expected, weight, 1e-6))
        gate, up = functional.linear(output, gate_up, bias).chunk(2, 1)
        check(gated_separately, functional.silu(gate) * up)
        check(gated, functional.silu(gate) * up)
        check(hidden, before + functional.linear(gated, down))
        expected = hidden + addend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 80), (4, 1, 256)])
def test_heads_go_to_the_pool(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, pdl: bool) -> None:
    torch.manual_seed(0)
    num_tokens, block_size = 70, 16
    heads = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    queries, keys, values = heads.clone().view(num_tokens, -1, head_dim).split((num_heads, *2 * (num_kv_heads,)), 1)
    angles = torch.arange(500)[:, None] * torch.rand(head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to("cuda", dtype)
    positions = torch.randint(500, (num_tokens,), device="cuda")
    slots = torch.randperm(6 * block_size, device="cuda")[:num_tokens]
    pool = torch.zeros(6, 2, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device="cuda")
    weights = [torch.rand(head_dim, device="cuda").to(dtype) + 0.5 for _ in range(2)]
    layer.rotate_and_store(heads, (weights[0], 1e-6), (weights[1], 1e-6), cos_sin, positions, slots, pool, 1, pdl=pdl)
    cos, sin = (part.repeat(1, 2)[positions] for part in cos_sin.split(head_dim // 2, 1))
    normed = rms_norm(queries, weights[0], 1e-6), rms_norm(keys, weights[1], 1e-6)
    queries, keys = apply_rotary_pos_emb(*normed, cos, sin)
    check(heads.view(num_tokens, -1, head_dim)[:, :num_heads], queries)
    stored = pool[slots // block_size, 1, :, slots % block_size]
    check(stored[:, 0], keys)
    assert torch.equal(stored[:, 1], values)
    assert int((pool != 0).sum()) == int((stored != 0).sum())


@contextmanager
def running(model_path: Path, dtype: str) -> Iterator[TorchRunner]:
    runner = TorchRunner(
        TorchEngineConfig(
            model_path=str(model_path),
            dtype=dtype,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            device="cuda:0",
            cuda_graph_max_batch_size=4,
        )
    )
    with torch.inference_mode():
        yield runner
    runner.close()


@pytest.mark.parametrize("dtype", ["float64", *STEP_TOLERANCE])
@pytest.mark.parametrize("family", BY_HAND)
def test_known_families_run_by_kernels_in_all_dtypes_that_these_know(
    family: str, dtype: str, checkpoint: Checkpoints
) -> None:
    with running(checkpoint(family), dtype) as runner:
        assert isinstance(runner._compute, Decoder)
        is_by_kernels = isinstance(getattr(runner._forward, "_compute", None), gpu_decoder.GpuDecoder)
        assert is_by_kernels == (dtype != "float64")


@pytest.mark.parametrize("dtype", STEP_TOLERANCE)
@pytest.mark.parametrize("family", BY_HAND)
def test_steps_yield_the_logits_and_the_kv_of_the_decoder(family: str, dtype: str, checkpoint: Checkpoints) -> None:
    with running(checkpoint(family), dtype) as runner:
        for sizes in (MIXED, DECODING, ONE_ROW, NONE_SAMPLES):
            found, expected = compare_steps(runner, sizes)
            for ours, theirs in zip(found, expected, strict=True):
                error = float((ours - theirs).abs().max()) if theirs.numel() else 0.0
                assert error <= STEP_TOLERANCE[dtype] * float(theirs.abs().max() if theirs.numel() else 0.0)


@pytest.mark.parametrize("sizes", [ONE_ROW, DECODING], ids=["one row", "rows"])
@pytest.mark.parametrize("dtype", STEP_TOLERANCE)
def test_a_graph_repeats_a_step(dtype: str, sizes: Sizes, checkpoint: Checkpoints) -> None:
    with running(checkpoint("qwen3"), dtype) as runner:
        forward = runner._forward
        step = forward._builder.make(forward._builder.lay_out(make_chunks(sizes)))
        torch.manual_seed(0)
        before = runner._pool.tensor.normal_().clone()
        expected = forward._compute(step).clone()
        after = runner._pool.tensor.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = forward._compute(step)
        for _ in range(3):
            runner._pool.tensor.copy_(before)
            logits.zero_()
            graph.replay()
            torch.testing.assert_close(logits, expected)
            torch.testing.assert_close(runner._pool.tensor, after)


@pytest.mark.parametrize("dtype", GAP)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_engines_tokens_are_greedy(family: str, dtype: str, tmp_path: Path) -> None:
    """In prompts' chunks and graphs of decode steps; in float32 they are the CPU's, but where two tokens nearly tie."""
    # Weights that every dtype holds: only what is computed differs.
    model_path = make_checkpoint(
        tmp_path, make_config(family), torch.bfloat16 if dtype == "bfloat16" else torch.float16
    )
    oracle = Oracle(model_path)
    prompts = ragged_prompts()

    async def run(device: str) -> list[list[int]]:
        async with torch_engine(model_path, device=device, dtype=dtype, max_num_batched_tokens=64) as engine:
            return [outcome.token_ids for outcome in await run_all(engine, [greedy(prompt) for prompt in prompts])]

    ours = asyncio.run(run("cuda:0"))
    for prompt, token_ids in zip(prompts, ours, strict=True):
        assert len(token_ids) == NUM_TOKENS
        for i, token_id in enumerate(token_ids):
            [logits] = oracle.generate([*prompt, *token_ids[:i]], 1).logits
            assert float(logits.max() - logits[token_id]) < GAP[dtype]
    if dtype == "float32":
        theirs = asyncio.run(run("cpu"))
        num_equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        assert num_equal >= len(prompts) - 1, "two tokens nearly tie nowhere near as often"
