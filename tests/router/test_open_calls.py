"""How many sessions and calls of Generate may be open at a router, and what their messages may cost it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quartet.api.answer import AnswerSink
from quartet.api.request import SessionLimits, SessionStart
from quartet.api.session_server import SessionStream
from quartet.errors import ConfigError, QueueFullError, ServingError, SessionIdleError
from quartet.rpc.open_calls import OpenCalls
from quartet.rpc.refusal_pace import note_message
from quartet.rpc.server import StalledCalls
from quartet.streams.read_pace import ReadPace
from quartet.v1 import router_pb2 as pb
from quartet.v1 import types_pb2
from router.config import CallLimits
from router.open_sessions import OpenSessions
from tests.api.test_session_server import FakeRun

TIMEOUT_S = 30.0
NEVER_S = 3600.0


class Context:
    """A call of ``peer``, whose client sends what is put into ``messages``; long ones have ``message_bytes``."""

    def __init__(self, peer: str = "ipv4:127.0.0.1:1") -> None:
        self._peer = peer
        self._on_done: list[Callable[[Any], None]] = []
        self.messages: asyncio.Queue[object] = asyncio.Queue()
        self.written: list[pb.SessionResponse] = []
        self.message_bytes = 0

    def peer(self) -> str:
        return self._peer

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._on_done.append(callback)

    def end(self) -> None:
        for callback in self._on_done:
            callback(self)

    async def send_initial_metadata(self, _metadata: object) -> None:
        return

    async def read(self) -> object:
        message = await self.messages.get()
        note_message(self.message_bytes)  # as the server's parser does
        return message

    async def write(self, message: pb.SessionResponse) -> None:
        self.written.append(message)


def session(**options: Any) -> SessionStream:
    return SessionStream(FakeRun, SessionLimits(tick_s=0), StalledCalls(TIMEOUT_S), **options)


def start(slot: int, **fields: Any) -> pb.SessionRequest:
    return pb.SessionRequest(start=pb.SessionStart(slot=slot, start=pb.GenerateStart(text="Hi", **fields)))


def cancel(slot: int) -> pb.SessionRequest:
    return pb.SessionRequest(cancel=types_pb2.Cancel(slot=slot))


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_connection_an_identity_and_all_together_have_bounds_that_errors_name() -> None:
    calls = OpenCalls("sessions", max_of_connection=2, max_of_identity=3, max_calls=4, setting="calls.max_sessions")
    one, other = [Context("one") for _ in range(2)], Context("other")
    for context in one:
        calls.enter(context, "client/ann")  # type: ignore[arg-type]
    with pytest.raises(QueueFullError, match=r"calls.max_sessions_of_connection"):
        calls.enter(Context("one"), "client/bob")  # type: ignore[arg-type]
    calls.enter(other, "client/ann")  # type: ignore[arg-type]
    with pytest.raises(QueueFullError, match=r"calls.max_sessions_of_identity"):
        calls.enter(Context("third"), "client/ann")  # type: ignore[arg-type]
    calls.enter(Context("third"), "client/bob")  # type: ignore[arg-type]
    with pytest.raises(QueueFullError, match=r"calls.max_sessions\)"):
        calls.enter(Context("fourth"), "client/eve")  # type: ignore[arg-type]
    one[0].end()
    calls.enter(Context("one"), "client/ann")  # type: ignore[arg-type]
    assert len(calls) == 4


async def test_where_there_are_too_many_sessions_the_first_idle_one_of_the_largest_client_ends() -> None:
    limits = CallLimits(max_sessions=4, max_sessions_of_connection=3)
    sessions, tasks, streams = OpenSessions(limits), [], []

    def open_one(peer: str) -> Context:
        context = Context(peer)
        sessions.enter(context, None)  # type: ignore[arg-type]
        stream = session()
        streams.append(stream)

        async def serve() -> None:
            with sessions.serving(peer, stream):
                await stream.serve(context)  # type: ignore[arg-type]

        tasks.append(asyncio.create_task(serve()))
        return context

    small = open_one("small")
    busy, idle, last = (open_one("large") for _ in range(3))
    busy.messages.put_nowait(start(0))
    await settle()
    assert len(sessions) == 4
    with pytest.raises(QueueFullError, match="of_connection"):
        open_one("large")
    open_one("new")
    await settle()
    assert [task.done() for task in tasks] == [False, False, True, False, False]
    with pytest.raises(ExceptionGroup) as ended:
        await tasks[2]
    assert ended.group_contains(SessionIdleError, match="calls.max_sessions")
    for context in (small, last):
        context.messages.put_nowait(start(0))
    await settle()
    # That of "new" is the only idle one; its status has not left, nor has that of the first.
    with pytest.raises(QueueFullError, match=r"calls.max_sessions"):
        open_one("newer")
    idle.end()
    open_one("newer")
    await settle()
    assert tasks[4].done()
    for task in tasks:
        task.cancel()
    for run in [run for stream in streams for run in stream._requests.runs.values()]:
        assert isinstance(run, FakeRun)
    await asyncio.wait(tasks)
    assert len(sessions) == 0


async def test_only_what_a_request_gives_pays_for_its_start_and_its_cancel() -> None:
    account = ReadPace(interval_s=NEVER_S).new_account()
    account.credit = 100
    context, stream = Context(), session(account=account)
    serving = asyncio.create_task(stream.serve(context))  # type: ignore[arg-type]
    for message in (cancel(7), cancel(7)):  # of no request
        context.messages.put_nowait(message)
    await settle()
    assert account.credit == 98
    context.messages.put_nowait(start(0))
    await settle()
    assert account.credit == 99, "a start that is placed earns itself and a cancel"
    run = stream._requests.runs[stream._requests.by_slot[0]]
    assert isinstance(run, FakeRun)
    run.give(1)
    context.messages.put_nowait(cancel(0))
    await settle()
    assert account.credit == 98
    context.messages.put_nowait(grpc_eof())
    await asyncio.wait_for(serving, TIMEOUT_S)


async def test_a_stream_without_credit_reads_nothing_and_a_refused_start_costs_three_messages() -> None:
    account = ReadPace(interval_s=NEVER_S).new_account()
    account.credit = 6
    limits = SessionLimits(tick_s=0, max_requests=1)
    context, stream = Context(), SessionStream(FakeRun, limits, StalledCalls(TIMEOUT_S), account)
    serving = asyncio.create_task(stream.serve(context))  # type: ignore[arg-type]
    for slot in range(50):
        context.messages.put_nowait(start(slot, num_choices=2))
    await settle()
    assert context.messages.qsize() == 48
    assert account.credit == 0
    serving.cancel()
    await asyncio.wait([serving])


class NeverPlaced:
    """A request that waits for room until it is cancelled."""

    def __init__(self, _asked: SessionStart, sink: AnswerSink) -> None:
        self._sink = sink

    def cancel(self) -> None:
        raise AssertionError("no client cancels it")

    def abort(self, error: ServingError) -> None:
        asyncio.get_running_loop().call_soon(self._sink.end, error)


@pytest.mark.parametrize(("num_choices", "cost"), [pytest.param(2, 15, id="refused"), pytest.param(1, 15, id="left")])
async def test_a_long_start_that_comes_to_nothing_costs_more_than_a_short_one(num_choices: int, cost: int) -> None:
    account = ReadPace(interval_s=NEVER_S).new_account()
    account.credit = 100
    limits = SessionLimits(tick_s=0, max_requests=1)
    context, stream = Context(), SessionStream(NeverPlaced, limits, StalledCalls(TIMEOUT_S), account)
    serving = asyncio.create_task(stream.serve(context))  # type: ignore[arg-type]
    context.message_bytes = 1 << 20
    context.messages.put_nowait(start(0, num_choices=num_choices))
    await settle()
    serving.cancel()
    await asyncio.wait([serving])
    assert account.credit == 100 - cost


def grpc_eof() -> object:
    return object()


@pytest.mark.parametrize("name", vars(CallLimits()))
def test_every_limit_must_leave_room_for_one(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        CallLimits(**{name: 0})
