"""Where a request can run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Place:
    """One data-parallel rank of one worker: what requests are routed to, everywhere."""

    worker_id: str
    data_parallel_rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.data_parallel_rank}"
