"""A router and workers in this process, over real gRPC and ZMQ; only the model is a fake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.discovery.base import Role
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind
from quartet.discovery.file import FileConfig
from quartet.engine.base import Generation, RequestKind
from quartet.engine.sampling import Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.rpc.server import ServerConfig
from quartet.telemetry.metrics import RouterMetrics
from quartet.transfer.base import Puller
from quartet.v1 import router_pb2 as pb
from quartet.v1 import router_pb2_grpc
from router import servicer as router_servicer
from router.config import RouterConfig
from router.policy.create import PolicyConfig, PolicyName
from router.process import RouterProcess
from services.workers import process as worker_process
from services.workers.config import WorkerConfig
from tests.engine.fakes import FakeRunner, expected_output
from tests.engine.tiers import make_tiers
from tests.text.builders import byte_level_backend

TIMEOUT_S = 50.0
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 64, 200
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)
_VOCAB_SIZE = byte_level_backend().get_vocab_size()

Stub = router_pb2_grpc.RouterServiceStub


def expected(prompt: list[int], num_output: int, *, choice: int = 0) -> list[int]:
    """What the fake model gives, undisturbed."""
    generation = Generation(prompt_token_ids=prompt, sampling=Sampling(max_tokens=num_output), choice=choice)
    return expected_output(generation, vocab_size=_VOCAB_SIZE, max_len=MAX_MODEL_LEN)


@dataclass
class Running:
    """A process that runs as a task of this one."""

    task: asyncio.Task[None]
    stop: asyncio.Event

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(TIMEOUT_S):
            await self.task


@dataclass
class System:
    """Starts and ends workers and the router.

    Attributes:
        gates: by worker id: where given, each step of its engine takes one permit.
        worker_settings: of every worker that is started from now on.
        settings_by_id: settings of single workers.
        unreachable: ids of workers whose blocks no transfer reaches, as in a GPU's memory.
        num_host_blocks: of the tier below each pool; 0: there is none.
        runners: by worker id.
        registry_ttl_s: after which a worker's record is gone that it no longer touches.
        shared_registry: a directory in which other namespaces are, too; ``None``: it has one of its own.
        namespace: in discovery.
    """

    directory: Path
    registry_ttl_s: float = 60
    shared_registry: Path | None = None
    namespace: str = "default"
    gates: dict[str, threading.Semaphore] = field(default_factory=dict)
    worker_settings: Mapping[str, Any] = field(default_factory=dict)
    settings_by_id: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unreachable: Collection[str] = ()
    num_host_blocks: int = 0
    runners: dict[str, FakeRunner] = field(default_factory=dict)
    workers: dict[str, Running] = field(default_factory=dict)
    engines: dict[str, StepEngine] = field(default_factory=dict)
    router: Running | None = None
    router_metrics: RouterMetrics | None = None
    address: str = ""

    @property
    def discovery(self) -> DiscoveryConfig:
        files = FileConfig(
            directory=self.shared_registry or self.directory / "discovery",
            namespace=self.namespace,
            poll_interval_s=0.02,
            ttl_s=self.registry_ttl_s,
        )
        return DiscoveryConfig(kind=DiscoveryKind.FILE, file=files)

    @property
    def signing_keys_file(self) -> Path:
        file = self.directory / "signing_keys"
        if not file.exists():
            file.touch(mode=0o600)
            file.write_text(f"test {'5e' * 32}\n")
        return file

    def write_model(self) -> Path:
        model = self.directory / "model"
        model.mkdir(exist_ok=True)
        (model / "tokenizer.json").write_text(byte_level_backend().to_str())
        (model / "chat_template.jinja").write_text(_TEMPLATE)
        return model

    def create_engine(self, config: WorkerConfig, kind: RequestKind, puller: Puller) -> StepEngine:
        def load() -> FakeRunner:
            runner = self.runners[config.worker_id] = FakeRunner(
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                vocab_size=_VOCAB_SIZE,
                max_model_len=MAX_MODEL_LEN,
                step_gate=self.gates.get(config.worker_id),
            )
            if config.worker_id in self.unreachable:
                runner.memory = None
            return runner

        # One whose gate is closed cannot end before it is killed.
        close_timeout_s = 0.2 if config.worker_id in self.gates else 10.0
        engine = StepEngine(
            load,
            SchedulerConfig(),
            puller=puller,
            kinds=frozenset({kind}),
            close_timeout_s=close_timeout_s,
            tiers=make_tiers(self.num_host_blocks) if self.num_host_blocks else None,
        )
        self.engines[config.worker_id] = engine
        return engine

    def start_worker(self, worker_id: str) -> None:
        config = WorkerConfig(
            worker_id=worker_id,
            model_name="tiny",
            model_path=str(self.write_model()),
            discovery=self.discovery,
            signing_keys_file=self.signing_keys_file,
            **{"drain_timeout_s": 2.0, **self.worker_settings, **self.settings_by_id.get(worker_id, {})},
        )
        stop = asyncio.Event()
        process = worker_process.WorkerProcess(config, Role(worker_id.split("-", maxsplit=1)[0]))
        self.workers[worker_id] = Running(asyncio.create_task(process.run(stop)), stop)

    async def start_router(self, **changes: object) -> None:
        settings: dict[str, Any] = {
            "server": ServerConfig(),
            "discovery": self.discovery,
            "policy": PolicyConfig(name=PolicyName.LEAST_LOADED),
            "signing_keys_file": self.signing_keys_file,
            "drain_timeout_s": 2.0,
            **changes,
        }
        process = RouterProcess(RouterConfig(**settings))
        stop = asyncio.Event()
        self.router = Running(asyncio.create_task(process.run(stop)), stop)
        async with asyncio.timeout(TIMEOUT_S):
            while not process.address:
                assert not self.router.task.done(), self.router.task.exception()
                await asyncio.sleep(0.005)
        self.address, self.router_metrics = process.address, process._metrics

    async def wait_serving(self) -> None:
        """Return when the router's health is SERVING."""
        async with grpc.aio.insecure_channel(self.address) as channel, asyncio.timeout(TIMEOUT_S):
            async for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return

    async def wait_workers(self, is_wanted: Callable[[dict[str, pb.WorkerStatus]], bool]) -> None:
        """Watch until the workers are as wanted."""
        known: dict[str, pb.WorkerStatus] = {}
        async with grpc.aio.insecure_channel(self.address) as channel, asyncio.timeout(TIMEOUT_S):
            async for response in Stub(channel).WatchWorkers(pb.WatchWorkersRequest()):
                known.update({status.record.worker_id: status for status in response.updated})
                for worker_id in response.removed_worker_ids:
                    known.pop(worker_id)
                if is_wanted(known):
                    return

    async def wait_ready(self) -> None:
        wanted = dict.fromkeys(self.workers, pb.WORKER_STATE_READY)
        await self.wait_workers(lambda known: {name: status.state for name, status in known.items()} == wanted)

    async def wait_idle(self) -> None:
        """Return when no worker has a request or holds a block."""
        await self.wait_workers(
            lambda known: all(
                status.num_requests == 0
                and all(rank.num_in_use_blocks + rank.num_held_blocks == 0 for rank in status.load.ranks)
                for status in known.values()
            )
        )

    async def close(self) -> None:
        for gate in self.gates.values():
            gate.release(10_000)
        if self.router is not None and not self.router.task.done():
            await self.router.end()
        await asyncio.gather(*(worker.end() for worker in self.workers.values() if not worker.task.done()))


@asynccontextmanager
async def running_system(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *worker_ids: str,
    gated: tuple[str, ...] = (),
    worker: Mapping[str, Any] | None = None,
    settings_by_id: Mapping[str, Mapping[str, Any]] | None = None,
    unreachable: Collection[str] = (),
    num_host_blocks: int = 0,
    registry_ttl_s: float = 60,
    **router: object,
) -> AsyncIterator[tuple[System, Stub]]:
    """A system whose workers are all ready, and a stub for its router; ``worker``: settings of every worker."""
    gates = {worker_id: threading.Semaphore(0) for worker_id in gated}
    system = System(
        tmp_path,
        registry_ttl_s=registry_ttl_s,
        gates=gates,
        worker_settings=worker or {},
        settings_by_id=settings_by_id or {},
        unreachable=unreachable,
        num_host_blocks=num_host_blocks,
    )
    monkeypatch.setattr(worker_process, "create_engine", system.create_engine)
    # What tests wait for is seen by watching.
    monkeypatch.setattr(router_servicer, "_WATCH_INTERVAL_S", 0.02)
    try:
        for worker_id in worker_ids:
            system.start_worker(worker_id)
        await system.start_router(**router)
        if worker_ids:
            await system.wait_ready()
        async with grpc.aio.insecure_channel(system.address) as channel:
            yield system, Stub(channel)
    finally:
        await system.close()
