"""What the disaggregation benchmark makes of the times that it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest

from benchmarks.bare_chain import Sample, bare_chain
from benchmarks.disagg_client import Answered
from benchmarks.disagg_figures import Round, split, summarize, summarize_bare
from benchmarks.tables.disagg import disagg_tables

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
BARE = Sample(chain_ms=2.0, thread_change_ms=0.25, round_trip_ms=0.5)


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
        Round(agg=AGG, disagg=replace(DISAGG, second_token_ms=30.0 + extra), copy_ms=1.5, bare=BARE)
        for extra in (0.0, 1.0, 5.0)
    ]
    figures = summarize(rounds, 1 << 20, is_paced=True)
    assert figures.overhead_ms == 4.5
    assert figures.overhead_ms_p10 == pytest.approx(3.7)
    assert figures.second_token_ms == {"agg": 25.0, "disagg": 31.0}


def test_where_computing_takes_now_more_now_less_no_overhead_is_told() -> None:
    rounds = [Round(agg=AGG, disagg=DISAGG, copy_ms=1.5, bare=BARE)] * 2
    assert summarize(rounds, 1 << 20, is_paced=False).overhead_ms is None


def test_the_bare_chain_is_the_middle_of_what_was_measured() -> None:
    bare = summarize_bare([replace(BARE, chain_ms=chain_ms) for chain_ms in (9.0, 2.0, 3.0)])
    assert (bare.bare_chain_ms, bare.bare_chain_ms_p10) == (3.0, pytest.approx(2.2))
    assert (bare.thread_change_ms, bare.round_trip_ms) == (0.25, 0.5)


async def test_the_bare_chain_goes_through_its_processes_again_and_again() -> None:
    async with bare_chain() as chain:
        for _ in range(2):
            sample = await chain.measure()
            assert min(asdict(sample).values()) > 0


async def test_a_bare_chain_that_has_ended_is_an_error() -> None:
    async with bare_chain() as chain:
        pass
    with pytest.raises(RuntimeError, match="ended"):
        await chain.measure()


def report_of(rounds: list[Round]) -> dict[str, object]:
    figures = {"128": asdict(summarize(rounds, 4 << 20, is_paced=True))}
    return {"stub": figures, "tiny": figures, "bare": asdict(summarize_bare([item.bare for item in rounds]))}


def test_the_table_sets_the_own_cost_beside_the_bare_chain() -> None:
    table = disagg_tables(report_of([Round(agg=AGG, disagg=DISAGG, copy_ms=1.0, bare=BARE)] * 2))
    row = next(line for line in table.splitlines() if line.startswith("| 128 |"))
    assert row.endswith("| 1.0 | 4.0 | <= 3 | 2.0 | 2.0 |")
    assert "The bare chain over all rounds: 2.00 ms" in table


def test_a_report_from_before_the_bare_chain_still_has_a_table() -> None:
    report = report_of([Round(agg=AGG, disagg=DISAGG, copy_ms=1.0, bare=BARE)] * 2)
    del report["bare"]
    table = disagg_tables({**without_chain(report), "round_trip_ms": 0.5})
    row = next(line for line in table.splitlines() if line.startswith("| 128 |"))
    assert row.endswith("| 1.0 | 4.0 | <= 3 | 8.0 |")
    assert "bare chain" not in table


def without_chain(report: Mapping[str, object]) -> Mapping[str, object]:
    figures = {"128": {key: value for key, value in report["stub"]["128"].items() if key != "bare_chain_ms"}}
    return {**report, "stub": figures, "tiny": figures}
