"""Processes, a network and a clock in one thread, so that every interleaving of the product's own code can be chosen.

``SimLoop`` is an event loop with a clock of its own: code of all processes runs on it until everybody waits. Then the
caller chooses what happens next: a message arrives, time passes, a process dies. ``SimNet`` has streams with the
interface of gRPC's, as far as the product uses it: in order, without loss, until they break.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc.aio import Metadata

from quartet.rpc.errors import DETAILS_KEY, to_status

_MAX_CANCELS = 10

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(eq=False)
class Life:
    """One life of one process: paused, it goes on later; dead, it never does."""

    name: str
    number: int
    is_dead: bool = False
    is_paused: bool = False
    backlog: deque[asyncio.Handle] = field(default_factory=deque)

    def __str__(self) -> str:
        return self.name if self.number == 1 else f"{self.name} (life {self.number})"


_LIFE: contextvars.ContextVar[Life] = contextvars.ContextVar("life")


class SimLoop(asyncio.AbstractEventLoop):
    """An event loop that does nothing by itself."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.errors: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Life | None]] = []
        self._numbers = itertools.count()

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.append(task)
        return task

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._put(handle, context.get(_LIFE))
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer, context.get(_LIFE)))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    # What the caller of the simulation asks.

    def run_ready(self) -> None:
        """Run everything until all wait."""
        while self._ready:
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()

    def next_timer(self) -> float | None:
        """When the next timer is due."""
        while self._timers:
            when, _, timer, life = self._timers[0]
            if not timer.cancelled() and (life is None or not life.is_dead):
                return when
            heapq.heappop(self._timers)
        return None

    @property
    def next_callback(self) -> Any:
        """What the next timer calls; there is one."""
        return self._timers[0][2]._callback  # type: ignore[attr-defined]

    def advance(self, now: float) -> None:
        """Let time pass; timers that are due become ready, in order."""
        self.now = max(self.now, now)
        while (when := self.next_timer()) is not None and when <= self.now:
            _, _, timer, life = heapq.heappop(self._timers)
            self._put(timer, life)

    def resume(self, life: Life) -> None:
        """A paused process goes on."""
        life.is_paused = False
        backlog, life.backlog = life.backlog, deque()
        for handle in backlog:
            self._put(handle, life)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the running loop of the thread."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def bury(self, lives: Iterable[Life]) -> None:
        """End all tasks, those of dead lives too, so that none complains when it is thrown away."""
        for life in lives:
            life.is_dead = False
            self.resume(life)
        for _ in range(_MAX_CANCELS):
            tasks = self.tasks = [task for task in self.tasks if not task.done()]
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.run_ready()
        self._timers.clear()

    def _put(self, handle: asyncio.Handle, life: Life | None) -> None:
        if life is None:
            self._ready.append(handle)
        else:
            (life.backlog if life.is_paused or life.is_dead else self._ready).append(handle)

    def kill(self, life: Life) -> None:
        """Nothing of ``life`` runs any more, not even what cleans up."""
        life.is_dead = True
        ready, self._ready = self._ready, deque()
        for handle in ready:
            self._put(handle, handle._context.get(_LIFE))  # type: ignore[attr-defined]


def current_life() -> Life:
    """The life whose code runs now."""
    return _LIFE.get()


def run_in(life: Life, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` as a part of ``life``: the tasks and timers that it makes are that life's."""
    context = contextvars.copy_context()

    def call() -> Any:
        _LIFE.set(life)
        return function(*args)

    return context.run(call)


def spawn_in(loop: SimLoop, life: Life, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    """A task of ``life``."""
    task: asyncio.Task[Any] = run_in(life, loop.create_task, work)
    task.set_name(name)
    return task


# The network.


@dataclass(frozen=True)
class _HalfClose:
    def __str__(self) -> str:
        return "half-close"


@dataclass(frozen=True)
class _Cancel:
    def __str__(self) -> str:
        return "cancel"


@dataclass(frozen=True)
class _Open:
    def __str__(self) -> str:
        return "open"


@dataclass(frozen=True)
class _Status:
    code: grpc.StatusCode
    details: str = ""
    trailers: tuple[tuple[str, bytes], ...] = ()

    def __str__(self) -> str:
        return f"status {self.code.name} {self.details}".strip()


@dataclass(eq=False)
class Sent:
    """Something on its way: bytes of a message, or a mark; ``number`` gives the order in which all were sent."""

    content: Any
    number: int
    arrived: asyncio.Future[None] | None = None


@dataclass(eq=False)
class Way:
    """One direction of one stream."""

    stream: SimStream
    is_to_server: bool
    sent: deque[Sent] = field(default_factory=deque)

    def __str__(self) -> str:
        ends = (self.stream.client, self.stream.server)
        source, target = ends if self.is_to_server else reversed(ends)
        return f"{self.stream.method} {source} -> {target}"


class SimStream:
    """One call with streams both ways."""

    def __init__(self, net: SimNet, client: Life, server: Life, method: str, codec: Any, number: int) -> None:
        self.net, self.client, self.server, self.method, self.number = net, client, server, method, number
        self.up, self.down = Way(self, True), Way(self, False)
        self._serialize, self._deserialize = codec
        self._client_inbox: deque[Any] = deque()
        self._server_inbox: deque[Any] = deque()
        self._client_waiter: asyncio.Future[None] | None = None
        self._server_waiter: asyncio.Future[None] | None = None
        self.status: _Status | None = None
        self._is_cancelled = False
        self.server_task: asyncio.Task[Any] | None = None
        self.num_opened = 0
        self.messages_up: list[bytes] = []  # delivered ones
        self.handler: Any = None

    # The client's end, with the interface of a gRPC call.

    async def write(self, message: Any) -> None:
        if self._is_cancelled or self.client.is_dead:
            raise asyncio.CancelledError
        if self.status is not None:
            raise self._error()
        self.net.send(self.up, self._serialize(message))

    async def read(self) -> Any:
        while not self._client_inbox:
            if self._is_cancelled:
                raise asyncio.CancelledError
            if self.status is not None:
                if self.status.code is grpc.StatusCode.OK:
                    return grpc.aio.EOF
                raise self._error()
            self._client_waiter = self.net.loop.create_future()
            await self._client_waiter
        return self._deserialize(self._client_inbox.popleft())

    async def done_writing(self) -> None:
        if self.status is None and not self._is_cancelled:
            self.net.send(self.up, _HalfClose())

    def cancel(self) -> bool:
        if self.status is None and not self._is_cancelled and not self.client.is_dead:
            self._is_cancelled = True
            self.net.send(self.up, _Cancel())
            _wake(self._client_waiter)
        return True

    def expire(self) -> None:
        """The call's own timeout has passed."""
        if not self.done():
            self.net.send(self.up, _Cancel())
            self.status = _Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            _wake(self._client_waiter)

    def done(self) -> bool:
        return self._is_cancelled or self.status is not None

    def _error(self) -> grpc.aio.AioRpcError:
        assert self.status is not None
        return grpc.aio.AioRpcError(self.status.code, Metadata(), Metadata(*self.status.trailers), self.status.details)

    # What the network does.

    def arrive(self, way: Way, content: Any) -> None:
        """One thing reaches its end."""
        if way.is_to_server:
            self._arrive_at_server(content)
        elif isinstance(content, _Status):
            self.status = self.status or content
            _wake(self._client_waiter)
        else:
            self._client_inbox.append(content)
            _wake(self._client_waiter)

    def lose(self, *, client_knows: bool = True, server_knows: bool = True) -> None:
        """The connection breaks: what is on its way is lost."""
        self.up.sent.clear()
        self.down.sent.clear()
        if client_knows and self.status is None:
            self.status = _Status(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            _wake(self._client_waiter)
        if server_knows:
            run_in(self.server, self._end_server)

    def _end_server(self) -> None:
        if self.server_task is not None:
            self.net.loop.call_soon(self.server_task.cancel)  # soon: a paused process notices later

    def _arrive_at_server(self, content: Any) -> None:
        if isinstance(content, _Open):
            self.num_opened += 1
            server = self.net.servers.get(self.server.name)
            if server is None or server.life is not self.server or self.server.is_dead:
                self.net.send(self.down, _Status(grpc.StatusCode.UNAVAILABLE, "Connection refused"))
                return
            self.handler = server.handlers[self.method]
            context = ServerContext(self)
            self.server_task = spawn_in(self.net.loop, self.server, self._serve(context), self.method)
        elif isinstance(content, _Cancel):
            self._end_server()
        else:
            if isinstance(content, bytes):
                self.messages_up.append(content)
            self._server_inbox.append(content)
            _wake(self._server_waiter)

    async def _serve(self, context: ServerContext) -> None:
        status = _Status(grpc.StatusCode.OK)
        try:
            await self.handler.stream_stream(_no_requests(), context)
        except asyncio.CancelledError:
            status = _Status(grpc.StatusCode.CANCELLED, "cancelled")
        except Exception as error:  # noqa: BLE001 - a handler ends here, as in a server
            rich = to_status(error)
            if rich.code == grpc.StatusCode.INTERNAL.value[0]:
                self.net.loop.errors.append(f"{self.method} of {self.server} ended with {error!r}")
            status = _Status(_CODES[rich.code], rich.message, ((DETAILS_KEY, rich.SerializeToString()),))
        context.is_over = True
        self.net.send(self.down, status)


class ServerContext:
    """A handler's end of a stream."""

    def __init__(self, stream: SimStream) -> None:
        self.stream = stream
        self.is_over = False

    async def read(self) -> Any:
        inbox = self.stream._server_inbox
        while not inbox:
            self.stream._server_waiter = self.stream.net.loop.create_future()
            await self.stream._server_waiter
        content = inbox.popleft()
        return grpc.aio.EOF if isinstance(content, _HalfClose) else self.stream.handler.request_deserializer(content)

    async def write(self, message: Any) -> None:
        data = self.stream.handler.response_serializer(message)
        self.stream.net.on_server_write(self.stream, data)
        # As with a reader that takes each message before there is room for the next.
        arrived = self.stream.net.loop.create_future()
        self.stream.net.send(self.stream.down, data, arrived)
        await arrived

    async def send_initial_metadata(self, metadata: Any) -> None:
        return

    def auth_context(self) -> dict[str, Any]:
        return {}


async def _no_requests() -> Any:
    return
    yield


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


@dataclass
class SimServer:
    """The handlers of one life; services register themselves here as at a gRPC server."""

    life: Life
    handlers: dict[str, Any] = field(default_factory=dict)

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        return

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


class SimNet:
    """All streams between lives. Servers are known by the name of their process, which is also their address."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.servers: dict[str, SimServer] = {}
        self.streams: list[SimStream] = []
        self._busy: dict[Way, None] = {}  # with something on it
        self.numbers = itertools.count()
        self.on_server_write: Callable[[SimStream, bytes], None] = lambda _stream, _data: None
        self.frozen: dict[frozenset[str], float] = {}

    def serve(self, server: SimServer) -> None:
        self.servers[server.life.name] = server

    def open(self, client: Life, address: str, method: str, codec: Any, timeout_s: float | None) -> SimStream:
        server = self.servers[address].life
        stream = SimStream(self, client, server, method, codec, len(self.streams))
        self.streams.append(stream)
        self.send(stream.up, _Open())
        if timeout_s is not None:
            self.loop.call_later(timeout_s, stream.expire)
        return stream

    def send(self, way: Way, content: Any, arrived: asyncio.Future[None] | None = None) -> None:
        sender = way.stream.client if way.is_to_server else way.stream.server
        if not sender.is_dead:
            way.sent.append(Sent(content, next(self.numbers), arrived))
            self._busy[way] = None

    def is_frozen(self, way: Way) -> bool:
        pair = frozenset((way.stream.client.name, way.stream.server.name))
        return self.frozen.get(pair, 0.0) > self.loop.now

    def ways(self) -> list[Way]:
        """Directions with something on its way that can arrive now, the longest waiting first."""
        for way in [way for way in self._busy if not way.sent]:
            del self._busy[way]
        found = [way for way in self._busy if not self.is_frozen(way)]
        return sorted(found, key=lambda way: way.sent[0].number)

    def has_requests(self, worker: Life) -> bool:
        """Whether a message to ``worker`` that is about requests is on its way."""
        streams = (way.stream for way in self._busy if way.sent and way.is_to_server)
        return any(stream.server is worker and not stream.method.endswith("/Pull") for stream in streams)

    def deliver(self, way: Way) -> Any:
        """Let the first thing on ``way`` arrive; returns it."""
        sent = way.sent.popleft()
        content = sent.content
        _wake(sent.arrived)
        target = way.stream.server if way.is_to_server else way.stream.client
        if target.is_dead:
            if way.is_to_server and not way.stream.client.is_dead:
                way.stream.lose()
        else:
            run_in(target, way.stream.arrive, way, content)
        return content

    def drop_life(self, life: Life) -> None:
        """The process has died: the other ends of its streams learn of it at once."""
        for stream in self.streams:
            if life in (stream.client, stream.server):
                stream.lose()

    def lose_connection(self, one: str, other: str) -> None:
        """Break every stream between two processes."""
        for stream in self.streams:
            if {stream.client.name, stream.server.name} == {one, other}:
                stream.lose()


class SimChannel:
    """Makes streams from one life to one address, as a gRPC channel does; the host of an address is a life's name."""

    def __init__(self, net: SimNet, life: Life, address: str) -> None:
        self._net, self._life, self._address = net, life, address.partition(":")[0]

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_more: Any) -> Any:
        codec = (request_serializer, response_deserializer)
        return lambda timeout=None, **_options: self._net.open(self._life, self._address, method, codec, timeout)

    def unary_unary(self, method: str, **_more: Any) -> Any:
        return None

    unary_stream = unary_unary

    async def close(self) -> None:
        return
