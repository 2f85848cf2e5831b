"""Layers run by kernels, interpreted: the logits, keys and values of ``Decoder``."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quartet.engine.runner import ScheduledChunk
from quartet.engine.torch import decoder as decoder_module
from quartet.engine.torch.attention import PagedStep
from quartet.engine.torch.batch import MediaRows, build_batch
from quartet.engine.torch.config import TorchEngineConfig
from quartet.engine.torch.decoder import Decoder, TransposedLinear
from quartet.engine.torch.runner import TorchRunner
from tests.engine.torch.checkpoints import VOCAB_SIZE, make_checkpoint, make_config
from tests.engine.torch.test_kernel_step import BLOCK_SIZE, make_chunk
from tests.triton_kernels import interpreted

gpu_decoder = pytest.importorskip("quartet.engine.torch.gpu_decoder", reason="Triton is not installed")
gemv = pytest.importorskip("quartet.engine.torch.kernels.gemv", reason="Triton is not installed")
kernel_forward = pytest.importorskip("quartet.engine.torch.kernel_forward", reason="Triton is not installed")
kernel_step = pytest.importorskip("quartet.engine.torch.kernel_step", reason="Triton is not installed")

Checkpoints = Callable[[str], Path]

NUM_BLOCKS = 24


@contextmanager
def decoding(model_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32") -> Iterator[TorchRunner]:
    """A runner whose weights are in their own order, as on a GPU."""
    monkeypatch.setattr(decoder_module, "best_order", lambda _: None)
    monkeypatch.setattr(gemv, "_tile", lambda *_, **__: (64, 64))  # an interpreter is done soonest with few programs
    runner = TorchRunner(
        TorchEngineConfig(
            model_path=str(model_path),
            dtype=dtype,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_threads=1,
            cuda_graph_max_batch_size=0,
        )
    )
    with torch.inference_mode():
        yield runner
    runner.close()


Sizes = list[tuple[int, int, bool]]

# Of each chunk, tokens before the step, and of the step; whether it samples.
MIXED: Sizes = [(3, 6, True), (20, 1, True), (0, 5, False), (9, 1, True)]
DECODING: Sizes = [(3, 1, True), (20, 1, True), (17, 1, True)]
ONE_ROW: Sizes = [(20, 1, True)]
NONE_SAMPLES: Sizes = [(3, 6, False), (8, 1, False)]
ONE_ROW_THAT_DOES_NOT_SAMPLE: Sizes = [(20, 1, False)]


class NothingRead(TorchDispatchMode):
    """Fails where the host asks for a value of a tensor, for which it would wait on a GPU, and no graph be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "item", "is_nonzero", "nonzero"), func
        return func(*args, **(kwargs or {}))


def make_chunks(sizes: Sizes) -> list[ScheduledChunk]:
    free = random.Random(1).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return [
        make_chunk([free.pop() for _ in range(-(-(first + num) // BLOCK_SIZE))], first, num, samples)
        for first, num, samples in sizes
    ]


def compare_steps(
    runner: TorchRunner, sizes: Sizes, media: MediaRows | None = None
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Logits, and the pool afterwards: by kernels, and by ``Decoder``."""
    decoder, pool = runner._compute, runner._pool
    assert isinstance(decoder, Decoder)
    by_kernels = gpu_decoder.on_kernels(decoder.parts, 64)
    torch.manual_seed(0)
    before = pool.tensor.normal_().clone()
    chunks = make_chunks(sizes)
    batch = build_batch(chunks, runner.layout, pool.tensor.device)
    expected = decoder(PagedStep(pool, replace(batch, media=media))).clone(), pool.tensor.clone()
    pool.tensor.copy_(before)
    builder = kernel_step.StepBuilder(pool, num_heads=decoder.parts.shape.num_heads)
    step = builder.make(builder.lay_out(chunks), media)
    with NothingRead():
        logits = by_kernels(step)
    found = logits, pool.tensor.clone()
    assert found[0].shape == expected[0].shape == (sum(samples for *_, samples in sizes), VOCAB_SIZE)
    return found, expected


def check_step(runner: TorchRunner, sizes: Sizes, media: MediaRows | None = None) -> None:
    with interpreted():
        found, expected = compare_steps(runner, sizes, media)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama3_rope", "qwen2", "qwen3", "mistral"])
def test_steps_yield_the_logits_and_the_kv_of_the_decoder(
    family: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    with decoding(checkpoint(family), monkeypatch) as runner:
        check_step(runner, MIXED)
        check_step(runner, ONE_ROW)


def test_every_kind_of_step_does_of_a_model_with_odd_sizes_and_biases_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        "hidden_size": 72,
        "intermediate_size": 90,
        "head_dim": 20,
        "num_attention_heads": 6,
        "num_hidden_layers": 2,
    }
    config = make_config("llama", attention_bias=True, mlp_bias=True, **sizes)
    with decoding(make_checkpoint(tmp_path, config), monkeypatch) as runner:
        for step in (MIXED, DECODING, ONE_ROW, NONE_SAMPLES, ONE_ROW_THAT_DOES_NOT_SAMPLE):
            check_step(runner, step)


def test_media_replace_embeddings(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    with decoding(checkpoint("llama"), monkeypatch) as runner:
        for sizes, rows in (([(3, 6, True)], [1, 2, 5]), (ONE_ROW, [0])):
            check_step(runner, sizes, MediaRows(torch.tensor(rows), torch.randn(len(rows), 64)))


def test_float64_is_left_to_others(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    with decoding(checkpoint("llama"), monkeypatch, "float64") as runner:
        assert isinstance(runner._compute, Decoder)
        assert gpu_decoder.on_kernels(runner._compute.parts, 64) is None


def test_reordered_weights_are_left_to_others_and_none_is_copied(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    with decoding(checkpoint("llama"), monkeypatch) as runner:
        assert isinstance(runner._compute, Decoder)
        parts = runner._compute.parts
        by_kernels = gpu_decoder.on_kernels(parts, 64)
        for layer, own in zip(parts.layers, by_kernels._layers, strict=True):
            for name in ("query_key_value", "output", "gate_up", "down"):
                assert getattr(own, name) is getattr(layer, name)
        assert (by_kernels._embedding, by_kernels._head) == (parts.embedding, parts.head)
        weight = torch.randn(64, 64)
        layer = replace(parts.layers[1], output=TransposedLinear(weight, None))
        assert gpu_decoder.on_kernels(replace(parts, layers=[parts.layers[0], layer]), 64) is None


@pytest.mark.parametrize("is_right", [True, False])
def test_a_runner_has_kernels_compute_layers_if_they_are_right_else_attention_alone(
    is_right: bool, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TorchRunner, "_has_kernels", lambda *_: True)
    if not is_right:
        monkeypatch.setattr(gpu_decoder, "multiply_gated", lambda _, output: output.zero_())
        monkeypatch.setattr(kernel_forward, "SPLITS", (1,))  # where it is right, each way is tried
    with interpreted(), caplog.at_level(logging.WARNING), decoding(checkpoint("qwen2"), monkeypatch) as runner:
        assert type(runner._forward._compute) is (gpu_decoder.GpuDecoder if is_right else Decoder)  # type: ignore[attr-defined]
        assert isinstance(runner._forward, kernel_forward.KernelForward)
    assert ("layers of Qwen2ForCausalLM" in caplog.text) != is_right
