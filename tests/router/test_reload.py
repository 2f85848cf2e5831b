"""What a router takes over of its configuration while it runs, and what it does with a file that it can't use."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from prometheus_client import CollectorRegistry

from quartet.config import build, load_yaml
from quartet.errors import RateLimitedError
from quartet.telemetry.metrics import ReloadedFile, ReloadMetrics
from router import __main__ as main_module
from router import reload as module
from router.config import RouterConfig
from router.global_router.config import GlobalRouterConfig, without_units
from router.process import RouterProcess
from router.rate_limits import RateLimits
from router.reload import ConfigFile
from router.tenants import TenantConfig, TenantNames, Tenants
from tests.router.fakes import TIMEOUT_S
from tests.router.global_router.test_relay import agg
from tests.router.http.face import until

LIMITED = "tenants: {acme: {requests_per_minute: 1}}\n"


class Watched:
    """A file of a configuration, and what was taken over of it."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        path.write_text(text)
        self.registry = CollectorRegistry()
        self.count = ReloadMetrics(self.registry).counter(ReloadedFile.CONFIG)
        self.used: list[RouterConfig] = []
        self.came = asyncio.Event()
        self.file = ConfigFile(path, self.load(), self.load, lambda config: config)

    def load(self) -> RouterConfig:
        return build(RouterConfig, load_yaml(self.path))

    def use(self, config: RouterConfig) -> None:
        self.used.append(config)
        self.came.set()

    async def poll(self, *, is_complete: bool = True) -> None:
        await self.file.poll(self.use, self.count, is_complete=is_complete)

    def counted(self) -> tuple[float | None, float | None]:
        read: Callable[..., float | None] = self.registry.get_sample_value
        labels = {"file": "config"}
        return (
            read("quartet_process_reloads_total", labels),
            read("quartet_process_failed_reloads_total", labels),
        )


async def test_a_changed_file_is_taken_over_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched(tmp_path / "router.yaml", "{}\n")
    await watched.poll()
    assert not watched.used
    watched.path.write_text(LIMITED)
    await watched.poll()
    await watched.poll()
    assert [config.tenants for config in watched.used] == [{"acme": TenantConfig(requests_per_minute=1)}]
    assert watched.counted() == (1, 0) and "takes a restart" not in caplog.text
    watched.path.write_text(LIMITED + "drain_timeout_s: 7\n")
    await watched.poll()
    assert watched.counted() == (2, 0) and "takes a restart" in caplog.text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tenants: {acme: {weight: 0}}\n", "weight"),
        ("tenants: [", "router.yaml"),
        ("[" * 5000, "nested too deeply"),
        ("drain_timeout_s: 2026-99-99\n", "not YAML"),
        ("{{a: b}: c}\n", "not YAML"),
        (None, "router.yaml"),
        ("identity_tenants: {front: [acme]}\n", "server.tls"),
        ("tenants: {acme: {isolated: true}}\n", "take a restart"),
    ],
)
async def test_a_file_that_cannot_be_used_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, why: str
) -> None:
    watched = Watched(tmp_path / "router.yaml", LIMITED)
    if text is None:
        watched.path.unlink()
    else:
        watched.path.write_text(text)
    await watched.poll()
    await watched.poll()
    assert not watched.used and watched.counted() == (0, 1)
    [record] = caplog.records
    assert why in record.getMessage()
    watched.path.write_text("{}\n")
    await watched.poll()
    assert watched.used[-1].tenants == {} and watched.counted() == (1, 1)


async def test_a_global_routers_file_says_too_what_takes_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, used = tmp_path / "global.yaml", list[RouterConfig]()
    settings = agg("a", "b")

    def load() -> GlobalRouterConfig:
        return build(GlobalRouterConfig, without_units(load_yaml(path)))

    async def change(**changes: Any) -> None:
        path.write_text(yaml.safe_dump({**settings, **changes}))
        await file.poll(used.append, lambda is_used: None, is_complete=True)

    path.write_text(yaml.safe_dump(settings))
    file = ConfigFile(path, load(), load, lambda config: config.router)
    router = {"tenants": {"acme": {"requests_per_minute": 1}}}
    await change(router=router)
    assert used[-1].tenants["acme"].is_limited and "takes a restart" not in caplog.text
    await change(router=router, default_ttft_target_ms=7.0)
    assert len(used) == 2 and "takes a restart" in caplog.text


async def test_a_file_that_is_being_written_is_not_read_before_it_is_whole(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "router.yaml", LIMITED)
    for text in ("", "tenants: {}\n", LIMITED + "trusted_gateways: [edge]\n"):
        watched.path.write_text(text)
        await watched.poll(is_complete=False)
        assert not watched.used and watched.counted() == (0, 0)
    await watched.poll(is_complete=False)
    await watched.poll(is_complete=False)
    assert [config.trusted_gateways for config in watched.used] == [("edge",)]


async def test_sighup_has_the_file_looked_at_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_INTERVAL_S", 10 * TIMEOUT_S)
    watched = Watched(tmp_path / "router.yaml", "{}\n")

    class Process:
        async def run(self, _stop: asyncio.Event, config_file: ConfigFile[RouterConfig]) -> None:
            following = asyncio.create_task(config_file.follow(watched.use, watched.count))
            try:
                watched.path.write_text(LIMITED)
                os.kill(os.getpid(), signal.SIGHUP)
                async with asyncio.timeout(TIMEOUT_S):
                    await watched.came.wait()
            finally:
                following.cancel()

    loop = asyncio.get_running_loop()
    with mock.patch("gc.freeze"), mock.patch("gc.set_threshold"):
        try:
            await main_module._run(lambda: Process(), watched.file)  # type: ignore[arg-type, return-value]
        finally:
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
    assert watched.used[0].tenants["acme"].requests_per_minute == 1


async def test_a_router_that_serves_takes_tenants_and_gateways_over(tmp_path: Path) -> None:
    watched = Watched(
        tmp_path / "router.yaml",
        f"server: {{address: 127.0.0.1:0}}\ndiscovery: {{kind: file, file: {{directory: {tmp_path / 'discovery'}}}}}\n",
    )
    process, stop = RouterProcess(watched.load()), asyncio.Event()
    running = asyncio.create_task(process.run(stop, watched.file))
    try:
        await until(lambda: bool(process.address) or running.done())
        watched.path.write_text(watched.path.read_text() + LIMITED + "trusted_gateways: [edge]\n")
        watched.file.ask()
        await until(lambda: process._tenants.config("acme").is_limited or running.done())
        assert process._names.tenant("edge", "acme") == "acme"
    finally:
        stop.set()
        await running


def test_replaced_tenants_count_for_all_who_share_the_table() -> None:
    tenants = Tenants({"acme": TenantConfig(weight=2)})
    limits = RateLimits(tenants)
    assert limits.admit("acme", None, 0) is None and tenants.config("acme").weight == 2
    tenants.replace({"ac*": TenantConfig(requests_per_minute=1)})
    assert limits.admit("acme", None, 0) is not None
    with pytest.raises(RateLimitedError):
        limits.admit("acme", None, 0)
    names = TenantNames(trusted_gateways=["edge"], tenants=tenants)
    assert names.tenant("edge", "acme") == "acme"
    names.replace([], {"edge": ["globex"]})
    assert names.tenant("edge", "") == "globex"
