"""What Prometheus is told of models and processes: both are read from the table when it asks, on its thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from quartet.api.fleet import WorkerStatus
from quartet.discovery.base import Role, RouterRecord
from quartet.telemetry.targets import Target
from quartet.telemetry.vllm_names import AdapterFigures, ModelFigures
from router.workers import PoolKey


def model_figures(statuses: Iterable[WorkerStatus], num_waiting: Callable[[PoolKey], int]) -> list[ModelFigures]:
    """The figures of each model that has a Decode worker, by name.

    Args:
        statuses: all workers.
        num_waiting: choices that wait for a worker of a pool.
    """
    by_model: dict[str, list[WorkerStatus]] = {}
    for status in statuses:
        if status.record.role is Role.DECODE:
            by_model.setdefault(status.record.model_name, []).append(status)
    return [_figures(model, workers, num_waiting) for model, workers in sorted(by_model.items())]


def adapter_figures(
    statuses: Iterable[WorkerStatus], waiting: Collection[str], running: Collection[str]
) -> AdapterFigures:
    """The adapters that workers serve, and those that choices need which wait, or have a place."""
    served = {adapter for status in statuses for adapter in status.record.adapters}
    return AdapterFigures(num_served=len(served), waiting=waiting, running=running)


def scrape_targets(statuses: Iterable[WorkerStatus], routers: Sequence[RouterRecord], namespace: str) -> list[Target]:
    """The processes of ``namespace`` that have said where their metrics are."""
    workers = [
        Target(
            address=status.record.http_address,
            role=status.record.role.value,
            worker_id=status.record.worker_id,
            namespace=namespace,
            model=status.record.model_name,
        )
        for status in statuses
    ]
    others = [
        Target(
            address=record.metrics_address,
            role=Role.ROUTER.value,
            worker_id=record.router_id,
            namespace=namespace,
        )
        for record in routers
    ]
    return [target for target in (*others, *workers) if target.address]


def _figures(model: str, workers: Sequence[WorkerStatus], num_waiting: Callable[[PoolKey], int]) -> ModelFigures:
    pools = {PoolKey(model, status.record.model_fingerprint) for status in workers}
    ranks = [rank for status in workers if status.load is not None for rank in status.load.ranks]
    return ModelFigures(
        model=model,
        num_waiting=sum(num_waiting(pool) for pool in pools),
        num_running=sum(status.num_requests for status in workers),
        num_used_blocks=sum(rank.num_used_blocks for rank in ranks),
        num_total_blocks=sum(rank.num_total_blocks for rank in ranks),
        block_size=workers[0].record.block_size,
        max_model_len=max(status.record.max_model_len for status in workers),
    )
