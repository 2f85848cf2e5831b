"""A worker's health and its leaving."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from prometheus_client import CollectorRegistry

from quartet.discovery.base import Registration, Role, WorkerRecord
from quartet.engine.base import RequestKind, Turn
from quartet.engine.scheduler import SchedulerConfig
from quartet.errors import DiscoveryError, DrainingError
from quartet.events.load import TransferTotal
from quartet.events.publisher import PromptQueue
from quartet.supervision import AwakeClock
from quartet.telemetry.http import Probes, TelemetryServer
from quartet.transfer.base import FetchResult, TransferWay
from services.workers import worker as worker_module
from services.workers.kv_events import KvEvents
from services.workers.worker import ProgressWatch, TransferTotals, TurnWatch, Worker
from tests.engine.fakes import FakeRunner
from tests.fakes.memory_registry import MemoryRegistry
from tests.router.records import make_record
from tests.services.fake_kv import FakeKvPublisher
from tests.services.stream_workers import WAIT_S, StreamWorker, collect, expected, make_start, stream_worker, until

PROMPT = tuple(range(1, 11))


class FakeRegistration(Registration):
    """Takes note of its end."""

    is_closed = False

    async def _remove(self) -> None:
        self.is_closed = True


class FakeRegistry(MemoryRegistry):
    """Lists ``records``; ``None``: it can't be reached."""

    def __init__(self, records: Sequence[WorkerRecord] | None) -> None:
        super().__init__()
        self.records = records
        self.is_asked = False

    async def workers(self) -> list[WorkerRecord]:
        self.is_asked = True
        if self.records is None:
            raise DiscoveryError("out of reach")
        return list(self.records)


def make_worker(
    served: StreamWorker, role: Role, *, stall_timeout_s: float = 5.0, drain_timeout_s: float = 5.0
) -> Worker:
    return Worker(
        make_record(role=role),
        served.engine,
        served.dispatcher,
        served.source,
        served.server,
        KvEvents(served.engine, FakeKvPublisher()),
        drain_timeout_s=drain_timeout_s,
        stall_timeout_s=stall_timeout_s,
        poll_interval_s=0.01,
    )


async def next_status(health: Any) -> int:
    """The next status that a watcher of health gets."""
    async with asyncio.timeout(WAIT_S):
        response = await health.read()
    return int(response.status)


async def probe(address: str, path: str) -> int:
    """The HTTP status that a probe gets."""

    def get() -> int:
        connection = HTTPConnection(address, timeout=WAIT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    return await asyncio.to_thread(get)


def test_only_work_in_flight_without_a_step_is_a_standstill() -> None:
    watch = ProgressWatch(stall_timeout_s=10.0)
    assert watch.is_moving(num_steps=0, num_in_flight=0, now=0.0)
    assert watch.is_moving(num_steps=0, num_in_flight=0, now=100.0)  # idle for long
    assert watch.is_moving(num_steps=0, num_in_flight=1, now=105.0)
    assert not watch.is_moving(num_steps=0, num_in_flight=1, now=111.0)
    assert watch.is_moving(num_steps=1, num_in_flight=1, now=112.0)
    assert watch.is_moving(num_steps=1, num_in_flight=1, now=122.0)
    assert not watch.is_moving(num_steps=1, num_in_flight=1, now=122.1)


def turn(number: int, expected_s: float | None, thread: int = 0) -> Turn:
    return Turn(thread, number, expected_s)


def test_a_thread_that_is_in_one_turn_for_much_longer_than_forecast_hangs() -> None:
    watch = TurnWatch(stall_timeout_s=30.0)
    assert watch.is_moving([turn(1, 0.02)], now=0.0)
    assert watch.is_moving([turn(1, 0.02)], now=6.0)
    assert not watch.is_moving([turn(1, 0.02)], now=7.0)
    assert watch.is_moving([turn(2, 0.02)], now=8.0)
    assert watch.is_moving([], now=60.0)  # it waits for work, and then begins the same turn anew
    assert watch.is_moving([turn(2, 0.02)], now=61.0)


def test_a_long_step_may_take_long_and_one_of_unknown_length_the_whole_timeout() -> None:
    watch = TurnWatch(stall_timeout_s=30.0)
    turns = [turn(1, 4.0), turn(1, None, thread=1)]
    assert watch.is_moving(turns, now=0.0)
    assert watch.is_moving(turns, now=20.0)
    assert not watch.is_moving(turns, now=20.1)
    assert watch.is_moving(turns[1:], now=30.0)
    assert not watch.is_moving(turns[1:], now=30.1)


async def test_a_hanging_step_of_known_length_shows_long_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_HANGS_AFTER_S", 0.1)
    monkeypatch.setattr(worker_module, "_HANGS_AFTER_FORECASTS", 0.0)
    gate = threading.Semaphore(20)  # enough steps that their length is known
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as served, asyncio.TaskGroup() as tasks:
        worker = make_worker(served, Role.DECODE, stall_timeout_s=3600.0)
        await worker.announce(FakeRegistration(make_record(), on_close=lambda _: None))
        watching = tasks.create_task(worker.watch_health())
        call = served.decodes().start(make_start(PROMPT, max_tokens=60))
        await until(lambda: not worker.sample_load().is_healthy)
        assert not worker.is_ready
        [hanging] = served.engine.turns()
        assert hanging.expected_s is not None
        gate.release(1000)
        await until(lambda: worker.sample_load().is_healthy)
        await collect(call)
        await until(lambda: not served.engine.turns())  # it waits for work
        watching.cancel()


async def test_a_standstill_and_its_end_show_in_health_probes_and_load() -> None:
    gate = threading.Semaphore(1)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as served, asyncio.TaskGroup() as tasks:
        worker = make_worker(served, Role.DECODE, stall_timeout_s=0.1)
        await worker.announce(FakeRegistration(make_record(), on_close=lambda _: None))
        watching = tasks.create_task(worker.watch_health())
        probes = Probes(is_alive=lambda: worker.is_alive, is_ready=lambda: worker.is_ready)
        telemetry = TelemetryServer("127.0.0.1:0", CollectorRegistry(), probes)
        http = f"127.0.0.1:{telemetry.start()}"
        health = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        assert await next_status(health) == HealthCheckResponse.SERVING
        start = make_start(PROMPT)
        call = served.decodes().start(start)
        assert await next_status(health) == HealthCheckResponse.NOT_SERVING
        assert not worker.sample_load().is_healthy
        # Still alive: a restart would lose the request, and it may only be slow.
        assert [await probe(http, path) for path in ("/readyz", "/livez")] == [503, 200]
        gate.release(1000)
        assert await next_status(health) == HealthCheckResponse.SERVING
        assert worker.sample_load().is_healthy
        assert [await probe(http, path) for path in ("/readyz", "/livez")] == [200, 200]
        assert await collect(call) == expected(start)
        health.cancel()
        watching.cancel()
        await telemetry.close()


class JumpingClock:
    """Real seconds and ``away_s`` more; counts how often it was asked."""

    def __init__(self) -> None:
        self.away_s = 0.0
        self.num_asked = 0

    def monotonic(self) -> float:
        self.num_asked += 1
        return time.monotonic() + self.away_s


async def test_a_worker_that_was_stopped_with_work_in_flight_is_not_stuck_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = JumpingClock()
    monkeypatch.setattr(worker_module, "time", clock)
    monkeypatch.setattr(worker_module, "AwakeClock", partial(AwakeClock, clock=clock.monotonic))
    gate = threading.Semaphore(0)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as served, asyncio.TaskGroup() as tasks:
        worker = make_worker(served, Role.DECODE, stall_timeout_s=3600.0)
        call = served.decodes().start(start := make_start(PROMPT))
        await until(lambda: bool(served.engine.turns()))
        watching = tasks.create_task(worker.watch_health())
        for away_s in (0.0, 7200.0):
            clock.away_s, num_asked = away_s, clock.num_asked
            await until(lambda: clock.num_asked >= num_asked + 3)  # noqa: B023 - it is called within the loop only
        assert worker.sample_load().is_healthy
        gate.release(1000)
        assert await collect(call) == expected(start)
        watching.cancel()


async def test_the_load_describes_the_running_step() -> None:
    gate = threading.Semaphore(0)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as served:
        worker, client = make_worker(served, Role.DECODE), served.decodes()
        first, second = make_start(PROMPT), make_start(PROMPT[:7])
        calls = [client.start(first)]
        await until(lambda: worker.sample_load().ranks[0].num_running == 1)
        calls.append(client.start(second))
        await until(lambda: worker.sample_load().ranks[0].num_waiting == 1)
        [load] = worker.sample_load().ranks
        assert (load.num_queued_prefill_tokens, load.num_unbegun_prefill_tokens) == (17, 7)
        assert load.max_step_tokens == SchedulerConfig().max_num_batched_tokens
        assert worker.prompt_queues() == [PromptQueue(17, 7, 1)]
        gate.release(1000)
        assert [await collect(call) for call in calls] == [expected(first), expected(second)]
        await until(lambda: worker.sample_load().ranks[0].step_time is not None)
        [load] = worker.sample_load().ranks
        assert (load.num_unbegun_prefill_tokens, load.num_decoding, load.step_ends_in_s) == (0, 0, 0.0)


def test_what_was_pulled_is_counted_by_way_and_the_way_used_last_comes_last() -> None:
    totals = TransferTotals()
    for way, size_bytes in (
        (TransferWay.SHM, 3),
        (TransferWay.GRPC, 5),
        (TransferWay.SHM, 4),
        (TransferWay.GRPC, 0),  # ended by messages alone: all was cached
    ):
        totals.add(FetchResult(way, size_bytes, 0.5))
    assert totals.by_way == (TransferTotal("grpc", 5, 0.5), TransferTotal("shm", 7, 1.0))


async def test_a_drain_refuses_new_requests_and_waits_for_running_ones() -> None:
    gate = threading.Semaphore(0)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as served:
        worker, registration = (
            make_worker(served, Role.DECODE),
            FakeRegistration(make_record(), on_close=lambda _: None),
        )
        await worker.announce(registration)
        assert [worker.is_ready] == [True]
        client = served.decodes()
        start = make_start(PROMPT)
        call = client.start(start)
        await until(lambda: served.dispatcher.num_running == 1)
        gate.release(1000)
        outcome = await worker.drain()
        assert (outcome.num_completed, outcome.num_cancelled) == (1, 0)
        assert await collect(call) == expected(start)
        with pytest.raises(DrainingError):
            await client.start(make_start(PROMPT)).next()
        assert registration.is_closed
        assert [worker.is_ready] == [False]
        assert worker.sample_load().is_draining


@pytest.mark.parametrize(("limit_s", "asked_s"), [(3600.0, 0.05), (0.05, 3600.0)])
async def test_a_drain_cancels_requests_that_do_not_end_in_time(limit_s: float, asked_s: float) -> None:
    gate = threading.Semaphore(2)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as served:
        worker = make_worker(served, Role.DECODE, drain_timeout_s=limit_s)
        call = served.decodes().start(make_start(PROMPT, max_tokens=200))
        assert (await call.next()).started is not None
        async with asyncio.timeout(WAIT_S):
            outcome = await worker.drain(asked_s)
        assert (outcome.num_completed, outcome.num_cancelled) == (0, 1)
        gate.release(1000)
        with pytest.raises(DrainingError):
            await collect(call)


SUCCESSORS = {
    "another": make_record(worker_id="decode-1", epoch=2),
    "its-next-life": make_record(epoch=2),
    "one-of-more-abilities": replace(make_record(epoch=2), adapters=("law",), media=("image",), max_model_len=10**6),
}


@pytest.mark.parametrize("successor", SUCCESSORS.values(), ids=SUCCESSORS)
async def test_a_drain_leaves_long_requests_to_another_worker_as_soon_as_there_is_one(
    monkeypatch: pytest.MonkeyPatch, successor: WorkerRecord
) -> None:
    monkeypatch.setattr(worker_module, "_MOVE_AFTER_S", 0.05)
    monkeypatch.setattr(worker_module, "_LAST_OUTPUTS_S", 0.05)
    gate = threading.Semaphore(3)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as served:
        worker = make_worker(served, Role.DECODE, drain_timeout_s=3600.0)
        registration = FakeRegistration(worker.record, on_close=lambda _: None)
        registry = FakeRegistry([worker.record])
        await worker.announce(registration, registry)
        start = make_start(PROMPT, max_tokens=200)
        call = served.decodes().start(start)
        assert (await call.next()).started is not None
        draining = asyncio.create_task(worker.drain())
        await until(lambda: registry.is_asked)
        assert served.dispatcher.num_running == 1 and not draining.done()
        registry.records = [successor]
        async with asyncio.timeout(WAIT_S):
            outcome = await draining
        assert (outcome.num_completed, outcome.num_cancelled) == (0, 1)
        gate.release(1000)
        with pytest.raises(DrainingError):
            await collect(call)


ABLE = replace(make_record(), max_model_len=500, adapters=("law", "code"), media=("image",), max_media_tokens=100)
OTHER = replace(ABLE, worker_id="decode-1", epoch=2)

NOT_STAND_INS: dict[str, Sequence[WorkerRecord] | None] = {
    "itself": [ABLE],
    "another-role": [replace(OTHER, role=Role.PREFILL)],
    "another-model": [replace(OTHER, model_name="other")],
    "other-weights": [replace(OTHER, model_fingerprint="other")],
    "another-version": [replace(OTHER, contract_version="quartet.v2")],
    "shorter-sequences": [replace(OTHER, max_model_len=ABLE.max_model_len - 1)],
    "no-room-for-the-longest": [replace(OTHER, num_blocks=1)],
    "without-an-adapter": [replace(OTHER, adapters=("law",))],
    "without-media": [replace(OTHER, media=())],
    "smaller-media": [replace(OTHER, max_media_tokens=99)],
    "fewer-sampling-fields": [replace(OTHER, sampling_fields=())],
    "unknown": None,
}


@pytest.mark.parametrize("others", NOT_STAND_INS.values(), ids=NOT_STAND_INS)
async def test_a_drain_lets_long_requests_end_where_no_other_worker_can_go_on_with_them(
    monkeypatch: pytest.MonkeyPatch, others: Sequence[WorkerRecord] | None
) -> None:
    monkeypatch.setattr(worker_module, "_MOVE_AFTER_S", 0.01)
    gate = threading.Semaphore(1)
    async with stream_worker(RequestKind.DECODE, FakeRunner(step_gate=gate)) as served:
        worker, registry = make_worker(served, Role.DECODE, drain_timeout_s=3600.0), FakeRegistry(others)
        worker.record = ABLE
        await worker.announce(FakeRegistration(worker.record, on_close=lambda _: None), registry)
        start = make_start(PROMPT)
        call = served.decodes().start(start)
        await until(lambda: served.dispatcher.num_running == 1)
        draining = asyncio.create_task(worker.drain())
        await until(lambda: registry.is_asked)
        for _ in range(10):  # by then it would have cut the request
            await asyncio.sleep(0)
        gate.release(1000)
        async with asyncio.timeout(WAIT_S):
            outcome = await draining
        assert (outcome.num_completed, outcome.num_cancelled) == (1, 0)
        assert await collect(call) == expected(start)


async def test_a_drain_does_not_wait_long_for_hand_offs_where_another_worker_can_prefill_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "_LAST_PULLS_S", 0.05)
    async with stream_worker(RequestKind.PREFILL) as served:
        worker = make_worker(served, Role.PREFILL, drain_timeout_s=3600.0)
        other = make_record(worker_id="prefill-1", epoch=2)
        await worker.announce(FakeRegistration(worker.record, on_close=lambda _: None), FakeRegistry([other]))
        outcome = await served.prefills().start(make_start(PROMPT)).outcome()
        assert outcome.hand_off is not None
        async with asyncio.timeout(WAIT_S):
            await worker.drain()
        assert served.source.counts.held == 1
        served.source.withdraw(1)
        await served.wait_clean()


async def test_a_drain_waits_for_hand_offs_that_are_not_fetched_yet() -> None:
    async with stream_worker(RequestKind.PREFILL) as served:
        worker = make_worker(served, Role.PREFILL)
        outcome = await served.prefills().start(make_start(PROMPT)).outcome()
        assert outcome.hand_off is not None
        draining = asyncio.create_task(worker.drain())
        await until(lambda: worker.sample_load().is_draining)
        assert not draining.done()
        served.source.withdraw(1)  # as a pull that ends does
        async with asyncio.timeout(WAIT_S):
            await draining
        await served.wait_clean()
