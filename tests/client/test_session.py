"""The client's one stream for many requests: shared, opened again, and read on though one reader is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from quartet.api.answer import Answer
from quartet.api.session_client import SessionClient
from quartet.client import ChoiceFinished, Delta, QuartetClient
from quartet.client.request import make_start
from quartet.client.routers import ResultT, Router
from quartet.client.session import SessionRequest
from quartet.errors import (
    PermissionDeniedError,
    QueueFullError,
    RequestTimeoutError,
    RouterUnavailableError,
    ServingError,
    StalledStreamError,
)
from quartet.v1 import router_pb2, types_pb2
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter

WAIT_S = 30.0


async def test_many_requests_share_one_stream(start_router: StartRouter) -> None:
    router = FakeRouter()
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(WAIT_S):
        completions = await asyncio.gather(*(client.complete("Hi", path="session", num_choices=2) for _ in range(50)))
    assert {choice.text for completion in completions for choice in completion.choices} == {"one two three"}
    assert router.num_sessions == 1


async def test_a_session_that_broke_is_opened_again(start_router: StartRouter) -> None:
    router = FakeRouter()
    router.break_session_after = "finished"
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(WAIT_S):
        assert (await client.complete("Hi", path="session")).text == "one two three"
        assert (await client.complete("Hi", path="session")).text == "one two three"
    assert router.num_sessions == 2


async def test_a_session_that_breaks_before_takes_its_requests_to_the_next_router(start_router: StartRouter) -> None:
    breaking, router = FakeRouter(), FakeRouter()
    breaking.breaks_session_at_once = True
    addresses = [await start_router(breaking), await start_router(router)]
    async with QuartetClient(addresses) as client, asyncio.timeout(WAIT_S):
        completions = await asyncio.gather(*(client.complete("Hi", path="session") for _ in range(10)))
    assert {completion.router for completion in completions} == {addresses[1]}


async def test_one_requests_failure_ends_no_other(start_router: StartRouter) -> None:
    router = FakeRouter()
    router.hold(1)
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(WAIT_S):
        running = client.generate("Hi", path="session")
        await anext(running)
        router.error = QueueFullError("full", retry_delay_s=0.5)
        with pytest.raises(QueueFullError) as raised:
            await client.complete("Hi", path="session")
        await running.cancel()
        assert [type(part) async for part in running][-1] is ChoiceFinished
    assert raised.value.retry_delay_s == 0.5


async def test_a_router_that_does_not_end_a_request_at_its_timeout_is_cut_off(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet.client.session.DEADLINE_GRACE_S", 0.0)
    router = FakeRouter()
    router.hold(1)
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(WAIT_S):
        with pytest.raises(RequestTimeoutError):
            await client.complete("Hi", path="session", timeout_s=0.05)
        await router.dropped.wait()


class RefusingRouter:
    """Its sessions end with these statuses before anything could be written, the last one again and again."""

    address = "127.0.0.1:1"

    def __init__(self, *statuses: tuple[grpc.StatusCode, str]) -> None:
        self._statuses = list(statuses)
        self.num_calls = 0
        self._session = SessionClient(self.address, self, self._error)  # type: ignore[arg-type]

    async def connect(self) -> None:
        """Nothing to do."""

    async def call(self, call: Callable[[RefusingRouter], Awaitable[ResultT]]) -> ResultT:
        return await call(self)

    def Session(self) -> RefusingRouter:
        self.num_calls += 1
        return self

    async def write(self, _: object) -> None:
        raise asyncio.InvalidStateError

    async def read(self) -> object:
        code, details = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    def cancel(self) -> None:
        """Nothing to do."""

    @property
    def session(self) -> SessionClient:
        return self._session

    def _error(self, error: grpc.aio.AioRpcError) -> ServingError:
        return Router(self.address, None).error(error, is_begun=True)


async def test_the_routers_own_refusal_is_reported_though_gRPC_made_up_another_first() -> None:
    made_up = (grpc.StatusCode.INTERNAL, "Internal error from Core")
    router = RefusingRouter(made_up, made_up, (grpc.StatusCode.PERMISSION_DENIED, "not for strangers"))
    request = SessionRequest(router, make_start("Hi"))  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(PermissionDeniedError, match="not for strangers"):
            await anext(request.parts())
    assert router.num_calls == 3


async def test_a_stream_that_cannot_be_opened_ends_its_requests() -> None:
    router = Router("127.0.0.1:1", None)
    await router.close()
    session = SessionClient(router.address, router.stub, lambda error: router.error(error, is_begun=True))
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):
            answer = Answer()
            session.start(router_pb2.GenerateStart(), answer)
            with pytest.raises(RouterUnavailableError, match="closed"):
                await answer.next()
        await session.close()


class ScriptedCall:
    """One session's call: ``responses`` come down (``idle`` is set when all have), what goes up is kept."""

    def __init__(self) -> None:
        self.responses: asyncio.Queue[router_pb2.SessionResponse] = asyncio.Queue()
        self.requests: list[router_pb2.SessionRequest] = []
        self.written = asyncio.Event()
        self.idle = asyncio.Event()

    def Session(self) -> ScriptedCall:
        return self

    async def write(self, request: router_pb2.SessionRequest) -> None:
        self.requests.append(request)
        self.written.set()

    async def read(self) -> router_pb2.SessionResponse:
        if self.responses.empty():
            self.idle.set()
        return await self.responses.get()

    def cancel(self) -> None:
        """Nothing to do."""


@pytest.fixture
def call() -> ScriptedCall:
    return ScriptedCall()


@pytest.fixture
def session(call: ScriptedCall) -> SessionClient:
    return SessionClient("here", call, lambda error: ServingError(str(error)))  # type: ignore[arg-type]


def accepted(*slots: int) -> router_pb2.SessionResponse:
    return router_pb2.SessionResponse(
        accepted=[router_pb2.SessionAccepted(slot=slot, accepted=router_pb2.Accepted(seed=slot)) for slot in slots]
    )


def finished(slot: int) -> router_pb2.SessionFinished:
    ended = router_pb2.ChoiceFinished(reason=types_pb2.FINISH_REASON_LENGTH)
    return router_pb2.SessionFinished(slot=slot, finished=ended)


async def test_columns_come_to_their_requests(call: ScriptedCall, session: SessionClient) -> None:
    answers = [Answer(), Answer()]
    for answer in answers:
        session.start(router_pb2.GenerateStart(num_choices=2), answer)
    call.responses.put_nowait(accepted(0, 1))
    logprobs = [
        router_pb2.SessionLogprobs(slot=1, choice=1, tokens=[types_pb2.TokenLogprobs(token_id=7, logprob=-1)]),
    ]
    response = router_pb2.SessionResponse(
        slots=[0, 1, 1, 0],
        choices=[1, 0, 1, 1],
        num_tokens=[2, 0, 1, 1],
        token_offsets=[0, 5, 3, 2],
        token_ids=[1, 2, 7, 3],
        texts=["a", "b", "c", "d"],
        logprobs=logprobs,
    )
    call.responses.put_nowait(response)
    async with asyncio.timeout(WAIT_S):
        await call.idle.wait()
        first, second = [(await answer.next())[1:] for answer in answers]
    assert first == [Delta(choice=1, token_offset=0, token_ids=(1, 2, 3), text="ad")]
    [text_only, with_logprobs] = second
    assert text_only == Delta(choice=0, token_offset=5, text="b")
    assert isinstance(with_logprobs, Delta) and with_logprobs.token_ids == (7,)
    assert [entry.logprob for entry in with_logprobs.logprobs] == [-1]
    await session.close()


@pytest.mark.parametrize(
    "response",
    [
        router_pb2.SessionResponse(slots=[9], num_tokens=[1], token_offsets=[0], token_ids=[1]),
        router_pb2.SessionResponse(slots=[0], num_tokens=[2], token_offsets=[0], token_ids=[1]),
        router_pb2.SessionResponse(slots=[0], num_tokens=[], token_offsets=[0], token_ids=[]),
        router_pb2.SessionResponse(slots=[0], num_tokens=[1], token_offsets=[0], token_ids=[1], texts=["a", "b"]),
        router_pb2.SessionResponse(logprobs=[router_pb2.SessionLogprobs(slot=0)]),
        router_pb2.SessionResponse(finished=[router_pb2.SessionFinished(slot=0)]),
    ],
)
async def test_nonsense_ends_the_session(
    call: ScriptedCall, session: SessionClient, response: router_pb2.SessionResponse
) -> None:
    answer = Answer()
    session.start(router_pb2.GenerateStart(), answer)
    call.responses.put_nowait(response)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(RouterUnavailableError, match="broke the protocol"):
            await answer.next()


async def test_a_reader_that_leaves_too_much_unread_loses_only_its_own_request(
    call: ScriptedCall, session: SessionClient
) -> None:
    slow, quick = Answer(max_unread=10), Answer(max_unread=10)
    for answer in (slow, quick):
        session.start(router_pb2.GenerateStart(), answer)
    call.responses.put_nowait(accepted(0, 1))
    read: list[int] = []
    async with asyncio.timeout(WAIT_S):
        for number in range(12):
            tokens = router_pb2.SessionResponse(
                slots=[0, 1], num_tokens=[1, 1], token_offsets=[number] * 2, token_ids=[number] * 2
            )
            call.responses.put_nowait(tokens)
            read += [token for part in await quick.next() if isinstance(part, Delta) for token in part.token_ids]
        while len(read) < 12:
            read += [token for part in await quick.next() if isinstance(part, Delta) for token in part.token_ids]
        shown = await slow.next()
        with pytest.raises(StalledStreamError, match="unread"):
            await slow.next()
        while len(call.requests) < 3:
            call.written.clear()
            await call.written.wait()
    assert read == list(range(12))
    assert [len(part.token_ids) for part in shown if isinstance(part, Delta)] == [11]
    assert [request.WhichOneof("message") for request in call.requests] == ["start", "start", "cancel"]
    assert call.requests[2].cancel.slot == 0
    await session.close()


async def test_a_slot_is_used_again_only_after_its_requests_end(call: ScriptedCall, session: SessionClient) -> None:
    dropped, second, third = Answer(), Answer(), Answer()
    session.start(router_pb2.GenerateStart(), dropped).drop(ServingError("nobody wants it"))
    session.start(router_pb2.GenerateStart(), second)
    call.responses.put_nowait(accepted(0))
    call.responses.put_nowait(router_pb2.SessionResponse(finished=[finished(0)]))
    async with asyncio.timeout(WAIT_S):
        await call.idle.wait()
        session.start(router_pb2.GenerateStart(), third)
        while len(call.requests) < 4:
            call.written.clear()
            await call.written.wait()
    slots: list[int] = [request.start.slot for request in call.requests if request.HasField("start")]
    assert slots == [0, 1, 0]
    await session.close()
