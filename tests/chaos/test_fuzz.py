"""Some thousand hostile inputs on every surface, as ``benchmarks.fuzz`` sends a million."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.fuzz import SURFACES, fuzz

SEED = 15
NUM_INPUTS = 4_500
BATCH_INPUTS = 150


@pytest.mark.usefixtures("etcd_binary")
def test_no_input_crashes_hangs_or_stalls_a_process_nor_leaves_anything_held(tmp_path: Path) -> None:
    said: list[str] = []

    results = asyncio.run(
        fuzz(SEED, NUM_INPUTS, list(SURFACES), said.append, batch_inputs=BATCH_INPUTS, directory=tmp_path)
    )

    assert results.findings == [], "\n".join(said)
    assert results.surfaces.keys() == SURFACES.keys()
    assert results.inputs >= NUM_INPUTS
