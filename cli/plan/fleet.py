"""What is known of the fleet to plan: its engines, how fast they are, and its policy."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from cli.plan.search import Shape
from cli.replay.policies import MakePolicy
from cli.replay.simulation import FleetSettings
from cli.replay.tiers import TierSettings
from cli.replay.worker import EngineSettings as ReplayedEngine
from quartet.client import WorkerState, WorkerStatus
from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.mock.model import FULL_CONTEXT_TOKENS, StepTiming
from quartet.engine.settings import EngineKind, EngineSettings
from quartet.errors import ConfigError
from quartet.events.load import RankLoad, StepTime
from router.config import RouterConfig
from router.policy.create import PolicyConfig, create_policy
from services.topology.topology import Topology, load_topology, plan_router, plan_workers
from services.workers.config import WorkerConfig

#: Of blocks that move between workers, where nothing says it: a model of 8 billion parameters with grouped queries.
DEFAULT_KV_BYTES = ReplayedEngine.kv_bytes_per_token

_MS = 1e3
_PER_1K = 1000
_ROLES = (Role.PREFILL, Role.DECODE)
_UNMEASURED = StepTime()


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Steps as a user states them; ``None``: not stated.

    Attributes:
        prefill_tokens_per_s: prompt tokens that a step computes a second, beside ``prefill_base_ms``.
        decode_step_ms: of a step in which requests decode, beside ``decode_ms_per_1k``.
        decode_ms_per_1k: for each thousand tokens in the contexts of all requests that decode.
    """

    prefill_tokens_per_s: float | None = None
    prefill_base_ms: float | None = None
    decode_step_ms: float | None = None
    decode_ms_per_1k: float | None = None

    def over(self, timing: StepTiming | None) -> StepTiming:
        """``timing`` with what is stated in place of its parts.

        Raises:
            ConfigError: there is none, and nothing is stated of prompts, or of decoding.
        """
        if timing is None:
            for name in ("prefill_tokens_per_s", "decode_step_ms"):
                if getattr(self, name) is None:
                    raise ConfigError(
                        f"{name}: is missing, or --from-fleet: the topology does not say how long steps take, as its "
                        "engine is not mock"
                    )
            timing = StepTiming()
        if self.prefill_tokens_per_s is not None:
            linear = _MS / self.prefill_tokens_per_s
            timing = replace(timing, prefill_base=0.0, prefill_linear=linear, prefill_square=0.0)
        if self.prefill_base_ms is not None:
            timing = replace(timing, prefill_base=self.prefill_base_ms)
        if self.decode_step_ms is not None:
            timing = replace(timing, decode_base=self.decode_step_ms, decode_linear=0.0, decode_square=0.0)
        if self.decode_ms_per_1k is not None:
            linear = self.decode_ms_per_1k * FULL_CONTEXT_TOKENS / _PER_1K
            timing = replace(timing, decode_linear=linear, decode_square=0.0)
        return timing


@dataclass(frozen=True, kw_only=True)
class MeasuredFleet:
    """What a running fleet says of its workers.

    Attributes:
        timing: of steps, as the workers have measured them.
        loads: by role, a rank's report; it has the sizes of its pool and its steps.
        block_size, max_model_len: tokens.
    """

    timing: StepTiming
    loads: Mapping[Role, RankLoad]
    block_size: int
    max_model_len: int

    @classmethod
    def of(cls, workers: Sequence[WorkerStatus]) -> MeasuredFleet:
        """Of workers that a router lists.

        Raises:
            ConfigError: none is ready that decodes, one has several ranks, or they have not measured steps with
                prompts, or that decode.
        """
        ready = [worker for worker in workers if worker.state is WorkerState.READY and worker.load is not None]
        by_role = {role: [worker for worker in ready if worker.record.role is role] for role in _ROLES}
        if not by_role[Role.DECODE]:
            raise ConfigError("--from-fleet: no worker is ready that decodes")
        if len({worker.record.model_fingerprint for worker in ready}) > 1:
            raise ConfigError("--model: the fleet serves several, or several versions of one; a plan is for one")
        for worker in (*by_role[Role.PREFILL], *by_role[Role.DECODE]):
            num_ranks = len(worker.load.ranks) if worker.load is not None else 0
            if num_ranks != 1:
                raise ConfigError(
                    f"--from-fleet: {worker.record.worker_id} has {num_ranks} ranks "
                    "(engine.data_parallel_size): a plan is for workers of one rank"
                )
        times = {role: _step_times(found) for role, found in by_role.items()}
        prefill = [time for time in times[Role.PREFILL] or times[Role.DECODE] if _has_prefilled(time)]
        decode = [time for time in times[Role.DECODE] if _has_decoded(time)]
        for what, known in (("prompts", prefill), ("decoding", decode)):
            if not known:
                raise ConfigError(
                    f"--from-fleet: its workers have not measured enough steps with {what}: "
                    "put load on it before, as with quartet bench"
                )
        record = by_role[Role.DECODE][0].record
        return cls(
            timing=_timing(prefill, decode),
            loads={role: found[0].load.ranks[0] for role, found in by_role.items() if found and found[0].load},
            block_size=record.block_size,
            max_model_len=record.max_model_len,
        )

    def sizes(self, engine: ReplayedEngine, role: Role) -> ReplayedEngine:
        """``engine`` with the sizes of the workers of ``role``, or of those that decode."""
        load = self.loads.get(role) or self.loads[Role.DECODE]
        return replace(
            engine,
            block_size=self.block_size,
            num_blocks=load.num_total_blocks,
            max_num_seqs=load.max_running or engine.max_num_seqs,
            max_num_batched_tokens=load.max_step_tokens or engine.max_num_batched_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Start:
    """How to start what was planned.

    Attributes:
        command: it can be run as it is; empty: there is none.
        otherwise: what to do in place of it, in words.
    """

    command: str = ""
    otherwise: str = ""

    def __str__(self) -> str:
        return f"Start it: {self.command}" if self.command else f"To start it, {self.otherwise}."


@dataclass(frozen=True, kw_only=True)
class PlannedFleet:
    """The fleet whose numbers of workers are to be found.

    Attributes:
        settings: for replays; its numbers of workers mean nothing.
        policy: of its router.
        max_model_len: tokens of prompt and answer together.
        speeds_from: where the times of steps come from, in words.
        topology: its name or file; empty: it is not known.
        assignments: changes of the topology.
        groups: by role, the names of the topology's groups, or the roles.
        pool_assignments: by role, the changes that give its workers the pools that were stated.
    """

    settings: FleetSettings
    policy: PolicyConfig
    max_model_len: int
    speeds_from: str
    topology: str
    assignments: Sequence[str] = ()
    groups: Mapping[Role, str] = field(default_factory=dict)
    pool_assignments: Mapping[Role, Sequence[str]] = field(default_factory=dict)

    @property
    def max_request_tokens(self) -> int:
        """Longer requests fit no worker."""
        engines = (self.settings.engine, self.settings.prefill_engine or self.settings.engine)
        return min(self.max_model_len, *(engine.num_pool_tokens for engine in engines))

    @property
    def make_policy(self) -> MakePolicy:
        """Makes the policy of one router."""
        return partial(create_policy, self.policy)

    def prompt_step_ms(self, num_tokens: int) -> float:
        """How long a step takes for a prompt of ``num_tokens``, or as much of it as one step computes."""
        engines = (self.settings.engine, self.settings.prefill_engine or self.settings.engine)
        return max(engine.timing.prefill_ms(min(num_tokens, engine.max_num_batched_tokens)) for engine in engines)

    def of(self, shape: Shape) -> FleetSettings:
        """For a replay on so many workers."""
        return replace(self.settings, num_workers=shape.num_decode, num_prefill_workers=shape.num_prefill)

    def how_to_start(self, shape: Shape) -> Start:
        """What starts so many workers."""
        options = self._options(shape)
        if not self.topology:
            return Start(otherwise=f"give quartet up the fleet's topology and {options}")
        if shape.num_prefill and Role.PREFILL not in self.groups:
            return Start(
                otherwise=f"copy the file of {self.topology}, which has no group of the role prefill, add "
                f"{{role: prefill, replicas: {shape.num_prefill}}} to its workers, and give quartet up the copy and "
                f"{options}"
            )
        return Start(command=f"quartet up {shlex.quote(self.topology)} {options}")

    def _options(self, shape: Shape) -> str:
        counts = {Role.PREFILL: shape.num_prefill, Role.DECODE: shape.num_decode}
        pools = [one for role, found in self.pool_assignments.items() if counts[role] for one in found]
        changes = [part for one in (*self.assignments, *pools) for part in ("--set", one)]
        replicas = [part for role, name in self.groups.items() for part in ("--replicas", f"{name}={counts[role]}")]
        return shlex.join([*changes, *replicas])


def plan_fleet(
    topology: Path | None,
    name: str,
    assignments: Sequence[str],
    speeds: Speeds,
    measured: MeasuredFleet | None,
    *,
    num_blocks: int | None,
    kv_bytes_per_token: int | None,
    transfer_gb_per_s: float,
) -> PlannedFleet:
    """The fleet of ``topology``, which is called ``name``; ``None``: it is only known as ``measured``.

    What is ``measured`` counts before what the topology says, and what is stated (``speeds``, ``num_blocks``, ...)
    before both.

    Raises:
        ConfigError: naming the setting that can't be planned with, or is missing.
    """
    groups = dict[Role, _Group]()
    policy = PolicyConfig()
    if topology is not None:
        found = load_topology(topology, assignments, os.environ)
        groups, policy = _groups(found), build(RouterConfig, plan_router(found).settings, "router.overrides").policy
    decode = groups.get(Role.DECODE) or _Group(Role.DECODE.value, EngineSettings())
    engines = {Role.DECODE: decode, Role.PREFILL: groups.get(Role.PREFILL, decode)}
    replayed = {
        role: _replayed(group, role, speeds, measured, num_blocks, kv_bytes_per_token)
        for role, group in engines.items()
    }
    if replayed[Role.PREFILL].block_size != replayed[Role.DECODE].block_size:
        raise ConfigError("engine.block_size: Prefill and Decode must have the same")
    max_model_len = measured.max_model_len if measured is not None else decode.engine.max_model_len
    return PlannedFleet(
        settings=FleetSettings(
            engine=replayed[Role.DECODE],
            prefill_engine=replayed[Role.PREFILL],
            transfer_gb_per_s=transfer_gb_per_s,
        ),
        policy=policy,
        max_model_len=max_model_len or replayed[Role.DECODE].num_pool_tokens,
        speeds_from=_origin(name, speeds, measured),
        topology="" if topology is None else name,
        assignments=assignments,
        groups={role: groups[role].name for role in _ROLES if role in groups} or {role: role.value for role in _ROLES},
        pool_assignments={
            role: _pool_assignments(group, num_blocks) for role, group in groups.items() if num_blocks is not None
        },
    )


@dataclass(frozen=True)
class _Group:
    """Workers of one role in a topology."""

    name: str
    engine: EngineSettings


def _groups(topology: Topology) -> dict[Role, _Group]:
    if topology.global_router is not None:
        raise ConfigError("global_router: a plan is for one pool")
    names = {group.role: group.process_name for group in topology.workers}
    for role in _ROLES:
        if sum(group.role is role for group in topology.workers) > 1:
            raise ConfigError(f"workers: several groups have the role {role}: a plan is for workers of one kind each")
    plans = {plan.role: plan for plan in plan_workers(topology, num_cores=1) if plan.role in _ROLES}
    return {role: _Group(names[role], build(WorkerConfig, plan.settings).engine) for role, plan in plans.items()}


def _replayed(
    group: _Group,
    role: Role,
    speeds: Speeds,
    measured: MeasuredFleet | None,
    num_blocks: int | None,
    kv_bytes_per_token: int | None,
) -> ReplayedEngine:
    engine, is_mock = group.engine, group.engine.kind is EngineKind.MOCK
    if engine.data_parallel_size > 1 or engine.enable_attention_dp:
        raise ConfigError("engine.data_parallel_size: a plan is for workers of one rank")
    timing = _scaled(engine.mock.timing, engine.mock.speed_up) if is_mock else None
    if measured is not None:
        timing = measured.timing
    mock_bytes = engine.mock.kv_bytes_per_token if is_mock else DEFAULT_KV_BYTES
    replayed = ReplayedEngine(
        block_size=engine.block_size,
        max_num_seqs=engine.step_bounds.max_num_seqs,
        max_num_batched_tokens=engine.step_bounds.max_num_batched_tokens,
        kv_bytes_per_token=kv_bytes_per_token or mock_bytes,
        timing=speeds.over(timing),
        # TensorRT-LLM does not say that it would let short prompts pass.
        short_prompts_part=0.0 if engine.kind is EngineKind.TRTLLM else engine.step_bounds.short_prompts_part,
        shares_within_step=False,
        reports_by_step=True,
        retention=engine.cache.retention,
    )
    replayed = measured.sizes(replayed, role) if measured is not None else _sized(replayed, group, num_blocks)
    replayed = replace(replayed, num_blocks=num_blocks or replayed.num_blocks)
    return replace(replayed, tiers=_tiers(engine, replayed))


def _sized(replayed: ReplayedEngine, group: _Group, num_blocks: int | None) -> ReplayedEngine:
    """With what the topology says of sizes, or is stated."""
    engine = group.engine
    is_open = engine.free_gpu_memory_fraction is not None or engine.kind is EngineKind.TRTLLM
    if is_open and engine.num_blocks is None and num_blocks is None:
        raise ConfigError(
            f"{group.name}: engine.num_blocks: is known only once a worker has started: give --blocks or --from-fleet"
        )
    if engine.kind is EngineKind.TRTLLM:
        for name in ("max_batch_size", "max_num_tokens"):
            if getattr(engine, name) is None:
                raise ConfigError(f"{group.name}: engine.{name}: must be set, or give --from-fleet")
        assert engine.max_batch_size is not None and engine.max_num_tokens is not None, "just checked"
        replayed = replace(replayed, max_num_seqs=engine.max_batch_size, max_num_batched_tokens=engine.max_num_tokens)
    return replace(replayed, num_blocks=num_blocks or engine.num_pool_blocks)


def _pool_assignments(group: _Group, num_blocks: int) -> list[str]:
    """Give the workers of ``group`` so many blocks, whatever the topology says of all workers or of these."""
    path, engine = f"workers.{group.name}.engine", group.engine
    found = [f"{path}.num_blocks={num_blocks}"]
    if engine.kind is EngineKind.TORCH and engine.free_gpu_memory_fraction is not None:
        found.append(f"{path}.free_gpu_memory_fraction=null")  # it takes one of the two
    return found


def _tiers(engine: EngineSettings, replayed: ReplayedEngine) -> TierSettings | None:
    if not engine.cache.host.is_on:
        return None
    host, disk = engine.cache.plans(replayed.block_size * replayed.kv_bytes_per_token)
    if engine.kind is not EngineKind.MOCK:
        return TierSettings(host=host, disk=disk)
    mock = engine.mock
    return TierSettings(
        host=host,
        disk=disk,
        host_gb_per_s=mock.host_gb_per_s * mock.speed_up,
        disk_gb_per_s=mock.disk_gb_per_s * mock.speed_up,
    )


def _origin(name: str, speeds: Speeds, measured: MeasuredFleet | None) -> str:
    origin = "measured by the running fleet" if measured is not None else f"of {name}"
    stated = [item.replace("_", "-") for item, value in vars(speeds).items() if value is not None]
    return f"{origin}, with --{', --'.join(stated)} as stated" if stated else origin


def _scaled(timing: StepTiming, speed_up: float) -> StepTiming:
    return StepTiming(**{name: value / speed_up for name, value in vars(timing).items()})


def _step_times(workers: Sequence[WorkerStatus]) -> list[StepTime]:
    loads = [worker.load for worker in workers if worker.load is not None]
    return [rank.step_time for load in loads for rank in load.ranks if rank.step_time is not None]


def _has_prefilled(time: StepTime) -> bool:
    """What no step has taught is still as it was at first."""
    return (time.prefill_base_s, time.prefill_s_per_token) != (
        _UNMEASURED.prefill_base_s,
        _UNMEASURED.prefill_s_per_token,
    )


def _has_decoded(time: StepTime) -> bool:
    return time.decode_base_s != _UNMEASURED.decode_base_s


def _timing(prefill: Sequence[StepTime], decode: Sequence[StepTime]) -> StepTiming:
    """Medians of what ranks have measured, part by part."""
    return StepTiming(
        prefill_base=_MS * median(time.prefill_base_s for time in prefill),
        prefill_linear=_MS * median(time.prefill_s_per_token for time in prefill),
        prefill_square=_MS * median(time.prefill_s_per_token2 for time in prefill),
        decode_base=_MS * median(time.decode_base_s for time in decode),
        decode_linear=_MS * FULL_CONTEXT_TOKENS * median(time.decode_s_per_context_token for time in decode),
        decode_square=0.0,
    )
