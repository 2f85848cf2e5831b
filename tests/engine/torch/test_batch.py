"""The layout of one step: which blocks of the pool attention reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quartet.engine.torch.batch import Segment
from quartet.kvcache.layout import KvLayout

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
