"""Workers that come, break, leave and return under a router, over real gRPC and ZMQ."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import zmq
from prometheus_client import CollectorRegistry

from quartet.discovery.base import Rank, Role, WorkerKey, WorkerRecord
from quartet.discovery.create import create_registry
from quartet.discovery.file import FileRegistration
from quartet.discovery.record_json import to_json
from quartet.errors import ServingError, WorkerReplacedError, WorkerUnavailableError
from quartet.events.load import WorkerLoad
from quartet.events.publisher import EventPublisher
from quartet.events.wire import LOAD_TOPIC
from quartet.rpc import channels
from quartet.rpc.errors import from_rpc_error
from quartet.rpc.server import ServerConfig
from quartet.streams.client import DecodeClient
from quartet.streams.worker_client import WorkerClient
from quartet.telemetry.metrics import RouterMetrics
from quartet.v1 import router_pb2 as pb
from quartet.v1 import types_pb2, worker_pb2
from router import process as router_process
from router.config import AttemptConfig
from router.fleet import Fleet
from router.kv_index.feed import KvJoins
from router.kv_index.index import PrefixIndex
from router.workers import PoolKey, WorkerTable
from services.topology.launch import free_port
from services.workers import process as worker_process
from services.workers import worker
from services.workers.servicer import WorkerServicer
from tests.certificates import CertificateAuthority
from tests.fakes.memory_registry import MemoryRegistry, MemoryStore
from tests.router.records import make_record
from tests.router.system import TIMEOUT_S, Stub, System, expected, running_system
from tests.router.test_servicer import PROMPT, generate, make_start, read_all, token_ids_of
from tests.services.stream_workers import make_start as make_worker_start
from tests.services.stream_workers import until
from tests.services.test_model_files import FakeWorker, serving
from tests.text.builders import byte_level_backend


async def open_until_token(
    stub: Stub, num_tokens: int = 12
) -> tuple[grpc.aio.StreamStreamCall, list[pb.GenerateResponse]]:
    """A call that has shown its first token, and what came so far."""
    call = stub.Generate()
    await call.write(pb.GenerateRequest(start=make_start(sampling=types_pb2.Sampling(max_tokens=num_tokens))))
    responses = []
    async with asyncio.timeout(TIMEOUT_S):
        while not token_ids_of(responses):
            responses.append(await call.read())
    return call, responses


def decode_worker(responses: list[pb.GenerateResponse]) -> str:
    return responses[0].accepted.choices[0].decode.worker_id


async def finish(call: grpc.aio.StreamStreamCall, responses: list[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    async with asyncio.timeout(TIMEOUT_S):
        return responses + await read_all(call)


def levels_of_breaks(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The log level of each broken stream."""
    return [record.levelno for record in caplog.records if record.name == "router.fleet" and "broke" in record.message]


def open_gates(system: System) -> None:
    for gate in system.gates.values():
        gate.release(10_000)


_TWO_DECODES = ("prefill-0", "decode-0", "decode-1")


async def test_a_dying_engine_is_a_pause_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(tmp_path, monkeypatch, *_TWO_DECODES, gated=("decode-0", "decode-1")) as (system, stub):
        call, responses = await open_until_token(stub)
        victim = decode_worker(responses)
        system.gates[victim].release(3)
        async with asyncio.timeout(TIMEOUT_S):
            while len(token_ids_of(responses)) < 4:
                responses.append(await call.read())
        system.runners[victim].failure = RuntimeError("out of paper")
        open_gates(system)
        responses = await finish(call, responses)
        assert token_ids_of(responses) == expected(PROMPT, 12)
        assert responses[-1].finished.usage.num_attempts == 2
        with pytest.raises(Exception, match="engine"):
            await system.workers.pop(victim).task


async def test_a_worker_cut_off_mid_stream_is_replaced_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove, left = FileRegistration._remove, list[FileRegistration]()

    async def leave(registration: FileRegistration) -> None:
        left.append(registration)

    caplog.set_level(logging.INFO, logger="router.fleet")
    async with running_system(tmp_path, monkeypatch, *_TWO_DECODES, gated=("decode-0", "decode-1")) as (system, stub):
        call, responses = await open_until_token(stub)
        victim = decode_worker(responses)
        system.gates[victim].release(2)
        gone = system.workers.pop(victim)
        with monkeypatch.context() as patch:
            # If the router saw first that the record is gone, it would leave before the stream breaks.
            patch.setattr(FileRegistration, "_remove", leave)
            gone.task.cancel()
            open_gates(system)
            responses = await finish(call, responses)
            await asyncio.wait([gone.task])
            await until(lambda: bool(levels_of_breaks(caplog)))
        assert token_ids_of(responses) == expected(PROMPT, 12)
        await remove(left.pop())
        await system.wait_ready()
        await system.wait_idle()
        assert levels_of_breaks(caplog) == [logging.WARNING]


async def test_requests_leave_a_worker_that_is_silent_though_its_connection_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a worker whose event loop is blocked, or that was stopped: gRPC itself may still answer pings."""
    get_info, publish_load = WorkerServicer.GetInfo, EventPublisher.publish_load
    silenced: list[str] = []

    async def answer_or_hang(self: WorkerServicer, request: object, context: object) -> object:
        if self._required().record.worker_id in silenced:
            await asyncio.Event().wait()
        return await get_info(self, request, context)

    def publish_or_not(self: EventPublisher, load: WorkerLoad) -> None:
        if load.worker_id not in silenced:
            publish_load(self, load)

    monkeypatch.setattr(WorkerServicer, "GetInfo", answer_or_hang)
    monkeypatch.setattr(EventPublisher, "publish_load", publish_or_not)
    monkeypatch.setattr("router.fleet._PROBE_TIMEOUT_S", 0.5)
    async with running_system(
        tmp_path, monkeypatch, *_TWO_DECODES, gated=("decode-0", "decode-1"), heartbeat_timeout_s=0.6
    ) as (system, stub):
        call, responses = await open_until_token(stub)
        victim = decode_worker(responses)
        [other] = {"decode-0", "decode-1"} - {victim}
        silenced.append(victim)
        system.gates[other].release(10_000)
        responses = await finish(call, responses)
        assert token_ids_of(responses) == expected(PROMPT, 12)
        assert responses[-1].finished.usage.num_attempts > 1
        for _ in range(4):
            assert decode_worker(await generate(stub, make_start())) == other
        silenced.clear()
        open_gates(system)
        await system.wait_ready()
        await system.wait_idle()


async def test_requests_leave_a_worker_whose_engine_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"stall_timeout_s": 0.2}
    async with running_system(
        tmp_path, monkeypatch, *_TWO_DECODES, gated=("decode-0", "decode-1"), worker=settings
    ) as (system, stub):
        call, responses = await open_until_token(stub)
        victim = decode_worker(responses)
        [other] = {"decode-0", "decode-1"} - {victim}
        system.gates[other].release(10_000)
        responses = await finish(call, responses)
        assert token_ids_of(responses) == expected(PROMPT, 12)
        assert responses[-1].finished.usage.num_attempts > 1
        assert decode_worker(await generate(stub, make_start())) == other
        open_gates(system)
        await system.wait_ready()
        await system.wait_idle()


async def test_a_prefill_worker_cut_off_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = ("prefill-0", "prefill-1", "decode-0")
    async with running_system(tmp_path, monkeypatch, *workers, gated=workers[:2]) as (system, stub):
        call = stub.Generate()
        await call.write(pb.GenerateRequest(start=make_start()))
        async with asyncio.timeout(TIMEOUT_S):
            accepted = await call.read()
        victim = accepted.accepted.choices[0].prefill.worker_id
        system.workers.pop(victim).task.cancel()
        open_gates(system)
        responses = await finish(call, [accepted])
        assert token_ids_of(responses) == expected(PROMPT, 12)
        await system.wait_idle()


async def test_a_drained_worker_ends_its_work_and_gets_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="router.fleet")
    monkeypatch.setattr(worker, "_MOVE_AFTER_S", TIMEOUT_S)
    workers, settings = ("decode-0", "decode-1"), {"drain_timeout_s": TIMEOUT_S}
    async with running_system(tmp_path, monkeypatch, *workers, gated=workers, worker=settings) as (system, stub):
        call = stub.Generate()
        await call.write(pb.GenerateRequest(start=make_start()))
        async with asyncio.timeout(TIMEOUT_S):
            accepted = await call.read()
        leaving = decode_worker([accepted])
        assert await asyncio.to_thread(system.runners[leaving].step_began.wait, TIMEOUT_S)
        system.workers[leaving].stop.set()
        await system.wait_workers(lambda known: leaving in known and known[leaving].state == pb.WORKER_STATE_DRAINING)
        open_gates(system)
        for _ in range(3):
            assert decode_worker(await generate(stub, make_start())) != leaving
        responses = await finish(call, [accepted])
        assert token_ids_of(responses) == expected(PROMPT, 12)
        assert responses[-1].finished.usage.num_attempts == 1
        await system.workers.pop(leaving).end()
        await system.wait_ready()
        # It said that it would go.
        assert levels_of_breaks(caplog) == [logging.INFO]


async def test_a_worker_that_starts_anew_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0") as (system, stub):
        [before] = (await stub.ListWorkers(pb.ListWorkersRequest())).workers
        system.workers["decode-0"].task.cancel()
        await asyncio.wait([system.workers["decode-0"].task])
        system.start_worker("decode-0")
        await system.wait_workers(lambda known: _serves_again(known, before))
        assert token_ids_of(await generate(stub, make_start())) == expected(PROMPT, 12)


def _serves_again(known: dict[str, pb.WorkerStatus], before: pb.WorkerStatus) -> bool:
    now = known.get(before.record.worker_id, before)
    return now.state == pb.WORKER_STATE_READY and now.record.epoch != before.record.epoch


async def test_a_killed_worker_that_starts_anew_at_the_same_address_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_killed(_: FileRegistration) -> None:
        """Leave the record to the next life, as a process does that gets no chance to remove it."""

    monkeypatch.setattr(FileRegistration, "_remove", is_killed)
    fixed = {
        worker_id: {
            "server": ServerConfig(address=f"127.0.0.1:{free_port()}"),
            "events_address": f"127.0.0.1:{free_port()}",
            "http_address": f"127.0.0.1:{free_port()}",
        }
        for worker_id in ("prefill-0", "decode-0")
    }
    async with running_system(tmp_path, monkeypatch, *fixed, settings_by_id=fixed) as (system, stub):
        assert token_ids_of(await generate(stub, make_start())) == expected(PROMPT, 12)
        # The prefill under a decode that has pulled from it, the decode under a router that has streamed with it.
        for worker_id in ("prefill-0", "decode-0", "prefill-0"):
            before = await record_of(stub, worker_id)
            system.workers[worker_id].task.cancel()
            await asyncio.wait([system.workers[worker_id].task])
            system.start_worker(worker_id)
            await system.wait_workers(partial(has_new_epoch, before))
            await system.wait_ready()
            answer = await generate(stub, make_start())
            assert token_ids_of(answer) == expected(PROMPT, 12)
            assert answer[0].accepted.choices[0].prefill.worker_id == "prefill-0"
            after = await record_of(stub, worker_id)
            assert (after.grpc_address, after.events_address) == (before.grpc_address, before.events_address)
        await system.wait_idle()


async def record_of(stub: Stub, worker_id: str) -> worker_pb2.WorkerRecord:
    workers = (await stub.ListWorkers(pb.ListWorkersRequest())).workers
    [record] = [status.record for status in workers if status.record.worker_id == worker_id]
    return record


def has_new_epoch(before: worker_pb2.WorkerRecord, known: dict[str, pb.WorkerStatus]) -> bool:
    return before.worker_id in known and known[before.worker_id].record.epoch != before.epoch


async def test_a_worker_whose_id_another_process_takes_ends_and_its_requests_go_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = ("decode-0", "decode-1")
    async with running_system(tmp_path, monkeypatch, *_TWO_DECODES, gated=gated, registry_ttl_s=2.0) as (system, stub):
        call, responses = await open_until_token(stub)
        victim = decode_worker(responses)
        registry = create_registry(system.discovery)
        later = await registry.register(make_record(victim, grpc_address=f"127.0.0.1:{free_port()}"))
        open_gates(system)
        assert token_ids_of(await finish(call, responses)) == expected(PROMPT, 12)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(WorkerReplacedError, match=f"another process has registered as decode {victim}"):
                await system.workers.pop(victim).task
        assert later.record in await registry.workers()
        await registry.close()


async def test_a_fleet_is_upgraded_to_another_contract_version_without_a_failed_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0") as (system, stub):
        monkeypatch.setattr(worker_process, "CONTRACT_VERSION", "quartet.v2")
        system.start_worker("decode-1")
        old_and_new = {"decode-0": pb.WORKER_STATE_READY, "decode-1": pb.WORKER_STATE_INCOMPATIBLE}
        await system.wait_workers(lambda known: {name: known[name].state for name in known} == old_and_new)
        for _ in range(3):
            assert decode_worker(await generate(stub, make_start())) == "decode-0"
        assert caplog.text.count("worker decode-1 is not used: it speaks 'quartet.v2'") == 1

        await system.router.end()
        both = frozenset({"quartet.v1", "quartet.v2"})
        monkeypatch.setattr(router_process, "WorkerTable", partial(WorkerTable, versions=both))
        await system.start_router()
        await system.wait_ready()
        async with grpc.aio.insecure_channel(system.address) as channel:
            upgraded = Stub(channel)
            answers = await asyncio.gather(*(generate(upgraded, make_start()) for _ in range(6)))
            assert {decode_worker(answer) for answer in answers} == {"decode-0", "decode-1"}
            await system.workers.pop("decode-0").end()
            answers += [await generate(upgraded, make_start())]
        assert decode_worker(answers[-1]) == "decode-1"
        assert {tuple(token_ids_of(answer)) for answer in answers} == {tuple(expected(PROMPT, 12))}


async def test_an_id_that_moves_to_another_role_is_a_change_and_takes_no_blocks_along() -> None:
    store, index = MemoryStore(), PrefixIndex()
    discovery, table = MemoryRegistry(store), WorkerTable("router-a", heartbeat_timeout_s=30)
    fleet = Fleet(table, RouterMetrics(CollectorRegistry()), None, kv=KvJoins(index))
    watching = asyncio.create_task(fleet.watch(discovery.watch()))
    prefill = make_record("both", role=Role.PREFILL, epoch=1)
    decode = make_record("both", role=Role.DECODE, epoch=2)
    try:
        store.put("default", prefill.key, to_json(prefill))
        await until(lambda: list_keys(table) == [prefill.key])
        index.store(Rank("both"), None, [1, 2, 3])
        # No registration of ours lets both be there; a router that is shown both keeps the first.
        store.put("default", decode.key, to_json(decode))
        store.put("default", WorkerKey(Role.DECODE, "last"), to_json(make_record("last", role=Role.DECODE)))
        await until(lambda: len(table.statuses(0)) == 2)
        assert prefill.key in list_keys(table)
        assert len(index.match([1, 2, 3])) == 1
        store.delete("default", prefill.key)
        await until(lambda: decode.key in list_keys(table))
        assert prefill.key not in list_keys(table)
        assert len(index.match([1, 2, 3])) == 0
        with pytest.raises(WorkerUnavailableError):
            fleet.prefill(Rank("both"), make_worker_start(PROMPT))
    finally:
        await discovery.close()
        await watching
        await fleet.close()


async def test_a_worker_that_starts_again_at_its_address_joins_though_its_last_life_refused_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="router.fleet")
    for name in ("initial", "max"):  # a channel that has failed to connect tries again long after this test
        monkeypatch.setitem(channels._OPTIONS, f"grpc.{name}_reconnect_backoff_ms", 3_600_000)
    store, address = MemoryStore(), f"127.0.0.1:{free_port()}"
    discovery, table = MemoryRegistry(store), WorkerTable("router-a", heartbeat_timeout_s=30)
    fleet = Fleet(table, RouterMetrics(CollectorRegistry()), None)
    running = [asyncio.create_task(fleet.watch(discovery.watch())), asyncio.create_task(fleet.tend())]
    try:
        for epoch in (1, 2, 3):
            record = make_record(epoch=epoch, grpc_address=address, events_address="")
            caplog.clear()
            async with serving(FakeWorker(record), {}, address):
                store.put("default", record.key, to_json(record))
                await until(partial(has_joined, table, record))
            await until(lambda: "does not answer" in caplog.text)
    finally:
        running[1].cancel()
        await discovery.close()
        await asyncio.wait(running)
        await fleet.close()


def has_joined(table: WorkerTable, record: WorkerRecord) -> bool:
    is_known = record in [status.record for status in table.statuses(0)]
    return is_known and table.has_joined(record.key)


def list_keys(table: WorkerTable) -> list[WorkerKey]:
    return [status.record.key for status in table.statuses(0)]


async def test_a_watch_shows_a_changed_role_as_a_change_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_system(tmp_path, monkeypatch) as (system, stub):
        registry = system.directory / "discovery" / "default"
        watch = stub.WatchWorkers(pb.WatchWorkersRequest())
        async with asyncio.timeout(TIMEOUT_S):
            await watch.read()
            write_record(registry, make_record("both", role=Role.PREFILL))
            seen = await watch.read()
            assert [status.record.role for status in seen.updated] == [worker_pb2.WORKER_ROLE_PREFILL]
            write_record(registry, make_record("both", role=Role.DECODE, epoch=2))
            (registry / "prefill.both.json").unlink()
            while not any(status.record.role == worker_pb2.WORKER_ROLE_DECODE for status in seen.updated):
                # A look at the directory between these two files' changes may find neither.
                seen = await watch.read()
                assert not (seen.updated and seen.removed_worker_ids)
        watch.cancel()


async def test_a_watch_that_wants_totals_gets_them_though_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0") as (system, stub):
        await generate(stub, make_start())
        await system.wait_idle()
        watch = stub.WatchWorkers(pb.WatchWorkersRequest(wants_totals=True))
        async with asyncio.timeout(TIMEOUT_S):
            first = await watch.read()
            while (later := await watch.read()).updated:
                pass
        watch.cancel()
        assert first.updated and later.totals == first.totals
        totals = first.totals
        assert (dict(totals.outcomes), totals.num_failed) == ({"length": 1}, 0)
        assert (totals.num_prompt_tokens, totals.num_output_tokens) == (len(PROMPT), 12)
        assert sum(totals.ttft_counts) == 1 and len(totals.ttft_counts) == len(totals.ttft_bounds_s) + 1
        assert (totals.policy, totals.num_running) == ("least_loaded", 0)


def write_record(directory: Path, record: WorkerRecord) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{record.role}.{record.worker_id}.json"
    path.with_suffix(".new").write_bytes(to_json(record))
    path.with_suffix(".new").rename(path)


async def test_many_requests_at_once_share_the_pool_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = AttemptConfig(reserve_tokens=16)
    workers = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    async with running_system(tmp_path, monkeypatch, *workers, attempts=attempts) as (system, stub):
        prompts = [[20 + i % 100, *PROMPT] for i in range(60)]
        starts = [make_start(token_ids=pb.TokenIds(ids=prompt)) for prompt in prompts]
        answers = await asyncio.gather(*(generate(stub, start) for start in starts))
        for prompt, responses in zip(prompts, answers, strict=True):
            assert token_ids_of(responses) == expected(prompt, 12)
        # Room was booked before each prefill: nothing was done twice.
        assert {responses[-1].finished.usage.num_attempts for responses in answers} == {1}
        assert set(Counter(decode_worker(responses) for responses in answers)) == {"decode-0", "decode-1"}
        await system.wait_idle()
        assert all(stats.num_preemptions == 0 for engine in system.engines.values() for stats in engine.stats())


async def test_a_router_before_its_workers_answers_that_it_knows_no_model_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_system(tmp_path, monkeypatch) as (system, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, make_start())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert from_rpc_error(caught.value).retry_delay_s
        system.start_worker("decode-0")
        await system.wait_serving()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, make_start(model="none"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert token_ids_of(await generate(stub, make_start())) == expected(PROMPT, 12)


async def test_a_stopping_router_waits_until_its_requests_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0", gated=("decode-0",)) as (system, stub):
        call = stub.Generate()
        await call.write(pb.GenerateRequest(start=make_start()))
        async with asyncio.timeout(TIMEOUT_S):
            accepted = await call.read()
            silent = stub.Generate()
            watch = stub.WatchWorkers(pb.WatchWorkersRequest())
            await watch.read()
            system.router.stop.set()
            # It gets notice of the drain; from then on the router takes no new request.
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await watch.read() is not grpc.aio.EOF:
                    pass
                raise AssertionError("the watch ended without a status")
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await read_all(silent)
            assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        open_gates(system)
        assert token_ids_of(await finish(call, [accepted])) == expected(PROMPT, 12)
        await system.router.end()


async def test_workers_that_vanish_while_the_router_drains_are_worth_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="router.fleet")
    async with running_system(tmp_path, monkeypatch, "decode-0", gated=("decode-0",)) as (system, stub):
        call = stub.Generate()
        await call.write(pb.GenerateRequest(start=make_start()))
        async with asyncio.timeout(TIMEOUT_S):
            await call.read()
            watch = stub.WatchWorkers(pb.WatchWorkersRequest())
            await watch.read()
            system.router.stop.set()
            with pytest.raises(grpc.aio.AioRpcError):  # it drains
                while await watch.read() is not grpc.aio.EOF:
                    pass
        gone = system.workers.pop("decode-0")
        gone.task.cancel()
        await asyncio.wait([gone.task])
        call.cancel()
        await system.router.end()
        assert levels_of_breaks(caplog) == [logging.INFO]


async def test_a_request_that_outlasts_the_drain_timeout_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0", gated=("decode-0",), drain_timeout_s=0.1) as (
        system,
        stub,
    ):
        call = stub.Generate()
        await call.write(pb.GenerateRequest(start=make_start()))
        async with asyncio.timeout(TIMEOUT_S):
            await call.read()
            system.router.stop.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(call)
        assert (caught.value.code(), from_rpc_error(caught.value).reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        await system.router.end()


async def test_a_watch_sends_all_workers_and_then_the_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0") as (system, stub):
        watch = stub.WatchWorkers(pb.WatchWorkersRequest())
        async with asyncio.timeout(TIMEOUT_S):
            first = await watch.read()
            assert [status.record.worker_id for status in first.updated] == ["decode-0"]
            system.start_worker("prefill-0")
            seen: set[str] = set()
            while "prefill-0" not in seen:
                seen |= {status.record.worker_id for status in (await watch.read()).updated}
            await system.wait_ready()
            await system.workers.pop("prefill-0").end()
            removed: list[str] = []
            while not removed:
                removed = list((await watch.read()).removed_worker_ids)
        assert removed == ["prefill-0"]
        watch.cancel()


async def test_a_probe_that_fails_cuts_no_request_of_a_worker_that_was_heard_of_lately(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_asked, num_reset = 0, 0

    async def refuse(_client: WorkerClient, _timeout_s: float) -> object:
        nonlocal num_asked
        num_asked += 1
        raise WorkerUnavailableError("no time")

    async def note_reset(_client: DecodeClient) -> None:
        nonlocal num_reset
        num_reset += 1

    monkeypatch.setattr(WorkerClient, "info", refuse)
    monkeypatch.setattr(DecodeClient, "reset", note_reset)
    discovery = MemoryRegistry()
    fleet = Fleet(WorkerTable("router-a", heartbeat_timeout_s=3600), RouterMetrics(CollectorRegistry()), None)
    running = [asyncio.create_task(work) for work in (fleet.watch(discovery.watch()), fleet.tend())]
    try:
        await discovery.register(make_record())
        await until(lambda: num_asked > 0)
        await asyncio.sleep(0)
        assert num_reset == 0
    finally:
        running[1].cancel()
        await discovery.close()
        await asyncio.wait(running)
        await fleet.close()


@pytest.mark.parametrize(("pause_s", "away_s"), [(1.0, set()), (3.0, {3.0})])
async def test_only_the_time_since_the_last_tick_is_taken_for_absence(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, away_s: set[float]
) -> None:
    clock, noted = itertools.count(0.0, pause_s), list[float]()
    monkeypatch.setattr("router.fleet.time", SimpleNamespace(monotonic=lambda: next(clock), time=lambda: 0.0))
    monkeypatch.setattr("router.fleet._TICK_S", 0.001)
    table = WorkerTable("router-a", heartbeat_timeout_s=30)
    monkeypatch.setattr(table, "was_away", noted.append)
    num_ticks, tick = 0, table.tick

    def count_tick(now: float) -> None:
        nonlocal num_ticks
        num_ticks += 1
        tick(now)

    monkeypatch.setattr(table, "tick", count_tick)
    fleet = Fleet(table, RouterMetrics(CollectorRegistry()), None)
    tending = asyncio.create_task(fleet.tend())
    try:
        await until(lambda: num_ticks >= 5)
    finally:
        tending.cancel()
        await asyncio.wait([tending])
        await fleet.close()
    assert set(noted) == away_s


async def test_events_that_make_no_sense_are_counted() -> None:
    metrics, discovery = CollectorRegistry(), MemoryRegistry()
    fleet = Fleet(WorkerTable("router-a", heartbeat_timeout_s=30), RouterMetrics(metrics), None)
    watching = asyncio.create_task(fleet.watch(discovery.watch()))
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        await discovery.register(make_record(events_address=f"tcp://127.0.0.1:{port}"))
        async with asyncio.timeout(TIMEOUT_S):
            # What is said before the connection stands is lost.
            while not metrics.get_sample_value("quartet_router_malformed_events_total"):
                socket.send_multipart([LOAD_TOPIC, b"short", b""])
                await asyncio.sleep(0.005)
    await discovery.close()
    await watching
    await fleet.close()


async def test_a_worker_that_comes_while_a_certificate_is_missing_ends_no_task(tmp_path: Path) -> None:
    tls = CertificateAuthority(tmp_path).issue("router", "quartet://default/router/r1")
    table, discovery = WorkerTable("router-a", heartbeat_timeout_s=30), MemoryRegistry()
    fleet = Fleet(table, RouterMetrics(CollectorRegistry()), tls)
    tls.cert_file.unlink()
    adopted = asyncio.Event()
    table.listen(adopted.set)
    watching = asyncio.create_task(fleet.watch(discovery.watch()))
    await discovery.register(make_record())
    waiting = asyncio.create_task(adopted.wait())
    await asyncio.wait([waiting, watching], timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    assert adopted.is_set() and not watching.done()
    await discovery.close()
    await watching
    await fleet.close()


async def test_text_files_of_another_model_are_not_used_for_the_pool() -> None:
    worker, old = FakeWorker(make_record(model_fingerprint="0b" * 32)), "0a" * 32
    table, discovery = WorkerTable("router-a", heartbeat_timeout_s=30), MemoryRegistry()
    fleet = Fleet(table, RouterMetrics(CollectorRegistry()), None)
    adopted = asyncio.Event()
    table.listen(adopted.set)
    watching = asyncio.create_task(fleet.watch(discovery.watch()))
    files = {"tokenizer.json": byte_level_backend().to_str().encode()}
    async with serving(worker, files) as address, asyncio.timeout(TIMEOUT_S):
        # As discovery knows it; another worker listens there by now.
        await discovery.register(make_record(grpc_address=address, model_fingerprint=old))
        await adopted.wait()
        with pytest.raises(ServingError, match="another model"):
            await fleet.texts.model_text(PoolKey("tiny", old))
    await discovery.close()
    await watching
    await fleet.close()


async def test_what_a_worker_itself_says_counts_and_none_joins_by_the_answer_of_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="router.fleet")
    worker = FakeWorker(make_record())
    table, discovery = WorkerTable("router-a", heartbeat_timeout_s=30), MemoryRegistry()
    fleet = Fleet(table, RouterMetrics(CollectorRegistry()), None)
    running = [asyncio.create_task(work) for work in (fleet.watch(discovery.watch()), fleet.tend())]
    async with serving(worker, {"tokenizer.json": byte_level_backend().to_str().encode()}) as address:
        ghost = make_record("decode-ghost", grpc_address=address, max_model_len=1, sampling_fields=())
        await discovery.register(ghost)
        await discovery.register(make_record(grpc_address=address, max_model_len=1, block_size=7))
        own_key = worker.record.key
        await until(lambda: table.has_joined(own_key) and "decode-ghost does not answer" in caplog.text)
        assert table.record(own_key) == make_record(grpc_address=address)
        assert not table.has_joined(ghost.key)
        [pool] = table.pools(0.0)
        assert (pool.max_model_len, pool.block_size) == (2000, 10)
        assert "its own word counts" in caplog.text
    running[1].cancel()
    await discovery.close()
    await asyncio.wait(running)
    await fleet.close()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_records_of_workers_that_never_answer_refuse_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, role: Role
) -> None:
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0") as (system, stub):
        assert "its own word counts" not in caplog.text, "real workers say in discovery what they say themselves"
        own = await record_of(stub, "decode-0")
        claims = {"max_model_len": 1, "sampling_fields": (), "block_size": 7, "num_blocks": 1}
        at = f"127.0.0.1:{free_port()}"
        ghost = make_record("ghost", role=role, grpc_address=at, model_fingerprint=own.model_fingerprint, **claims)
        directory = system.directory / "discovery" / "default"
        write_record(directory, ghost)
        write_record(directory, replace(ghost, worker_id="other-model", model_name="a"))
        await system.wait_workers(lambda known: {"ghost", "other-model"} <= known.keys())
        sampling = types_pb2.Sampling(max_tokens=12, temperature=0, top_k=3)
        responses = await generate(stub, make_start(sampling=sampling))
        assert token_ids_of(responses) == expected(PROMPT, 12)
