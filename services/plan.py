"""From a topology to its processes: what each one runs, and the whole of its settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path

from quartet.config import build
from quartet.discovery.base import Role
from quartet.errors import ConfigError
from quartet.rpc.server import ServerConfig
from services.topology import Topology
from services.workers.config import WorkerConfig

#: The name of the router's process.
ROUTER = "router"

_LOOPBACK = "127.0.0.1"
_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, order=True)
class ModelNeed:
    """The folder of a model that has to be there, or a repository's name, and whether its weights have to."""

    path: str
    has_weights: bool


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """One process to start: ``python -m MODULE --config FILE`` with ``settings`` in the file.

    Attributes:
        name: unique in the topology; a worker's is its worker id.
        num_threads: CPU threads of one operation; ``None``: the library's choice.
        model: that it reads, if any.
        gpus: of the host, that it alone of all processes sees; empty: it is told nothing of them.
        environment: variables that the topology gives it, those for ``gpus`` included.
    """

    name: str
    role: Role
    module: str
    settings: Mapping[str, object]
    num_threads: int | None = None
    model: ModelNeed | None = None
    gpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def plan_workers(topology: Topology, *, num_cores: int) -> list[ProcessPlan]:
    """The workers to start; engines that compute on CPUs share ``num_cores`` where they aren't told otherwise.

    Raises:
        ConfigError: naming the override at fault (``workers[1].overrides.engine.num_blocks``), or a role that the
            engine does not have.
    """
    configs = [_group_config(topology, number) for number in range(len(topology.workers))]
    groups = list(zip(topology.workers, configs, strict=True))
    num_sharing = sum(group.replicas for group, config in groups if config.engine.kind.shares_cores)
    num_own_cores = max(1, num_cores // max(1, num_sharing))
    num_of_name: Counter[str] = Counter()
    plans = []
    for group, config in groups:
        for gpus in group.gpus or [()] * group.replicas:
            name = f"{group.process_name}-{num_of_name[group.process_name]}"
            num_of_name[group.process_name] += 1
            variables = {**topology.environment, **group.environment, **_gpu_variables(gpus)}
            plan = _plan_worker(name, group.role, config, num_own_cores)
            plans.append(replace(plan, gpus=gpus, environment=variables))
    return plans


def plan_router(topology: Topology) -> ProcessPlan:
    """The router to start. Its overrides are ``RouterConfig``'s to check, which only the router knows."""
    base = {
        "server": {"address": f"{_LOOPBACK}:{topology.router.port}", "namespace": topology.namespace},
        "discovery": to_settings(topology.namespaced_discovery),
        "seal_keys_file": to_settings(topology.seal_keys_file),
        "drain_timeout_s": topology.drain_timeout_s,
    }
    return ProcessPlan(
        name=ROUTER,
        role=Role.ROUTER,
        module="router",
        settings=merge(base, topology.router.overrides),
        environment={**topology.environment, **topology.router.environment},
    )


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


def _group_config(topology: Topology, number: int) -> WorkerConfig:
    group, where = topology.workers[number], f"workers[{number}]"
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
    config = build(WorkerConfig, merge(settings, group.overrides), f"{where}.overrides")
    if group.role is Role.ENCODE and not config.engine.kind.has_encoder:
        raise ConfigError(f"{where}.role: the engine {config.engine.kind} encodes no media")
    return config


def _plan_worker(name: str, role: Role, config: WorkerConfig, num_cores: int) -> ProcessPlan:
    engine = config.engine
    if engine.num_threads is None:
        engine = replace(engine, num_threads=engine.kind.num_threads(num_cores))
    settings = to_settings(replace(config, worker_id=name, engine=engine))
    assert isinstance(settings, dict), "a dataclass becomes a mapping"
    need = ModelNeed(config.model_path, has_weights=engine.needs_weights)
    module = f"services.{role}"
    return ProcessPlan(
        name=name, role=role, module=module, settings=settings, num_threads=engine.num_threads, model=need
    )


def _gpu_variables(gpus: tuple[int, ...]) -> dict[str, str]:
    return {_GPUS_VARIABLE: ",".join(map(str, gpus))} if gpus else {}
