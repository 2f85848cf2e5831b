"""From a topology to its processes: what each one runs, and the whole of its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path

from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.settings import EngineKind
from quartet.errors import ConfigError
from quartet.rpc.server import ServerConfig
from services.topology import Topology, WorkerGroup
from services.workers.config import WorkerConfig

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, order=True)
class ModelNeed:
    """The folder of a model that has to be there, and whether its weights have to."""

    path: str
    has_weights: bool


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """One process to start: ``python -m MODULE --config FILE`` with ``settings`` in the file.

    Attributes:
        name: unique in the topology; a worker's is its worker id.
        num_threads: CPU threads of one operation; ``None``: the library's choice.
        model: that it reads, if any.
    """

    name: str
    module: str
    settings: Mapping[str, object]
    num_threads: int | None = None
    model: ModelNeed | None = None


def plan_workers(topology: Topology, *, num_cores: int) -> list[ProcessPlan]:
    """The workers to start; torch engines that aren't told otherwise share ``num_cores`` among them, others get one.

    Raises:
        ConfigError: naming the override at fault (``workers[1].overrides.engine.num_blocks``), or a role that the
            engine does not have.
    """
    configs: list[tuple[str, WorkerConfig]] = []
    for number, group in enumerate(topology.workers):
        config = _worker_config(topology, group, f"workers[{number}].overrides")
        if group.role is Role.ENCODE and config.engine.kind is not EngineKind.TORCH:
            message = f"an encode worker takes the engine torch, as {config.engine.kind} has no vision tower"
            raise ConfigError(f"workers[{number}].role: {message}")
        configs += [(str(group.role), config)] * group.replicas
    num_torch = sum(config.engine.kind is EngineKind.TORCH for _, config in configs)
    num_threads = max(1, num_cores // max(1, num_torch))
    num_of_role: dict[str, int] = {}
    plans = []
    for role, config in configs:
        index = num_of_role[role] = num_of_role.get(role, -1) + 1
        plans.append(_plan_worker(f"{role}-{index}", role, config, num_threads))
    return plans


def plan_router(topology: Topology) -> ProcessPlan:
    """The router to start. Its overrides are ``RouterConfig``'s to check, which only the router knows."""
    base = {
        "server": {"address": f"{_LOOPBACK}:{topology.router.port}", "namespace": topology.namespace},
        "discovery": to_settings(topology.namespaced_discovery),
        "seal_keys_file": to_settings(topology.seal_keys_file),
        "drain_timeout_s": topology.drain_timeout_s,
    }
    return ProcessPlan(name="router", module="router", settings=merge(base, topology.router.overrides))


def to_settings(value: object) -> object:
    """``value``, a configuration, as YAML can hold it and ``quartet.config.build`` reads it."""
    if is_dataclass(value):
        return {item.name: to_settings(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_settings(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_settings(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """``base`` with the values of ``over``; where both hold a mapping, those are merged likewise."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _worker_config(topology: Topology, group: WorkerGroup, where: str) -> WorkerConfig:
    base = WorkerConfig(
        model_path=str(topology.model.path),
        model_name=topology.model.name,
        engine=topology.engine,
        server=ServerConfig(namespace=topology.namespace),
        discovery=topology.namespaced_discovery,
        seal_keys_file=topology.seal_keys_file if group.role is Role.DECODE else None,
        drain_timeout_s=topology.drain_timeout_s,
    )
    settings = to_settings(base)
    assert isinstance(settings, dict), "a dataclass becomes a mapping"
    return build(WorkerConfig, merge(settings, group.overrides), where)


def _plan_worker(name: str, role: str, config: WorkerConfig, num_threads: int) -> ProcessPlan:
    engine = config.engine
    if engine.num_threads is None:
        engine = replace(engine, num_threads=num_threads if engine.kind is EngineKind.TORCH else 1)
    settings = to_settings(replace(config, worker_id=name, engine=engine))
    assert isinstance(settings, dict), "a dataclass becomes a mapping"
    return ProcessPlan(
        name=name,
        module=f"services.{role}",
        settings=settings,
        num_threads=engine.num_threads,
        model=ModelNeed(config.model_path, has_weights=engine.kind is EngineKind.TORCH),
    )
