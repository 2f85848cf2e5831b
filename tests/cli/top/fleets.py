"""Fleets for tests of ``quartet top``: states as a router sends them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cli.top.fleet import Fleet
from quartet.api.convert.fleet import from_worker_status
from quartet.client import FleetState, FleetTotals, WorkerStatus
from quartet.v1 import router_pb2, worker_pb2
from tests.client.fake_router import worker_status

PREFILL = worker_pb2.WORKER_ROLE_PREFILL
SUSPECT, DRAINING = router_pb2.WORKER_STATE_SUSPECT, router_pb2.WORKER_STATE_DRAINING
NOTHING = FleetTotals(
    router_id="router-1",
    policy="kv_aware",
    outcomes={},
    num_failed=0,
    num_prompt_tokens=0,
    num_cached_tokens=0,
    num_output_tokens=0,
    ttft_bounds_s=(0.1, 0.2, 0.4),
    ttft_counts=(),
    num_without_room=0,
    num_kv_gaps=0,
    num_queued=0,
    num_running=0,
)


def worker(worker_id: str, *settings: Any, **rank: int) -> WorkerStatus:
    """A worker; ``settings``: role and state, ``rank``: its load."""
    return from_worker_status(worker_status(worker_id, *settings, **rank))


def state(*workers: WorkerStatus, **totals: Any) -> FleetState:
    """These workers, and ``NOTHING`` but what ``totals`` says."""
    return FleetState(workers=workers, totals=replace(NOTHING, **totals))


def busy_fleet() -> Fleet:
    """Two prefill and two decode workers, of which one is lost, at 100 s, with figures of 20 s."""
    workers = [
        worker("prefill-0", PREFILL, num_running=1, max_running=8, num_queued_prefill_tokens=12_345, num_steps=50),
        worker("prefill-1", PREFILL, DRAINING, num_running=2, max_running=8, num_waiting=3),
        worker(
            "decode-0",
            num_running=7,
            max_running=64,
            num_in_use_blocks=50,
            num_held_blocks=10,
            num_cached_blocks=20,
            num_free_blocks=20,
            num_total_blocks=100,
        ),
        worker("decode-1", num_running=3, max_running=64, num_total_blocks=100, num_free_blocks=100),
    ]
    fleet = Fleet()
    fleet.take(state(*workers), 80.0)
    totals = {
        "outcomes": {"stop_id": 45, "timeout": 5},
        "num_failed": 5,
        "num_prompt_tokens": 1000,
        "num_cached_tokens": 630,
        "num_output_tokens": 24_000,
        "ttft_counts": (2, 6, 2, 0),
        "num_queued": 4,
        "num_running": 9,
    }
    fleet.take(state(*workers[:3], worker("decode-1", worker_pb2.WORKER_ROLE_DECODE, SUSPECT), **totals), 100.0)
    return fleet
