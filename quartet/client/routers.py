"""Connections to several equal routers: a call goes to the first that answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, TypeVar

import grpc

from quartet.api.session_client import SessionClient
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

logger = logging.getLogger(__name__)

_MAX_DETAILS_LENGTH = 200

# What gRPC says when a peer, or a proxy between, dropped one call and not its connection.
_RESET_DETAILS = "RST_STREAM"
_RESET_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)

# All requests that find no router ask discovery at once; those of this time take the answer of the first.
_MIN_FIND_INTERVAL_S = 0.5

ResultT = TypeVar("ResultT")
#: Finds the addresses of the routers that there are now. Raises ``ServingError``.
FindRouters = Callable[[], Awaitable[Sequence[str]]]


class ClientClosedError(RouterUnavailableError):
    """The client was closed and sends nothing more."""

    def __init__(self) -> None:
        super().__init__("the client was closed")


class RouterLostError(RouterUnavailableError):
    """There is no connection to a router any more, or a call on it was cut off: the router itself did not say why."""


class Router:
    """One router's address and its channel, which connects when first used and reconnects when needed.

    Attributes:
        session: carries many requests on one stream; opened by the first of them.
    """

    def __init__(self, address: str, tls: TlsConfig | None) -> None:
        """Raises ``ConfigError``: ``address`` is not ``host:port``, or a file of ``tls`` can't be used."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"a router's address is host:port, not {address!r}")
        self.address = address
        self.is_closed = False
        self._is_forgotten = False
        self._channel = create_channel(address, tls)
        self.stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(self._channel)
        self.session = SessionClient(address, self.stub, self._session_error, lost_error=RouterLostError)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return not self.is_closed and self._channel.get_state() is grpc.ChannelConnectivity.READY

    @property
    def closed_error(self) -> RouterUnavailableError:
        """What requests fail with once this was closed."""
        return (
            RouterLostError(f"there is no router at {self.address} any more")
            if self._is_forgotten
            else ClientClosedError()
        )

    async def connect(self) -> None:
        """Return once calls can be sent, or will fail at once.

        Raises:
            RouterUnavailableError: connecting takes too long.
            ClientClosedError: the client was closed.
        """
        if self.is_closed:
            raise self.closed_error
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connect()
        except TimeoutError as error:
            message = f"no router answers at {self.address} within {CONNECT_TIMEOUT_S:g} s"
            raise RouterUnavailableError(message) from error
        except grpc.aio.UsageError:  # it was closed meanwhile
            raise self.closed_error from None

    def error(self, error: grpc.aio.AioRpcError, *, is_begun: bool) -> ServingError:
        """The error of a failed call here; ``is_begun``: the router had already answered something."""
        if self.is_closed:
            return self.closed_error
        details = error.details() or ""
        if details == MADE_UP_DETAILS:
            # A cancel or another request's start was written when the call ended: nobody knows why it did.
            if is_begun:
                return RouterLostError(f"the router at {self.address} ended the call while it was written to")
            return RouterUnavailableError(f"the router at {self.address} ended the call before it was sent")
        is_from_router = DETAILS_KEY in dict(error.trailing_metadata() or ())
        is_reset = error.code() in _RESET_CODES and _RESET_DETAILS in details
        if is_from_router or not (is_reset or error.code() is grpc.StatusCode.UNAVAILABLE):
            return from_rpc_error(error)
        why = details.rpartition("last error: ")[2][:_MAX_DETAILS_LENGTH]
        what = "lost the router at" if is_begun else "no router answers at"
        return RouterLostError(f"{what} {self.address}: {why}")

    async def forget(self) -> None:
        """End the connection, for good: this router is gone. The client goes on."""
        self._is_forgotten = True
        await self.close()

    async def close(self) -> None:
        """End all calls and the connection, for good."""
        self.is_closed = True
        await self.session.close()
        await self._channel.close()

    def _session_error(self, error: grpc.aio.AioRpcError) -> ServingError:
        return self.error(error, is_begun=True)

    async def _connect(self) -> None:
        # A call would wait for name resolution and handshakes however long they take. A call on a failed channel fails
        # at once, with the reason.
        ended = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        while (state := self._channel.get_state(try_to_connect=True)) not in ended:
            await self._channel.wait_for_state_change(state)


class Routers:
    """Routers in the order in which the client tries them, beginning with the one that answered last."""

    def __init__(self, addresses: Sequence[str], tls: TlsConfig | None, find: FindRouters | None = None) -> None:
        """``find`` is asked when no known router answers; ``None``: there are no others.

        Raises ``ConfigError``: no address, a wrong one, or a file of ``tls`` can't be used.
        """
        if not addresses:
            raise ConfigError("give at least one router address")
        self._tls = tls
        self._routers = [Router(address, tls) for address in addresses]
        self._first = 0
        self._find = find
        self._finding: asyncio.Task[None] | None = None
        self._found_at: float | None = None
        self._is_closed = False

    def candidates(self) -> Candidates:
        """Each router once, the preferred one first; if the caller goes on after them, those that discovery finds."""
        return Candidates(self)

    def in_order(self) -> list[Router]:
        """All that are known, the preferred one first."""
        return self._routers[self._first :] + self._routers[: self._first]

    async def find_again(self) -> None:
        """Ask discovery, once for all that wait for it. Never fails: then it finds no more."""
        now = asyncio.get_running_loop().time()
        if self._find is None or self._is_closed:
            return
        if self._found_at is not None and now < self._found_at + _MIN_FIND_INTERVAL_S:
            return
        if self._finding is None or self._finding.done():
            self._finding = asyncio.create_task(self._take_found(self._find), name="find routers")
        await asyncio.wait([self._finding])  # cancelling one waiter must not cancel it for the others

    def prefer(self, router: Router) -> None:
        """Begin with ``router`` from now on."""
        if self._routers[self._first] is not router and router in self._routers:
            self._first = self._routers.index(router)

    def avoid(self, router: Router) -> None:
        """``router`` was lost, or drains: begin with the next one, unless another is preferred already."""
        if self._routers[self._first] is router:
            self._first = (self._first + 1) % len(self._routers)

    async def call(self, call: Callable[[Router], Awaitable[ResultT]]) -> ResultT:
        """The result of ``call`` at the first router that takes it. Raises ``ServingError``."""
        failures: list[ServingError] = []
        async for router in self.candidates():
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
        self._is_closed = True
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.wait([self._finding])
        await asyncio.gather(*(router.close() for router in self._routers))

    async def _take_found(self, find: FindRouters) -> None:
        """Add the routers that are new. Forget those that are listed no more and have no connection."""
        try:
            addresses = await find()
            known = {router.address for router in self._routers}
            added = [Router(address, self._tls) for address in addresses if address not in known]
        except (ServingError, ConfigError) as error:
            logger.info("discovery finds no other router: %s", error)
            return
        finally:
            self._found_at = asyncio.get_running_loop().time()
        self._routers += added
        gone = [router for router in self._routers if router.address not in addresses and not router.is_connected]
        for router in gone:
            await router.forget()
        preferred = self._routers[self._first]
        self._routers = [router for router in self._routers if router not in gone]
        self._first = self._routers.index(preferred) if preferred in self._routers else 0


class Candidates:
    """Routers for one request to try, one after the other.

    Not a generator: most requests take the first one only, and each generator left behind costs a task that closes it.
    """

    def __init__(self, routers: Routers) -> None:
        """``Routers.candidates`` makes it."""
        self._routers = routers
        self._left = routers.in_order()
        self._tried: set[Router] = set()
        self._has_asked = False

    def __aiter__(self) -> Candidates:
        return self

    async def __anext__(self) -> Router:
        if not self._left and not self._has_asked:
            self._has_asked = True
            await self._routers.find_again()
            self._left = [router for router in self._routers.in_order() if router not in self._tried]
        if not self._left:
            raise StopAsyncIteration
        router = self._left.pop(0)
        self._tried.add(router)
        return router


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
