"""The tables of benchmarks.disagg."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from benchmarks.tables import Report, markdown_table

_PARTS = ("route", "prefill", "transfer", "join", "first_message", "edge")
_WANTED_MS = 3


class _Chains(Enum):
    """What a report has without Quartet: single round trips only, the bare chain, or the contract's beside it."""

    NONE = auto()
    BARE = auto()
    CONTRACT = auto()

    @staticmethod
    def of(report: Report) -> _Chains:
        """Which ``report`` has."""
        if "bare" not in report:
            return _Chains.NONE
        return _Chains.CONTRACT if "contract_chain_ms" in report["bare"] else _Chains.BARE


_COSTS = ("copying alone (ms)", "own cost", "wanted")
_HEADINGS = {
    _Chains.NONE: (*_COSTS, "in round trips"),
    _Chains.BARE: (*_COSTS, "bare chain", "own cost over it"),
    _Chains.CONTRACT: (
        "copying alone: plain, as transferred (ms)",
        "own cost, less either",
        "wanted",
        "bare chain",
        "contract's chain",
        "own cost over it",
    ),
}


def disagg_tables(report: Report) -> str:
    """What it costs, then where the second token's time goes.

    Reports from before there was a bare chain, or one with the contract's messages, go without.
    """
    chains = _Chains.of(report)
    overhead = markdown_table(
        ["stub engine, prompt", "agg: 1st, 2nd token (ms)", "disagg", "moved", *_HEADINGS[chains]],
        [[*_sides(length, figures), *_costs(report, figures, chains)] for length, figures in report["stub"].items()],
    )
    parts = markdown_table(
        ["disaggregated, prompt", *(part.replace("_", " ") for part in _PARTS), "second token (ms)", "aggregated"],
        [
            [f"{engine}, {length}", *_parts(figures)]
            for engine in ("stub", "tiny")
            for length, figures in report[engine].items()
        ],
    )
    return f"{overhead}\n{_bare(report, chains)}\n{parts}"


def _sides(length: str, figures: Mapping[str, Any]) -> list[str]:
    return [
        length,
        *(f"{figures['ttft_ms'][side]:.1f}, {figures['second_token_ms'][side]:.1f}" for side in ("agg", "disagg")),
        f"{figures['transfer_bytes'] / (1 << 20):.0f} MiB",
    ]


def _costs(report: Report, figures: Mapping[str, Any], chains: _Chains) -> list[str]:
    copy_ms, own_ms, wanted = figures["copy_ms"], figures["overhead_ms"], f"<= {_WANTED_MS}"
    if chains is _Chains.NONE:
        return [f"{copy_ms:.1f}", f"{own_ms:.1f}", wanted, f"{own_ms / report['round_trip_ms']:.1f}"]
    bare_ms = figures["bare_chain_ms"]
    if chains is _Chains.BARE:
        return [f"{copy_ms:.1f}", f"{own_ms:.1f}", wanted, f"{bare_ms:.1f}", f"{own_ms / bare_ms:.1f}"]
    contract_ms = figures["contract_chain_ms"]
    return [
        f"{copy_ms:.1f}, {figures['transfer_copy_ms']:.1f}",
        f"{own_ms:.1f}, {figures['overhead_beyond_transfer_copy_ms']:.1f}",
        wanted,
        f"{bare_ms:.1f}",
        f"{contract_ms:.1f}",
        f"{own_ms / contract_ms:.1f}",
    ]


def _bare(report: Report, chains: _Chains) -> str:
    bare = report if chains is _Chains.NONE else report["bare"]
    sentences = [f"A round trip by nothing but gRPC, after a pause: {bare['round_trip_ms']:.2f} ms."]
    if chains is not _Chains.NONE:
        sentences.insert(0, f"From an event loop to a thread and back: {bare['thread_change_ms']:.2f} ms.")
    if chains is _Chains.CONTRACT:
        sentences.insert(0, _over_all("The contract's chain", bare, "contract_chain_ms"))
    if chains is not _Chains.NONE:
        sentences.insert(0, _over_all("The bare chain", bare, "bare_chain_ms"))
    return " ".join(sentences) + "\n"


def _over_all(name: str, bare: Mapping[str, float], key: str) -> str:
    return f"{name} over all rounds: {bare[key]:.2f} ms, a tenth of them at or below {bare[f'{key}_p10']:.2f} ms."


def _parts(figures: Mapping[str, Any]) -> list[str]:
    disagg, second = figures["parts_ms"]["disagg"], figures["second_token_ms"]
    return [*(f"{disagg[part]:.1f}" for part in _PARTS), f"{second['disagg']:.1f}", f"{second['agg']:.1f}"]
