"""What an open page shows of the fleet: the router's counts, its workers and their hand-offs, as JSON has them.

Counts only grow, so a page that misses a state still knows the rates. They begin anew with the router, and those of
hand-offs with the first page that looks.
"""

from __future__ import annotations

import time
from typing import Any

from quartet.api.fleet import WorkerStatus
from quartet.telemetry.metrics import RouterTotals
from router.generate import Pipeline
from router.http.models import model_names


def read_state(pipeline: Pipeline, namespace: str, *, is_ready: bool) -> dict[str, Any]:
    """The state of this moment. Its times are monotonic seconds, good for differences only."""
    now, context = time.monotonic(), pipeline.context
    return {
        "at_s": round(now, 3),
        "router": {
            "id": context.router_id,
            "namespace": namespace,
            "policy": context.admission.policy.name,
            "is_ready": is_ready,
            "models": model_names(context.table),
        },
        "totals": _totals(context.metrics.totals(), pipeline.num_output_tokens),
        "workers": [_worker(status) for status in context.table.statuses(now)],
        "hand_offs": [[*ends, count] for ends, count in context.hand_offs.counts.items()],
    }


def _totals(totals: RouterTotals, num_running_tokens: int) -> dict[str, Any]:
    return {
        "requests": totals.num_requests,
        "failed_requests": totals.num_failed,
        # Those of requests that still run are counted by their requests.
        "output_tokens": totals.num_output_tokens + num_running_tokens,
        "prompt_tokens": totals.num_prompt_tokens,
        "cached_tokens": totals.num_cached_tokens,
        "reuse": totals.reuse,
        "queued": totals.num_queued,
        "running": totals.num_running,
        "ttft_bounds_s": totals.ttft_bounds_s,
        "ttft_counts": totals.ttft_counts,
    }


def _worker(status: WorkerStatus) -> dict[str, Any]:
    record, load = status.record, status.load
    ranks, transfers = ((), ()) if load is None else (load.ranks, load.transfers)
    return {
        "id": record.worker_id,
        "role": record.role,
        "epoch": str(record.epoch),  # beyond what JavaScript's numbers hold
        "model": record.model_name,
        "state": status.state,
        "address": record.grpc_address,
        "ways": record.transfer_ways,
        "report_age_s": None if status.load_age_s is None else round(status.load_age_s, 1),
        "requests": status.num_requests,
        "running": sum([rank.num_running for rank in ranks]),
        "waiting": sum([rank.num_waiting for rank in ranks]),
        "max_running": sum([rank.max_running for rank in ranks]),
        "queued_tokens": sum([rank.num_queued_prefill_tokens for rank in ranks]),
        "blocks": {
            "used": sum([rank.num_in_use_blocks for rank in ranks]),
            "held": sum([rank.num_held_blocks for rank in ranks]),
            "cached": sum([rank.num_cached_blocks for rank in ranks]),
            "total": sum([rank.num_total_blocks for rank in ranks]),
        },
        "pulled": [[one.way, one.size_bytes, round(one.duration_s, 6)] for one in transfers],
    }
