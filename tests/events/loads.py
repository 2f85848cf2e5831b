"""Load reports and publishers for tests."""

from __future__ import annotations

from quartet.events.load import RankLoad, WorkerLoad
from quartet.events.publisher import EventPublisher


def make_load(*, worker_id: str = "decode-0", epoch: int = 7, queued: int = 0, steps: int = 0) -> WorkerLoad:
    rank = RankLoad(num_queued_prefill_tokens=queued, num_steps=steps, num_free_blocks=64, num_total_blocks=64)
    return WorkerLoad(worker_id=worker_id, epoch=epoch, ranks=(rank,), router_progress={"router-a": 3})


def make_publisher(port: int = 0, **settings: object) -> EventPublisher:
    """On loopback."""
    return EventPublisher("127.0.0.1", port, **{"worker_id": "decode-0", "epoch": 7, **settings})  # type: ignore[arg-type]
