"""What the benchmark of isolation makes of its measurements."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.isolation import Measurements, Outcome, Window
from benchmarks.processes import CoreUse
from benchmarks.report import Report
from benchmarks.table import isolation_tables


def outcome(ratio: float, cores: dict[str, CoreUse] | None = None) -> Outcome:
    window = Window(
        requests=600,
        failed={},
        ttft_ms_p50=10.0,
        ttft_ms_p99=20.0,
        other_share=0.5,
        cores=cores or {},
        router_stall_ms=5.0,
        ended={},
        waiting=1,
        overtaken=1,
        slowest_ms={"line": 3.0, "begin": 1.2, "queue": 14.6, "prefill": 12.0} if cores else {},
    )
    return Outcome(attacked=window, burnt=window, ratio=ratio)


def report(number: int) -> Report:
    return Report("isolation", arguments=["--run", str(number)], revision=f"{number:040d}")


def test_several_commands_share_the_attacks_and_the_newest_measurement_of_each_stays(tmp_path: Path) -> None:
    file = tmp_path / "isolation.json"
    for number, attacks in enumerate((("small", "tiny"), ("choices", "small"), ("tiny", "gone"))):
        measurements = Measurements(report(number), str(file))
        for attack in attacks:
            measurements.add(attack, outcome(ratio=number))
    measurements.close()

    found = json.loads(file.read_text())
    # In the order of the attacks; one that this code does not know is left out.
    assert [(name, one["ratio"]) for name, one in found["outcomes"].items()] == [
        ("choices", 1),
        ("small", 1),
        ("tiny", 2),
    ]
    assert found["commit"]["revision"] == f"{2:040d}"
    assert [one["run"]["commit"]["revision"][-1] for one in found["outcomes"].values()] == ["1", "1", "2"]

    found["started_at"] = found["outcomes"]["tiny"]["run"]["started_at"] = (
        "2026-01-01T00:00:00+00:00"  # a second passes
    )
    table = isolation_tables(found)
    assert "- `choices`, `small`: `python -m benchmarks.isolation --run 1`" in table
    assert "--run 2" not in table, "it comes with the page"


def test_the_table_shows_where_the_slowest_were_and_who_waited_for_a_core() -> None:
    cores = {
        name: CoreUse(cores=number / 10, main_waited=number / 100, busiest_waited=2 * number / 100)
        for number, name in enumerate(("prefill-0", "decode-0", "router", "tenant", "other"), start=1)
    }
    found = report(0).finish(outcome(1.0))
    measured = {key: found[key] for key in ("attacked", "burnt", "ratio")}
    without = isolation_tables({"started_at": "", "outcomes": {"small": measured}})
    assert "|  |  |  |\n" in without

    measured = {key: report(0).finish(outcome(1.0, cores))[key] for key in measured}
    row = isolation_tables({"started_at": "", "outcomes": {"small": measured}}).splitlines()[-1]
    assert "| 3 + 1 + 15 + 12; 3 + 1 + 15 + 12 |" in row
    assert row.endswith("| 0.30 + 0.30 + 0.90; 0.30 + 0.30 + 0.90 | 3%; 3% | 2%, 4%; 2%, 4% |")
