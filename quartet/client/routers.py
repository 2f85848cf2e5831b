"""Connections to several equal routers: a call goes to the first that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, TypeVar

import grpc

from quartet.errors import ConfigError, DrainingError, ModelUnavailableError, RouterUnavailableError, ServingError
from quartet.rpc.channels import TlsConfig, create_channel
from quartet.rpc.errors import DETAILS_KEY, from_rpc_error
from quartet.v1 import router_pb2_grpc

#: Seconds within which a router must accept a connection, name resolution and TLS included.
CONNECT_TIMEOUT_S = 3.0

#: A router ends a request at its timeout and says so. The client cuts off only a router that fails to, much later.
DEADLINE_GRACE_S = 2.0

#: Tokens and characters of one choice that may wait for a slow reader. One stream carries many requests, so the client
#: never stops reading it.
MAX_UNREAD = 1 << 16

#: The status that gRPC makes up if a router refuses a stream before the first message is written.
MADE_UP_DETAILS = "Internal error from Core"
#: Times to ask again after that status: nothing was sent, and the router's own status says more.
MAX_OPENINGS = 5

_MAX_DETAILS_LENGTH = 200

ResultT = TypeVar("ResultT")


class ClientClosedError(RouterUnavailableError):
    """The client was closed and sends nothing more."""

    def __init__(self) -> None:
        super().__init__("the client was closed")


class Router:
    """One router's address and its channel, which connects when first used and reconnects when needed."""

    def __init__(self, address: str, tls: TlsConfig | None) -> None:
        """Raises ``ConfigError``: ``address`` is not ``host:port``, or a file of ``tls`` can't be used."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"a router's address is host:port, not {address!r}")
        self.address = address
        self.is_closed = False
        self._channel = create_channel(address, tls)
        self.stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(self._channel)

    async def connect(self) -> None:
        """Return once calls can be sent, or will fail at once.

        Raises:
            RouterUnavailableError: connecting takes too long.
            ClientClosedError: the client was closed.
        """
        if self.is_closed:
            raise ClientClosedError
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connect()
        except TimeoutError as error:
            message = f"no router answers at {self.address} within {CONNECT_TIMEOUT_S:g} s"
            raise RouterUnavailableError(message) from error

    def error(self, error: grpc.aio.AioRpcError, *, is_begun: bool) -> ServingError:
        """The error of a failed call here; ``is_begun``: the router had already answered something."""
        if error.details() == MADE_UP_DETAILS:
            return RouterUnavailableError(f"the router at {self.address} ended the call before it was sent")
        is_from_router = DETAILS_KEY in dict(error.trailing_metadata() or ())
        if error.code() is not grpc.StatusCode.UNAVAILABLE or is_from_router:
            return from_rpc_error(error)
        why = (error.details() or "").rpartition("last error: ")[2][:_MAX_DETAILS_LENGTH]
        what = "lost the router at" if is_begun else "no router answers at"
        return RouterUnavailableError(f"{what} {self.address}: {why}")

    async def close(self) -> None:
        """End all calls and the connection, for good."""
        self.is_closed = True
        await self._channel.close()

    async def _connect(self) -> None:
        # A call would wait for name resolution and handshakes however long they take. A call on a failed channel fails
        # at once, with the reason.
        ended = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        while (state := self._channel.get_state(try_to_connect=True)) not in ended:
            await self._channel.wait_for_state_change(state)


class Routers:
    """Routers in the order in which the client tries them, beginning with the one that answered last."""

    def __init__(self, addresses: Sequence[str], tls: TlsConfig | None) -> None:
        """Raises ``ConfigError``: no address, a wrong one, or a file of ``tls`` can't be used."""
        if not addresses:
            raise ConfigError("give at least one router address")
        self._routers = [Router(address, tls) for address in addresses]
        self._first = 0

    def in_order(self) -> list[Router]:
        """All routers, the preferred one first."""
        return self._routers[self._first :] + self._routers[: self._first]

    def prefer(self, router: Router) -> None:
        """Begin with ``router`` from now on."""
        self._first = self._routers.index(router)

    async def call(self, call: Callable[[Router], Awaitable[ResultT]]) -> ResultT:
        """The result of ``call`` at the first router that takes it. Raises ``ServingError``."""
        failures: list[ServingError] = []
        for router in self.in_order():
            try:
                await router.connect()
                result = await call(router)
            except (RouterUnavailableError, DrainingError) as error:
                failures.append(error)
            except grpc.aio.AioRpcError as error:
                failures.append(go_on_or_raise(router.error(error, is_begun=False)))
            else:
                self.prefer(router)
                return result
        raise_all(failures)

    async def close(self) -> None:
        """End all calls and connections."""
        await asyncio.gather(*(router.close() for router in self._routers))


def go_on_or_raise(error: ServingError) -> ServingError:
    """Return ``error`` if another router may do better; raise it if another router would say the same."""
    if isinstance(error, RouterUnavailableError | DrainingError | ModelUnavailableError):
        return error
    raise error


def raise_all(failures: Sequence[ServingError]) -> NoReturn:
    """Raise one error for the failures of all routers."""
    if len(failures) == 1 or isinstance(failures[-1], ClientClosedError):
        raise failures[-1]
    raise RouterUnavailableError("; ".join(failure.message for failure in failures))
