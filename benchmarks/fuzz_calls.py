"""The fuzzer's calls: every method of every service, with scripts of messages that end in every way a client can end.

A script that half-closes must end within a bound; one that cancels or vanishes need not be answered.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FileDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from benchmarks.fuzz_messages import MessageMaker
from quartet.rpc.channels import create_channel
from quartet.v1 import decode_pb2, encode_pb2, prefill_pb2, router_pb2, transfer_pb2, worker_pb2

#: A call that was half-closed ends within it; the longest limits of the fuzzed processes are a third of it.
CALL_BOUND_S = 45.0
#: How many calls run at once.
NUM_AT_ONCE = 32

# A call that the server has ended, as gRPC shows it to who still writes or reads.
_ENDED = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)
# They have no end of their own.
_ENDLESS = frozenset({"/quartet.v1.RouterService/WatchWorkers", "/grpc.health.v1.Health/Watch"})
_DRAIN = "/quartet.v1.WorkerService/Drain"
_NUM_CHANNELS = 2
_WATCHED_S = 0.05
_LEFT_AFTER_S = 5.0
_STREAM_LENGTHS = (1, 1, 1, 2, 2, 3, 5, 8, 20)
_LONG_STREAM, _LONG_STREAM_SHARE = 400, 0.005
_METADATA = (
    None, None, None, None, None, None,
    (("traceparent", "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"),),
    (("traceparent", "00-zz"),),
    (("traceparent", "0" * 4000), ("x-bin", b"\0\xff" * 500)),
    tuple((f"k{number}", "v" * 20) for number in range(60)),
)  # fmt: skip
_FILES: Sequence[Any] = (
    router_pb2, encode_pb2, prefill_pb2, decode_pb2, worker_pb2, transfer_pb2, health_pb2, reflection_pb2, channelz_pb2,
)  # fmt: skip


class End(StrEnum):
    """How a client ends its call."""

    HALF_CLOSE = "half_close"
    CANCEL = "cancel"
    DEADLINE = "deadline"  # an expired deadline cancels
    VANISH = "vanish"  # the connection goes


@dataclass(frozen=True)
class Method:
    """One method: its path, such as ``/quartet.v1.RouterService/Place``, and what it takes."""

    path: str
    request: Descriptor
    takes_stream: bool


def methods_of(service: str) -> list[Method]:
    """The methods of the service of this full name."""
    descriptor = _services()[service]
    return [
        Method(f"/{service}/{method.name}", method.input_type, method.client_streaming) for method in descriptor.methods
    ]


def _services() -> dict[str, ServiceDescriptor]:
    files: list[FileDescriptor] = [module.DESCRIPTOR for module in _FILES]
    return {service.full_name: service for file in files for service in file.services_by_name.values()}


@dataclass(frozen=True)
class Script:
    """One call.

    Attributes:
        pauses: after each of these messages the client waits until something came, or a moment.
        reads: whether the client reads what comes.
    """

    path: str
    messages: Sequence[bytes]
    end: End
    pauses: frozenset[int]
    reads: bool
    metadata: tuple[tuple[str, str | bytes], ...] | None


def draw_script(draw: random.Random, maker: MessageMaker, methods: Sequence[Method]) -> Script:
    """Draw a call of one of ``methods``, or, now and then, of none that exists."""
    method = draw.choice(methods)
    number = draw.choice(_STREAM_LENGTHS) if method.takes_stream or draw.random() < 0.02 else 1
    if method.takes_stream and draw.random() < _LONG_STREAM_SHARE:
        number = _LONG_STREAM
    if draw.random() < 0.01:
        number = 0
    if number == _LONG_STREAM:
        messages = [maker.message(method.request).SerializeToString() for _ in range(number)]
    else:
        messages = [maker.body(method.request) for _ in range(number)]
    if method.path == _DRAIN:
        messages = [message for message in messages if not _drains(message)]
    ends = [*[End.HALF_CLOSE] * 13, *[End.CANCEL] * 4, End.DEADLINE, *[End.VANISH] * (draw.random() < 0.3)]
    end = draw.choice(ends)
    if method.path in _ENDLESS and end is End.HALF_CLOSE:
        end = End.CANCEL
    return Script(
        path=method.path if draw.random() > 0.002 else draw.choice(("/", "/a/b", method.path + "x", method.path[:-1])),
        messages=messages,
        end=end,
        pauses=frozenset(index for index in range(len(messages)) if draw.random() < 0.1),
        reads=end is End.HALF_CLOSE or draw.random() < 0.7,
        metadata=draw.choice(_METADATA) if draw.random() < 0.2 else None,
    )


def _drains(message: bytes) -> bool:
    """Whether it is a request that a worker rightly obeys by ending."""
    try:
        timeout = worker_pb2.DrainRequest.FromString(message).timeout
    except DecodeError:
        return False
    return timeout.seconds + timeout.nanos / 1e9 >= 0


@dataclass
class Told:
    """What came of the calls.

    Attributes:
        num_inputs: messages sent, one for a call without any.
        codes: statuses by name, of calls that were half-closed.
        hangs: what did not end in time.
    """

    num_calls: int = 0
    num_inputs: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    hangs: list[str] = field(default_factory=list)


class Caller:
    """Makes calls to one server. Use it as a context manager."""

    def __init__(self, address: str, told: Told) -> None:
        self._address = address
        self._told = told
        self._channels = [create_channel(address, None) for _ in range(_NUM_CHANNELS)]
        self._next = 0

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()

    async def play(self, script: Script) -> None:
        """Make the call, and wait for its end as long as the bound says."""
        self._told.num_calls += 1
        self._told.num_inputs += max(1, len(script.messages))
        if script.end is End.VANISH:
            channel = create_channel(self._address, None)
        else:
            self._next = (self._next + 1) % len(self._channels)
            channel = self._channels[self._next]
        must_end = script.end is End.HALF_CLOSE
        try:
            async with asyncio.timeout(CALL_BOUND_S if must_end else _LEFT_AFTER_S):
                await self._play(channel, script)
        except TimeoutError:
            if not must_end:  # a call that is not read may take no more messages
                return
            sizes = [len(message) for message in script.messages]
            self._told.hangs.append(f"{script.path} {script.end}, messages of {sizes[:20]} bytes")
        finally:
            if script.end is End.VANISH:
                await channel.close()

    async def _play(self, channel: grpc.aio.Channel, script: Script) -> None:
        deadline_s = _WATCHED_S if script.end is End.DEADLINE else None
        call: Any = channel.stream_stream(script.path)(metadata=script.metadata, timeout=deadline_s)
        arrived = asyncio.Event()
        reader = asyncio.create_task(_read(call, arrived)) if script.reads else None
        try:
            await self._send(call, script, arrived)
            if script.end is End.HALF_CLOSE or script.end is End.DEADLINE:
                self._told.codes[(await call.code()).name] += 1
        except _ENDED:
            self._told.codes[(await call.code()).name] += 1  # the server ended it before all was sent
        finally:
            call.cancel()
            if reader is not None:
                await asyncio.wait([reader])

    async def _send(self, call: Any, script: Script, arrived: asyncio.Event) -> None:
        for index, message in enumerate(script.messages):
            await call.write(message)
            if index in script.pauses:
                await _wait(arrived)
        if script.end in (End.HALF_CLOSE, End.DEADLINE):
            await call.done_writing()
        elif script.messages:
            await _wait(arrived)


async def play_all(scripts: Sequence[Callable[[], Any]]) -> None:
    """Run them, so many at once; each makes a coroutine."""
    waiting = iter(scripts)

    async def work() -> None:
        for make in waiting:
            await make()

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(work())


async def _read(call: Any, arrived: asyncio.Event) -> None:
    try:
        while await call.read() is not grpc.aio.EOF:
            arrived.set()
    except (*_ENDED, asyncio.CancelledError):
        pass
    arrived.set()


async def _wait(arrived: asyncio.Event) -> None:
    """Wait until something has come since the last wait, but only for a moment."""
    try:
        async with asyncio.timeout(_WATCHED_S):
            await arrived.wait()
        arrived.clear()
    except TimeoutError:
        pass
