"""What a router has sent to workers, as it tells the other routers before the workers' load reports do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class BookedStart:
    """One start that a router has sent, and what it takes. Not frozen: one is made for each request.

    Attributes:
        worker_id, worker_epoch, data_parallel_rank: where it was sent.
        number: its ``router_request_number``; it counts until a load report says that it has arrived.
        num_queued_tokens: prompt tokens to compute there.
        num_reserved_blocks: blocks that it may take there.
    """

    worker_id: str
    worker_epoch: int
    data_parallel_rank: int
    number: int
    num_queued_tokens: int
    num_reserved_blocks: int


@dataclass(frozen=True, slots=True)
class RouterBookings:
    """What one router has sent since its last message.

    Attributes:
        router_id: as workers know it, without the part that names a worker's epoch.
        starts: in the order in which they were sent; at least one.
    """

    router_id: str
    starts: Sequence[BookedStart]
