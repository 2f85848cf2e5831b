"""A topology's file that changes while ``quartet up`` runs: what is taken over of it, and what is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from cli.up import _with_checked_routers
from cli.up_file import TopologyFile
from services.topology.topology import Topology, load_topology


class Local:
    """What the routers are to use."""

    def __init__(self) -> None:
        self.tenants: list[object] = []
        self.error: OSError | None = None

    def use_tenants(self, topology: Topology) -> None:
        if self.error is not None:
            raise self.error
        self.tenants.append(topology.router.overrides.get("tenants"))


class Changing:
    """A file that is followed."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "topology.yaml"
        self.num_changes = 0
        self.change({})
        self.file = TopologyFile(self.path, lambda: _with_checked_routers(load_topology(self.path)))
        self.used = load_topology(self.path)
        self.local: Any = Local()
        self.reports: list[str] = []

    def change(self, tenants: object, **others: object) -> None:
        settings = {"workers": [{"role": "decode"}], "router": {"overrides": {"tenants": tenants}}, **others}
        self.path.write_text(yaml.safe_dump(settings))
        self.num_changes += 1
        os.utime(self.path, ns=(self.num_changes, self.num_changes))

    async def poll(self, times: int = 2) -> None:
        for _ in range(times):
            self.used = await self.file.poll(self.local, self.used, self.reports.append)


async def test_tenants_are_taken_over_once_the_file_is_at_rest(tmp_path: Path) -> None:
    changing = Changing(tmp_path)
    await changing.poll(3)
    assert changing.local.tenants == changing.reports == []
    limited = {"acme": {"requests_per_minute": 1}}
    changing.change({"half": {}})
    await changing.poll(1)
    changing.change(limited)
    await changing.poll(1)
    assert changing.local.tenants == [], "an editor may be about to write the rest"
    await changing.poll(3)
    assert changing.local.tenants == [limited]
    assert changing.reports == [f"{changing.path} has changed: routers take over its tenants"]
    changing.path.unlink()
    await changing.poll(3)
    assert len(changing.reports) == 1


async def test_what_else_changes_takes_a_restart_and_is_said_each_time(tmp_path: Path) -> None:
    changing = Changing(tmp_path)
    restart = f"{changing.path}: what else has changed there takes a restart"
    changing.change({}, drain_timeout_s=9)
    await changing.poll()
    assert changing.reports == [restart]
    changing.change({"acme": {}}, drain_timeout_s=9)
    await changing.poll()
    assert changing.reports[1:] == [f"{changing.path} has changed: routers take over its tenants", restart]
    changing.change({"acme": {}})
    await changing.poll()
    assert len(changing.reports) == 3, "it is as it runs"


async def test_a_file_that_cannot_be_used_changes_nothing_and_is_reported_once(tmp_path: Path) -> None:
    changing = Changing(tmp_path)
    changing.change({"acme": {"requests_per_minute": 0}})
    await changing.poll(4)
    [report] = changing.reports
    assert "is not used: router.overrides.tenants" in report and changing.local.tenants == []
    changing.local.error = OSError(28, "No space left on device")
    changing.change({"acme": {}})
    await changing.poll(3)
    assert len(changing.reports) == 2 and "No space left" in changing.reports[1]
    changing.local.error = None
    changing.change({"acme": {}})
    await changing.poll()
    assert changing.local.tenants == [{"acme": {}}]
