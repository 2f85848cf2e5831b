"""Where a write loses the race with the end of its call, the router's word counts, not gRPC's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from quartet.client.generate import GenerateRequest
from quartet.client.request import make_start
from quartet.client.stream import GenerateStream
from quartet.errors import PermissionDeniedError, ServingError
from quartet.rpc.errors import from_rpc_error
from quartet.v1 import router_pb2, types_pb2

_MADE_UP = (grpc.StatusCode.INTERNAL, "Internal error from Core")
_REFUSED = (grpc.StatusCode.PERMISSION_DENIED, "not for strangers")


class EndedCall:
    """A call whose write lost the race: it has ended with ``status``."""

    def __init__(self, status: tuple[grpc.StatusCode, str]) -> None:
        self._status = status

    @property
    def _error(self) -> grpc.aio.AioRpcError:
        code, details = self._status
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    async def write(self, _: object) -> None:
        raise self._error

    def done(self) -> bool:
        return True

    async def details(self) -> str:
        return self._status[1]

    def cancel(self) -> bool:
        return False

    async def __aiter__(self) -> AsyncIterator[Any]:
        if self.done():
            raise self._error
        yield


class RefusingRouter:
    """Its calls end with these statuses, one after the other, the last one again and again."""

    address = "127.0.0.1:1"
    is_closed = False

    def __init__(self, *statuses: tuple[grpc.StatusCode, str]) -> None:
        self._statuses = list(statuses)
        self.num_calls = 0
        self.stub = self

    async def connect(self) -> None:
        """Nothing to do."""

    def Generate(self, timeout: float | None, metadata: object = ()) -> EndedCall:
        self.num_calls += 1
        return EndedCall(self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0])

    def error(self, error: grpc.aio.AioRpcError, *, is_begun: bool) -> ServingError:
        return from_rpc_error(error)


class AnsweringCall(EndedCall):
    """A call that gives these messages, and whose status a late write has hidden."""

    def __init__(self, messages: Sequence[router_pb2.GenerateResponse]) -> None:
        super().__init__(_MADE_UP)
        self._messages = messages

    async def write(self, _: object) -> None:
        """It goes out, or it is too late for it."""

    def done(self) -> bool:
        return False

    async def __aiter__(self) -> AsyncIterator[Any]:
        for message in self._messages:
            yield message
        raise self._error


class AnsweringRouter(RefusingRouter):
    """Its call gives these messages."""

    def __init__(self, *messages: router_pb2.GenerateResponse) -> None:
        super().__init__()
        self._messages = messages

    def Generate(self, timeout: float | None, metadata: object = ()) -> EndedCall:
        return AnsweringCall(self._messages)


class OneRouter:
    """The only router there is."""

    def __init__(self, router: RefusingRouter) -> None:
        self._router = router

    async def candidates(self) -> AsyncIterator[RefusingRouter]:
        yield self._router

    def avoid(self, router: RefusingRouter) -> None:
        """There is no other."""

    def prefer(self, router: RefusingRouter) -> None:
        """There is no other."""


async def _ask(router: RefusingRouter) -> None:
    async for _ in GenerateStream(GenerateRequest(OneRouter(router), make_start("hello"))):  # type: ignore[arg-type]
        pass


async def test_the_routers_own_refusal_is_reported_though_the_first_write_lost_the_race() -> None:
    router = RefusingRouter(_MADE_UP, _MADE_UP, _REFUSED)
    with pytest.raises(PermissionDeniedError, match="not for strangers"):
        await _ask(router)
    assert router.num_calls == 3


async def test_asking_again_ends() -> None:
    router = RefusingRouter(_MADE_UP)
    with pytest.raises(ServingError):
        await _ask(router)
    assert router.num_calls == 5


_ACCEPTED = router_pb2.GenerateResponse(accepted=router_pb2.Accepted(request_id="0" * 32))
_FINISHED = router_pb2.GenerateResponse(finished=router_pb2.ChoiceFinished(reason=types_pb2.FINISH_REASON_CANCELLED))


async def test_an_answer_that_is_complete_stays_so_though_a_cancel_came_too_late() -> None:
    await _ask(AnsweringRouter(_ACCEPTED, _FINISHED))


async def test_an_answer_that_breaks_off_is_an_error_though_a_cancel_came_too_late() -> None:
    with pytest.raises(ServingError):
        await _ask(AnsweringRouter(_ACCEPTED))
