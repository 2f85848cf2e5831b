"""Where a request can run."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """One data-parallel rank of one worker: what requests are routed to, everywhere.

    A tuple, as routers look places up hundreds of times a request: a dataclass takes four times as long.
    """

    worker_id: str
    data_parallel_rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.data_parallel_rank}"
