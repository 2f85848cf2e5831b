"""What Prometheus is told of models and processes: both are read from the table when it asks, on its thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quartet.api.fleet import WorkerState, WorkerStatus
from quartet.discovery.base import Role, RouterRecord
from quartet.rpc.channels import ListenAddress
from quartet.telemetry.targets import Target
from quartet.telemetry.vllm_names import AdapterFigures, ModelFigures
from router.workers import PoolKey


class ObservedModels:
    """The models that have had a Decode worker when they were read: their series stay when all workers leave."""

    def __init__(self) -> None:
        """None was seen."""
        self._known: dict[str, _KnownModel] = {}

    def read(self, statuses: Iterable[WorkerStatus], num_waiting: Callable[[PoolKey], int]) -> Sequence[ModelFigures]:
        """The figures of each model now, by name. Several threads may read.

        Args:
            statuses: all workers.
            num_waiting: choices that wait for a worker of a pool.
        """
        by_model: dict[str, list[WorkerStatus]] = {}
        for status in statuses:
            if status.record.role is Role.DECODE:
                by_model.setdefault(status.record.model_name, []).append(status)
        for model, workers in by_model.items():
            self._known[model] = _known(workers, self._known.get(model))
        known = sorted(self._known.items())
        return [_figures(model, shape, by_model.get(model, ()), num_waiting) for model, shape in known]


@dataclass(frozen=True)
class _KnownModel:
    """What is known of a model, by its workers so far: ``pools`` and ``block_size`` are those of the last ones."""

    pools: Collection[PoolKey]
    block_size: int
    max_model_len: int


def _known(workers: Sequence[WorkerStatus], before: _KnownModel | None) -> _KnownModel:
    lengths = [status.record.max_model_len for status in workers]
    return _KnownModel(
        pools={PoolKey(status.record.model_name, status.record.model_fingerprint) for status in workers},
        block_size=workers[0].record.block_size,
        # Buckets that are there stay.
        max_model_len=max(*lengths, 0 if before is None else before.max_model_len),
    )


class RequiredRoles:
    """Which of the roles that a router requires have no ready worker, by model.

    A model is known from its first worker of such a role on, and for good: a model that has lost all is missed.
    """

    def __init__(self, roles: Collection[Role]) -> None:
        """``roles`` each need a ready worker."""
        self._roles = sorted(roles)
        self._models: frozenset[str] = frozenset()

    def read(self, statuses: Iterable[WorkerStatus]) -> Mapping[tuple[str, str], bool]:
        """By model and role, whether it is missing. Several threads may read.

        Before any model is known, its name is empty.

        Args:
            statuses: all workers.
        """
        required = [status for status in statuses if status.record.role in self._roles]
        ready = {(one.record.model_name, one.record.role) for one in required if one.state is WorkerState.READY}
        models = self._models = self._models | {status.record.model_name for status in required}
        return {
            (model, role.value): (model, role) not in ready for model in sorted(models or {""}) for role in self._roles
        }


def adapter_figures(
    statuses: Iterable[WorkerStatus], waiting: Collection[str], running: Collection[str]
) -> AdapterFigures:
    """The adapters that workers serve, and those that choices need which wait, or have a place."""
    served = {adapter for status in statuses for adapter in status.record.adapters}
    return AdapterFigures(num_served=len(served), waiting=waiting, running=running)


def scrape_targets(
    statuses: Iterable[WorkerStatus], routers: Sequence[RouterRecord], namespace: str, *, host: str, is_near: bool
) -> list[Target]:
    """The processes of ``namespace`` that have said where their metrics are, and that who asks can reach there.

    Metrics on loopback are those of the process's own host: only who asks there is told of them.

    Args:
        statuses: all workers.
        routers: all routers.
        namespace: of the deployment.
        host: that others dial for this router; empty: they can't.
        is_near: whether who asks is on this router's host.
    """

    def is_within_reach(metrics_address: str, grpc_address: str) -> bool:
        if not ListenAddress.parse(metrics_address, "metrics_address").is_loopback:
            return True
        peer = ListenAddress.parse(grpc_address, "grpc_address")
        return is_near and (peer.is_loopback or peer.host == host)

    workers = [
        Target(
            address=status.record.http_address,
            role=status.record.role.value,
            worker_id=status.record.worker_id,
            namespace=namespace,
            model=status.record.model_name,
        )
        for status in statuses
        if status.record.http_address and is_within_reach(status.record.http_address, status.record.grpc_address)
    ]
    others = [
        Target(
            address=record.metrics_address,
            role=Role.ROUTER.value,
            worker_id=record.router_id,
            namespace=namespace,
        )
        for record in routers
        if record.metrics_address and is_within_reach(record.metrics_address, record.grpc_address)
    ]
    return [*others, *workers]


def _figures(
    model: str, known: _KnownModel, workers: Sequence[WorkerStatus], num_waiting: Callable[[PoolKey], int]
) -> ModelFigures:
    ranks = [rank for status in workers if status.load is not None for rank in status.load.ranks]
    return ModelFigures(
        model=model,
        num_waiting=sum(num_waiting(pool) for pool in known.pools),
        num_running=sum(status.num_requests for status in workers),
        num_used_blocks=sum(rank.num_used_blocks for rank in ranks),
        num_total_blocks=sum(rank.num_total_blocks for rank in ranks),
        block_size=known.block_size,
        max_model_len=known.max_model_len,
        has_workers=bool(workers),
    )
