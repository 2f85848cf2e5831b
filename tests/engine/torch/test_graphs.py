"""What CUDA graphs are captured and which steps they run; a stand-in repeats them on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from quartet.engine.torch.attention import LayerAttention
from quartet.engine.torch.pool import KeysValues, KvPool
from quartet.kvcache.layout import KvLayout
from tests.engine.torch.checkpoints import VOCAB_SIZE
from tests.engine.torch.test_kernel_step import make_chunk
from tests.triton_kernels import interpreted

graphs_module = pytest.importorskip("quartet.engine.torch.graphs", reason="Triton is not installed")
kernel_forward = pytest.importorskip("quartet.engine.torch.kernel_forward", reason="Triton is not installed")

LAYOUT = KvLayout(model_fingerprint="ab", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=16, block_size=4)
LAYER = LayerAttention(index=0, scale=0.25, window=None, softcap=None, sinks=None)
CPU = torch.device("cpu")


class ToyModel:
    """One layer of attention, and nothing else: its logits depend on every input of a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weights = torch.randn(3, VOCAB_SIZE, 16)
        self.num_calls = 0

    def __call__(self, step: Any) -> torch.Tensor:
        self.num_calls += 1
        query, key, value = self.weights[:, step.batch.token_ids[0]] + step.batch.positions[0, :, None] / 10
        fresh = KeysValues(key[None, None], value[None, None])
        attended = step.store_and_attend(LAYER, fresh, query[None, None])
        return attended.flatten(1).index_select(0, step.batch.last_rows)


class StandInGraph:
    """Repeats what was captured by calling it again, on the inputs of then."""

    def __init__(self, graphs: Any, step: Any, size: int) -> None:
        self.graphs, self.step, self.size = graphs, step, size

    def replay(self) -> None:
        self.graphs._logits[: self.size].copy_(self.graphs._compute(self.step))


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Captures by stand-ins, on the CPU."""

    def capture_one(graphs: Any, step: Any, size: int) -> StandInGraph:
        logits = graphs._compute(step)
        if graphs._logits is None:
            graphs._logits = logits.new_empty(graphs._sizes[-1], logits.shape[1])
        return StandInGraph(graphs, step, size)

    monkeypatch.setattr(graphs_module.DecodeGraphs, "_capture_one", capture_one)
    for name in ("Stream", "synchronize", "graph_pool_handle", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    with torch.inference_mode(), interpreted():
        yield


def forward(num_blocks: int = 20) -> Any:
    return kernel_forward.KernelForward(KvPool(LAYOUT, num_blocks, CPU), ToyModel(), 1, None)


def bounds(max_batch_size: int = 4, *, pads: bool = True) -> Any:
    return graphs_module.GraphBounds(max_batch_size, pads, max_model_len=64)


DECODES = [([5, 7], 6), ([9], 0), ([1, 2, 3], 9)]


def test_a_padded_graph_yields_what_the_step_does_and_stores_the_same(no_cuda: None) -> None:
    eager, by_graphs = forward(), forward()
    by_graphs.pool.tensor.copy_(eager.pool.tensor.normal_())
    by_graphs.capture(bounds())
    for num in (3, 1, 2, 3):  # a step of fewer rows finds what a larger one left
        chunks = [make_chunk(blocks, first, 1, True) for blocks, first in DECODES[:num]]
        num_calls = by_graphs._compute.num_calls
        torch.testing.assert_close(by_graphs(chunks), eager(chunks), rtol=1e-6, atol=1e-6)
        assert by_graphs._compute.num_calls == num_calls + 1
        assert by_graphs._graphs._logits is not None
        torch.testing.assert_close(by_graphs.pool.tensor, eager.pool.tensor, rtol=0, atol=0)


@pytest.mark.parametrize("has_prompt", [False, True])
def test_tokens_that_only_the_device_knows_are_taken_from_there(no_cuda: None, has_prompt: bool) -> None:
    reading, launching = forward(), forward()
    launching.pool.tensor.copy_(reading.pool.tensor.normal_())
    for model in (reading, launching):
        model.capture(bounds(8))
    prompt = [make_chunk([11, 12], 2, 4, True)] if has_prompt else []
    known, unread = ([*prompt, *(make_chunk(blocks, first, 1, True) for blocks, first in DECODES)] for _ in range(2))
    tokens = torch.tensor([3, 0, 0])
    for chunk, row in ((unread[-1], 2), (unread[-3], 1)):  # not in the order of their rows, and one is known
        tokens[row] = chunk.running.seq.token_ids.pop()
        chunk.running.seq.append_unread()
        chunk.running.unread_row = row
    torch.testing.assert_close(launching(unread, tokens), reading(known), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(launching.pool.tensor, reading.pool.tensor, rtol=0, atol=0)


def test_short_chunks_are_rows_of_a_graph(no_cuda: None) -> None:
    eager, by_graphs = forward(), forward()
    by_graphs.pool.tensor.copy_(eager.pool.tensor.normal_())
    by_graphs.capture(bounds(12))
    decodes = [make_chunk(blocks, first, 1, True) for blocks, first in DECODES]
    prompt, part, fresh = (
        make_chunk(blocks, first, num, samples)
        for blocks, first, num, samples in (([11, 12], 2, 4, True), ([13, 14], 3, 3, False), ([15], 0, 2, True))
    )
    for chunks in ([prompt], [decodes[0], prompt, decodes[1], part, fresh], [part]):
        num_calls = by_graphs._compute.num_calls
        torch.testing.assert_close(by_graphs(chunks), eager(chunks), rtol=1e-6, atol=1e-6)
        assert by_graphs._compute.num_calls == num_calls + 1
        torch.testing.assert_close(by_graphs.pool.tensor, eager.pool.tensor, rtol=0, atol=0)


def test_steps_that_no_graph_fits_are_left(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = forward()
    graphs = graphs_module.DecodeGraphs(model._builder, model._compute, bounds(2, pads=False))
    graphs.capture()

    def is_run(chunks: list[Any]) -> bool:
        return model._run_graph(graphs, model._builder.lay_out(chunks), lambda *_: None) is not None

    one, two, three = ([make_chunk(blocks, first, 1, True) for blocks, first in DECODES[:num]] for num in (1, 2, 3))
    assert is_run(one) and is_run(two)
    assert not is_run(three), "more rows than the largest"
    assert not is_run([make_chunk([5, 7], 3, 3, True)]), "as many in a prompt"
    assert not is_run([replace(make_chunk([5, 7], 3, 1, False), reports=True), one[0]]), "a prompt's own token"
    prompt = [make_chunk([5, 7], 3, 2, True)]  # what its first query reads, its second one reads again
    token_size_bytes = LAYOUT.piece_size_bytes // LAYOUT.block_size
    monkeypatch.setattr(kernel_forward, "_MAX_REREAD_SIZE_BYTES", 3 * token_size_bytes)
    assert is_run(prompt)
    monkeypatch.setattr(kernel_forward, "_MAX_REREAD_SIZE_BYTES", 3 * token_size_bytes - 1)
    assert not is_run(prompt), "its queries read too much"
    graphs = graphs_module.DecodeGraphs(model._builder, model._compute, bounds(4, pads=False))
    graphs.capture()
    assert not is_run(three), "not padded"


def test_a_model_that_cannot_be_captured_runs_without(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs_module.DecodeGraphs, "_capture_one", refuse)
    model = forward()
    with caplog.at_level(logging.WARNING):
        model.capture(bounds())
    assert "without CUDA graphs" in caplog.text
    chunks = [make_chunk([5, 7], 6, 1, True)]
    assert model(chunks).isfinite().all()


def test_the_memory_of_graphs_is_that_of_the_largest_and_the_nodes_of_the_others(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([10_000, 7_000, 6_900])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (next(free), 0))
    assert forward().graphs_size_bytes(bounds(8)) == 3_000 + 100 * 3  # beside 8: 4, 2 and 1


@pytest.mark.parametrize(
    ("max_batch_size", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (20, [1, 2, 4, 8, 16, 20]), (100, [1, 2, 4, *range(8, 65, 8), 80, 96, 100])],
)
def test_few_sizes_are_captured_and_the_largest_is_what_is_set(max_batch_size: int, sizes: list[int]) -> None:
    assert graphs_module.batch_sizes(max_batch_size) == sizes
