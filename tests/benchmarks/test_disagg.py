"""What the disaggregation benchmark makes of the times that it is given."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from benchmarks.disagg import BlockCopier, Round, summarize
from benchmarks.disagg_client import Answered, split
from benchmarks.table import disagg_tables

AGG = Answered(
    ttft_ms=14.0,
    second_token_ms=25.0,
    first_token_ms=13.0,
    total_ms=23.5,
    prefill_ms=None,
    decode_queue_ms=0.5,
    transfer_ms=None,
)
DISAGG = Answered(
    ttft_ms=14.0,
    second_token_ms=30.0,
    first_token_ms=12.5,
    total_ms=28.0,
    prefill_ms=12.0,
    decode_queue_ms=1.0,
    transfer_ms=2.0,
)


@pytest.mark.parametrize("answered", [AGG, DISAGG])
def test_the_parts_add_up_to_the_second_token(answered: Answered) -> None:
    assert sum(split(answered).values()) == pytest.approx(answered.second_token_ms)


def test_each_part_is_where_it_belongs() -> None:
    assert split(DISAGG) == {
        "route": 0.5,
        "prefill": 12.0,
        "transfer": 2.0,
        "join": 1.0,
        "first_message": 12.5,
        "api": 2.0,
    }
    assert split(AGG) == {"first_token": 12.5, "join": 0.5, "step": 10.5, "api": 1.5}


def test_the_overhead_leaves_out_what_moving_the_bytes_takes_anyway() -> None:
    rounds = [
        Round(agg=AGG, disagg=replace(DISAGG, second_token_ms=30.0 + extra), copy_ms=1.5) for extra in (0.0, 1.0, 5.0)
    ]
    figures = summarize(rounds, 1 << 20, is_paced=True)
    assert figures.overhead_ms == 4.5
    assert figures.overhead_ms_p10 == pytest.approx(3.7)
    assert figures.copy_ms == 1.5
    assert figures.second_token_ms == {"agg": 25.0, "disagg": 31.0}


def test_no_overhead_is_given_where_the_time_to_compute_varies() -> None:
    figures = summarize(ROUNDS, 1 << 20, is_paced=False)
    assert (figures.overhead_ms, figures.overhead_ms_p10) == (None, None)


def test_a_copy_moves_every_block() -> None:
    copier = BlockCopier(num_blocks=4, block_bytes=1 << 12)
    source, destination = copier.pools
    for block in range(4):
        source.piece(block)[:] = bytes([block + 1]) * (1 << 12)
    assert copier.copy(3) > 0
    assert copier.copy(1) > 0
    assert destination.view == source.view


ROUNDS = [Round(agg=AGG, disagg=DISAGG, copy_ms=1.0)] * 2


def test_the_table_sets_the_own_cost_beside_what_is_wanted() -> None:
    figures = {"128": asdict(summarize(ROUNDS, 4 << 20, is_paced=True))}
    table = disagg_tables({"stub": figures, "tiny": figures})
    row = next(line for line in table.splitlines() if line.startswith("| 128 |"))
    assert row.endswith("| 4 MiB | 1.0 | 4.0 | <= 3 |")
