"""What a trace comes to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from cli.traces.format import TraceRequest


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """Figures of one trace.

    Attributes:
        duration_s: from the first arrival to the last.
        num_blocks, num_seen_blocks: hash ids of all requests, and those of them that came before: what a cache of any
            size can hit at best.
    """

    num_requests: int
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_seen_blocks: int

    @classmethod
    def of(cls, requests: Iterable[TraceRequest]) -> Self:
        """Sum up ``requests``, in the order of their arrivals."""
        num_requests = num_input = num_output = num_blocks = 0
        duration_s = 0.0
        seen: set[int] = set()
        for request in requests:
            num_requests += 1
            duration_s = request.arrival_s
            num_input += request.num_input_tokens
            num_output += request.num_output_tokens
            num_blocks += len(request.hash_ids)
            seen.update(request.hash_ids)
        return cls(
            num_requests=num_requests,
            duration_s=duration_s,
            num_input_tokens=num_input,
            num_output_tokens=num_output,
            num_blocks=num_blocks,
            num_seen_blocks=num_blocks - len(seen),
        )

    def __str__(self) -> str:
        count = max(self.num_requests, 1)
        return (
            f"{self.num_requests} requests in {self.duration_s:.1f} s, on average {self.num_input_tokens / count:.0f} "
            f"input and {self.num_output_tokens / count:.0f} output tokens; "
            f"{self.num_seen_blocks / max(self.num_blocks, 1):.1%} of their blocks came before"
        )
