"""A topology file: which model, how many workers of which role, and how each process differs from the defaults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quartet.config import build, load_yaml, override
from quartet.discovery.base import Role, check_name
from quartet.discovery.create import DiscoveryConfig
from quartet.discovery.etcd_config import EtcdConfig
from quartet.engine.settings import EngineSettings
from quartet.errors import ConfigError

#: The model that comes along; relative to the working directory, which is the repository.
DEFAULT_MODEL_PATH = Path("models/tiny/checkpoint")
#: Where clients look for a router when they are told nothing else.
DEFAULT_ROUTER_PORT = 50050

_WORKER_ROLES = (Role.ENCODE, Role.PREFILL, Role.DECODE)
_MAX_PORT = 2**16 - 1
_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The model that all workers serve, unless their overrides say otherwise.

    Attributes:
        path: folder of a Hugging Face checkpoint, relative to the working directory; the mock engine needs no weights.
            For engines that fetch models themselves also a repository, such as ``Qwen/Qwen3-0.6B``.
        name: what requests call it by; empty: the folder's name.
    """

    path: Path = DEFAULT_MODEL_PATH
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class RouterGroup:
    """The router.

    Attributes:
        port: of its gRPC services on loopback; 0 takes a free one.
        overrides: settings of ``RouterConfig`` that differ from its defaults.
        environment: variables of its process, over the topology's.
    """

    port: int = DEFAULT_ROUTER_PORT
    overrides: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"port: must be in [0, {_MAX_PORT}], not {self.port}")


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """Equal workers.

    Attributes:
        role: encode, prefill or decode.
        name: begins their process names and worker ids, before a number; empty: the role.
        replicas: how many.
        gpus: the host's GPUs of each of them, as ``[[0], [1]]`` for two with one each; empty: they are told nothing.
        overrides: settings of ``WorkerConfig`` that differ from the topology's.
        environment: variables of their processes, over the topology's.
    """

    role: Role
    name: str = ""
    replicas: int = 1
    gpus: tuple[tuple[int, ...], ...] = ()
    overrides: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if self.role not in _WORKER_ROLES:
            raise ConfigError(f"role: must be one of {', '.join(_WORKER_ROLES)}, not {self.role}")
        if self.replicas < 1:
            raise ConfigError("replicas: must be at least 1")
        if self.name:
            check_name("name", self.name)
        self._check_gpus()

    @property
    def process_name(self) -> str:
        """What the names of its processes begin with."""
        return self.name or str(self.role)

    def _check_gpus(self) -> None:
        if self.gpus and len(self.gpus) != self.replicas:
            raise ConfigError(f"gpus: must be a list for each of {self.replicas} replicas, not {len(self.gpus)}")
        for number, gpus in enumerate(self.gpus):
            if not gpus or min(gpus) < 0 or len(set(gpus)) < len(gpus):
                raise ConfigError(f"gpus[{number}]: must hold different numbers of GPUs, one at least")
        if self.gpus and _GPUS_VARIABLE in self.environment:
            raise ConfigError(f"environment.{_GPUS_VARIABLE}: gpus says it already")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """What ``quartet up`` starts on one host, on loopback.

    Attributes:
        namespace: separates it from others that share its discovery.
        engine: of every worker.
        environment: variables of every process, over those that ``quartet up`` has.
        share_gpus: several workers may be given one GPU. Those are started one after the other, in their order here,
            as an engine takes a share of the memory that it finds free.
        discovery: the topology's namespace replaces the one in it.
        seal_keys_file: keys for Place, for the router and the decode workers, unless their overrides say otherwise;
            ``None``: one is drawn at each start.
        drain_timeout_s: running requests get this long to end when the topology is stopped.
        start_timeout_s: everything must serve within it.
    """

    namespace: str = "default"
    model: ModelSource = field(default_factory=ModelSource)
    engine: EngineSettings = field(default_factory=EngineSettings)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    router: RouterGroup = field(default_factory=RouterGroup)
    workers: tuple[WorkerGroup, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    share_gpus: bool = False
    seal_keys_file: Path | None = None
    drain_timeout_s: float = 3.0
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        check_name("namespace", self.namespace)
        if not any(group.role is Role.DECODE for group in self.workers):
            raise ConfigError("workers: at least one must have the role decode")
        for name in ("drain_timeout_s", "start_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")
        self._check_gpus()

    def _check_gpus(self) -> None:
        num_workers = Counter(gpu for group in self.workers for gpus in group.gpus for gpu in gpus)
        shared = sorted(gpu for gpu, count in num_workers.items() if count > 1)
        if shared and not self.share_gpus:
            raise ConfigError(f"workers: several have GPU {shared[0]}; if that is meant, say share_gpus: true")
        if num_workers and _GPUS_VARIABLE in self.environment:
            raise ConfigError(f"environment.{_GPUS_VARIABLE}: the workers' gpus say it already")

    @property
    def namespaced_discovery(self) -> DiscoveryConfig:
        """``discovery`` in the topology's namespace."""
        directory = self.discovery.file
        return replace(
            self.discovery,
            etcd=replace(self.discovery.etcd, namespace=self.namespace),
            file=None if directory is None else replace(directory, namespace=self.namespace),
        )

    def with_etcd(self, etcd: EtcdConfig) -> Topology:
        """The same with another etcd."""
        return replace(self, discovery=replace(self.discovery, etcd=etcd))

    def with_seal_keys(self, file: Path) -> Topology:
        """The same with these keys."""
        return replace(self, seal_keys_file=file)

    def with_router_port(self, port: int) -> Topology:
        """The same with the router at ``port``. Raises ``ConfigError``."""
        return replace(self, router=replace(self.router, port=port))


def load_topology(path: Path, assignments: Sequence[str] = ()) -> Topology:
    """Read a topology file, with assignments (``router.port=0``) over it.

    Raises:
        ConfigError: naming the setting. Overrides are checked by ``services.plan``.
    """
    return build(Topology, read_settings(path, assignments))


def read_settings(path: Path, assignments: Sequence[str]) -> dict[str, object]:
    """What ``load_topology`` reads, not checked yet."""
    settings = load_yaml(path)
    for assignment in assignments:
        settings = override(settings, assignment)
    return settings
