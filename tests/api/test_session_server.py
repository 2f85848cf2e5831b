"""Session over real gRPC, above a fake that gives answers as the test says: readers that stop, and those that don't."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from quartet.api import session_server
from quartet.api.answer import AnswerSink
from quartet.api.request import ChoiceFinished, SessionLimits, SessionStart, TimeBreakdown, Usage
from quartet.api.session_server import SessionStream
from quartet.engine.base import FinishReason
from quartet.errors import InvalidRequestError, ProtocolError, QueueFullError, ServingError, StalledStreamError
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.rpc.message_limits import UNCHECKED_BYTES, MaxBytes, MessageLimits
from quartet.rpc.server import RpcServer, ServerConfig, StalledCalls
from quartet.streams.read_pace import Account, ReadPace
from quartet.v1 import router_pb2 as pb
from quartet.v1 import types_pb2
from tests.api.test_session_outbox import ACCEPTED
from tests.rpc.services import generic_service

_METHOD = "/test.Router/Session"
_TIMEOUT_S = 30.0
USAGE = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=1, num_attempts=1)


class FakeRun:
    """A request whose answer the test gives; it ends one turn of the loop after its last choice or an abort."""

    def __init__(self, asked: SessionStart, sink: AnswerSink) -> None:
        self.asked, self.sink = asked, sink
        self.aborted: ServingError | None = None
        self.has_ended = False
        self.num_given = 0
        self.num_cancelled = 0
        self._num_open = asked.start.num_choices
        sink.accept(ACCEPTED)

    def give(self, num_tokens: int) -> None:
        """Tokens one by one, as an engine does."""
        for _ in range(num_tokens):
            self.sink.add(0, self.num_given, [70_000], "", ())
            self.num_given += 1

    def finish(self, reason: FinishReason = FinishReason.LENGTH, choice: int = 0) -> None:
        self.sink.finish(ChoiceFinished(choice=choice, reason=reason, usage=USAGE, time=TimeBreakdown()))
        self._num_open -= 1
        if self._num_open == 0:
            asyncio.get_running_loop().call_soon(self._end, None)

    def cancel(self) -> None:
        self.num_cancelled += 1
        self.finish(FinishReason.CANCELLED)

    def abort(self, error: ServingError) -> None:
        self.aborted = error
        asyncio.get_running_loop().call_soon(self._end, error)

    def _end(self, error: ServingError | None) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.sink.end(error)


class Sessions:
    """A server of sessions.

    Attributes:
        runs: by slot, of all sessions.
        num_taken: messages that were taken from gRPC, of all sessions.
        ended: how each call ended.
        account: pays for the messages of all sessions; ``None``: they are free.
    """

    def __init__(self, stall_timeout_s: float = 30, **limits: Any) -> None:
        self.runs: dict[int, FakeRun] = {}
        self.num_taken = 0
        self.ended: asyncio.Queue[BaseException | None] = asyncio.Queue()
        self.streams: list[SessionStream] = []
        self.limits = SessionLimits(**limits)
        self.stalled = StalledCalls(stall_timeout_s)
        self.account: Account | None = None
        self._begun = asyncio.Event()

    def parse(self, message: bytes) -> pb.SessionRequest:
        self.num_taken += 1
        return pb.SessionRequest.FromString(message)

    def begin(self, asked: SessionStart, sink: AnswerSink) -> FakeRun:
        if asked.start.model == "none":
            raise InvalidRequestError("no such thing", field="model")
        run = self.runs[asked.slot] = FakeRun(asked, sink)
        self._begun.set()
        return run

    async def serve(self, _requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        stream = SessionStream(self.begin, self.limits, self.stalled, self.account)
        self.streams.append(stream)
        try:
            await stream.serve(context)
        except BaseException as error:
            self.ended.put_nowait(error)
            raise
        self.ended.put_nowait(None)

    async def wait_for(self, slot: int) -> FakeRun:
        async with asyncio.timeout(_TIMEOUT_S):
            while slot not in self.runs:
                self._begun.clear()
                await self._begun.wait()
        return self.runs[slot]


class Client:
    """One session."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        self.call = call
        self.seen: list[pb.SessionResponse] = []
        self.has_seen = asyncio.Event()

    async def start(self, *slots: int, **start: Any) -> None:
        for slot in slots:
            asked = pb.SessionStart(slot=slot, start=pb.GenerateStart(**({"text": "Hi"} | start)))
            await asyncio.wait_for(self.call.write(pb.SessionRequest(start=asked)), _TIMEOUT_S)

    async def cancel(self, slot: int) -> None:
        message = pb.SessionRequest(cancel=types_pb2.Cancel(slot=slot))
        await asyncio.wait_for(self.call.write(message), _TIMEOUT_S)

    async def read(self) -> pb.SessionResponse:
        response = await asyncio.wait_for(self.call.read(), _TIMEOUT_S)
        assert response is not grpc.aio.EOF
        assert response.ByteSize() <= MAX_STREAM_MESSAGE_BYTES
        self.seen.append(response)
        self.has_seen.set()
        return response

    async def read_end(self, slot: int) -> str:
        """Read to the end of ``slot``: its failure's reason, or nothing."""
        while True:
            response = await self.read()
            for failed in response.failures:
                if failed.slot == slot:
                    return failed.failure.reason
            if slot in [item.slot for item in response.finished]:
                return ""

    async def status(self) -> grpc.StatusCode:
        """Read to the end of the stream."""
        async with asyncio.timeout(_TIMEOUT_S):
            try:
                while (response := await self.call.read()) is not grpc.aio.EOF:
                    self.seen.append(response)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return await self.call.code()

    def num_tokens(self, slot: int) -> int:
        return sum(
            num_tokens
            for response in self.seen
            for seen_slot, num_tokens in zip(response.slots, response.num_tokens, strict=True)
            if seen_slot == slot
        )


class OpenCall:
    """A call's context: its client starts requests and then neither reads nor says anything more."""

    def __init__(self, num_starts: int) -> None:
        self._starts = [pb.SessionStart(slot=slot, start=pb.GenerateStart(text="Hi")) for slot in range(num_starts)]

    async def send_initial_metadata(self, _metadata: object) -> None:
        pass

    async def read(self) -> pb.SessionRequest:
        if not self._starts:
            await asyncio.Event().wait()
        return pb.SessionRequest(start=self._starts.pop(0))

    async def write(self, _message: pb.SessionResponse) -> None:
        await asyncio.Event().wait()


class StuckCall:
    """A call's context: its client starts requests when the test says so, and takes no answer."""

    def __init__(self) -> None:
        self._starts: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._listens = asyncio.Event()

    async def start(self, slot: int) -> None:
        """Returns when the start was handled."""
        await self._listens.wait()
        self._listens.clear()
        self._starts.put_nowait(pb.SessionRequest(start=pb.SessionStart(slot=slot, start=pb.GenerateStart(text="Hi"))))
        await self._listens.wait()

    async def send_initial_metadata(self, _metadata: object) -> None:
        pass

    async def read(self) -> pb.SessionRequest:
        self._listens.set()
        return await self._starts.get()

    async def write(self, _message: pb.SessionResponse) -> None:
        await asyncio.Event().wait()


class Served:
    """Sessions and a channel to them."""

    def __init__(self, sessions: Sessions, channel: grpc.aio.Channel) -> None:
        self.sessions = sessions
        self._method = channel.stream_stream(
            _METHOD, pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString
        )

    def open(self) -> Client:
        return Client(self._method())


@pytest.fixture
async def make_served() -> AsyncIterator[Any]:
    """Makes ``Served`` of limits."""
    servers: list[RpcServer] = []
    channels: list[grpc.aio.Channel] = []

    async def make(max_text_bytes: int | None = None, **limits: Any) -> Served:
        sessions = Sessions(**limits)
        # Only generated parsers are limited.
        parse = sessions.parse if max_text_bytes is None else pb.SessionRequest.FromString
        handler = grpc.stream_stream_rpc_method_handler(sessions.serve, parse, pb.SessionResponse.SerializeToString)
        services = [generic_service("test.Router", {"Session": handler})]
        bounds = MessageLimits(max_bytes=lambda: MaxBytes(text=max_text_bytes or 0))
        server = RpcServer(ServerConfig(), services, limits=bounds)
        servers.append(server)
        port = await server.start()
        # Small windows: what the reader has not taken waits at the sender.
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.http2.bdp_probe", 0)])
        channels.append(channel)
        return Served(sessions, channel)

    yield make
    for channel in channels:
        await channel.close()
    for server in servers:
        await server.drain(0)


async def test_a_reader_that_stops_loses_its_busy_request_only_and_memory_stays_bounded(make_served: Any) -> None:
    served = await make_served(max_pending_tokens=1000)
    slow, other = served.open(), served.open()
    await slow.start(0, 1)
    await other.start(2)
    busy, calm, elsewhere = [await served.sessions.wait_for(slot) for slot in range(3)]
    calm.give(10)
    while busy.aborted is None:  # no client reads on `slow`
        assert busy.num_given < 1_000_000, "it gathers without bound"
        busy.give(100)
        elsewhere.give(1)
        await asyncio.sleep(0)
    assert busy.aborted.reason == "READER_TOO_SLOW"
    assert not calm.has_ended
    calm.give(5)
    calm.finish()
    elsewhere.finish()
    assert await other.read_end(2) == ""
    assert other.num_tokens(2) == elsewhere.num_given
    busy.give(5)  # what comes before it has ended is dropped
    assert await slow.read_end(0) == "READER_TOO_SLOW"
    if 1 not in {item.slot for response in slow.seen for item in response.finished}:
        assert await slow.read_end(1) == ""
    assert slow.num_tokens(1) == 15
    assert [item.slot for response in slow.seen for item in response.failures] == [0]
    served.sessions.runs.clear()
    await slow.start(0)  # the slot is free again
    (await served.sessions.wait_for(0)).finish()
    assert await slow.read_end(0) == ""


async def test_a_slow_reader_gets_fewer_larger_messages(make_served: Any) -> None:
    served = await make_served(tick_s=0, max_pending_tokens=1 << 20, max_pending_bytes=1 << 30)
    client = served.open()
    await client.start(0)
    run = await served.sessions.wait_for(0)
    for _ in range(200):  # far more than goes into the window
        run.give(500)
        await asyncio.sleep(0)
    run.finish()
    assert await client.read_end(0) == ""
    assert client.num_tokens(0) == 100_000
    assert len(client.seen) < 50
    assert not run.aborted


async def test_a_session_whose_client_reads_nothing_ends_with_its_requests(make_served: Any) -> None:
    served = await make_served(stall_timeout_s=0.3, max_pending_tokens=1 << 30, max_pending_bytes=1 << 40)
    client = served.open()
    await client.start(0)
    run = await served.sessions.wait_for(0)
    async with asyncio.timeout(_TIMEOUT_S):
        while served.sessions.ended.empty():
            run.give(1000)
            await asyncio.sleep(0.005)
    assert isinstance(served.sessions.ended.get_nowait(), StalledStreamError)
    assert run.has_ended
    assert await client.status() == grpc.StatusCode.ABORTED


async def test_a_client_that_starts_and_never_reads_is_held_back_and_loses_nothing(make_served: Any) -> None:
    served = await make_served(max_requests=5)
    sessions, client = served.sessions, served.open()
    # Far more than fit into what gRPC holds on either side.
    num_starts = 5_000
    starting = asyncio.create_task(client.start(*range(num_starts), text=1024 * "x", model="none"))
    async with asyncio.timeout(30):
        num_before = -1
        while sessions.num_taken > num_before:
            num_before = sessions.num_taken
            await asyncio.sleep(0.5)  # nothing rings when nothing more is taken
    assert sessions.num_taken < num_starts / 2, "starts are taken without bound"
    failed: list[int] = []
    while len(failed) < num_starts:
        failed += [item.slot for item in (await client.read()).failures]
    await starting
    assert failed == list(range(num_starts))


async def test_tokens_of_a_tick_share_a_message_and_the_first_after_a_pause_goes_at_once(make_served: Any) -> None:
    tick_s = 0.2
    served = await make_served(tick_s=tick_s)
    client = served.open()
    await client.start(0)
    run = await served.sessions.wait_for(0)
    reading = asyncio.create_task(client.read_end(0))
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() < began + 5 * tick_s:
        run.give(1)
        await asyncio.sleep(0.01)  # the engine's pace
    assert len(client.seen) <= (loop.time() - began) / tick_s + 2
    waits_s = []
    for _ in range(5):
        await asyncio.sleep(1.5 * tick_s)
        client.has_seen.clear()
        given_at = loop.time()
        run.give(1)
        await asyncio.wait_for(client.has_seen.wait(), _TIMEOUT_S)
        waits_s.append(loop.time() - given_at)
    assert min(waits_s) < tick_s / 2
    run.finish()
    assert await reading == ""
    assert client.num_tokens(0) == run.num_given


async def test_a_router_that_traces_a_request_learns_when_each_choice_began(make_served: Any) -> None:
    gc.collect()
    served = await make_served(tick_s=0.0)
    client = served.open()
    began_ns = time.time_ns()
    for slot, sent_at_unix_ns in ((0, 0), (1, 5)):
        asked = pb.SessionStart(
            slot=slot, start=pb.GenerateStart(text="Hi", num_choices=2), sent_at_unix_ns=sent_at_unix_ns
        )
        await client.call.write(pb.SessionRequest(start=asked))
    runs = [await served.sessions.wait_for(slot) for slot in (0, 1)]
    # Of a choice that ends without a token nothing is to be told.
    for number, choice in enumerate((1, 1, 0)):
        for run in runs:
            run.sink.add(choice, number, [70_000], "", ())
        while client.num_tokens(1) <= number:
            await client.read()
        assert len(first_entries()) == (number < 2), "later tokens cost nothing more"
    for run in runs:
        run.finish()
        run.finish(choice=1)
    assert await client.read_end(1) == ""
    told = [first for response in client.seen for first in response.first_tokens]
    assert [(first.slot, first.choice) for first in told] == [(1, 1), (1, 0)]
    assert began_ns < told[0].sent_at_unix_ns < told[1].sent_at_unix_ns < time.time_ns()


async def test_a_traced_request_that_ends_before_its_tokens_is_freed_at_once(make_served: Any) -> None:
    served = await make_served()
    client = served.open()
    asked = pb.SessionStart(slot=0, start=pb.GenerateStart(text="Hi"), sent_at_unix_ns=5)
    await client.call.write(pb.SessionRequest(start=asked))
    run = await served.sessions.wait_for(0)
    gc.collect()
    gc.disable()
    try:
        assert len(first_entries()) == 1
        run.abort(QueueFullError("it is full"))
        assert await client.read_end(0) == "QUEUE_FULL"
        served.sessions.runs.clear()
        del run
        assert first_entries() == []
    finally:
        gc.enable()


def first_entries() -> list[object]:
    """What waits for the first tokens of traced requests."""
    return [one for one in gc.get_objects() if isinstance(one, session_server._FirstEntries)]


async def test_a_slot_in_use_ends_the_stream_and_all_its_requests(make_served: Any) -> None:
    served = await make_served()
    client = served.open()
    await client.start(0, 1, 0)
    assert await client.status() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await served.sessions.wait_for(0)).has_ended
    assert (await served.sessions.wait_for(1)).has_ended


async def test_a_cancel_is_answered_once_and_unknown_slots_are_ignored(make_served: Any) -> None:
    served = await make_served()
    client = served.open()
    await client.start(3)
    for slot in (7, 3, 3, 7):
        await client.cancel(slot)
    assert await client.read_end(3) == ""
    assert client.seen[-1].finished[0].finished.reason == types_pb2.FINISH_REASON_CANCELLED
    await client.cancel(3)
    await client.call.done_writing()
    assert await client.status() == grpc.StatusCode.OK
    assert served.sessions.runs[3].num_cancelled == 1


async def test_a_session_on_which_only_cancels_of_nothing_come_ends_and_says_why(make_served: Any) -> None:
    served = await make_served(idle_timeout_s=0.05)
    client = served.open()
    await client.cancel(1)
    assert await client.status() == grpc.StatusCode.UNAVAILABLE
    assert "session.idle_timeout_s" in await client.call.details()
    assert served.sessions.streams[0]._idle_timer.cancelled(), "nothing is left that polls"


async def test_an_idle_session_ends_only_after_its_last_request(make_served: Any) -> None:
    served = await make_served(idle_timeout_s=3600)
    client = served.open()
    await client.start(0)
    run = await served.sessions.wait_for(0)
    [stream] = served.sessions.streams

    def poll(times: int) -> None:
        """As its timer does, four times in 3600 s."""
        for _ in range(times):
            stream._idle_timer.cancel()
            stream._poll_idle()

    poll(20)
    run.give(1)
    run.finish()
    assert await client.read_end(0) == ""
    poll(4)
    await client.start(1, model="none")  # begins and ends between two polls
    assert await client.read_end(1) == "INVALID_FIELD"
    poll(4)
    await client.start(2)
    run = await served.sessions.wait_for(2)
    poll(20)
    run.finish()
    assert await client.read_end(2) == ""
    poll(5)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not served.sessions.ended.qsize()
    poll(1)
    assert await client.status() == grpc.StatusCode.UNAVAILABLE


async def test_a_request_that_ends_slowly_is_cancelled_once(make_served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await make_served()
    client = served.open()
    await client.start(0)
    run = await served.sessions.wait_for(0)
    num_cancels = itertools.count(1)
    monkeypatch.setattr(run, "cancel", lambda: next(num_cancels))
    await client.cancel(0)
    await client.cancel(0)  # this one must not disturb what the first one has it do
    await client.start(1)
    (await served.sessions.wait_for(1)).finish()
    assert next(num_cancels) == 2
    run.finish()
    assert await client.read_end(0) == ""


async def test_a_request_that_cannot_begin_fails_alone_and_its_slot_is_free(make_served: Any) -> None:
    served = await make_served(max_requests=2)
    client = served.open()
    await client.start(0)
    await client.start(1, model="none")
    assert await client.read_end(1) == "INVALID_FIELD"
    await client.start(1, 2)
    assert await client.read_end(2) == "QUEUE_FULL"
    (await served.sessions.wait_for(1)).finish()
    assert await client.read_end(1) == ""
    await client.start(2)
    (await served.sessions.wait_for(2)).finish()
    assert await client.read_end(2) == ""


async def test_a_request_counts_as_often_as_it_has_choices(make_served: Any) -> None:
    served = await make_served(max_requests=10)
    client = served.open()
    await client.start(0, num_choices=8)
    run = await served.sessions.wait_for(0)
    await client.start(1, num_choices=3)
    assert await client.read_end(1) == "QUEUE_FULL"
    await client.start(1, 2)
    await client.start(3)
    assert await client.read_end(3) == "QUEUE_FULL"
    for choice in range(8):
        run.finish(choice=choice)
    assert await client.read_end(0) == ""
    await client.start(4, num_choices=8)
    for slot in (4, 1, 2):
        run = await served.sessions.wait_for(slot)
        for choice in range(8 if slot == 4 else 1):
            run.finish(choice=choice)
        assert await client.read_end(slot) == ""


async def test_a_request_whose_end_was_not_taken_counts_and_keeps_its_slot() -> None:
    sessions, call = Sessions(max_requests=2), StuckCall()
    serving = asyncio.create_task(sessions.serve(None, call))  # type: ignore[arg-type]
    await call.start(0)
    await call.start(1)
    sessions.runs[0].finish()
    await call.start(2)
    assert set(sessions.runs) == {0, 1}, "it begins more requests than the session may have"
    again = asyncio.create_task(call.start(0))
    [error] = (await asyncio.wait_for(asyncio.gather(serving, return_exceptions=True), _TIMEOUT_S))[0].exceptions
    assert isinstance(error, ProtocolError)
    again.cancel()


async def test_output_after_the_last_end_is_dropped(make_served: Any) -> None:
    served = await make_served()
    client = served.open()
    await client.start(0, num_choices=2)
    run = await served.sessions.wait_for(0)
    run.finish(choice=1)
    run.finish(choice=0)
    run.give(3)
    run.finish()
    run.abort(InvalidRequestError("too late"))
    await client.call.done_writing()
    assert await client.status() == grpc.StatusCode.OK
    assert [item.finished.choice for response in client.seen for item in response.finished] == [1, 0]
    assert not any(response.failures or response.slots for response in client.seen)


async def test_an_empty_message_ends_the_stream(make_served: Any) -> None:
    served = await make_served()
    client = served.open()
    await client.start(0)
    await client.call.write(pb.SessionRequest())
    assert await client.status() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await served.sessions.wait_for(0)).has_ended


async def test_a_client_that_vanishes_drops_all_its_requests(make_served: Any) -> None:
    served = await make_served()
    client = served.open()
    await client.start(0, 1, 2)
    runs = [await served.sessions.wait_for(slot) for slot in range(3)]
    client.call.cancel()
    await asyncio.wait_for(served.sessions.ended.get(), _TIMEOUT_S)
    assert all(run.has_ended for run in runs)


async def test_a_session_ends_only_once_its_last_request_has(make_served: Any) -> None:
    served = await make_served()
    client = served.open()
    await client.start(0)
    (await served.sessions.wait_for(0)).finish()
    assert await client.read_end(0) == ""  # none ran at that moment
    await client.start(1)
    run, aborted = await served.sessions.wait_for(1), asyncio.Event()
    run.abort = lambda _error: aborted.set()  # it takes its time
    client.call.cancel()
    await asyncio.wait_for(aborted.wait(), _TIMEOUT_S)
    for _ in range(5):
        await asyncio.sleep(0)
    assert served.sessions.ended.empty()
    run.sink.end()
    await asyncio.wait_for(served.sessions.ended.get(), _TIMEOUT_S)


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_call_that_is_cancelled_twice_leaves_no_request_running(num_turns: int) -> None:
    sessions, call = Sessions(), OpenCall(3)
    stream = SessionStream(sessions.begin, sessions.limits, sessions.stalled)
    serving = asyncio.create_task(stream.serve(call))  # type: ignore[arg-type]
    runs = [await sessions.wait_for(slot) for slot in range(3)]
    serving.cancel()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait([serving], timeout=_TIMEOUT_S)
    assert serving.cancelled()
    await asyncio.sleep(0)  # the aborted requests end in this turn
    assert all(run.has_ended for run in runs)


async def test_a_session_that_ends_aborts_only_some_choices_in_a_turn() -> None:
    sessions, call, loop = Sessions(), OpenCall(200), asyncio.get_running_loop()
    stream = SessionStream(sessions.begin, sessions.limits, sessions.stalled)
    serving = asyncio.create_task(stream.serve(call))  # type: ignore[arg-type]
    runs = [await sessions.wait_for(slot) for slot in range(200)]
    num_aborted = [0]  # by turn

    def next_turn() -> None:
        num_aborted.append(0)
        if not all(run.has_ended for run in runs):
            loop.call_soon(next_turn)

    for run in runs:

        def abort(error: ServingError, abort: Callable[[ServingError], None] = run.abort) -> None:
            num_aborted[-1] += 1
            abort(error)
            if sum(num_aborted) == 1:
                raise RuntimeError("a bug")  # it keeps no other from its end

        run.abort = abort  # type: ignore[method-assign]
    next_turn()
    serving.cancel()
    await asyncio.wait([serving], timeout=_TIMEOUT_S)
    assert sorted(filter(None, num_aborted)) == [8, 64, 64, 64]
    assert all(run.has_ended for run in runs)


async def test_a_draining_session_takes_no_new_request_and_ends_with_the_last_one(make_served: Any) -> None:
    served = await make_served()
    client, idle = served.open(), served.open()
    await client.start(0)
    await idle.start(9)
    (await served.sessions.wait_for(9)).finish()
    await idle.read_end(9)
    run = await served.sessions.wait_for(0)
    for stream in served.sessions.streams:
        stream.drain()
    assert await idle.status() == grpc.StatusCode.UNAVAILABLE
    await client.start(1)
    assert await client.read_end(1) == "DRAINING"
    run.give(2)
    run.finish()
    assert await client.status() == grpc.StatusCode.UNAVAILABLE
    assert client.num_tokens(0) == 2
    assert [item.slot for response in client.seen for item in response.finished] == [0]


async def test_a_start_that_is_too_long_fails_in_its_slot_and_no_other(make_served: Any) -> None:
    served = await make_served(max_text_bytes=1_000)
    client = served.open()
    await client.start(1)
    run = await served.sessions.wait_for(1)
    await client.start(300, text="x" * UNCHECKED_BYTES)
    assert await client.read_end(300) == "MESSAGE_TOO_LARGE"
    run.finish()
    assert await client.read_end(1) == ""
    await client.start(300)
    await served.sessions.wait_for(300)
    # The slot is in use now: the client could not tell two ends apart.
    await client.start(300, text="x" * UNCHECKED_BYTES)
    assert await client.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_long_start_that_is_refused_is_paid_for_by_its_length(make_served: Any) -> None:
    served = await make_served(max_text_bytes=2 << 20)
    served.sessions.account = account = ReadPace(interval_s=3600.0).new_account()
    account.credit = 100
    client = served.open()
    await client.start(1, text="x" * (1 << 20), model="none")
    assert await client.read_end(1) == "INVALID_FIELD"
    assert account.credit == 85


async def test_a_session_that_says_nothing_is_ended(make_served: Any) -> None:
    served = await make_served(stall_timeout_s=0.1)
    assert await served.open().status() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_session_that_has_begun_may_be_silent(make_served: Any) -> None:
    served = await make_served(stall_timeout_s=0.1)
    begun, silent = served.open(), served.open()
    await begun.start(1)
    run = await served.sessions.wait_for(1)
    assert await silent.status() is grpc.StatusCode.DEADLINE_EXCEEDED
    run.finish()
    assert await begun.read_end(1) == ""
