"""What a plan knows of a fleet: by its topology, by what it reports when it runs, and by options."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cli.plan.fleet import MeasuredFleet, PlannedFleet, Speeds, plan_fleet
from cli.plan.search import Shape
from quartet.client import WorkerStatus
from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.mock.model import StepTiming
from quartet.errors import ConfigError
from quartet.events.load import StepTime
from quartet.shipped import topologies
from router.policy.create import PolicyName
from services.topology.groups import GroupChoices
from services.topology.topology import Topology, plan_workers, read_settings
from services.workers.config import WorkerConfig
from tests.cli.plan.fleets import MEASURED, status


def plan(
    topology: str | Path | None = "mock_fleet",
    *assignments: str,
    speeds: Speeds | None = None,
    measured: MeasuredFleet | None = None,
    num_blocks: int | None = None,
) -> PlannedFleet:
    file = topologies()[topology] if isinstance(topology, str) else topology
    return plan_fleet(
        file,
        str(topology),
        assignments,
        speeds or Speeds(),
        measured,
        num_blocks=num_blocks,
        kv_bytes_per_token=None,
        transfer_gb_per_s=50.0,
    )


def test_a_topology_gives_engines_policy_and_speeds(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        """
model: {path: models/tiny/checkpoint, name: mock}
engine: {kind: mock, num_blocks: 600, max_model_len: 9000, mock: {speed_up: 2, timing: {decode_base: 8}}}
router: {overrides: {policy: {name: round_robin}}}
workers:
  - {role: prefill, name: big, overrides: {engine: {max_batch_size: 8, max_num_tokens: 4096}}}
  - {role: decode, overrides: {engine: {num_blocks: 500}}}
"""
    )
    fleet = plan(file)
    prefill, decode = fleet.settings.prefill_engine, fleet.settings.engine
    assert prefill is not None
    assert (prefill.num_blocks, prefill.max_num_seqs, prefill.max_num_batched_tokens) == (600, 8, 4096)
    assert (decode.num_blocks, decode.max_num_seqs, decode.max_num_batched_tokens) == (500, 64, 2048)
    assert (decode.timing.decode_base, decode.timing.prefill_base) == (4, StepTiming().prefill_base / 2)
    assert decode.short_prompts_part == 0.5
    assert not decode.shares_within_step
    assert fleet.policy.name is PolicyName.ROUND_ROBIN
    assert fleet.max_request_tokens == 9000
    assert plan(file, "engine.max_model_len=90000").max_request_tokens == 500 * 32
    assert fleet.of(Shape(2, 3)).num_prefill_workers == 2
    assert fleet.how_to_start(Shape(2, 3)).command == f"quartet up {file} --replicas big=2 --replicas decode=3"


def test_a_topology_without_prefill_workers_says_what_it_lacks() -> None:
    fleet = plan("agg", speeds=Speeds(prefill_tokens_per_s=10_000, decode_step_ms=10), num_blocks=2000)
    blocks = "--set workers.decode.engine.num_blocks=2000"
    assert str(fleet.how_to_start(Shape(0, 2))) == f"Start it: quartet up agg {blocks} --replicas decode=2"
    start = fleet.how_to_start(Shape(1, 2))
    assert not start.command, "none can be run as it is"
    assert str(start) == (
        "To start it, copy the file of agg, which has no group of the role prefill, add {role: prefill, replicas: 1} "
        f"to its workers, and give quartet up the copy and {blocks} --replicas decode=2."
    )


def test_a_fleet_without_a_topology_has_no_command_that_starts_it() -> None:
    fleet = plan(None, measured=MeasuredFleet.of([status(Role.DECODE, 0)]))
    start = fleet.how_to_start(Shape(1, 2))
    assert not start.command
    assert str(start) == (
        "To start it, give quartet up the fleet's topology and --replicas prefill=1 --replicas decode=2."
    )


@pytest.mark.parametrize(
    ("topology", "assignments"),
    [
        ("mock_fleet", ()),
        ("mock_fleet", ("workers.prefill.engine.num_blocks=50", "engine.num_blocks=60")),
        ("gpu/disagg", ()),
    ],
)
def test_stated_blocks_are_those_of_the_workers_that_the_command_starts(
    topology: str, assignments: tuple[str, ...]
) -> None:
    speeds = Speeds(prefill_tokens_per_s=10_000, decode_step_ms=10)
    fleet = plan(topology, *assignments, speeds=speeds, num_blocks=2000)
    words = shlex.split(fleet.how_to_start(Shape(1, 1)).command)
    assert words[:3] == ["quartet", "up", topology]
    given = {option: [value for name, value in pairwise(words) if name == option] for option in ("--set", "--replicas")}
    choices = GroupChoices(replicas=given["--replicas"])
    started = build(Topology, read_settings(topologies()[topology], given["--set"], {}, choices))
    engines = [build(WorkerConfig, each.settings).engine for each in plan_workers(started, num_cores=1)]
    assert [engine.num_blocks for engine in engines] == [2000, 2000]
    alone = fleet.how_to_start(Shape(0, 2)).command
    assert "workers.prefill.engine.num_blocks=2000" not in alone, "there is none"


def test_what_is_stated_takes_the_place_of_a_part() -> None:
    timing = plan(speeds=Speeds(prefill_tokens_per_s=10_000, prefill_base_ms=5)).settings.engine.timing
    assert timing.prefill_ms(1000) == pytest.approx(105)
    assert timing.decode_ms(1000) == StepTiming().decode_ms(1000)
    timing = plan(speeds=Speeds(decode_step_ms=10, decode_ms_per_1k=0.5)).settings.engine.timing
    assert timing.decode_ms(4000) == pytest.approx(12)
    assert timing.prefill_ms(1000) == StepTiming().prefill_ms(1000)


def test_a_running_fleet_gives_what_its_workers_have_measured() -> None:
    unlearned = StepTime(decode_base_s=0.008, decode_s_per_context_token=1e-7)
    workers = [
        status(Role.PREFILL, 0, num_total_blocks=40),
        status(Role.DECODE, 0, unlearned),
        status(Role.DECODE, 1, None),
    ]
    measured = MeasuredFleet.of(workers)
    fleet = plan(None, measured=measured)
    prefill, decode = fleet.settings.prefill_engine, fleet.settings.engine
    assert prefill is not None
    assert (prefill.num_blocks, decode.num_blocks) == (40, 100)
    assert (decode.block_size, decode.max_num_seqs, decode.max_num_batched_tokens) == (16, 32, 512)
    assert decode.timing.prefill_ms(1000) == pytest.approx(1e3 * MEASURED.prefill_s(1000))
    assert decode.timing.decode_ms(5000) == pytest.approx(1e3 * MEASURED.decode_s(5000))
    assert fleet.max_request_tokens == 40 * 16
    assert fleet.speeds_from == "measured by the running fleet"
    alone = plan("mock_fleet", measured=MeasuredFleet.of([status(Role.DECODE, 0)]), speeds=Speeds(decode_step_ms=9.0))
    assert alone.settings.engine.timing.decode_base == 9
    assert alone.settings.prefill_engine is not None
    assert alone.settings.prefill_engine.num_blocks == 100
    assert alone.speeds_from == "measured by the running fleet, with --decode-step-ms as stated"


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([], "no worker is ready that decodes"),
        ([status(Role.PREFILL, 0)], "no worker is ready that decodes"),
        ([status(Role.DECODE, 0, None)], "have not measured enough steps with prompts"),
        ([status(Role.DECODE, 0, StepTime(decode_base_s=0.008))], "have not measured enough steps with prompts"),
        (
            [status(Role.PREFILL, 0), status(Role.DECODE, 0, StepTime(prefill_base_s=0.02))],
            "have not measured enough steps with decoding",
        ),
    ],
)
def test_a_running_fleet_that_knows_too_little_says_so(workers: list[WorkerStatus], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--from-fleet: .*{message}"):
        MeasuredFleet.of(workers)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_running_fleet_with_several_ranks_a_worker_is_refused_as_such_a_topology_is(role: Role) -> None:
    workers = [status(Role.PREFILL, 0), status(Role.DECODE, 0)]
    [one] = [worker for worker in workers if worker.record.role is role]
    assert one.load is not None
    two = replace(one, load=replace(one.load, ranks=2 * one.load.ranks))
    with pytest.raises(ConfigError, match=f"^--from-fleet: {role}-0 has 2 ranks .*a plan is for workers of one rank"):
        MeasuredFleet.of([two if worker is one else worker for worker in workers])


@pytest.mark.parametrize(
    ("topology", "assignments", "message"),
    [
        ("disagg", (), "prefill_tokens_per_s: is missing, or --from-fleet: the topology does not say"),
        ("gpu/disagg", (), "engine.num_blocks: is known only once a worker has started"),
        ("mock_fleet", ("workers.prefill.engine.block_size=64",), "engine.block_size: Prefill and Decode must have"),
    ],
)
def test_what_a_topology_does_not_say_is_named(topology: str, assignments: tuple[str, ...], message: str) -> None:
    speeds = Speeds() if topology == "disagg" else Speeds(prefill_tokens_per_s=1e4, decode_step_ms=10)
    with pytest.raises(ConfigError, match=message):
        plan(topology, *assignments, speeds=speeds)


def test_several_groups_of_one_role_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("engine: {kind: mock}\nworkers: [{role: decode, name: a}, {role: decode, name: b}]")
    with pytest.raises(ConfigError, match=r"^workers: several groups have the role decode"):
        plan(file)


def test_trtllm_needs_its_bounds_said() -> None:
    speeds = Speeds(prefill_tokens_per_s=1e4, decode_step_ms=10)
    bounds = ("engine.max_batch_size=64", "engine.max_num_tokens=4096")
    with pytest.raises(ConfigError, match=r"engine.max_(batch_size|num_tokens): must be set, or give --from-fleet"):
        plan("trtllm/agg_router", "engine.max_num_tokens=null", speeds=speeds, num_blocks=900)
    fleet = plan("trtllm/agg_router", *bounds, speeds=speeds, num_blocks=900)
    assert fleet.settings.engine.short_prompts_part == 0, "it does not say that it would let them pass"
    assert fleet.settings.engine.num_blocks == 900
