"""What the disaggregation benchmark makes of the times that it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest

from benchmarks.bare_chain import Sample
from benchmarks.disagg_client import Answered
from benchmarks.disagg_copies import BlockCopier, CopyTimes
from benchmarks.disagg_figures import Round, split, summarize, summarize_bare
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
COPIES = CopyTimes(plain_ms=1.0, transfer_ms=1.25)
BARE = Sample(chain_ms=2.0, contract_chain_ms=2.5, thread_change_ms=0.25, round_trip_ms=0.5)


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
    copies = CopyTimes(plain_ms=1.5, transfer_ms=2.0)
    rounds = [
        Round(agg=AGG, disagg=replace(DISAGG, second_token_ms=30.0 + extra), copies=copies, bare=BARE)
        for extra in (0.0, 1.0, 5.0)
    ]
    figures = summarize(rounds, 1 << 20, is_paced=True)
    assert figures.overhead_ms == 4.5
    assert figures.overhead_ms_p10 == pytest.approx(3.7)
    assert figures.overhead_beyond_transfer_copy_ms == 4.0
    assert (figures.copy_ms, figures.transfer_copy_ms) == (1.5, 2.0)
    assert figures.second_token_ms == {"agg": 25.0, "disagg": 31.0}


def test_where_computing_takes_now_more_now_less_no_overhead_is_told() -> None:
    figures = summarize([Round(agg=AGG, disagg=DISAGG, copies=COPIES, bare=BARE)] * 2, 1 << 20, is_paced=False)
    assert (figures.overhead_ms, figures.overhead_ms_p10, figures.overhead_beyond_transfer_copy_ms) == (None,) * 3


def test_the_bare_chain_is_the_middle_of_what_was_measured() -> None:
    bare = summarize_bare([replace(BARE, chain_ms=chain_ms) for chain_ms in (9.0, 2.0, 3.0)])
    assert bare.bare_chain_ms == 3.0
    assert bare.bare_chain_ms_p10 == pytest.approx(2.2)
    assert (bare.contract_chain_ms, bare.contract_chain_ms_p10) == (2.5, 2.5)
    assert (bare.thread_change_ms, bare.round_trip_ms) == (0.25, 0.5)


def test_each_length_has_its_own_contract_chain() -> None:
    rounds = [
        Round(agg=AGG, disagg=DISAGG, copies=COPIES, bare=replace(BARE, contract_chain_ms=chain_ms))
        for chain_ms in (9.0, 3.0, 4.0)
    ]
    figures = summarize(rounds, 1 << 20, is_paced=True)
    assert (figures.bare_chain_ms, figures.contract_chain_ms) == (2.0, 4.0)


async def test_both_copies_move_every_block() -> None:
    copier = BlockCopier(num_blocks=4, block_bytes=1 << 12)
    source, destination = copier.pools
    for block in range(4):
        source.piece(block)[:] = bytes([block + 1]) * (1 << 12)
    assert copier.copy_plain(4) > 0
    assert destination.view == source.view
    destination.view[:] = bytes(4 << 12)
    assert await copier.copy_as_transfer(3) > 0
    assert await copier.copy_as_transfer(1) > 0
    # Scattered: each block is somewhere, whole.
    assert sorted(bytes(destination.piece(block)) for block in range(4)) == [
        bytes([block + 1]) * (1 << 12) for block in range(4)
    ]


def report_of(rounds: list[Round]) -> dict[str, object]:
    figures = {"128": asdict(summarize(rounds, 4 << 20, is_paced=True))}
    return {"stub": figures, "tiny": figures, "bare": asdict(summarize_bare([item.bare for item in rounds]))}


ROUNDS = [Round(agg=AGG, disagg=DISAGG, copies=COPIES, bare=BARE)] * 2


def test_the_table_sets_the_own_cost_beside_both_chains() -> None:
    table = disagg_tables(report_of(ROUNDS))
    assert row_of(table).endswith("| 1.0, 1.2 | 4.0, 3.8 | <= 3 | 2.0 | 2.5 | 1.6 |")
    assert "The bare chain over all rounds: 2.00 ms" in table
    assert "The contract's chain over all rounds: 2.50 ms" in table


def test_a_report_from_before_the_contracts_chain_still_has_a_table() -> None:
    table = disagg_tables(without(report_of(ROUNDS), "contract_chain_ms", "contract_chain_ms_p10", "transfer_copy_ms"))
    assert row_of(table).endswith("| 1.0 | 4.0 | <= 3 | 2.0 | 2.0 |")
    assert "The bare chain over all rounds: 2.00 ms" in table
    assert "contract" not in table


def test_a_report_from_before_the_bare_chain_still_has_a_table() -> None:
    report = without(report_of(ROUNDS), "bare_chain_ms", "contract_chain_ms", "transfer_copy_ms")
    del report["bare"]
    table = disagg_tables({**report, "round_trip_ms": 0.5})
    assert row_of(table).endswith("| 1.0 | 4.0 | <= 3 | 8.0 |")
    assert "chain" not in table


def row_of(table: str) -> str:
    return next(line for line in table.splitlines() if line.startswith("| 128 |"))


def without(report: Mapping[str, object], *keys: str) -> dict[str, object]:
    """``report`` with none of ``keys``, wherever they are."""
    return {
        key: without(value, *keys) if isinstance(value, Mapping) else value
        for key, value in report.items()
        if key not in keys
    }
