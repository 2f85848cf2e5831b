"""A gRPC server as every service runs it: one port with health, reflection, channelz, TLS, and a bounded end.

``ServingInterceptor`` is on the way of every call: it checks the caller's audience, counts calls, refuses them while
the server drains, and turns errors into statuses. ``StalledCalls`` ends calls of silent clients.
``MessageLimits`` bound each message before it is parsed.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import math
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_channelz.v1 import channelz, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from quartet.errors import (
    ConfigError,
    DrainingError,
    InvalidRequestError,
    MessageTooLargeError,
    ProtocolError,
    RequestTimeoutError,
    StalledStreamError,
)
from quartet.rpc.audience import Gate
from quartet.rpc.channels import (
    KEEPALIVE_TIME_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_API_MESSAGE_BYTES,
    ListenAddress,
    TlsConfig,
    TlsFiles,
    server_credentials,
)
from quartet.rpc.errors import abort, is_or_holds
from quartet.rpc.health import HealthServicer
from quartet.rpc.message_limits import MAX_STANDARD_BYTES, UNCHECKED_BYTES, MessageLimits, limited_parser
from quartet.rpc.open_calls import OpenCalls
from quartet.rpc.refusal_pace import RefusalPace, note_message, take_message_bytes
from quartet.supervision import vital

logger = logging.getLogger(__name__)

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# gRPC's own types: requests and responses are of the types that the method's (de)serializers make and take.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Behavior: TypeAlias = Callable[[Any, _Context], Any]
_Deserializer: TypeAlias = Callable[[bytes], Any]

# Calls that were cut clean up after themselves; the server doesn't wait longer for them than this.
_CUT_TIMEOUT_S = 5.0
_MAX_POLL_INTERVAL_S = 1.0
# A call of a method that takes one request must bring it within this time; one of gRPC's own services each request. A
# client of a method that yields must take each response within this time.
_REQUEST_TIMEOUT_S = 30.0
_MIN_POLLS = 4
# More than gRPC takes to cancel a handler whose client has gone.
_CANCEL_FOLLOWS_S = 10.0
# Calls of a connection that were ended because its client took nothing, and wait in gRPC until it does or goes. With
# so many the connection gets no further calls. A gateway may have many users who do not read for a while.
_MAX_UNTAKEN = 1024
# Calls that one connection may have open.
_MAX_STREAMS = 10_000
_HEALTH_SERVICE = "grpc.health.v1.Health"
# Refusals of a request that no tenant pays for.
_CLIENTS_FAULTS = (InvalidRequestError, MessageTooLargeError, ProtocolError)
_CHANNELZ_SERVICE = "grpc.channelz.v1.Channelz"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where and how to serve.

    Attributes:
        address: ``host:port`` to listen on; port 0 takes a free one.
        tls: certificates; ``None`` serves in the clear.
        insecure: allows an address other than loopback without TLS.
        namespace: deployment that callers' identities must belong to.
        trusted_namespaces: others whose routers may send requests here, and whose routers and workers may pull blocks.
        reflection: offer reflection; ``None``: on loopback only.
        channelz: offer channelz; ``None``: on loopback only.
        max_receive_message_bytes: a longer message ends its call.

    Raises:
        ConfigError: naming the field.
    """

    address: str = "127.0.0.1:0"
    tls: TlsConfig | None = None
    insecure: bool = False
    namespace: str = "default"
    trusted_namespaces: tuple[str, ...] = ()
    reflection: bool | None = None
    channelz: bool | None = None
    max_receive_message_bytes: int = MAX_API_MESSAGE_BYTES

    def __post_init__(self) -> None:
        address = ListenAddress.parse(self.address, "address")
        if not self.is_open:
            address.require_loopback("address", "tls, or insecure: true")
        if self.max_receive_message_bytes < 1:
            raise ConfigError("max_receive_message_bytes: must be at least 1")

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can reach the address."""
        return ListenAddress.parse(self.address, "address").is_loopback

    @property
    def is_open(self) -> bool:
        """Whether callers from other hosts may be served: with certificates, or because ``insecure`` allows it."""
        return self.tls is not None or self.insecure

    def check_beside(self, address: str, field: str) -> ListenAddress:
        """The ``address`` of a port beside gRPC's, which has no TLS of its own.

        Raises:
            ConfigError: naming ``field``; not ``host:port``, or beyond loopback while gRPC may not be either.
        """
        parsed = ListenAddress.parse(address, field)
        if not self.is_open:
            parsed.require_loopback(field, "server.tls, or server.insecure: true")
        return parsed

    def check_events_key(self, key_file: Path | None) -> None:
        """Refuse events without a key beside gRPC with TLS. Raises ``ConfigError`` naming ``events_key_file``."""
        if self.tls is not None and key_file is None:
            raise ConfigError(
                "events_key_file: is missing; with server.tls events are encrypted too: let it name one file for all "
                "processes, made by `openssl rand -hex 32`"
            )

    @property
    def with_reflection(self) -> bool:
        """Whether reflection is offered."""
        return self.is_loopback if self.reflection is None else self.reflection

    @property
    def with_channelz(self) -> bool:
        """Whether channelz is offered."""
        return self.is_loopback if self.channelz is None else self.channelz


@dataclass(frozen=True)
class Service:
    """One service to offer.

    Attributes:
        name: full name, ``quartet.v1.DecodeService``.
        register: adds the servicer to a server: ``lambda server: add_X_to_server(servicer, server)``.
    """

    name: str
    register: Callable[[grpc.aio.Server], None]


class RpcServer:
    """One server: made, started, drained, once. All services are NOT_SERVING until ``set_serving`` says otherwise."""

    def __init__(
        self,
        config: ServerConfig,
        services: Sequence[Service],
        *,
        limits: MessageLimits | None = None,
        num_listeners: int = 1,
        count_reload: Callable[[bool], None] = lambda is_used: None,
    ) -> None:
        """Make one.

        Args:
            config: where and how to serve.
            services: to offer.
            limits: bound each message, beside ``config.max_receive_message_bytes``, before it is parsed.
            num_listeners: sockets that listen at the address, among which the kernel spreads connections by chance.
                grpc.aio takes some five turns of the event loop to hand over one call of a listener, in order of
                arrival: with several, calls of other connections don't wait behind a flood.
            count_reload: is told of each change of the files of TLS whether they could be used; any thread may call it.
        """
        self._config = config
        self._count_reload = count_reload
        self._num_listeners = num_listeners
        self._limits = limits or MessageLimits()
        self._service_names = tuple(service.name for service in services)
        self._services = tuple(services)
        self._health = HealthServicer()
        self._calls = CallCounter()
        self._listeners: list[grpc.aio.Server] = []
        self._tls_files: TlsFiles | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def num_active_calls(self) -> int:
        """Calls of the services that run now; a stream is one call."""
        return self._calls.num_active

    def certificate_end(self) -> float | None:
        """Unix time at which the certificate ends that new connections get. Any thread may ask.

        ``None``: it does not serve by TLS, or not yet.
        """
        return None if self._tls_files is None else self._tls_files.current().end

    async def start(self) -> int:
        """Listen, and return the port.

        Raises:
            ConfigError: the address can't be listened on, or a TLS file can't be used.
        """
        tls = self._config.tls
        self._tls_files = None if tls is None else TlsFiles(tls, "serving", count=self._count_reload)
        config, interceptor = self._config, self._interceptor()
        is_shared = self._num_listeners > 1
        if is_shared:
            _check_free(config.address)
        listeners, port = list[grpc.aio.Server](), ListenAddress.parse(config.address, "address").port
        for _ in range(self._num_listeners):
            listener = grpc.aio.server(interceptors=[interceptor], options=_options(config, is_shared=is_shared))
            for service in self._services:
                service.register(listener)
            self._add_standard_services(listener)
            port = self._bind(listener, _with_port(config.address, port))
            listeners.append(listener)
        await self.set_serving(None, False)
        self._listeners = listeners
        for listener in listeners:
            await listener.start()
        logger.info("listening on %s", _with_port(self._config.address, port))
        return port

    async def set_serving(self, service: str | None, is_serving: bool) -> None:
        """Set the health of one service, or, for ``None``, of all and overall. After ``drain`` it changes nothing."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._service_names) if service is None else (service,):
            await self._health.set(name, status)

    async def set_not_serving_for_good(self) -> None:
        """Set all health to NOT_SERVING for the rest of this server's life; calls are still taken."""
        await self._health.enter_graceful_shutdown()

    async def drain(self, grace_s: float) -> None:
        """Say NOT_SERVING, refuse new calls (``DrainingError``), let running ones end for ``grace_s``, cut the rest.

        Returns soon after the last call; watchers of health don't delay it. It may be called again, also while it runs:
        the shorter grace counts.
        """
        self._calls.is_draining = True
        await self.set_not_serving_for_good()
        if not self._listeners:
            return
        try:
            async with asyncio.timeout(grace_s):
                await self._calls.wait_idle()
        except TimeoutError:
            logger.warning("cut %d calls that did not end within %g s", self._calls.num_active, grace_s)
        await self._stop()

    async def _stop(self) -> None:
        # Once only, and never with a grace beside: two concurrent `stop`s of grpc.aio 1.85 crash the process.
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_all())
        try:
            async with asyncio.timeout(_CUT_TIMEOUT_S):
                await asyncio.shield(self._stopping)
                # grpc.aio is done with a cut call before its handler has run its `finally`.
                await self._calls.wait_idle()
        except TimeoutError:
            logger.warning("calls that were cut still clean up after %g s", _CUT_TIMEOUT_S)

    async def _stop_all(self) -> None:
        for listener in self._listeners:
            await listener.stop(None)

    def _interceptor(self) -> ServingInterceptor:
        tls = self._config.tls
        if tls is None:
            return ServingInterceptor(None, self._calls, self._limits)
        gate = Gate(
            namespace=self._config.namespace,
            allow_anonymous=not tls.require_client_cert,
            trusted_namespaces=frozenset(self._config.trusted_namespaces),
        )
        return ServingInterceptor(gate, self._calls, self._limits)

    def _add_standard_services(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names, rare = [*self._service_names, _HEALTH_SERVICE], _RareMethods(server)
        if self._config.with_channelz:
            channelz_pb2_grpc.add_ChannelzServicer_to_server(channelz.aio.ChannelzServicer(), rare)
            names.append(_CHANNELZ_SERVICE)
        if self._config.with_reflection:
            servicer = reflection.aio.ReflectionServicer((*names, reflection.SERVICE_NAME))
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, rare)

    def _bind(self, server: grpc.aio.Server, address: str) -> int:
        credentials = None if self._tls_files is None else server_credentials(self._tls_files)
        try:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise _unusable(address) from error


class _RareMethods:
    """Adds services to a server without a wait of its own for each of their methods.

    For each call that comes, gRPC goes through all the methods for which it waits. The methods added here share one
    wait, that for unknown methods. So a flood of one of them delays the others, and no other service.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, _Handler]) -> None:
        """Nothing: the generic handlers know them too."""


class StalledCalls:
    """Bounds the time that one write may take, and the wait for a call's first message.

    One timer for all calls costs less than one for each message. A client that reads nothing, or opens a call and sends
    nothing, still answers gRPC's pings, so gRPC itself never ends its call.

    Time is counted in polls: while this process gets no CPU no poll runs, and no client is blamed for it.
    """

    def __init__(self, timeout_s: float) -> None:
        """A client may be still for ``timeout_s`` seconds, and at most one poll (1 s, or a quarter of it) more."""
        self._timeout_s = timeout_s
        self._max_polls = max(_MIN_POLLS, math.ceil(timeout_s / _MAX_POLL_INTERVAL_S))
        self._interval_s = timeout_s / self._max_polls
        self._calls: set[WatchedCall] = set()
        # Of the calls whose first message is awaited: by the task that reads it, the polls since; None: it is too late.
        self._unsaid: dict[asyncio.Task[Any], int | None] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def read_first(self, context: grpc.aio.ServicerContext[Any, Any]) -> object:
        """The next message of the call, its first or another that must come soon; ``grpc.aio.EOF`` if there is none.

        The current task reads it.

        Raises:
            RequestTimeoutError: none came in time.
        """
        with self.until_first():
            return await context.read()

    def until_first(self) -> FirstMessage:
        """Bound the time in which the current task, in a ``with`` block, reads a call's first message of use.

        Raises:
            RequestTimeoutError: out of the block, where it took too long.
        """
        return FirstMessage(self._unsaid, self._poll_soon, self._timeout_s)

    def watch(self, context: grpc.aio.ServicerContext[Any, Any]) -> WatchedCall:
        """Watch the call of ``context``, which the current task serves, for as long as a ``with`` block lasts.

        Raises:
            StalledStreamError: out of the block, where the client took nothing for too long.
        """
        return WatchedCall(context, self._calls, self._poll_soon)

    def _poll_soon(self) -> None:
        if self._timer is None:
            self._set_timer()

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._poll)

    @vital
    def _poll(self) -> None:
        self._timer = None
        for call in tuple(self._calls):
            call.poll(self._max_polls)
        for task, num_polls in tuple(self._unsaid.items()):
            if num_polls is not None:
                is_late = num_polls >= self._max_polls
                self._unsaid[task] = None if is_late else num_polls + 1
                if is_late:
                    task.cancel()
        if self._calls or self._unsaid:
            self._set_timer()


# These two are classes, since a generator as a context manager takes more steps, and each call pays for both.


class FirstMessage:
    """A ``with`` block that bounds the wait for a call's first message: see ``StalledCalls.until_first``."""

    __slots__ = ("_on_begin", "_task", "_timeout_s", "_unsaid")

    def __init__(
        self, unsaid: dict[asyncio.Task[Any], int | None], on_begin: Callable[[], None], timeout_s: float
    ) -> None:
        """The current task is in ``unsaid`` within the block."""
        self._unsaid = unsaid
        self._on_begin = on_begin
        self._timeout_s = timeout_s
        self._task = _handler_task()

    def __enter__(self) -> None:
        """The wait begins."""
        self._unsaid[self._task] = 0
        self._on_begin()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """The message is here, or the wait has ended badly. Raises ``RequestTimeoutError``."""
        is_late = self._unsaid.pop(self._task) is None
        if is_late and isinstance(error, asyncio.CancelledError) and self._task.uncancel() == 0:
            raise RequestTimeoutError(f"no message came within {self._timeout_s:g} s that starts anything") from None


class WatchedCall:
    """The writes of one call, which ``StalledCalls`` bounds within a ``with`` block."""

    __slots__ = ("_calls", "_context", "_num_polls", "_on_begin", "_task", "is_stalled")

    def __init__(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        calls: set[WatchedCall],
        on_begin: Callable[[], None],
    ) -> None:
        """The current task writes to ``context``. Within the block it is one of ``calls``."""
        self.is_stalled = False
        self._context = context
        self._calls = calls
        self._on_begin = on_begin
        self._task = _handler_task()
        self._num_polls: int | None = None  # since the write under way began; None: there is none

    def __enter__(self) -> WatchedCall:
        """The watch begins."""
        self._calls.add(self)
        self._on_begin()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """The watch ends. Raises ``StalledStreamError``."""
        self._calls.discard(self)
        if self.is_stalled and isinstance(error, asyncio.CancelledError) and self._task.uncancel() == 0:
            raise StalledStreamError("the client took nothing for too long") from None

    async def write(self, message: Any) -> None:
        """Write ``message``; returns when the client has room for the next one.

        Where the client has gone, that always ends in a cancel of the call's task.
        """
        self._num_polls = 0
        try:
            await self._context.write(message)
        except grpc.aio.InternalError:
            # gRPC may fail the write before it cancels the task, which it does as soon as it sees why. The client has
            # gone by then: it must not be taken for one that stalls.
            self._num_polls = None
            await asyncio.sleep(_CANCEL_FOLLOWS_S)
            raise
        self._num_polls = None

    def poll(self, max_polls: int) -> None:
        """End the call if one write has lasted for more than ``max_polls`` polls."""
        if self._num_polls is None or self.is_stalled:
            return
        self._num_polls += 1
        if self._num_polls > max_polls:
            self.is_stalled = True
            self._task.cancel()


def _handler_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "a handler runs in a task"
    return task


class CallCounter:
    """Counts the calls that run now, and refuses new ones during a drain.

    Calls of health, reflection and channelz are not counted: they answer until the end, and may stay open for ever.
    """

    def __init__(self) -> None:
        self.num_active = 0
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, context: _Context) -> None:
        """Count a call until its status has been sent. Raises ``DrainingError`` once ``is_draining`` is set."""
        if self.is_draining:
            raise DrainingError("the server is going away")
        self.num_active += 1
        self._idle.clear()
        context.add_done_callback(self._leave)  # type: ignore[arg-type]  # the stubs forgot that it is a Protocol

    async def wait_idle(self) -> None:
        """Return when no call runs."""
        await self._idle.wait()

    def _leave(self, ctx: _Context) -> None:
        self.num_active -= 1
        if self.num_active == 0:
            self._idle.set()


class ServingInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler once, whether it yields its responses, writes them, or works on raw bytes.

    It costs something for each call, nothing for a message. It is made by hand because OpenTelemetry's ready-made
    interceptor breaks streaming handlers that use ``context.write``.

    A ``ServingError`` becomes its status; a message that can't be parsed INVALID_ARGUMENT; anything unexpected
    INTERNAL, which leaks nothing. Cancellation passes through, and a generator is always closed.
    """

    def __init__(self, gate: Gate | None, calls: CallCounter, limits: MessageLimits) -> None:
        """``gate`` is ``None`` without TLS: every caller may call everything. ``limits`` bound each message."""
        self._gate = gate
        self._calls = calls
        self._limits = limits
        self._stalled = StalledCalls(_REQUEST_TIMEOUT_S)
        self._refusals = RefusalPace()
        self._untaken = OpenCalls("calls whose answers it does not take", max_of_connection=_MAX_UNTAKEN)
        self._wrapped: dict[str, _Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The method's handler, wrapped; ``None`` (gRPC answers UNIMPLEMENTED) where there is none."""
        method = str(handler_call_details.method)
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: _Handler) -> _Handler:
        behavior, make_handler = _parts(handler)
        is_standard = method.startswith("/grpc.")
        deserialize = limited_parser(handler.request_deserializer, self._limits)
        parse = _parser(deserialize, MAX_STANDARD_BYTES if is_standard else None)
        respond = self._responder(behavior, may_be_silent=not (is_standard and handler.request_streaming))

        async def serve(request: Any, context: _Context) -> Any:
            try:
                if self._untaken or self._refusals or self._gate is not None:
                    await self._enter(method, context)
                if not handler.request_streaming:
                    # Not counted yet: a drain does not wait for a client that says nothing.
                    request = parse(await self._lone_request(context))
                if not is_standard:
                    self._calls.enter(context)
                return await respond(request, context)
            except Exception as error:  # noqa: BLE001 - the call ends here; `abort` logs what is not a ServingError
                request = None  # let go before its sender waits
                return await self._fail(context, error)

        # A lone request is parsed in `serve`, where a failure gets a status; those of a stream where they are read.
        return make_handler(serve, parse if handler.request_streaming else None, handler.response_serializer)

    async def _enter(self, method: str, context: _Context) -> None:
        """Wait where the connection has to. Raises ``ServingError``: this caller may not make the call."""
        if self._untaken:
            self._untaken.check(context)
        if self._gate is not None:
            self._gate.check(method, context.auth_context())
        if self._refusals:
            await self._refusals.wait_to_read(context.peer())

    async def _fail(self, context: _Context, error: Exception) -> None:
        """The handler has raised ``error``: end the call."""
        try:
            if isinstance(error, grpc.aio.AbortError | grpc.aio.InternalError):
                raise error
            if isinstance(error, NotImplementedError):  # gRPC's own services leave out some methods
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not offer the method")
            await self._abort(context, error)
        except grpc.aio.InternalError:  # from what was sent to a client that has gone
            if context.done():  # It was a status, and gRPC cancels no task that has sent one.
                return
            # gRPC soon cancels this task, or knows the error by then.
            await asyncio.sleep(_CANCEL_FOLLOWS_S)
            raise

    async def _abort(self, context: _Context, error: Exception) -> None:
        """End the call with the status of ``error``; where it refuses a long message, its sender waits."""
        size_bytes, measure_s = take_message_bytes(), 0.0
        if isinstance(error, MessageTooLargeError | ProtocolError):  # another task may have read the message
            size_bytes, measure_s = max(size_bytes, error.size_bytes), error.measure_s
        if size_bytes > UNCHECKED_BYTES and isinstance(error, _CLIENTS_FAULTS):
            await self._refusals.wait(context.peer(), error, size_bytes, measure_s)
        if is_or_holds(error, StalledStreamError):
            # gRPC keeps the status, and what was written before, until the client takes it or goes.
            self._untaken.count(context)
        await abort(context, error)

    def _responder(self, behavior: _Behavior, *, may_be_silent: bool) -> _Behavior:
        if not may_be_silent:
            behavior = self._without_silence(behavior)
        return self._writer(behavior) if inspect.isasyncgenfunction(behavior) else behavior

    def _writer(self, generate: _Behavior) -> _Behavior:
        """Writes what a method yields while its client takes it. One that writes by itself must watch by itself."""

        async def write_all(request: Any, context: _Context) -> None:
            with self._stalled.watch(context) as call:
                # Closed also when the call is cancelled in `write`: its `finally` blocks free what the request held.
                async with aclosing(generate(request, context)) as responses:
                    async for response in responses:
                        await call.write(response)

        return write_all

    def _without_silence(self, generate: _Behavior) -> _Behavior:
        """A streaming method of gRPC's own services, such as reflection, whose clients may not be silent for long."""

        async def requests(context: _Context) -> AsyncIterator[Any]:
            while (request := await self._stalled.read_first(context)) is not grpc.aio.EOF:
                yield request

        async def respond(_requests: Any, context: _Context) -> AsyncIterator[Any]:
            async with aclosing(generate(requests(context), context)) as responses:
                async for response in responses:
                    yield response

        return respond

    async def _lone_request(self, context: _Context) -> Any:
        request = await self._stalled.read_first(context)
        if request is grpc.aio.EOF:
            raise ProtocolError("the call holds no request")
        return request


def raise_file_limit() -> None:
    """Let this process have as many connections as the system allows it: the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems name no real hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _check_free(address: str) -> None:
    """Raises ``ConfigError``: others listen there, with whom gRPC would share it. All else is for gRPC to judge."""
    parsed = ListenAddress.parse(address, "address")
    host = parsed.host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(host, parsed.port, type=socket.SOCK_STREAM)
    except OSError:
        return
    for family, kind, protocol, _name, at in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was closed just now doesn't matter
                probe.bind(at)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _unusable(address) from error


def _unusable(address: str) -> ConfigError:
    return ConfigError(f"address: cannot listen on {address}: is it this host's, and free?")


def _options(config: ServerConfig, *, is_shared: bool) -> list[tuple[str, int]]:
    return [
        # By default part of a burst of 1000 calls is silently answered CANCELLED; admission is the services' own.
        ("grpc.server.max_pending_requests", 100_000),
        ("grpc.server.max_pending_requests_hard_limit", 200_000),
        # Clients that ping more often than this get GOAWAY, and ours ping every 10 s.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client whose host died must not hold its requests' blocks.
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # Far above what one client needs. It is no admission control: further calls wait in the client, or break.
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.max_receive_message_length", config.max_receive_message_bytes),
        ("grpc.max_send_message_length", -1),
        # At most 64 KiB of each call wait here to be read. Else a window grows to megabytes, and messages
        # of clients that cancel them fill the memory. For the message that is being read gRPC opens it further.
        ("grpc.http2.bdp_probe", 0),
        # Else a second server on the same port starts, and the kernel gives it half of the connections.
        ("grpc.so_reuseport", int(is_shared)),
    ]


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


def _parts(handler: _Handler) -> tuple[_Behavior, Callable[..., _Handler]]:
    """What serves a call, and what makes a handler of it that reads its request itself.

    grpc.aio reads a lone request before it calls the handler. Where none comes, that call would never end.
    """
    if handler.response_streaming:
        behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
        return behavior, grpc.stream_stream_rpc_method_handler  # type: ignore[return-value]
    behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary
    return behavior, grpc.stream_unary_rpc_method_handler  # type: ignore[return-value]


def _parser(deserialize: _Deserializer | None, max_bytes: int | None) -> _Deserializer:
    def parse(message: bytes) -> Any:
        if len(message) > UNCHECKED_BYTES:
            note_message(len(message))
        if max_bytes is not None and len(message) > max_bytes:
            raise MessageTooLargeError(f"the message is longer than {max_bytes} bytes")
        try:
            return message if deserialize is None else deserialize(message)
        except DecodeError:
            error = ProtocolError("the message is malformed")
        error.size_bytes = len(message)
        raise error  # not from there, as those frames know the message

    return parse
