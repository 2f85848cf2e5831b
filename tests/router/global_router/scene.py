"""Pools and a global router in this process, over real gRPC; only the model is a fake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.base import RequestKind
from quartet.engine.step_engine import StepEngine
from quartet.rpc.channels import TlsConfig, create_channel
from quartet.rpc.server import ServerConfig
from quartet.transfer.base import Puller
from quartet.v1 import router_pb2 as pb
from quartet.v1 import router_pb2_grpc
from router import servicer as router_servicer
from router.global_router import pools as global_pools
from router.global_router.config import GlobalRouterConfig, without_units
from router.global_router.pipeline import RelayPipeline
from router.global_router.process import GlobalRouterProcess
from services.topology.launch import draw_events_key
from services.topology.topology import to_settings
from services.workers import process as worker_process
from services.workers.config import WorkerConfig
from tests.certificates import CertificateAuthority
from tests.router.system import TIMEOUT_S, Running, System

Stub = router_pb2_grpc.RouterServiceStub


class Certificates:
    """One authority for all pools: only the namespaces in the certificates keep them apart."""

    def __init__(self, directory: Path) -> None:
        self._authority = CertificateAuthority(directory / "certificates")
        self.events_key_file = draw_events_key(directory)
        self.operator = self.issue("global", "operator", "operator")
        self.client = self.issue("global", "client", "client")

    def issue(self, namespace: str, kind: str, name: str) -> TlsConfig:
        """A certificate of a holder in ``namespace``."""
        return self._authority.issue(f"{namespace}-{name}", f"quartet://{namespace}/{kind}/{name}")

    def server(self, namespace: str, kind: str, name: str, *trusted: str) -> ServerConfig:
        """How a process of ``namespace`` serves that trusts other namespaces."""
        return ServerConfig(
            tls=self.issue(namespace, kind, name), namespace=namespace, trusted_namespaces=tuple(trusted)
        )


@dataclass
class Scene:
    """Pools by namespace, and the global router before them."""

    pools: dict[str, System] = field(default_factory=dict)
    router: Running | None = None
    address: str = ""
    process: GlobalRouterProcess | None = None
    certificates: Certificates | None = None

    @property
    def pipeline(self) -> RelayPipeline | None:
        """What relays requests."""
        return None if self.process is None else self.process.pipeline

    def create_engine(self, config: WorkerConfig, kind: RequestKind, puller: Puller) -> StepEngine:
        """The engine of a worker of the pool whose model it loads."""
        return self.pools[Path(config.model_path).parent.name].create_engine(config, kind, puller)

    async def start_router(self, settings: Mapping[str, Any]) -> None:
        """Start the global router and wait until it serves."""
        routers = {name: [pool.address] for name, pool in self.pools.items()}
        whole = {**({} if "discovery" in settings else {"pool_routers": routers}), **settings}
        process = self.process = GlobalRouterProcess(build(GlobalRouterConfig, without_units(whole)))
        stop = asyncio.Event()
        self.router = Running(asyncio.create_task(process.run(stop)), stop)
        async with asyncio.timeout(TIMEOUT_S):
            while not process.address:
                assert not self.router.task.done(), self.router.task.exception()
                await asyncio.sleep(0.005)
        self.address = process.address

    async def wait_ready(self, *worker_ids: str) -> None:
        """Return when the global router knows these workers, by their names in it, as ready, and no others."""
        known: dict[str, pb.WorkerState] = {}
        async with self.channel() as channel, asyncio.timeout(TIMEOUT_S):
            async for response in Stub(channel).WatchWorkers(pb.WatchWorkersRequest()):
                known.update({one.record.worker_id: one.state for one in response.updated})
                for worker_id in response.removed_worker_ids:
                    known.pop(worker_id)
                if {name for name, state in known.items() if state == pb.WORKER_STATE_READY} == set(worker_ids):
                    return

    def channel(self) -> grpc.aio.Channel:
        """A channel to the global router, of an operator where there are certificates."""
        return create_channel(self.address, None if self.certificates is None else self.certificates.operator)

    async def close(self) -> None:
        """End everything."""
        if self.router is not None and not self.router.task.done():
            await self.router.end()
        for pool in self.pools.values():
            await pool.close()


@asynccontextmanager
async def running_pools(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: Mapping[str, Sequence[str]],
    settings: Mapping[str, Any],
    *,
    gated: Sequence[str] = (),
    routers: Mapping[str, Mapping[str, object]] | None = None,
    with_tls: bool = False,
    trusted_by: Mapping[str, Sequence[str]] | None = None,
    workers_trust: Mapping[str, Sequence[str]] | None = None,
    with_discovery: bool = False,
    answering: Sequence[str] | None = None,
) -> AsyncIterator[tuple[Scene, Stub]]:
    """Pools with these ``workers`` by namespace, and a global router.

    Pools that only prefill come first: the others may have them prefill.

    ``gated``: namespaces whose workers take a permit for each step, from the pool's ``gates``. ``with_tls``: mTLS
    everywhere; ``trusted_by`` has the namespaces that each trusts, which are all unless it says otherwise, and
    ``workers_trust`` those that its workers trust, where that differs. ``with_discovery``: routers of other
    pools are found in one registry, not in settings. ``answering``: namespaces whose routers answer; ``None``: all.
    """
    scene = Scene()
    certificates = scene.certificates = Certificates(tmp_path) if with_tls else None
    monkeypatch.setattr(worker_process, "create_engine", scene.create_engine)
    monkeypatch.setattr(router_servicer, "_WATCH_INTERVAL_S", 0.02)
    monkeypatch.setattr(global_pools, "_WATCH_AGAIN_S", 0.05)
    monkeypatch.setattr(global_pools, "_TICK_S", 0.1)
    prefill_pools: dict[str, tuple[str, ...]] = {}
    try:
        for namespace, worker_ids in workers.items():
            (tmp_path / namespace).mkdir()
            gates = {one: threading.Semaphore(0) for one in worker_ids} if namespace in gated else {}
            pool = scene.pools[namespace] = System(
                tmp_path / namespace,
                gates=gates,
                shared_registry=tmp_path / "registry" if with_discovery else None,
                namespace=namespace if with_discovery else "default",
            )
            router: dict[str, object] = {"server": ServerConfig(namespace=namespace)}
            router.update((routers or {}).get(namespace, {}))
            is_prefill = all(one.startswith("prefill") for one in worker_ids)
            if is_prefill:
                router["required_roles"] = (Role.PREFILL,)
            else:
                router["prefill_pools"] = dict(prefill_pools)
            if certificates is not None:
                trusted = (trusted_by or {}).get(namespace, [*workers, "global"])
                pool.settings_by_id = {
                    one: {
                        "server": certificates.server(
                            namespace, "worker", one, *(workers_trust or {}).get(namespace, trusted)
                        ),
                        "events_key_file": certificates.events_key_file,
                        "advertise_host": "127.0.0.1",
                    }
                    for one in worker_ids
                }
                router["server"] = certificates.server(namespace, "router", "router", *trusted)
                router["events_key_file"] = certificates.events_key_file
                router["trusted_gateways"] = ("global/router",)
            for worker_id in worker_ids:
                pool.start_worker(worker_id)
            await pool.start_router(**router)
            if is_prefill:
                prefill_pools[namespace] = () if with_discovery else (pool.address,)
        if with_discovery:
            files = {"directory": tmp_path / "registry", "poll_interval_s": 0.02, "ttl_s": 60}
            settings = {"discovery": {"kind": "file", "file": files}, **settings}
        own = {
            **settings,
            "router": {"server": to_settings(ServerConfig(namespace="global")), **settings.get("router", {})},
        }
        if certificates is not None:
            own["router"]["server"] = to_settings(certificates.server("global", "router", "router"))
            own["router"]["events_key_file"] = str(certificates.events_key_file)
        await scene.start_router(own)
        known = workers if answering is None else answering
        await scene.wait_ready(*(f"{name}.{one}" for name in known for one in workers[name]))
        async with scene.channel() as channel:
            yield scene, Stub(channel)
    finally:
        await scene.close()
