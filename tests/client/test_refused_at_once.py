"""A router that refuses at once may end the call before the start is sent; its word counts, not gRPC's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from quartet.client.generate import GenerateRequest
from quartet.client.request import make_start
from quartet.client.stream import GenerateStream
from quartet.errors import PermissionDeniedError, ServingError
from quartet.rpc.errors import from_rpc_error

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

    def __init__(self, *statuses: tuple[grpc.StatusCode, str]) -> None:
        self._statuses = list(statuses)
        self.num_calls = 0
        self.stub = self

    async def connect(self) -> None:
        """Nothing to do."""

    def Generate(self, timeout: float | None) -> EndedCall:
        self.num_calls += 1
        return EndedCall(self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0])

    def error(self, error: grpc.aio.AioRpcError, *, is_begun: bool) -> ServingError:
        return from_rpc_error(error)


class OneRouter:
    """The only router there is."""

    def __init__(self, router: RefusingRouter) -> None:
        self._router = router

    def in_order(self) -> Iterator[RefusingRouter]:
        yield self._router


async def _ask(router: RefusingRouter) -> None:
    async for _ in GenerateStream(GenerateRequest(OneRouter(router), make_start("hello"))):  # type: ignore[arg-type]
        pass


async def test_the_routers_own_refusal_is_told_though_the_first_write_lost_the_race() -> None:
    router = RefusingRouter(_MADE_UP, _MADE_UP, _REFUSED)
    with pytest.raises(PermissionDeniedError, match="not for strangers"):
        await _ask(router)
    assert router.num_calls == 3


async def test_asking_again_ends() -> None:
    router = RefusingRouter(_MADE_UP)
    with pytest.raises(ServingError):
        await _ask(router)
    assert router.num_calls == 5
