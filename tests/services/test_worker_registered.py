"""A worker's health when it is registered."""

from __future__ import annotations

import asyncio
import threading

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from quartet.discovery.base import Role
from quartet.engine.base import RequestKind
from tests.engine.fakes import FakeRunner
from tests.router.records import make_record
from tests.services.stream_workers import collect, expected, make_start, stream_worker, until
from tests.services.test_worker import PROMPT, FakeRegistration, make_worker, next_status


async def test_a_worker_that_is_stuck_when_it_is_registered_does_not_serve() -> None:
    gate = threading.Semaphore(1)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as served, asyncio.TaskGroup() as tasks:
        worker = make_worker(served, Role.DECODE, stall_timeout_s=0.1)
        watching = tasks.create_task(worker.watch_health())
        call = served.decodes().start(start := make_start(PROMPT))
        await until(lambda: not worker.sample_load().is_healthy)
        await worker.announce(FakeRegistration(make_record(), on_close=lambda _: None))
        health = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        assert await next_status(health) == HealthCheckResponse.NOT_SERVING
        gate.release(1000)
        assert await next_status(health) == HealthCheckResponse.SERVING
        assert await collect(call) == expected(start)
        health.cancel()
        watching.cancel()
