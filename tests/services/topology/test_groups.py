"""Groups of workers from a command line: found by name, role or number, and changed in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config import build
from quartet.engine.settings import EngineKind
from quartet.errors import ConfigError
from services.topology.topology import Choices, Chosen, ProcessPlan, choose, plan_workers, read_settings
from services.workers.config import WorkerConfig

CONFIGS = Path(__file__).parents[3] / "configs"
FOUR = """
workers:
  - {role: prefill, gpus: 0}
  - {role: decode, replicas: 3, gpus: 1-3}
  - {role: decode, name: big, gpus: [[4, 5]]}
"""


def write(directory: Path, text: str = FOUR) -> Path:
    file = directory / "topology.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def chosen(file: Path, *assignments: str, **choices: Any) -> Chosen:
    given = Choices(**choices)
    return choose(read_settings(file, assignments, None, given), given)


def plans_of(file: Path, *assignments: str, **choices: Any) -> list[ProcessPlan]:
    return plan_workers(chosen(file, *assignments, **choices).topology, num_cores=2)


def gpus_of(plans: list[ProcessPlan]) -> dict[str, tuple[int, ...]]:
    return {plan.name: plan.gpus for plan in plans}


@pytest.mark.parametrize(
    ("assignment", "changed"),
    [
        ("workers.prefill.engine.num_blocks=64", ["prefill-0"]),
        ("workers.prefill.overrides.engine.num_blocks=64", ["prefill-0"]),
        ("workers.decode.engine.num_blocks=64", ["decode-0", "decode-1", "decode-2"]),
        ("workers.big.engine.num_blocks=64", ["big-0"]),
        ("workers.2.engine.num_blocks=64", ["big-0"]),
        ("workers.decode-0.engine.num_blocks=64", ["decode-0"]),
        ("workers.decode-1.engine.num_blocks=64", ["decode-1"]),
        ("workers.decode-2.engine.num_blocks=64", ["decode-2"]),
        ("workers.big-0.engine.num_blocks=64", ["big-0"]),
    ],
)
def test_a_setting_reaches_workers_by_name_role_or_number_and_no_others(
    tmp_path: Path, assignment: str, changed: list[str]
) -> None:
    plans = plans_of(write(tmp_path), assignment)
    assert gpus_of(plans) == gpus_of(plans_of(write(tmp_path))), "names and GPUs stay"
    assert [plan.name for plan in plans if build(WorkerConfig, plan.settings).engine.num_blocks == 64] == changed


def test_any_key_of_a_group_and_of_its_workers_can_be_set(tmp_path: Path) -> None:
    assignments = (
        "workers.big.gpus=8-9",
        "workers.big.environment.LEVEL='1'",
        "workers.big.limits.cpus=1",
        "workers.big.stall_timeout_s=7",
        "workers.big.log.level=debug",
        "workers.decode-1.gpus=7",
    )
    plans = {plan.name: plan for plan in plans_of(write(tmp_path), *assignments)}
    big, config = plans["big-0"], build(WorkerConfig, plans["big-0"].settings)
    assert (big.gpus, big.environment["LEVEL"], big.limits.cpus) == ((8, 9), "1", 1)
    assert (config.stall_timeout_s, config.log.level) == (7, "debug")
    assert [plans[f"decode-{number}"].gpus for number in range(3)] == [(1,), (7,), (3,)]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "workers.reader.engine.num_blocks=1",
            "workers.reader: none is called so; known here: prefill, decode, big, pre",
        ),
        ("workers.decode-3.engine.num_blocks=1", r"workers\.decode-3: none is called so; .* decode-2, big-0$"),
        ("workers.decode=1", r"workers\.decode: must be followed by a key of these workers"),
        ("workers.decode-1.replicas=2", r"workers\.decode-1\.replicas: decode-1 is one worker; its group has replicas"),
        ("workers.decode.role.x=1", r"workers\.decode: role\.x: role is not a mapping"),
        (
            "workers.decode.engine.num_blocs=1",
            r"workers\[1\]\.overrides\.engine\.num_blocs: unknown; did you mean num_b",
        ),
        ("workers.decode.gpus=0;1", r"workers\[1\]\.gpus: must be numbers of GPUs, as in 0,1 or 0-3, not '0;1'"),
        ("workers.decode.gpus=3-1", r"workers\[1\]\.gpus: must be numbers of GPUs, .* not '3-1'"),
        ("workers.decode.gpus=0-99999999", r"workers\[1\]\.gpus: must be numbers of GPUs"),
        ("workers.decode.gpus=6-9", r"workers\[1\]\.gpus: 4 GPUs can't be shared out evenly to 3 workers"),
    ],
)
def test_an_assignment_that_reaches_nothing_is_refused(tmp_path: Path, assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        plans_of(write(tmp_path), assignment)


def test_a_fleet_has_consecutive_gpus() -> None:
    file = CONFIGS / "trtllm" / "agg_router.yaml"
    fleet = plans_of(file, replicas=["decode=8"])
    assert gpus_of(fleet) == {f"decode-{number}": (number,) for number in range(8)}
    wide = plans_of(file, "engine.tensor_parallel_size=2", replicas=["decode=3"], gpus=["decode=2-7"])
    assert gpus_of(wide) == {"decode-0": (2, 3), "decode-1": (4, 5), "decode-2": (6, 7)}
    assert {build(WorkerConfig, plan.settings).engine.tensor_parallel_size for plan in wide} == {2}


def test_further_workers_get_the_gpus_that_follow_and_fewer_keep_the_first(tmp_path: Path) -> None:
    wide = "workers: [{role: prefill, gpus: [[0]]}, {role: decode, replicas: 2, gpus: [[2, 1], [3, 4]]}]"
    more = plans_of(write(tmp_path, wide), replicas=["decode=4"])
    assert gpus_of(more[1:]) == {"decode-0": (2, 1), "decode-1": (3, 4), "decode-2": (5, 6), "decode-3": (7, 8)}
    assert gpus_of(plans_of(write(tmp_path, wide), replicas=["decode=1"])) == {"prefill-0": (0,), "decode-0": (2, 1)}
    assert len(plans_of(CONFIGS / "mock_fleet.yaml", replicas=["decode=8", "prefill=1"])) == 9
    alone = plans_of(CONFIGS / "mock_fleet.yaml", replicas=["decode=2", "prefill=0"])
    assert [plan.name for plan in alone] == ["decode-0", "decode-1"]


def test_files_with_engine_arguments_go_to_every_worker_of_a_role(tmp_path: Path) -> None:
    text = "engine: {kind: trtllm}\nworkers: [{role: decode}, {role: decode, name: big}, {role: prefill}]"
    plans = plans_of(write(tmp_path, text), engine_args=["decode=d.yaml", "big=b.yaml", "prefill=~/p.yaml"])
    files = [build(WorkerConfig, plan.settings).engine.extra_engine_args for plan in plans]
    assert files == [Path("d.yaml"), Path("b.yaml"), Path.home() / "p.yaml"]


def test_what_the_chosen_engine_lacks_of_these_is_left_out_with_a_line(tmp_path: Path) -> None:
    notes = chosen(write(tmp_path), engine=EngineKind.MOCK, gpus=["big=6"], engine_args=["big=b.yaml"]).notes
    assert "workers[2].gpus: left out, as the engine mock runs on none here" in notes
    assert "workers[2].overrides.engine.extra_engine_args: left out, as the engine mock does not have it" in notes


def test_assignments_reach_the_workers_that_there_are_after_the_choices(tmp_path: Path) -> None:
    plans = plans_of(write(tmp_path), "workers.big-2.gpus=9", replicas=["big=3"])
    assert gpus_of(plans[4:]) == {"big-0": (4, 5), "big-1": (6, 7), "big-2": (9,)}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"replicas": ["decode"]}, "replicas: 'decode' must have the form NAME=VALUE"),
        ({"replicas": ["decode=-1"]}, "replicas: decode=-1 must have the form NAME=N with N of at least 0"),
        ({"replicas": ["decode=x"]}, "replicas: decode=x must have the form NAME=N"),
        ({"replicas": ["reader=1"]}, "workers: none is called reader; known here: prefill, decode, big"),
        ({"gpus": ["decode="]}, "gpus: 'decode=' must have the form NAME=VALUE"),
        ({"gpus": ["decode=GPU-1"]}, "gpus: decode=GPU-1: must be numbers of GPUs"),
        ({"gpus": ["decode=6"]}, "gpus: decode=6: 1 GPUs can't be shared out evenly to 3 workers"),
        ({"engine_args": ["d.yaml"]}, "engine_args: 'd.yaml' must have the form NAME=VALUE"),
    ],
)
def test_a_choice_that_is_none_is_named(tmp_path: Path, choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        plans_of(write(tmp_path), **choices)


def test_replicas_of_two_groups_of_one_role_need_a_name(tmp_path: Path) -> None:
    text = "workers: [{role: decode, name: big}, {role: decode, name: small}]"
    with pytest.raises(
        ConfigError, match=r"^replicas: 2 groups are called decode; say --set workers\.NUMBER\.replicas="
    ):
        plans_of(write(tmp_path, text), replicas=["decode=2"])
    assert [plan.name for plan in plans_of(write(tmp_path, text), "workers.0.replicas=2")] == [
        "big-0",
        "big-1",
        "small-0",
    ]


@pytest.mark.parametrize("workers", ["3", "[3]", "{}"])
def test_groups_of_a_wrong_type_are_refused(tmp_path: Path, workers: str) -> None:
    with pytest.raises(ConfigError, match=r"^workers"):
        plans_of(write(tmp_path, f"workers: {workers}"), "workers.decode.gpus=0")
    with pytest.raises(ConfigError, match=r"^workers"):
        plans_of(write(tmp_path, f"workers: {workers}"), replicas=["decode=2"])


@pytest.mark.parametrize("group", ["gpus: true", "gpus: [0]", "gpus: 0, replicas: x"])
def test_a_value_of_a_wrong_type_is_left_for_the_check(tmp_path: Path, group: str) -> None:
    with pytest.raises(ConfigError, match=r"^workers\[0\]\.(gpus|replicas).*: must be a"):
        plans_of(write(tmp_path, f"workers: [{{role: decode, {group}}}]"), "workers.0.stall_timeout_s=1")
