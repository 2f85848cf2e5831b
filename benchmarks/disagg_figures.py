"""From single requests to figures: what disaggregation costs one request, and which part of the way takes it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.bare_chain import Sample
from benchmarks.disagg_client import Answered
from benchmarks.disagg_copies import CopyTimes
from benchmarks.stack import Side


@dataclass(frozen=True, kw_only=True)
class Round:
    """The same kind of prompt once by each side, one right after the other.

    Attributes:
        copies: of as many bytes as were moved, in the benchmark's own process.
        bare: the same way without Quartet, right after.
    """

    agg: Answered
    disagg: Answered
    copies: CopyTimes
    bare: Sample

    def of(self, side: Side) -> Answered:
        """That side's request."""
        return self.agg if side is Side.AGG else self.disagg

    @property
    def overhead_ms(self) -> float:
        """How much later the second token came disaggregated, less what moving the bytes takes at memory's speed.

        Both sides compute the prompt in as many steps and the second token in one more, so those cancel out.
        """
        return self._later_ms - self.copies.plain_ms

    @property
    def overhead_beyond_transfer_copy_ms(self) -> float:
        """The same, less what moving the bytes takes as the transfer copies them."""
        return self._later_ms - self.copies.transfer_ms

    @property
    def _later_ms(self) -> float:
        return self.disagg.second_token_ms - self.agg.second_token_ms


@dataclass(frozen=True, kw_only=True)
class LengthFigures:
    """Medians over all rounds with prompts of one length, in milliseconds.

    Attributes:
        ttft_ms, second_token_ms: by side, as the client saw them.
        parts_ms: by side, what the second token's time is made of; see ``split``.
        transfer_bytes: moved for each request.
        copy_ms, transfer_copy_ms: ``CopyTimes`` of as many bytes.
        overhead_ms: see ``Round.overhead_ms``; ``None`` where computing takes now more, now less time, and hides it.
        overhead_ms_p10: a tenth of the rounds was at or below this.
        overhead_beyond_transfer_copy_ms: as of ``Round``; ``None`` as before.
        bare_chain_ms, contract_chain_ms: ``Sample`` of the same rounds.
    """

    ttft_ms: Mapping[str, float]
    second_token_ms: Mapping[str, float]
    parts_ms: Mapping[str, Mapping[str, float]]
    transfer_bytes: int
    copy_ms: float
    transfer_copy_ms: float
    overhead_ms: float | None
    overhead_ms_p10: float | None
    overhead_beyond_transfer_copy_ms: float | None
    bare_chain_ms: float
    contract_chain_ms: float


@dataclass(frozen=True, kw_only=True)
class BareFigures:
    """Medians of ``Sample`` over all rounds, in milliseconds, and at or below what a tenth of each chain was."""

    bare_chain_ms: float
    bare_chain_ms_p10: float
    contract_chain_ms: float
    contract_chain_ms_p10: float
    thread_change_ms: float
    round_trip_ms: float


def summarize(rounds: Sequence[Round], transfer_bytes: int, *, is_paced: bool) -> LengthFigures:
    """Medians of ``rounds``, of which there are at least two. ``is_paced``: every step took the same time."""
    overheads = [item.overhead_ms for item in rounds]
    beyond_transfer_copy = [item.overhead_beyond_transfer_copy_ms for item in rounds]
    return LengthFigures(
        ttft_ms=_by_side(rounds, lambda answered: answered.ttft_ms),
        second_token_ms=_by_side(rounds, lambda answered: answered.second_token_ms),
        parts_ms={side: median_parts([split(item.of(side)) for item in rounds]) for side in Side},
        transfer_bytes=transfer_bytes,
        copy_ms=statistics.median(item.copies.plain_ms for item in rounds),
        transfer_copy_ms=statistics.median(item.copies.transfer_ms for item in rounds),
        overhead_ms=statistics.median(overheads) if is_paced else None,
        overhead_ms_p10=_tenth(overheads) if is_paced else None,
        overhead_beyond_transfer_copy_ms=statistics.median(beyond_transfer_copy) if is_paced else None,
        bare_chain_ms=statistics.median(item.bare.chain_ms for item in rounds),
        contract_chain_ms=statistics.median(item.bare.contract_chain_ms for item in rounds),
    )


def summarize_bare(samples: Sequence[Sample]) -> BareFigures:
    """Medians of ``samples``, of which there are at least two."""
    chains = [sample.chain_ms for sample in samples]
    contract_chains = [sample.contract_chain_ms for sample in samples]
    return BareFigures(
        bare_chain_ms=statistics.median(chains),
        bare_chain_ms_p10=_tenth(chains),
        contract_chain_ms=statistics.median(contract_chains),
        contract_chain_ms_p10=_tenth(contract_chains),
        thread_change_ms=statistics.median(sample.thread_change_ms for sample in samples),
        round_trip_ms=statistics.median(sample.round_trip_ms for sample in samples),
    )


def split(answered: Answered) -> Mapping[str, float]:
    """The parts of ``second_token_ms``, in the order in which they come; they add up to it.

    Disaggregated: ``route`` (in the router until the prefill begins), ``prefill`` (that hop, computing included),
    ``transfer``, ``join`` (in the decode worker, until the batch), ``first_message`` (the rest of the decode hop, one
    step included). Aggregated: ``first_token`` (all until then but ``join``), ``join``, ``step`` (until the second).
    Both: ``edge`` (between client and router).
    """
    edge_ms = answered.second_token_ms - answered.total_ms
    after_first_ms = answered.total_ms - answered.first_token_ms
    if answered.prefill_ms is None:
        return {
            "first_token": answered.first_token_ms - answered.decode_queue_ms,
            "join": answered.decode_queue_ms,
            "step": after_first_ms,
            "edge": edge_ms,
        }
    transfer_ms = answered.transfer_ms or 0.0
    return {
        "route": answered.first_token_ms - answered.prefill_ms,
        "prefill": answered.prefill_ms,
        "transfer": transfer_ms,
        "join": answered.decode_queue_ms,
        "first_message": after_first_ms - transfer_ms - answered.decode_queue_ms,
        "edge": edge_ms,
    }


def median_parts(parts: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Each part's median; all of ``parts``, at least one, have the same."""
    return {name: statistics.median(item[name] for item in parts) for name in parts[0]}


def _by_side(rounds: Sequence[Round], value: Callable[[Answered], float]) -> Mapping[str, float]:
    return {side: statistics.median(value(item.of(side)) for item in rounds) for side in Side}


def _tenth(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[0]
