"""A topology: from its file, through the choices of a command line, to a plan of its processes.

A file says which model is served, how many workers each role has, and how each process differs from the defaults.
``choose`` puts another engine or model over a file; ``plan_workers`` and ``plan_router`` make each process's settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from quartet.config import PathText, build, escape_path, expand_path, load_yaml, type_hints
from quartet.discovery.base import Role
from quartet.discovery.checks import check_name
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind
from quartet.engine.settings import EngineKind, EngineSettings, Modality, refused_fields
from quartet.engine.trtllm.arguments import PERF_METRICS, TRACES_ENDPOINT, LlmArguments, Use, llm_arguments
from quartet.engine.trtllm.environment import num_ranks_of
from quartet.errors import ConfigError
from quartet.rpc.audience import IdentityKind
from quartet.rpc.channels import TlsConfig
from quartet.rpc.server import ServerConfig
from quartet.telemetry.tracing import TracingConfig
from services.topology.groups import (
    GroupChoices,
    Settings,
    assign,
    below,
    copied,
    found,
    groups_of,
    share_out_gpus,
)
from services.topology.hosts import PORTS_OF_PROCESS, Host, SecretFiles
from services.workers.config import WorkerConfig, check_parsers

#: The model that ships with Quartet.
DEFAULT_MODEL_PATH = Path("models/tiny/checkpoint")

#: Where clients look for a router by default.
DEFAULT_ROUTER_PORT = 50050

#: Whose key HTTP gets with ``quartet up --tls``.
LOCAL_TENANT = "local"

_WORKER_ROLES = (Role.ENCODE, Role.PREFILL, Role.DECODE)

_MAX_PORT = 2**16 - 1

_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"

_CPU = "cpu"

_CHECKPOINT = "checkpoint"

# Settings of workers and of the router that a topology's ``tls`` makes.
_OF_TLS = ("server.tls", "events_key_file")

# Settings of workers and of the router that fit one model only.
_PARSERS = ("reasoning_parser", "tool_call_parser")
_OF_A_MODEL = ("model_path", "model_name", "custom_jinja_template", "custom_chat_template", *_PARSERS)

#: The name of the router's process.
ROUTER = "router"

_LOOPBACK = "127.0.0.1"


#: Settings of a router that it takes over of its changed file while it runs (``router.reload``).
TAKEN_OVER = ("tenants", "identity_tenants", "trusted_gateways")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The model that all workers serve, unless their overrides say otherwise.

    Attributes:
        path: folder of a Hugging Face checkpoint, relative to the working directory; the mock engine needs no weights.
            Also a repository, such as ``Qwen/Qwen3-0.6B``, which workers fetch.
        name: its name in requests; empty: the folder's name.
        reasoning_parser, tool_call_parser: how its answers to chats are parsed, as in ``WorkerConfig``.
    """

    path: Path = DEFAULT_MODEL_PATH
    name: str = ""
    reasoning_parser: str = ""
    tool_call_parser: str = ""

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        check_parsers(self.reasoning_parser, self.tool_call_parser)


@dataclass(frozen=True, kw_only=True)
class RouterGroup:
    """The router.

    Attributes:
        port: of its gRPC services on loopback; 0 takes a free one. With pools it is the global router's.
        http_port: of OpenAI's API on loopback; 0: there is none. If ``port`` is 0, it becomes a free one too.
        pool_ports: by pool, the port of its router; one that is left out becomes a free one.
        hosts: where the topology has hosts, those that run a router each, at the same ports.
        overrides: settings of ``RouterConfig`` that differ from its defaults; with pools, of each pool's router.
        environment: variables of its process, over the topology's.
    """

    port: int = DEFAULT_ROUTER_PORT
    http_port: int = 0
    pool_ports: Mapping[str, int] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    overrides: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("port", "http_port"):
            if not 0 <= getattr(self, name) <= _MAX_PORT:
                raise ConfigError(f"{name}: must be in [0, {_MAX_PORT}], not {getattr(self, name)}")
        if self.port and self.port == self.http_port:
            raise ConfigError(f"http_port: {self.port} is router.port, too")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What each worker of a group may take of the host, on Linux; ``None``: nothing limits it.

    Attributes:
        cpus: it and all that it starts run on so many CPUs, others than those of the workers before it as far as there
            are enough.
        memory_gb: in GB of 10**9 bytes, the private memory that each of its processes may allocate. Memory that
            processes share does not count, such as KV pools on CPUs, nor do files' pages and GPUs' memory.
    """

    cpus: int | None = None
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if self.cpus is not None and self.cpus < 1:
            raise ConfigError("cpus: must be at least 1")
        if self.memory_gb is not None and self.memory_gb <= 0:
            raise ConfigError("memory_gb: must be above 0")

    @property
    def memory_bytes(self) -> int | None:
        """``memory_gb`` in bytes."""
        return None if self.memory_gb is None else int(self.memory_gb * 1e9)


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """Workers with the same settings.

    Attributes:
        role: encode, prefill or decode.
        pool: namespace in which they run, with a router of its own; empty: that of the topology.
        host: where they run, if the topology has hosts.
        name: their process names and worker ids are this and a number; empty: the role.
        replicas: how many.
        gpus: GPUs of each worker, as ``[[0], [1]]`` for two workers with one each; empty: nothing restricts them. In a
            file also a text, such as ``0-3`` or ``0,1``, of which each worker gets the same number in turn.
        overrides: settings of ``WorkerConfig`` that differ from the topology's.
        environment: variables of their processes, over the topology's.
        limits: of each worker.
    """

    role: Role
    pool: str = ""
    host: str = ""
    name: str = ""
    replicas: int = 1
    gpus: tuple[tuple[int, ...], ...] = ()
    overrides: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if self.role not in _WORKER_ROLES:
            raise ConfigError(f"role: must be one of {', '.join(_WORKER_ROLES)}, not {self.role}")
        if self.replicas < 1:
            raise ConfigError("replicas: must be at least 1")
        for field_name in ("name", "pool"):
            if getattr(self, field_name):
                check_name(field_name, getattr(self, field_name))
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
    """What ``quartet up`` starts: on one host, on loopback, or on each of several ``hosts`` its share.

    Attributes:
        namespace: separates it from other topologies in the same discovery.
        hosts: the hosts by name; empty: all runs on this one. With hosts each group of ``workers`` and the router name
            theirs, and etcd runs already.
        host: which of ``hosts`` this one is. Empty is for who looks at all of them.
        secrets: the folder of this host that ``quartet secrets`` wrote: certificates, keys, what etcd asks for.
        engine: of every worker.
        global_router: pools and grids of a global router (docs/global.md); the groups of ``workers`` then name their
            pools, each of which gets a router. ``None``: there is one router, and no pools.
        environment: variables of every process, over those of ``quartet up``.
        share_gpus: ``gpus`` of several workers may name the same GPU. They are started one after the other, in their
            order here, because an engine takes a share of the memory that it finds free.
        trtllm_start_interval_s: between the starts of two workers with the engine ``trtllm``, whose MPI may fail when
            several begin at once.
        discovery: the topology's namespace replaces the one in it.
        signing_keys_file: keys for Place, for the router and the decode workers, unless their overrides say otherwise;
            ``None``: a new key is drawn at each start.
        tracing: of every process; a service is called ``quartet-`` and the role, unless this names it. Where it is
            enabled, logs are JSON.
        tls: make certificates for the run: mTLS on all gRPC, a key for events, and an etcd of its own with client
            certificates, unless ``discovery.etcd.tls`` names another one.
        drain_timeout_s: running requests get this long to end when the topology is stopped.
        start_timeout_s: everything must serve within it.
    """

    namespace: str = "default"
    hosts: Mapping[str, Host] = field(default_factory=dict)
    host: str = ""
    secrets: Path | None = None
    model: ModelSource = field(default_factory=ModelSource)
    engine: EngineSettings = field(default_factory=EngineSettings)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    router: RouterGroup = field(default_factory=RouterGroup)
    workers: tuple[WorkerGroup, ...]
    global_router: Mapping[str, object] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    share_gpus: bool = False
    trtllm_start_interval_s: float = 2.0
    signing_keys_file: Path | None = None
    tracing: TracingConfig = field(default_factory=TracingConfig)
    tls: bool = False
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
        if self.trtllm_start_interval_s < 0:
            raise ConfigError("trtllm_start_interval_s: must not be negative")
        self._check_gpus()
        self._check_http_port()
        self._check_pools()
        self._check_hosts()
        if self.tls or self.secrets is not None:
            self._check_certificates()

    def _check_http_port(self) -> None:
        """Refuse a port of HTTP beside ``router.http_port``: ``quartet up`` would print that one."""
        where, overrides = "router.overrides", self.router.overrides
        if self.global_router is not None:
            where, overrides = "global_router.router", found(self.global_router, "router")
        if found(overrides, "http").get("port") is not None:
            raise ConfigError(f"{where}.http.port: in a topology the port of HTTP is router.http_port; set that")

    def _check_pools(self) -> None:
        for number, group in enumerate(self.workers):
            if self.global_router is not None and not group.pool:
                raise ConfigError(f"workers[{number}].pool: is missing; with global_router each group is in a pool")
            if self.global_router is None and group.pool:
                raise ConfigError(f"workers[{number}].pool: is for topologies with global_router")
            if group.pool == self.namespace:
                raise ConfigError(f"workers[{number}].pool: is the namespace of the global router")

    def _check_hosts(self) -> None:
        known = f"; known here: {', '.join(self.hosts)}" if self.hosts else ", as there are no hosts"
        named = [("host", self.host), *(("router.hosts", name) for name in self.router.hosts)]
        named += [(f"workers[{number}].host", group.host) for number, group in enumerate(self.workers)]
        for field_name, name in named:
            if name and name not in self.hosts:
                raise ConfigError(f"{field_name}: no host is called {name}{known}")
        if self.hosts:
            self._check_spread(named)
            self._check_reach()
            self._check_ports()
        elif self.secrets is not None:
            raise ConfigError("secrets: are those of one of several hosts; a topology without hosts takes tls: true")

    def _check_spread(self, named: Sequence[tuple[str, str]]) -> None:
        for field_name, name in named:
            if not name and field_name != "host":
                raise ConfigError(f"{field_name}: is missing; it is one of {', '.join(self.hosts)}")
        if not self.router.hosts:
            raise ConfigError(f"router.hosts: is missing; it names those of {', '.join(self.hosts)} that run a router")
        if len(set(self.router.hosts)) < len(self.router.hosts):
            raise ConfigError("router.hosts: names a host twice; each runs one router")
        for name in self.hosts:
            check_name(f"hosts.{name}", name)
            if name not in self.router.hosts and all(group.host != name for group in self.workers):
                raise ConfigError(f"hosts.{name}: nothing runs there")
        if self.global_router is not None:
            raise ConfigError("global_router: runs with all its pools on one host; leave out hosts")

    def _check_reach(self) -> None:
        if not self.router.port:
            raise ConfigError("router.port: must not be 0; other hosts would not know what to dial")
        if self.discovery.kind is not DiscoveryKind.ETCD:
            raise ConfigError("discovery.kind: must be etcd; hosts find each other's processes by nothing else")
        if self.tls:
            raise ConfigError("tls: makes certificates for one host; with hosts `quartet secrets` does, see secrets")
        for where, overrides in self._overrides():
            if self.secrets is None and found(overrides, "server").get("insecure") is not True:
                raise ConfigError(
                    "secrets: is missing; it is the folder of a host that `quartet secrets` writes (or set "
                    f"{where}.overrides.server.insecure to true, for a network where everybody may read everything)"
                )

    def _check_ports(self) -> None:
        """Refuse ports on which two processes would listen. Overrides are not looked at."""
        holders: dict[tuple[str, int], str] = {}
        of_router = {self.router.port: "router.port", self.router.http_port: "router.http_port"}
        for name, host in self.hosts.items():
            num_workers = sum(group.replicas for group in self.workers if group.host == name)
            has_router = name in self.router.hosts
            counted = host.ports(num_workers=num_workers, has_router=has_router)
            fixed = {port: setting for port, setting in of_router.items() if port and has_router}
            for port in counted:
                if port in fixed:
                    message = f"{host.first_port} counts its processes' ports over {fixed[port]}, {port}"
                    raise ConfigError(f"hosts.{name}.first_port: {message}")
            for port in (*fixed, *counted):
                other = holders.setdefault((host.address, port), name)
                if other != name:
                    raise ConfigError(f"hosts.{name}: port {port} of {host.address} is that of hosts.{other}, too")

    def _overrides(self) -> list[tuple[str, Mapping[str, object]]]:
        groups = [(f"workers[{number}]", group.overrides) for number, group in enumerate(self.workers)]
        return [("router", self.router.overrides), *groups]

    def _check_certificates(self) -> None:
        what = "tls makes its own" if self.tls else "secrets holds one for each process"
        for where, overrides in self._overrides():
            for setting in _OF_TLS:
                *path, name = setting.split(".")
                if found(overrides, *path).get(name) is not None:
                    raise ConfigError(f"{where}.overrides.{setting}: {what}; leave one of both out")

    def _check_gpus(self) -> None:
        num_workers = Counter((group.host, gpu) for group in self.workers for gpus in group.gpus for gpu in gpus)
        shared = sorted(gpu for (_, gpu), count in num_workers.items() if count > 1)
        if shared and not self.share_gpus:
            raise ConfigError(f"workers: several have GPU {shared[0]}; if that is meant, say share_gpus: true")
        if num_workers and _GPUS_VARIABLE in self.environment:
            raise ConfigError(f"environment.{_GPUS_VARIABLE}: the workers' gpus say it already")

    @property
    def pools(self) -> Sequence[str]:
        """The namespaces of its pools, in the order of the file; empty: there are none."""
        return tuple(dict.fromkeys(group.pool for group in self.workers if group.pool))

    @property
    def prefill_pools(self) -> Sequence[str]:
        """Those of them in which nothing decodes."""
        decoding = {group.pool for group in self.workers if group.role is Role.DECODE}
        return tuple(pool for pool in self.pools if pool not in decoding)

    @property
    def secret_files(self) -> SecretFiles | None:
        """What is in ``secrets``."""
        return None if self.secrets is None else SecretFiles(self.secrets)

    @property
    def signing_keys(self) -> Path | None:
        """``signing_keys_file``, or else that of ``secrets``."""
        if self.signing_keys_file is None and self.secret_files is not None:
            return self.secret_files.signing_keys
        return self.signing_keys_file

    @property
    def router_addresses(self) -> Sequence[str]:
        """``host:port`` of each router that clients call, that of ``host`` first."""
        if not self.hosts:
            return (f"{_LOOPBACK}:{self.router.port}",)
        names = sorted(self.router.hosts, key=lambda name: name != self.host)
        return tuple(f"{self.hosts[name].address}:{self.router.port}" for name in names)

    @property
    def has_router(self) -> bool:
        """Whether this host runs the router that clients call."""
        return not self.hosts or self.host in self.router.hosts

    def discovery_of(self, pool: str) -> DiscoveryConfig:
        """``discovery`` in the namespace of ``pool``; empty: in the topology's."""
        directory, namespace = self.discovery.file, pool or self.namespace
        return replace(
            self.discovery,
            etcd=replace(self.discovery.etcd, namespace=namespace),
            file=None if directory is None else replace(directory, namespace=namespace),
        )


def load_topology(path: Path, assignments: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> Topology:
    """Read a topology file, with assignments (``router.port=0``) over it.

    Raises:
        ConfigError: naming the setting. Overrides are checked by ``plan_workers`` and by the router.
    """
    return build_topology(read_settings(path, assignments, variables))


def build_topology(settings: Mapping[str, object]) -> Topology:
    """The topology of checked ``settings``. What processes show etcd is in ``secrets``, unless the settings say else.

    Raises:
        ConfigError: naming the setting.
    """
    folder, etcd = settings.get("secrets"), found(settings, "discovery", "etcd")
    if isinstance(folder, str) and isinstance(settings.get("discovery", {}), Mapping):
        files = SecretFiles(Path(folder))
        missing: dict[str, object] = (
            {} if "tls" in etcd else {"tls": {key: str(file) for key, file in files.etcd.items()}}
        )
        if etcd.get("user") and "password_file" not in etcd:
            missing["password_file"] = str(files.etcd_password)
        settings = merge(settings, {"discovery": {"etcd": missing}})
    topology = build(Topology, settings)
    if topology.hosts and "endpoints" not in etcd:
        # The default is an etcd on loopback, another one on each host.
        raise ConfigError("discovery.etcd.endpoints: is missing; it names the etcd by which hosts find each other")
    return topology


def read_settings(
    path: Path,
    assignments: Sequence[str],
    variables: Mapping[str, str] | None = None,
    choices: GroupChoices | None = None,
) -> dict[str, object]:
    """The settings that ``load_topology`` reads, not checked yet.

    Values of the file may name ``variables`` (``quartet.config.load_yaml``), such as those of a shell; ``None``: there
    are none, so that all have their defaults. An assignment may name workers (``services.topology.groups.assign``),
    those that there are after ``choices``.

    Raises:
        ConfigError: naming the setting.
    """
    settings: Settings = load_yaml(path, variables or {})
    own_keys = {item.name for item in fields(WorkerGroup)}
    share_out_gpus(settings)
    if choices is not None:
        choices.apply(settings)
    for assignment in assignments:
        settings = assign(settings, assignment, own_keys)
        share_out_gpus(settings)
    return settings


@dataclass(frozen=True, kw_only=True)
class Choices(GroupChoices):
    """What a command line changes in a topology file; ``None`` and empty: as the file says.

    The groups of workers are changed by ``read_settings``, the rest by ``choose``.

    Attributes:
        engine: of every worker. Settings of the file that this engine does not have are left out.
        model: folder of a checkpoint, a folder with a checkpoint in ``checkpoint``, or a repository.
        served_model_name: the model's name in requests; ``None`` with ``model`` set: the name of the folder.
        media_paths: directories whose files requests may name.
        router_port: 0 takes a free port.
        host: which of the file's hosts this one is.
        secrets: its folder.
        tls: make certificates for the run.
        otel: trace requests: the URL of the collector; empty: where the environment says, or at the default one.
        enable_otel: the same as an empty ``otel``.
    """

    engine: EngineKind | None = None
    model: Path | None = None
    served_model_name: str | None = None
    media_paths: Sequence[Path] = ()
    router_port: int | None = None
    host: str | None = None
    secrets: Path | None = None
    tls: bool = False
    otel: str | None = None
    enable_otel: bool = False


@dataclass(frozen=True)
class Chosen:
    """A topology with choices applied.

    Attributes:
        notes: one line for each setting of the file that was left out or changed as a consequence.
    """

    topology: Topology
    notes: Sequence[str]


def choose(settings: Mapping[str, object], choices: Choices) -> Chosen:
    """Apply ``choices`` to the ``settings`` of a file, which ``read_settings`` gave.

    Raises:
        ConfigError: naming the setting.
    """
    changed, notes = copied(settings), list[str]()
    if choices.engine is not None:
        notes += _switch_engine(changed, choices.engine)
    if choices.model is not None:
        notes += _switch_model(changed, choices.model)
    if choices.served_model_name is not None:
        below(changed, "model")["name"] = choices.served_model_name
    if choices.media_paths:
        media = below(changed, "router", "overrides", "media")
        expanded = [Path(expand_path(str(path))).absolute() for path in choices.media_paths]
        media["allowed_local_paths"] = to_settings(expanded)
    if choices.router_port is not None:
        below(changed, "router")["port"] = choices.router_port
    if choices.host is not None:
        changed["host"] = choices.host
    if choices.secrets is not None:
        changed["secrets"] = escape_path(str(Path(expand_path(str(choices.secrets))).absolute()))
    if choices.tls:
        changed["tls"] = True
    if choices.otel is not None or choices.enable_otel:
        below(changed, "tracing").update({"enabled": True, **({"endpoint": choices.otel} if choices.otel else {})})
    return Chosen(build_topology(changed), notes)


def find_model(model: Path) -> tuple[Path, str]:
    """What ``model`` names, as ``Choices.model`` says, and its name in requests; empty: as the folder is called.

    Raises:
        ConfigError: it names a variable that is not set.
    """
    model = Path(expand_path(str(model)))
    inner = model / _CHECKPOINT
    folder = inner if not (model / "config.json").is_file() and (inner / "config.json").is_file() else model
    # A folder ``checkpoint`` gives no name: its parent does.
    return folder, folder.absolute().parent.name if folder.name == _CHECKPOINT else ""


@dataclass(frozen=True, order=True)
class ModelNeed:
    """A model's folder that must exist, or a repository's name, and whether its weights are needed."""

    path: str
    has_weights: bool


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """One process to start: ``python -m MODULE --config FILE`` with ``settings`` in the file.

    Attributes:
        name: unique in the topology; a worker's is its worker id.
        pool: namespace in which it runs; empty: that of the topology.
        section: the part of ``settings`` that says how it serves; empty: all of them.
        num_threads: CPU threads of one operation; ``None``: the library's choice.
        model: the model that it reads, if any.
        gpus: the host's GPUs that it sees; empty: nothing restricts it.
        environment: variables that the topology gives it, including those for ``gpus``.
        limits: what it may take of the host.
        after: workers that must serve before it starts, because they share a GPU's free memory with it.
        start_interval_s: it starts so long after the last process that has one, at the earliest; 0: it has none.
    """

    name: str
    role: Role
    module: str
    settings: Mapping[str, object]
    pool: str = ""
    section: str = ""
    num_threads: int | None = None
    model: ModelNeed | None = None
    gpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    after: tuple[str, ...] = ()
    start_interval_s: float = 0.0


def plan_workers(topology: Topology, *, num_cores: int) -> list[ProcessPlan]:
    """The workers to start, on ``topology.host`` if there are hosts.

    Engines on CPUs share ``num_cores`` unless their settings say otherwise.

    Raises:
        ConfigError: naming the override at fault (``workers[1].overrides.engine.num_blocks``), or a role that the
            engine does not have.
    """
    groups = [(number, group, names) for number, group, names in _named(topology) if group.host == topology.host]
    configs = [_worker_config(topology, number, names[0], 1) for number, _, names in groups]
    num_sharing = sum(
        group.replicas for (_, group, _), config in zip(groups, configs, strict=True) if config.engine.kind.shares_cores
    )
    num_own_cores = max(1, num_cores // max(1, num_sharing))
    plans, places = list[ProcessPlan](), list[_Place]()
    for (number, group, names), config in zip(groups, configs, strict=True):
        engine = config.engine
        if engine.num_threads is None:
            num_cpus = min(num_own_cores, group.limits.cpus or num_own_cores)
            engine = replace(engine, num_threads=engine.kind.num_threads(num_cpus))
        for name, gpus in zip(names, group.gpus or [()] * group.replicas, strict=True):
            if topology.hosts:  # ports and certificates are each worker's own
                config = _worker_config(topology, number, name, 1 + len(plans))
            on_gpus = {_GPUS_VARIABLE: ",".join(map(str, gpus))} if gpus else {}
            environment = {**_affinity(engine, group.limits), **topology.environment, **group.environment, **on_gpus}
            place = _place(name, engine, gpus, environment)
            plan = ProcessPlan(
                name=name,
                role=group.role,
                module=f"services.{group.role}",
                pool=group.pool,
                settings=to_settings(replace(config, worker_id=name, engine=engine)),
                num_threads=engine.num_threads,
                model=ModelNeed(config.model_path, has_weights=engine.needs_weights),
                gpus=gpus,
                environment=environment,
                limits=group.limits,
                start_interval_s=topology.trtllm_start_interval_s if engine.kind is EngineKind.TRTLLM else 0.0,
                after=tuple(other.worker for other in places if other.meets(place)),
            )
            plans.append(plan)
            places.append(place)
    return plans


def check_engines(plans: Sequence[ProcessPlan]) -> list[str]:
    """Check the arguments that workers of ``plans`` give to TensorRT-LLM, engine files included, without the package.

    An engine file that is not here is no error: a plan may be made on another host than it is for.

    Returns:
        What these workers will warn of, and files that are not here; each begins with the worker's name.

    Raises:
        ConfigError: naming the worker, the layer and the key.
    """
    warnings: list[str] = []
    for plan in plans:
        config = build(WorkerConfig, plan.settings)
        if config.engine.kind is EngineKind.TRTLLM:
            warnings += [f"{plan.name}: {warning}" for warning in _check_trtllm(plan, config)]
    return warnings


def check_gpus(plans: Sequence[ProcessPlan]) -> list[str]:
    """A line of each worker with TensorRT-LLM in ``plans`` that has more or fewer GPUs than its model takes.

    Raises:
        ConfigError: as ``check_engines``.
    """
    lines: list[str] = []
    for plan in plans:
        config = build(WorkerConfig, plan.settings)
        file = config.engine.extra_engine_args
        if config.engine.kind is EngineKind.TRTLLM and plan.gpus and (file is None or file.is_file()):
            num_ranks = num_ranks_of(_trtllm_arguments(plan, config).values)
            if len(plan.gpus) != num_ranks:
                lines.append(
                    f"{plan.name}: gpus: {len(plan.gpus)} given, but the model takes {num_ranks} "
                    "(tensor times pipeline times context parallel size)"
                )
    return lines


def trace_arguments(plans: Sequence[ProcessPlan], variables: Mapping[str, str]) -> list[str]:
    """A line of each worker in ``plans`` whose TensorRT-LLM sends spans, with the arguments that make it do so.

    ``variables`` is the environment that processes begin with. Workers whose engine file is not here are left out.

    Raises:
        ConfigError: as ``check_engines``.
    """
    lines: list[str] = []
    for plan in plans:
        config = build(WorkerConfig, plan.settings)
        file = config.engine.extra_engine_args
        if config.engine.kind is EngineKind.TRTLLM and (file is None or file.is_file()):
            tracing = config.tracing.with_variables({**variables, **plan.environment})
            values = _trtllm_arguments(plan, replace(config, tracing=tracing)).values
            if TRACES_ENDPOINT in values:
                shown = ", ".join(
                    f"{name}: {values[name]}" for name in (TRACES_ENDPOINT, PERF_METRICS) if name in values
                )
                lines.append(f"{plan.name}: TensorRT-LLM gets {shown}")
    return lines


def plan_router(topology: Topology) -> ProcessPlan:
    """The router that clients call. It checks its overrides itself: only it knows ``RouterConfig``."""
    base = {
        **_router_base(topology, "", topology.router.port),
        **({"http": _http_base(topology)} if topology.router.http_port else {}),
    }
    plan = ProcessPlan(
        name=ROUTER,
        role=Role.ROUTER,
        module="router",
        settings=merge(base, topology.router.overrides),
        environment={**topology.environment, **topology.router.environment},
    )
    if topology.global_router is None:
        return plan
    # It finds no workers itself: the pools' routers do.
    own = {name: value for name, value in base.items() if name not in ("discovery", "signing_keys_file")}
    routers = {pool: [f"{_LOOPBACK}:{topology.router.pool_ports.get(pool, 0)}"] for pool in topology.pools}
    settings = merge({"router": own, "pool_routers": routers}, topology.global_router)
    return replace(plan, module="router.global_router", settings=settings, section="router")


def plan_routers(topology: Topology) -> list[ProcessPlan]:
    """All routers to start, on ``topology.host`` if there are hosts. The last one is the one that clients call."""
    return [*plan_pool_routers(topology), *([plan_router(topology)] if topology.has_router else [])]


def plan_pool_routers(topology: Topology) -> list[ProcessPlan]:
    """A router for each pool. Those of pools that decode have prompts prefilled by the pools that only prefill."""
    ports, plans = topology.router.pool_ports, list[ProcessPlan]()
    prefill_pools = {pool: [f"{_LOOPBACK}:{ports.get(pool, 0)}"] for pool in topology.prefill_pools}
    for pool in topology.pools:
        is_prefill = pool in topology.prefill_pools
        role = {"required_roles": [Role.PREFILL.value]} if is_prefill else {"prefill_pools": prefill_pools}
        base = {**_router_base(topology, pool, ports.get(pool, 0)), **role}
        if topology.tls:
            base["trusted_gateways"] = [f"{topology.namespace}/{ROUTER}"]
        plan = ProcessPlan(
            name=f"{ROUTER}-{pool}",
            role=Role.ROUTER,
            module="router",
            pool=pool,
            settings=merge(base, topology.router.overrides),
            environment={**topology.environment, **topology.router.environment},
        )
        plans.append(plan)
    return plans


def take_tenants(topology: Topology, other: Topology) -> Topology:
    """``topology`` with what running routers take over of ``other``, a changed form of it: ``TAKEN_OVER``."""
    router = replace(topology.router, overrides=_taken_over(topology.router.overrides, other.router.overrides))
    own = topology.global_router
    if own is not None:
        changed = found(other.global_router or {}, "router")
        own = {**own, "router": _taken_over(found(own, "router"), changed)}
    return replace(topology, router=router, global_router=own)


def with_tenants_of(plan: ProcessPlan, other: ProcessPlan) -> ProcessPlan:
    """A router's ``plan`` with ``TAKEN_OVER`` of ``other``, another plan of it."""
    if not plan.section:
        return replace(plan, settings=_taken_over(plan.settings, other.settings))
    part = _taken_over(found(plan.settings, plan.section), found(other.settings, plan.section))
    return replace(plan, settings={**plan.settings, plan.section: part})


def _taken_over(settings: Mapping[str, object], other: Mapping[str, object]) -> dict[str, object]:
    kept = {name: value for name, value in settings.items() if name not in TAKEN_OVER}
    return {**kept, **{name: other[name] for name in TAKEN_OVER if name in other}}


def with_certificates(plan: ProcessPlan, tls: TlsConfig, events_key_file: Path) -> ProcessPlan:
    """``plan`` with the certificate and the events' key of its process."""
    settings = {"server": {"tls": to_settings(tls)}, "events_key_file": to_settings(events_key_file)}
    return replace(plan, settings=merge(plan.settings, _in_section(plan, settings)))


def with_http_identity(plan: ProcessPlan, tls: TlsConfig, keys_file: Path) -> ProcessPlan:
    """The router's ``plan`` with HTTP behind its certificate and API keys, where it does not say otherwise."""
    http = _http_identity(tls, keys_file, LOCAL_TENANT)
    return replace(plan, settings=merge(_in_section(plan, {"http": http}), plan.settings))


def to_settings(value: object) -> Any:
    """A configuration in the form that YAML holds and ``quartet.config.build`` reads."""
    if is_dataclass(value):
        hints = type_hints(type(value))
        settings = {item.name: to_settings(getattr(value, item.name)) for item in fields(value)}
        return {name: escape_path(item) if hints[name] == PathText else item for name, item in settings.items()}
    if isinstance(value, Mapping):
        return {key: to_settings(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_settings(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return escape_path(str(value)) if isinstance(value, Path) else value


def merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """``base`` with the values of ``over``; mappings in both are merged in the same way."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _in_section(plan: ProcessPlan, settings: Mapping[str, object]) -> Mapping[str, object]:
    return {plan.section: settings} if plan.section else settings


def _router_base(topology: Topology, pool: str, port: int) -> dict[str, object]:
    base: dict[str, object] = {
        "server": {"address": f"{_LOOPBACK}:{port}", **_namespaces(topology, pool)},
        "discovery": to_settings(topology.discovery_of(pool)),
        "signing_keys_file": to_settings(topology.signing_keys),
        "drain_timeout_s": topology.drain_timeout_s,
        **_telemetry(topology, Role.ROUTER),
    }
    if not topology.host:
        return base
    address = f"{topology.hosts[topology.host].listens_on}:{port}"
    own = {"router_id": f"{ROUTER}-{topology.host}", "server": {"address": address}}
    return merge(merge(base, _host_base(topology, ROUTER, 0)), own)


def _http_base(topology: Topology) -> dict[str, object]:
    """HTTP of the router that clients call."""
    base: dict[str, object] = {"port": topology.router.http_port}
    if topology.host:
        base["host"] = topology.hosts[topology.host].listens_on
    if (secrets := topology.secret_files) is not None:
        base |= _http_identity(secrets.identity(ROUTER), secrets.http_keys, IdentityKind.OPERATOR)
    return base


def _http_identity(tls: TlsConfig, keys_file: Path, operator: str) -> dict[str, object]:
    served = to_settings({"cert_file": tls.cert_file, "key_file": tls.key_file})
    return {"tls": served, "keys_file": to_settings(keys_file), "operators": [str(operator)]}


def _host_base(topology: Topology, name: str, process: int) -> dict[str, object]:
    """Settings of the process ``name``, the host's number ``process``, by which other hosts reach it."""
    host = topology.hosts[topology.host]
    grpc, events, metrics = (host.port(process, which) for which in range(PORTS_OF_PROCESS))
    server: dict[str, object] = {"address": f"{host.listens_on}:{grpc}"}
    base: dict[str, object] = {
        "server": server,
        "advertise_host": host.address,
        "events_address": f"{host.listens_on}:{events}",
        "http_address": f"{host.listens_on if host.metrics else _LOOPBACK}:{metrics}",
    }
    if (secrets := topology.secret_files) is not None:
        server["tls"] = to_settings(secrets.identity(name))
        base["events_key_file"] = to_settings(secrets.events_key)
    return base


def _telemetry(topology: Topology, role: Role) -> dict[str, object]:
    """Settings of a process's traces and logs; nothing where they are the defaults."""
    if not topology.tracing.enabled:
        return {}
    name = topology.tracing.service_name or f"quartet-{role}"
    return {"tracing": to_settings(replace(topology.tracing, service_name=name)), "log": {"json": True}}


def _namespaces(topology: Topology, pool: str) -> dict[str, object]:
    """The namespace of a server, and those that it trusts: pools of one topology trust each other."""
    own = pool or topology.namespace
    others = [name for name in (topology.namespace, *topology.pools) if name != own] if pool else []
    return {"namespace": own, **({"trusted_namespaces": others} if others else {})}


def _affinity(engine: EngineSettings, limits: Limits) -> Mapping[str, str]:
    """TensorRT-LLM puts its processes back on all CPUs unless this variable says that they are where they should be."""
    is_limited = engine.kind is EngineKind.TRTLLM and limits.cpus is not None
    return {"TLLM_NUMA_AWARE_WORKER_AFFINITY": "0"} if is_limited else {}


def _switch_engine(settings: Settings, kind: EngineKind) -> Iterator[str]:
    engine = below(settings, "engine")
    before = engine.get("kind", EngineKind.TORCH.value)
    is_switched = before != kind.value
    engine["kind"] = kind.value
    yield from _without_refused(engine, kind, "engine")
    for where, group in groups_of(settings):
        own = found(group, "overrides", "engine")
        is_switched |= own.pop("kind", before) != kind.value
        yield from _without_refused(own, kind, f"{where}.overrides.engine")
        if not kind.uses_gpu({**engine, **own}.get("device", _CPU)):
            yield from _without_gpus(group, kind, where)
    if not kind.has_encoder:
        yield from _without_encoders(settings, kind)
    has_gpu = kind.uses_gpu(engine.get("device", _CPU))
    if not has_gpu:
        yield from _without_gpus(settings, kind, "")
    if is_switched and kind is EngineKind.TORCH and not has_gpu and "dtype" not in engine:
        engine["dtype"] = "float32"
        yield "engine.dtype: float32, as CPUs are slow at what most checkpoints have"


def _without_refused(engine: Settings, kind: EngineKind, where: str) -> Iterator[str]:
    refused = {*refused_fields(kind)}
    if not kind.uses_gpu(engine.get("device", _CPU)):
        refused.add("free_gpu_memory_fraction")
    if not kind.has_encoder and engine.get("modality") == Modality.MULTIMODAL.value:
        refused.add("modality")
    for name in sorted(refused & engine.keys()):
        del engine[name]
        yield f"{where}.{name}: left out, as the engine {kind} does not have it"


def _without_encoders(settings: Settings, kind: EngineKind) -> Iterator[str]:
    for where, group in groups_of(settings):
        if group.get("role") == Role.ENCODE.value:
            settings["workers"].remove(group)
            yield f"{where}: left out, as the engine {kind} encodes no media"


def _without_gpus(holder: Settings, kind: EngineKind, where: str) -> Iterator[str]:
    """Remove the GPUs of a group, or of the whole topology, if the engine runs on none."""
    begin = f"{where}." if where else ""
    if holder.pop("gpus", None):
        yield f"{begin}gpus: left out, as the engine {kind} runs on none here"
    if found(holder, "environment").pop(_GPUS_VARIABLE, None) is not None:
        yield f"{begin}environment.{_GPUS_VARIABLE}: left out, as the engine {kind} runs on none here"


def _switch_model(settings: Settings, model: Path) -> Iterator[str]:
    folder, name = find_model(model)
    source = below(settings, "model")
    source.update(path=to_settings(folder), name=name)
    for setting in _PARSERS:
        if source.pop(setting, None) is not None:
            yield f"model.{setting}: left out, as it is another model's"
    holders = [("router", found(settings, "router")), *groups_of(settings)]
    for where, holder in holders:
        for setting in _OF_A_MODEL:
            if found(holder, "overrides").pop(setting, None) is not None:
                yield f"{where}.overrides.{setting}: left out, as it is another model's"


def _check_trtllm(plan: ProcessPlan, config: WorkerConfig) -> Sequence[str]:
    file = config.engine.extra_engine_args
    if file is not None and not file.is_file():
        return [f"extra_engine_args: {file} is not here, so TensorRT-LLM's arguments were not checked"]
    return _trtllm_arguments(plan, config).warnings


def _trtllm_arguments(plan: ProcessPlan, config: WorkerConfig) -> LlmArguments:
    try:
        return llm_arguments(config.engine_spec, Use(str(plan.role)))
    except ConfigError as error:
        raise ConfigError(f"{plan.name}: {error}") from error


def _named(topology: Topology) -> Iterator[tuple[int, WorkerGroup, list[str]]]:
    """Each group with its number and the names of its workers, which differ on all hosts."""
    num_of_name: Counter[str] = Counter()
    for number, group in enumerate(topology.workers):
        first = num_of_name[group.process_name]
        num_of_name[group.process_name] += group.replicas
        yield number, group, [f"{group.process_name}-{first + index}" for index in range(group.replicas)]


def _worker_config(topology: Topology, number: int, name: str, process: int) -> WorkerConfig:
    """Settings of the worker ``name`` of the group ``number``, the host's number ``process`` if there are hosts."""
    group, where = topology.workers[number], f"workers[{number}]"
    base = WorkerConfig(
        model_path=str(topology.model.path),
        model_name=topology.model.name,
        reasoning_parser=topology.model.reasoning_parser,
        tool_call_parser=topology.model.tool_call_parser,
        engine=topology.engine,
        server=build(ServerConfig, _namespaces(topology, group.pool)),
        discovery=topology.discovery_of(group.pool),
        signing_keys_file=topology.signing_keys if group.role is Role.DECODE else None,
        drain_timeout_s=topology.drain_timeout_s,
    )
    settings = merge(to_settings(base), _telemetry(topology, group.role))
    if topology.host:
        settings = merge(settings, _host_base(topology, name, process))
    config = build(WorkerConfig, merge(settings, group.overrides), f"{where}.overrides")
    if group.role is Role.ENCODE and not config.engine.kind.has_encoder:
        raise ConfigError(f"{where}.role: the engine {config.engine.kind} encodes no media")
    return config


@dataclass(frozen=True)
class _Place:
    """The GPUs that a worker takes memory of.

    Attributes:
        gpus: the host's, by number or as ``CUDA_VISIBLE_DEVICES`` names them.
        takes_share: it takes a share of the memory that it finds free, or may: only the engine knows.
    """

    worker: str
    gpus: frozenset[str]
    takes_share: bool

    def meets(self, other: _Place) -> bool:
        """Whether one of the two must not start before the other has taken its memory."""
        return bool(self.gpus & other.gpus) and (self.takes_share or other.takes_share)


def _place(worker: str, engine: EngineSettings, gpus: Sequence[int], environment: Mapping[str, str]) -> _Place:
    if gpus:
        return _Place(worker, frozenset(map(str, gpus)), takes_share=True)
    if engine.kind is not EngineKind.TORCH or not engine.kind.uses_gpu(engine.device):
        return _Place(worker, frozenset(), takes_share=False)
    number = engine.device.partition(":")[2]
    visible = [name.strip() for name in environment.get(_GPUS_VARIABLE, "").split(",")]
    is_named = _GPUS_VARIABLE in environment and number.isdigit() and int(number) < len(visible)
    gpu = visible[int(number)] if is_named else number
    return _Place(worker, frozenset([gpu]), takes_share=engine.free_gpu_memory_fraction is not None)
