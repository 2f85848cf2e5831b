"""The layout of one step: which blocks of the pool attention reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quartet.engine.runner import RunningRequest, ScheduledChunk
from quartet.engine.torch.batch import Segment, build_batch
from quartet.kvcache.layout import KvLayout
from quartet.kvcache.sequence import Sequence
from tests.engine.fakes import make_request

LAYOUT = KvLayout(model_fingerprint="ab", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4)


@pytest.mark.parametrize(("window", "expected"), [(None, {3, 5, 6, 7}), (2, {6, 7})])
def test_attention_reads_no_block_of_another_request(window: int | None, expected: set[int]) -> None:
    # What lies in the others may be anything, and 0 times infinity is no number. Block 0 is somebody's, too.
    segment = Segment(
        begin=0,
        num_queries=1,
        block_tables=[np.array([7]), np.array([3, 5, 6])],
        first_positions=np.array([1, 9]),
        layout=LAYOUT,
        device=torch.device("cpu"),
    )
    for rows in segment.span(window).rows:
        assert {row // (2 * LAYOUT.num_layers) for row in rows.tolist()} == expected


def chunk(token_ids: list[int], *, num_tokens: int = 1, unread_row: int | None = None) -> ScheduledChunk:
    """The last tokens of a sequence, and one after them if that is number ``unread_row`` of the step in flight's."""
    seq = Sequence(token_ids, block_size=LAYOUT.block_size)
    if unread_row is not None:
        seq.append_unread()
    seq.block_table = list(range(seq.num_blocks))
    running = RunningRequest(request=make_request(token_ids), seq=seq, unread_row=unread_row)
    return ScheduledChunk(running, len(seq) - num_tokens, num_tokens, samples=True)


def test_unread_tokens_come_from_the_step_in_flight() -> None:
    chunks = [
        chunk([1, 2, 3], num_tokens=3),
        chunk([4, 5, 6, 7, 8], unread_row=1),
        chunk([9], num_tokens=1),
        chunk([10, 11], unread_row=2),
    ]
    batch = build_batch(chunks, LAYOUT, torch.device("cpu"), unread=torch.tensor([100, 101, 102]))
    # Single tokens first, from the shortest sequence on.
    assert batch.token_ids.tolist() == [[9, 102, 101, 1, 2, 3]]
    assert batch.positions.tolist() == [[0, 2, 5, 0, 1, 2]]
