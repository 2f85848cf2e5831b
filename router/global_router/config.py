"""Configuration of the global router: pools and grids under the names of Dynamo's file, and what is ours beside them.

The file is YAML, and so may be JSON. Times in the grids are in milliseconds, as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from quartet.config import build, load_yaml, override
from quartet.discovery.checks import check_name
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind
from quartet.errors import ConfigError
from quartet.rpc.channels import ListenAddress
from router.config import RouterConfig
from router.global_router.grid import Axis, Grid, PriorityOverride

# Newer files end names of times in their unit.
_UNIT = "_ms"
_STRATEGIES = ("prefill_pool_selection_strategy", "decode_pool_selection_strategy", "agg_pool_selection_strategy")


class Mode(StrEnum):
    """What pools are made of."""

    DISAGG = "disagg"  # pools that prefill and pools that decode
    AGG = "agg"  # pools that do both


@dataclass(frozen=True, kw_only=True)
class PrefillStrategy:
    """Pools that prefill, by the prompt's tokens (ISL) and the target of the time to the first token, in ms."""

    ttft_min: float
    ttft_max: float
    ttft_resolution: int
    isl_min: int
    isl_max: int
    isl_resolution: int
    prefill_pool_mapping: tuple[tuple[int, ...], ...]
    priority_overrides: tuple[PriorityOverride, ...] = ()

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        _check_axes(self, "isl", "ttft")
        _check_shape(self.prefill_pool_mapping, "prefill_pool_mapping", self.isl_resolution, self.ttft_resolution)

    @property
    def grid(self) -> Grid:
        """Rows: the prompt's tokens; columns: the target in ms."""
        return Grid(_axis(self, "isl"), _axis(self, "ttft"), self.prefill_pool_mapping, self.priority_overrides)


@dataclass(frozen=True, kw_only=True)
class DecodeStrategy:
    """Pools that decode, by the tokens of the context and the target of the time between tokens, in ms."""

    itl_min: float
    itl_max: float
    itl_resolution: int
    context_length_min: int
    context_length_max: int
    context_length_resolution: int
    decode_pool_mapping: tuple[tuple[int, ...], ...]
    priority_overrides: tuple[PriorityOverride, ...] = ()

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        _check_axes(self, "context_length", "itl")
        _check_shape(
            self.decode_pool_mapping, "decode_pool_mapping", self.context_length_resolution, self.itl_resolution
        )

    @property
    def grid(self) -> Grid:
        """Rows: the context's tokens; columns: the target in ms."""
        return Grid(
            _axis(self, "context_length"), _axis(self, "itl"), self.decode_pool_mapping, self.priority_overrides
        )


@dataclass(frozen=True, kw_only=True)
class AggStrategy:
    """Pools that do both, by the two targets, in ms."""

    ttft_min: float
    ttft_max: float
    ttft_resolution: int
    itl_min: float
    itl_max: float
    itl_resolution: int
    agg_pool_mapping: tuple[tuple[int, ...], ...]
    priority_overrides: tuple[PriorityOverride, ...] = ()

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        _check_axes(self, "ttft", "itl")
        _check_shape(self.agg_pool_mapping, "agg_pool_mapping", self.ttft_resolution, self.itl_resolution)

    @property
    def grid(self) -> Grid:
        """Rows: the target of the first token in ms; columns: that between tokens in ms."""
        return Grid(_axis(self, "ttft"), _axis(self, "itl"), self.agg_pool_mapping, self.priority_overrides)


@dataclass(frozen=True, kw_only=True)
class PoolGroup:
    """Pools of one kind.

    Attributes:
        namespaces: of each pool, in the order of their numbers.
        priorities: of each pool; a lower number is faster.
    """

    namespaces: tuple[str, ...]
    priorities: tuple[int, ...]
    grid: Grid


@dataclass(frozen=True, kw_only=True)
class GlobalRouterConfig:
    """One global router.

    Attributes:
        mode: whether pools that prefill and pools that decode are apart.
        enable_priority_retry: a request that its pool refused for lack of room, without output, goes to the next.
        num_prefill_pools, num_decode_pools, num_agg_pools: how many namespaces are listed.
        prefill_pool_dynamo_namespaces, decode_pool_dynamo_namespaces, agg_pool_dynamo_namespaces: of each pool.
        prefill_pool_priorities, decode_pool_priorities, agg_pool_priorities: lower is faster; left out: the order.
        default_ttft_target_ms, default_itl_target_ms: of requests that name none; ``None``: the middle of the grid.
        pool_routers: by namespace, ``host:port`` of each of its routers.
        discovery: where routers of all other pools are announced, each pool's in its namespace, and where this router
            announces itself in its own; ``None``: all pools are in ``pool_routers``.
        router: where it listens, and its limits: as of a pool's router.
    """

    mode: Mode = Mode.DISAGG
    enable_priority_retry: bool = False
    num_prefill_pools: int | None = None
    num_decode_pools: int | None = None
    num_agg_pools: int | None = None
    prefill_pool_dynamo_namespaces: tuple[str, ...] | None = None
    decode_pool_dynamo_namespaces: tuple[str, ...] | None = None
    agg_pool_dynamo_namespaces: tuple[str, ...] | None = None
    prefill_pool_priorities: tuple[int, ...] | None = None
    decode_pool_priorities: tuple[int, ...] | None = None
    agg_pool_priorities: tuple[int, ...] | None = None
    prefill_pool_selection_strategy: PrefillStrategy | None = None
    decode_pool_selection_strategy: DecodeStrategy | None = None
    agg_pool_selection_strategy: AggStrategy | None = None
    default_ttft_target_ms: float | None = None
    default_itl_target_ms: float | None = None
    pool_routers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    discovery: DiscoveryConfig | None = None
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("default_ttft_target_ms", "default_itl_target_ms"):
            target = getattr(self, name)
            if target is not None and target < 0:
                raise ConfigError(f"{name}: must not be negative")
        for kind in self.kinds:
            self._check_kind(kind)
        self._check_routers()
        if self.discovery is not None:
            self._check_discovery(self.discovery)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of pools that the mode has."""
        return ("agg",) if self.mode is Mode.AGG else ("prefill", "decode")

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Of all pools, each once."""
        listed = [name for kind in self.kinds for name in getattr(self, f"{kind}_pool_dynamo_namespaces")]
        return tuple(dict.fromkeys(listed))

    @property
    def discovered(self) -> tuple[str, ...]:
        """Namespaces of pools whose routers are found in discovery."""
        return tuple(namespace for namespace in self.namespaces if not self.pool_routers.get(namespace))

    def discovery_of(self, namespace: str) -> DiscoveryConfig:
        """Where processes of ``namespace`` are announced; only for a router with ``discovery``."""
        assert self.discovery is not None, "checked when it was made"
        return self.discovery.of_namespace(namespace)

    def group(self, kind: str) -> PoolGroup:
        """The pools of one of ``kinds``."""
        namespaces = getattr(self, f"{kind}_pool_dynamo_namespaces")
        priorities = getattr(self, f"{kind}_pool_priorities")
        return PoolGroup(
            namespaces=namespaces,
            priorities=tuple(range(len(namespaces))) if priorities is None else priorities,
            grid=getattr(self, f"{kind}_pool_selection_strategy").grid,
        )

    def _check_routers(self) -> None:
        for namespace, addresses in self.pool_routers.items():
            if namespace not in self.namespaces:
                raise ConfigError(f"pool_routers.{namespace}: no pool has this namespace")
            for index, address in enumerate(addresses):
                ListenAddress.parse(address, f"pool_routers.{namespace}[{index}]")
            if len(set(addresses)) < len(addresses):
                raise ConfigError(f"pool_routers.{namespace}: has an address twice")
        if self.discovery is None and self.discovered:
            raise ConfigError(
                f"pool_routers.{self.discovered[0]}: is missing; list host:port of the pool's routers, or let discovery"
                " find them"
            )

    def _check_discovery(self, discovery: DiscoveryConfig) -> None:
        """Each pool has its own namespace there, and this router another, or it would find itself."""
        settings = discovery.etcd if discovery.kind is DiscoveryKind.ETCD else discovery.file
        if settings is not None and settings.namespace != type(settings).namespace:
            raise ConfigError(f"discovery.{discovery.kind}.namespace: is each pool's own; leave it out")
        if self.router.server.namespace in self.namespaces:
            raise ConfigError("router.server.namespace: is that of a pool; the global router needs one of its own")

    def _check_kind(self, kind: str) -> None:
        number, listed = f"num_{kind}_pools", f"{kind}_pool_dynamo_namespaces"
        strategy, priorities = f"{kind}_pool_selection_strategy", f"{kind}_pool_priorities"
        for name in (number, listed, strategy):
            if getattr(self, name) is None:
                raise ConfigError(f"{name}: is missing; the mode {self.mode} needs it")
        namespaces, num_pools = getattr(self, listed), getattr(self, number)
        if num_pools < 1:
            raise ConfigError(f"{number}: must be at least 1")
        if len(namespaces) != num_pools:
            raise ConfigError(f"{listed}: has {len(namespaces)} names, and {number} is {num_pools}")
        for index, namespace in enumerate(namespaces):
            check_name(f"{listed}[{index}]", namespace)
        if len(set(namespaces)) < num_pools:
            raise ConfigError(f"{listed}: has a namespace twice")
        if getattr(self, priorities) is not None and len(getattr(self, priorities)) != num_pools:
            raise ConfigError(
                f"{priorities}: has {len(getattr(self, priorities))} numbers, and {number} is {num_pools}"
            )
        _check_pools(getattr(self, strategy), kind, strategy, num_pools)


def load_config(path: Path, assignments: Sequence[str] = ()) -> GlobalRouterConfig:
    """Read a file, with assignments (``router.http.port=0``) over it. Raises ``ConfigError`` naming the setting."""
    settings = load_yaml(path)
    for assignment in assignments:
        settings = override(settings, assignment)
    return build(GlobalRouterConfig, without_units(settings))


def without_units(settings: Mapping[str, object]) -> dict[str, object]:
    """``settings`` with grids' times under the names that have no unit. Raises ``ConfigError``: both are there."""
    renamed = dict(settings)
    for strategy in _STRATEGIES:
        found = renamed.get(strategy)
        if not isinstance(found, Mapping):
            continue
        names = [name.removesuffix(_UNIT) if isinstance(name, str) else name for name in found]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"{strategy}.{twice}: stands twice, with its unit and without")
        renamed[strategy] = dict(zip(names, found.values(), strict=True))
    return renamed


def _axis(strategy: object, name: str) -> Axis:
    values = vars(strategy)
    return Axis(float(values[f"{name}_min"]), float(values[f"{name}_max"]), values[f"{name}_resolution"])


def _check_axes(strategy: Any, *names: str) -> None:
    for name in names:
        axis = _axis(strategy, name)
        if axis.resolution < 1:
            raise ConfigError(f"{name}_resolution: must be at least 1")
        if axis.minimum < 0:
            raise ConfigError(f"{name}_min: must not be negative")
        if not axis.minimum < axis.maximum:
            raise ConfigError(f"{name}_min: must be below {name}_max")
    for index, rule in enumerate(strategy.priority_overrides):
        if rule.min_priority > rule.max_priority:
            raise ConfigError(f"priority_overrides[{index}].min_priority: must not be above max_priority")


def _check_shape(mapping: Sequence[Sequence[int]], name: str, num_rows: int, num_columns: int) -> None:
    if len(mapping) != num_rows:
        raise ConfigError(f"{name}: must have {num_rows} rows, not {len(mapping)}")
    for index, row in enumerate(mapping):
        if len(row) != num_columns:
            raise ConfigError(f"{name}[{index}]: must have {num_columns} pools, not {len(row)}")


def _check_pools(strategy: Any, kind: str, where: str, num_pools: int) -> None:
    mapping = f"{kind}_pool_mapping"
    for row_index, row in enumerate(getattr(strategy, mapping)):
        for column_index, pool in enumerate(row):
            if not 0 <= pool < num_pools:
                place = f"{where}.{mapping}[{row_index}][{column_index}]"
                raise ConfigError(f"{place}: must be a pool in [0, {num_pools - 1}], not {pool}")
    for index, rule in enumerate(strategy.priority_overrides):
        if not 0 <= rule.target_pool < num_pools:
            place = f"{where}.priority_overrides[{index}].target_pool"
            raise ConfigError(f"{place}: must be a pool in [0, {num_pools - 1}], not {rule.target_pool}")
