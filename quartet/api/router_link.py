"""A router's way to another router: one connection, one session for all requests, and its view of its workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from quartet.api.answer import AnswerSink
from quartet.api.convert.answer import from_place_response, to_place_request
from quartet.api.convert.fleet import from_explain_response, from_worker_status, to_explain_request
from quartet.api.convert.prefill import (
    AskedPrefill,
    PrefilledFor,
    from_prefill_for_response,
    to_prefill_for_request,
)
from quartet.api.fleet import Explanation, WorkerStatus
from quartet.api.placement import PlacedRequest
from quartet.api.request import GenerateStart, Relayed, Resume
from quartet.api.session_client import SessionCall, SessionClient
from quartet.errors import ProtocolError, RouterUnavailableError, ServingError
from quartet.rpc.channels import Dialer
from quartet.rpc.errors import DETAILS_KEY, from_rpc_error
from quartet.v1 import router_pb2, router_pb2_grpc

_MAX_DETAILS_LENGTH = 200

ResponseT = TypeVar("ResponseT")


class RouterSilentError(RouterUnavailableError):
    """It is connected, and does not answer: its process stands still, or what is between."""


@dataclass(frozen=True)
class WorkerChanges:
    """Workers that changed; of a link's first message, all.

    Attributes:
        removed: ids of workers that are gone.
        is_complete: there are no others than those in ``updated``.
    """

    updated: tuple[WorkerStatus, ...]
    removed: tuple[str, ...] = ()
    is_complete: bool = False


class RouterLink:
    """One router of a pool. Connects when first used, and again after a break."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        """``address`` is ``host:port``."""
        self.address = address
        self._channel = dialer.open(address)
        self._stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._session = SessionClient(address, self._stub, self._to_error)
        self._calls: set[grpc.aio.Call] = set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs there."""
        return not self._calls and not self._session.num_calls

    def start(
        self, start: GenerateStart, answer: AnswerSink, *, resume: Resume | None, traceparent: str, relayed: Relayed
    ) -> SessionCall:
        """Start a request on the session. Never waits: errors of the router come out of ``answer``.

        Raises:
            InvalidRequestError: what no message can hold; ``field`` is its path.
        """
        return self._session.relay(start, answer, resume=resume, traceparent=traceparent, relayed=relayed)

    async def place(
        self, start: GenerateStart, resume: Resume | None, relayed: Relayed, *, traceparent: str = "", timeout_s: float
    ) -> PlacedRequest:
        """Place a request; an empty ``traceparent`` begins no trace. Raises ``ServingError``."""
        request = to_place_request(start, resume, relayed)
        metadata = (("traceparent", traceparent),) if traceparent else ()
        return from_place_response(await self._answer(self._stub.Place, request, timeout_s, metadata))

    async def explain(self, start: GenerateStart, *, timeout_s: float) -> Explanation:
        """Where the router would place a request. Raises ``ServingError``."""
        return from_explain_response(await self._answer(self._stub.Explain, to_explain_request(start), timeout_s))

    async def prefill(self, asked: AskedPrefill, *, timeout_s: float) -> PrefilledFor:
        """Have a prompt prefilled by a worker of that router. Raises ``ServingError``."""
        request = to_prefill_for_request(asked)
        return from_prefill_for_response(await self._answer(self._stub.PrefillFor, request, timeout_s))

    async def watch_workers(self, *, max_silence_s: float) -> AsyncIterator[WorkerChanges]:
        """All its workers, then each change, until it goes away.

        While nothing changes for ``max_silence_s`` seconds, it is asked for all of them, and must answer within as
        long: its host answers gRPC's pings also while its event loop stands still.

        Raises:
            RouterSilentError: it does not answer.
            RouterUnavailableError: it is lost.
            ServingError: it refused.
        """
        call = self._stub.WatchWorkers(router_pb2.WatchWorkersRequest())
        reading: asyncio.Future[object] | None = None
        try:
            while True:
                # A read that is cancelled would end the call, so it goes on while the router is asked.
                reading = reading or asyncio.ensure_future(call.read())
                await asyncio.wait([reading], timeout=max_silence_s)
                if not reading.done():
                    yield WorkerChanges(updated=await self._list_workers(max_silence_s), is_complete=True)
                    continue
                message, reading = reading.result(), None
                if message is grpc.aio.EOF:
                    return
                if not isinstance(message, router_pb2.WatchWorkersResponse):
                    raise ProtocolError("a message is malformed")
                yield WorkerChanges(
                    updated=tuple(map(from_worker_status, message.updated)), removed=tuple(message.removed_worker_ids)
                )
        except grpc.aio.AioRpcError as error:
            raise self._to_error(error) from None
        except grpc.aio.UsageError:
            raise self._closed_error() from None
        finally:
            if reading is not None:
                reading.cancel()
                reading.add_done_callback(_retrieve)
            call.cancel()

    async def reset(self) -> None:
        """Fail all that runs there; what begins later is not touched."""
        calls, self._calls = self._calls, set()
        for call in calls:
            call.cancel()
        await self._session.reset()

    async def close(self) -> None:
        """End all requests and the connection, for good."""
        await self._session.close()
        await self._channel.close()

    async def _list_workers(self, timeout_s: float) -> tuple[WorkerStatus, ...]:
        """All its workers. Raises ``RouterSilentError``: it does not answer."""
        while True:
            asked_at = time.monotonic()
            try:
                response = await self._stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=timeout_s)
                return tuple(map(from_worker_status, response.workers))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                # Else this process was stopped: the answer may have been there.
                if time.monotonic() - asked_at < 2 * timeout_s:
                    raise RouterSilentError(f"the router at {self.address} says nothing") from None

    async def _answer(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Any, ResponseT],
        request: object,
        timeout_s: float,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> ResponseT:
        """The answer to one call. Raises ``ServingError``."""
        try:
            call = method(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.UsageError:
            raise self._closed_error() from None
        self._calls.add(call)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._to_error(error) from None
        except grpc.aio.UsageError:  # the channel was closed meanwhile
            raise self._closed_error() from None
        except asyncio.CancelledError:
            if call in self._calls:
                raise  # the caller was cancelled, not the call alone
            raise RouterSilentError(f"the router at {self.address} says nothing") from None
        finally:
            self._calls.discard(call)

    def _closed_error(self) -> RouterUnavailableError:
        return RouterUnavailableError(f"the connection to the router at {self.address} was closed")

    def _to_error(self, error: grpc.aio.AioRpcError) -> ServingError:
        is_from_router = DETAILS_KEY in dict(error.trailing_metadata() or ())
        if error.code() is not grpc.StatusCode.UNAVAILABLE or is_from_router:
            return from_rpc_error(error)
        why = (error.details() or "").rpartition("last error: ")[2][:_MAX_DETAILS_LENGTH]
        return RouterUnavailableError(f"no router answers at {self.address}: {why}")


def _retrieve(done: asyncio.Future[object]) -> None:
    """Nobody waits for it any more: its error is no news."""
    if not done.cancelled():
        done.exception()
