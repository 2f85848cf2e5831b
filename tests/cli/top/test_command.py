"""``quartet top`` where there is no terminal: one table, or JSON."""

from __future__ import annotations

import asyncio
import json

import pytest

from cli.top import command
from quartet.api.convert.fleet import to_fleet_totals
from tests.cli.conftest import RunCli, start_router
from tests.cli.top.fleets import NOTHING
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter, worker_status

__all__ = ["start_router"]


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> FakeRouter:
    monkeypatch.setattr(command, "ONCE_S", 0.0)
    router = FakeRouter()
    router.workers = [worker_status("decode-0", num_running=3, max_running=8), worker_status("decode-1")]
    router.totals = to_fleet_totals(NOTHING)
    return router


async def test_a_pipe_gets_one_table(router: FakeRouter, start_router: StartRouter, run_cli: RunCli) -> None:
    result = await run_cli("top", "--router", await start_router(router))
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    [row] = [line.split() for line in result.stdout.splitlines() if "decode-0" in line]
    assert row[:6] == ["decode-0", "decode", "ready", "3", "of", "8"]
    assert "router-1  kv_aware  2 of 2 workers ready" in result.stdout
    assert "no alerts within 0 s\ntoo short to know: QuartetWorkerLost, QuartetEngineStalled, " in result.stdout


async def test_json_has_figures_workers_and_alerts(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    result = await run_cli("top", "--json", "--router", await start_router(router))
    shown = json.loads(result.stdout)
    assert (shown["router"], shown["figures"]["num_queued"], shown["alerts"]) == ("router-1", 0, [])
    assert "QuartetWorkerLost" in shown["alerts_not_known"] and "QuartetRoleMissing" not in shown["alerts_not_known"]
    assert [(one["worker_id"], one["num_running"]) for one in shown["workers"]] == [("decode-0", 3), ("decode-1", 0)]


async def test_a_router_without_totals_is_shown_at_once(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ONCE_S", 600.0)
    router.totals = None
    result = await run_cli("top", "--json", "--router", await start_router(router))
    shown = json.loads(result.stdout)
    assert (shown["router"], shown["figures"]["num_queued"], len(shown["workers"])) == (None, None, 2)


async def test_a_router_that_falls_silent_is_not_waited_for(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ONCE_S", 600.0)
    monkeypatch.setattr(command, "MAX_SILENCE_S", 0.5)
    async with asyncio.timeout(60):
        result = await run_cli("top", "--once", "--router", await start_router(router))
    assert result.exit_code == 1
    assert "the router has said nothing for 0.5 s" in result.stderr


async def test_a_fleet_without_workers_alerts(router: FakeRouter, start_router: StartRouter, run_cli: RunCli) -> None:
    router.workers = []
    result = await run_cli("top", "--json", "--router", await start_router(router))
    assert json.loads(result.stdout)["alerts"] == [{"rule": "QuartetRoleMissing", "text": "no worker is ready"}]


async def test_no_router_is_one_line(run_cli: RunCli) -> None:
    result = await run_cli("top", "--router", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no router answers at 127.0.0.1:1" in result.stderr
    assert "Traceback" not in result.output
