"""What the disaggregation benchmark makes of the times that it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.disagg_client import Answered
from benchmarks.disagg_figures import Round, split, summarize

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
        "edge": 2.0,
    }
    assert split(AGG) == {"first_token": 12.5, "join": 0.5, "step": 10.5, "edge": 1.5}


def test_the_overhead_leaves_out_what_moving_the_bytes_takes_anyway() -> None:
    rounds = [
        Round(agg=AGG, disagg=replace(DISAGG, second_token_ms=30.0 + extra), copy_ms=1.5) for extra in (0.0, 1.0, 5.0)
    ]
    figures = summarize(rounds, 1 << 20, is_paced=True)
    assert figures.overhead_ms == 4.5
    assert figures.overhead_ms_p10 == pytest.approx(3.7)
    assert figures.second_token_ms == {"agg": 25.0, "disagg": 31.0}


def test_where_computing_takes_now_more_now_less_no_overhead_is_told() -> None:
    assert summarize([Round(agg=AGG, disagg=DISAGG, copy_ms=1.5)] * 2, 1 << 20, is_paced=False).overhead_ms is None
