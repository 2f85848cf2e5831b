"""Steps whose attention is kernels', interpreted: the logits are those of steps that attend segment by segment."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quartet.engine.base import RequestKind
from quartet.engine.runner import RunningRequest, ScheduledChunk
from quartet.engine.torch import runner as runner_module
from quartet.engine.torch.attention import PagedStep
from quartet.engine.torch.batch import build_batch, probe_batch
from quartet.engine.torch.config import TorchEngineConfig
from quartet.engine.torch.inputs import SequenceTables, Staging, Tokens, lay_out
from quartet.engine.torch.pool import KvPool
from quartet.engine.torch.runner import TorchRunner
from quartet.kvcache.layout import KvLayout
from quartet.kvcache.sequence import Sequence as TokenSequence
from tests.engine.fakes import make_request
from tests.engine.torch.checkpoints import VOCAB_SIZE
from tests.triton_kernels import interpreted

kernel_step = pytest.importorskip("quartet.engine.torch.kernel_step", reason="Triton is not installed")
kernel_forward = pytest.importorskip("quartet.engine.torch.kernel_forward", reason="Triton is not installed")
gather = pytest.importorskip("quartet.engine.torch.kernels.gather", reason="Triton is not installed")

Checkpoints = Callable[[str], Path]

BLOCK_SIZE = 4
# Tokens before the step, and of the step; whether it samples.
CHUNKS = [(3, 6, True), (20, 1, True), (0, 5, False), (9, 1, True)]


def make_chunk(blocks: Sequence[int], first: int, num: int, samples: bool) -> ScheduledChunk:
    source = random.Random(first)
    token_ids = [source.randrange(VOCAB_SIZE) for _ in range(first + num)]
    seq = TokenSequence(token_ids, block_size=BLOCK_SIZE)
    seq.block_table = list(blocks)
    running = RunningRequest(request=make_request(token_ids, kind=RequestKind.DECODE), seq=seq)
    return ScheduledChunk(running, first, num, samples)


def make_chunks() -> list[ScheduledChunk]:
    free = random.Random(1).sample(range(24), 24)
    return [make_chunk([free.pop() for _ in range(-(-(first + num) // BLOCK_SIZE))], first, num, samples)
            for first, num, samples in CHUNKS]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "copies"),
    [
        *((name, False) for name in ("llama", "qwen3", "llama by modules", "qwen3_moe", "gemma2", "gemma3", "gpt_oss")),
        ("gpt_oss", True),
        ("qwen3 with reports", False),
        ("gemma3 with reports", False),
    ],
)
def test_a_mixed_step_yields_the_same_logits(
    family: str, copies: bool, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, _, how = family.partition(" ")
    if how == "by modules":
        monkeypatch.setattr(runner_module, "fuse", lambda *_: None)
    config = TorchEngineConfig(
        model_path=str(checkpoint(family)), dtype="float32", num_blocks=24, block_size=BLOCK_SIZE, num_threads=1
    )
    runner = TorchRunner(config)
    compute = runner._compute
    torch.manual_seed(0)
    pool = runner._pool
    pool.tensor.normal_()
    before = pool.tensor.clone()
    chunks = make_chunks()
    if how == "with reports":
        chunks = [replace(chunk, reports=chunk.num_tokens > 1) for chunk in chunks]
    with torch.inference_mode():
        expected = compute(PagedStep(pool, build_batch(chunks, runner.layout, torch.device("cpu"))))
        after = pool.tensor.clone()
        pool.tensor.copy_(before)
        builder = kernel_step.StepBuilder(pool, num_heads=4)
        # The interpreter copies heads of any dtype; of those that are to be had, the ones whose dimension fits.
        builder._copied_span = 32 * copies
        with interpreted():
            logits = compute(builder.make(builder.lay_out(chunks), copies=copies))
    assert len(logits) == sum(chunk.samples + chunk.num_reported for chunk in chunks)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pool.tensor, after, rtol=1e-5, atol=1e-5)
    runner.close()


@pytest.mark.parametrize(
    ("chunks", "size", "is_copied"),
    [
        ([(0, 350)], 1 << 22, False),  # a token is read by half of them
        ([(0, 370), (700, 1)], 1 << 22, True),
        ([(3000, 300), (700, 1)], 1 << 22, True),
        ([(4000, 200)], 1 << 22, False),
        ([(4000, 250), (5000, 50)], 1 << 22, False),
        ([(0, 1000), (5000, 10)], 1 << 22, False),
        ([(4000, 4000), (5000, 10)], 1 << 22, True),
        # In whole spans of 128.
        ([(4000, 600)], 36 * 128 * 2 * 4 * 16 * 2 - 1, False),
        ([(4000, 600)], 36 * 128 * 2 * 4 * 16 * 2, True),
        ([(4000, 600), (5, 2)], 36 * 128 * 2 * 4 * 16 * 2, False),
    ],
)
def test_keys_that_many_queries_read_are_copied_within_a_bound(
    chunks: list[tuple[int, int]], size: int, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KvLayout(
        model_fingerprint="", dtype="bfloat16", num_layers=1, num_kv_heads=4, head_dim=16, block_size=BLOCK_SIZE
    )
    monkeypatch.setattr(kernel_step, "_MAX_COPIED_SIZE_BYTES", size)
    builder = kernel_step.StepBuilder(KvPool(layout, 1, torch.device("cpu")), num_heads=16)
    step = builder.make(builder.lay_out([make_chunk([0] * 2500, first, num, True) for first, num in chunks]))
    assert (step.chunks.copies is not None) == is_copied
    if is_copied:
        first = step.chunks.first_row
        spans = [0, *itertools.accumulate(-(-(context + num) // 128) for context, num in chunks if num > 1)][:-1]
        assert step.chunks.copies.begins[first:].tolist() == [128 * begin for begin in spans]


def test_room_grows_up_to_its_bound_and_is_given_up_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.empty(1, 1, 2, BLOCK_SIZE, 4, 16)
    row_size = 2 * 4 * 16 * 4
    room = gather.Room(pool, 5000 * row_size)
    first = room.rows(100)
    assert first is not None and first.shape == (2, 100, 64)
    again = room.rows(4096)
    assert again is not None and again.data_ptr() == first.data_ptr()
    most = room.rows(5000)
    assert most is not None and most.shape[1] == 5000
    assert room.rows(5001) is None
    assert not room.holds(5001)

    def new_empty(_like: torch.Tensor, *shape: int) -> torch.Tensor:
        if shape[1]:
            raise torch.OutOfMemoryError
        return torch.empty(shape)

    room = gather.Room(pool, 5000 * row_size)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    assert room.rows(100) is None
    monkeypatch.undo()
    assert room.rows(100) is None, "it is not tried again"


def test_a_step_whose_copies_find_no_memory_reads_blocks(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TorchEngineConfig(
        model_path=str(checkpoint("llama")), dtype="float32", num_blocks=24, block_size=BLOCK_SIZE, num_threads=1
    )
    runner = TorchRunner(config)
    with torch.inference_mode(), interpreted():
        builder = kernel_step.StepBuilder(runner._pool, num_heads=4)
        builder._copied_span = 32
        inputs = builder.lay_out(make_chunks())
        expected = runner._compute(builder.make(inputs, copies=False))
        monkeypatch.setattr(gather.Room, "rows", lambda *_: None)
        assert torch.equal(runner._compute(builder.make(inputs, copies=True)), expected)
    runner.close()


@pytest.mark.parametrize("fault", ["other logits", "an error"])
def test_copies_that_fail_here_leave_all_else_as_it_is(fault: str, checkpoint: Checkpoints, caplog: Any) -> None:
    config = TorchEngineConfig(
        model_path=str(checkpoint("llama")), dtype="bfloat16", num_blocks=2, block_size=BLOCK_SIZE, num_threads=1
    )
    runner = TorchRunner(config)

    def judge(_logits: torch.Tensor) -> bool:
        if fault == "an error":
            raise RuntimeError("out of resource: shared memory")
        return False

    forward = kernel_forward.KernelForward(runner._pool, runner._compute, 4, None)
    assert forward._builder.can_copy
    with torch.inference_mode(), interpreted():
        forward.try_copies([1, 2, 3, 4], judge)
    assert not forward._builder.can_copy
    assert not forward.over(runner._pool)._builder.can_copy
    assert "read in their blocks" in caplog.text
    runner.close()


def test_spans_are_of_whole_sequences() -> None:
    blocks = [np.arange(8, dtype=np.int32)] * 3
    inputs = lay_out(
        [Tokens([1, 2], 4, blocks[0], True), Tokens([3], 9, blocks[1], True), Tokens([4, 5, 6], 7, blocks[2], True)],
        BLOCK_SIZE,
    )
    assert [part.tolist() for part in inputs.spans(4)] == [[1, 1, 2, 2, 2], [0, 4, 0, 4, 8]]


def test_kernels_are_tried_on_a_prompt_and_a_decoding_sequence(checkpoint: Checkpoints) -> None:
    config = TorchEngineConfig(
        model_path=str(checkpoint("llama")), dtype="float32", num_blocks=2, block_size=BLOCK_SIZE, num_threads=1
    )
    runner = TorchRunner(config)
    step = PagedStep(runner._pool, probe_batch(runner.layout, VOCAB_SIZE, torch.device("cpu")))
    with torch.inference_mode(), interpreted():
        expected = runner._compute(step)
        builder = kernel_step.StepBuilder(runner._pool, num_heads=4)
        builder._copied_span = 32
        for num_splits, copies in ((1, False), (8, False), (1, True)):
            token_ids = step.batch.token_ids[0].tolist()
            logits = kernel_step.probe_logits(builder, runner._compute, token_ids, num_splits, copies=copies)
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    runner.close()


def test_a_table_follows_the_blocks_of_its_sequence() -> None:
    tables = SequenceTables()
    chunk = make_chunk([5, 7], 7, 1, True)
    assert tables.tokens_of(chunk).blocks.tolist() == [5, 7]
    chunk.running.seq.block_table += [2, 9, 4]  # in place, as the pool does
    assert tables.tokens_of(chunk).blocks.tolist() == [5, 7, 2, 9, 4]
    chunk.running.seq.block_table = [5, 6, 2, 9, 4]  # preempted and admitted again
    assert tables.tokens_of(chunk).blocks.tolist() == [5, 6, 2, 9, 4]
    assert len(tables._tables) == 1
    del chunk
    assert not len(tables._tables)


def test_single_tokens_come_first_and_answers_keep_their_order() -> None:
    blocks = [np.array(table, dtype=np.int32) for table in ([3, 1], [8, 2, 6], [4])]
    sequences = [
        Tokens([10, 11, 12], 4, blocks[0], True),
        Tokens([20], 9, blocks[1], True),
        Tokens([30, 31], 0, blocks[2], False),
    ]
    inputs = lay_out(sequences, BLOCK_SIZE)
    assert inputs.order == [1, 0, 2]
    assert inputs.token_ids.tolist() == [20, 10, 11, 12, 30, 31]
    assert inputs.positions.tolist() == [9, 4, 5, 6, 0, 1]
    assert inputs.slots.tolist() == [6 * 4 + 1, 1 * 4, 1 * 4 + 1, 1 * 4 + 2, 4 * 4, 4 * 4 + 1]
    assert inputs.last_rows.tolist() == [3, 0]
    assert inputs.seqs_of(inputs.last_rows).tolist() == [1, 0]
    assert (inputs.num_singles, inputs.longest) == (1, 10)
    assert [part.tolist() for part in inputs.tiles(2)] == [[2, 1, 1], [0, 2, 0]]
    assert inputs.blocks[inputs.table_begins].tolist() == [8, 3, 4]


def test_parts_of_inputs_begin_where_wide_loads_can_and_outlive_later_ones() -> None:
    staging = Staging(torch.device("cpu"))
    arrays = [
        np.arange(size, dtype=dtype) for size, dtype in ((3, np.int64), (5, np.int32), (0, np.int32), (2, np.int64))
    ]
    sent = [staging.send([array + number for array in arrays]) for number in range(8)]
    for number, tensors in enumerate(sent):
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.tolist() == (array + number).tolist()
            assert tensor.numel() == 0 or tensor.data_ptr() % 16 == 0
