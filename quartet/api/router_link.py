"""A router's way to another router: one connection, one session for all requests, and its view of its workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
from quartet.errors import RouterUnavailableError, ServingError
from quartet.rpc.channels import Dialer
from quartet.rpc.errors import DETAILS_KEY, from_rpc_error
from quartet.v1 import router_pb2, router_pb2_grpc

_MAX_DETAILS_LENGTH = 200


@dataclass(frozen=True)
class WorkerChanges:
    """Workers that changed; of a link's first message, all.

    Attributes:
        removed: ids of workers that are gone.
    """

    updated: tuple[WorkerStatus, ...]
    removed: tuple[str, ...]


class RouterLink:
    """One router of a pool. Connects when first used, and again after a break."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        """``address`` is ``host:port``."""
        self.address = address
        self._channel = dialer.open(address)
        self._stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._session = SessionClient(address, self._stub, self._to_error)

    def start(
        self, start: GenerateStart, answer: AnswerSink, *, resume: Resume | None, traceparent: str, relayed: Relayed
    ) -> SessionCall:
        """Start a request on the session. Never waits: errors of the router come out of ``answer``.

        Raises:
            InvalidRequestError: what no message can hold; ``field`` is its path.
        """
        return self._session.relay(start, answer, resume=resume, traceparent=traceparent, relayed=relayed)

    async def place(
        self, start: GenerateStart, resume: Resume | None, relayed: Relayed, *, timeout_s: float
    ) -> PlacedRequest:
        """Place a request. Raises ``ServingError``."""
        with self._errors():
            request = to_place_request(start, resume, relayed)
            return from_place_response(await self._stub.Place(request, timeout=timeout_s))

    async def explain(self, start: GenerateStart, *, timeout_s: float) -> Explanation:
        """Where the router would place a request. Raises ``ServingError``."""
        with self._errors():
            return from_explain_response(await self._stub.Explain(to_explain_request(start), timeout=timeout_s))

    async def prefill(self, asked: AskedPrefill, *, timeout_s: float) -> PrefilledFor:
        """Have a prompt prefilled by a worker of that router. Raises ``ServingError``."""
        with self._errors():
            call = self._stub.PrefillFor(to_prefill_for_request(asked), timeout=timeout_s)
            return from_prefill_for_response(await call)

    async def watch_workers(self) -> AsyncIterator[WorkerChanges]:
        """All its workers, then each change, until it goes away. Raises ``ServingError``."""
        call = self._stub.WatchWorkers(router_pb2.WatchWorkersRequest())
        try:
            async for message in call:
                yield WorkerChanges(
                    updated=tuple(map(from_worker_status, message.updated)), removed=tuple(message.removed_worker_ids)
                )
        except grpc.aio.AioRpcError as error:
            raise self._to_error(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """End all requests and the connection, for good."""
        await self._session.close()
        await self._channel.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn a call's failure in the block into its ``ServingError``."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._to_error(error) from None
        except grpc.aio.UsageError:  # the channel was closed meanwhile
            raise RouterUnavailableError(f"the connection to the router at {self.address} was closed") from None

    def _to_error(self, error: grpc.aio.AioRpcError) -> ServingError:
        is_from_router = DETAILS_KEY in dict(error.trailing_metadata() or ())
        if error.code() is not grpc.StatusCode.UNAVAILABLE or is_from_router:
            return from_rpc_error(error)
        why = (error.details() or "").rpartition("last error: ")[2][:_MAX_DETAILS_LENGTH]
        return RouterUnavailableError(f"no router answers at {self.address}: {why}")
