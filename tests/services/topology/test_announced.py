"""Waiting for workers to announce themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path

from quartet.discovery.create import DiscoveryConfig, DiscoveryKind, create_registry
from quartet.discovery.etcd_client import EtcdConfig
from quartet.discovery.file import FileConfig
from services.topology.launch import wait_announced
from tests.discovery.records import make_record
from tests.etcd_server import EtcdServer

TIMEOUT_S = 30.0


async def test_it_waits_for_the_last_of_them(tmp_path: Path) -> None:
    discovery = DiscoveryConfig(kind=DiscoveryKind.FILE, file=FileConfig(directory=tmp_path))
    registry = create_registry(discovery)
    await registry.register(make_record("encode-0"))
    waiting = asyncio.create_task(wait_announced(discovery, ["encode-0", "decode-0"]))
    async with asyncio.timeout(TIMEOUT_S):
        await wait_announced(discovery, ["encode-0"])
    assert not waiting.done()
    await registry.register(make_record("decode-0"))
    async with asyncio.timeout(TIMEOUT_S):
        await waiting
    await registry.close()


async def test_a_registry_that_is_not_there_yet_is_waited_for(etcd: EtcdServer) -> None:
    discovery = DiscoveryConfig(etcd=EtcdConfig(endpoints=(etcd.endpoint,), request_timeout_s=0.5))
    registry = create_registry(discovery)
    etcd.kill()
    waiting = asyncio.create_task(wait_announced(discovery, ["decode-0"]))
    await asyncio.wait([waiting], timeout=1.0)
    assert not waiting.done()
    etcd.start()
    await registry.register(make_record("decode-0"))
    async with asyncio.timeout(TIMEOUT_S):
        await waiting
    await registry.close()
