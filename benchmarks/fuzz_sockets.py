"""The fuzzer's surfaces beside RPCs: records in etcd, ZMQ frames, shared-memory sockets, and bare TCP.

Each ``play`` sends so many inputs, drawn from one ``random.Random``, and removes what it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import zmq
import zmq.asyncio
from aetcd import rpc

from benchmarks.fuzz_calls import Told, play_all
from benchmarks.fuzz_fleet import DECODE, MODEL, Fleet
from benchmarks.fuzz_messages import MessageMaker
from quartet.rpc.channels import open_channel
from quartet.transfer.life_line import TOKEN_SIZE_BYTES, abstract_address
from quartet.v1 import kv_events_pb2

_ROLES = ("encode", "prefill", "decode", "router", "", "Decode", "decode/x", "\u00e4", "none")
_WILD_JSON: Sequence[str] = (
    "null", "true", "0", "-1", "1e400", "NaN", "-Infinity", "1.5", str(2**31), str(2**64), str(10**30), '""', '"x"',
    '"\\ud800"', '"\\u0000"', '"tcp://\\ud800:1"', '"a:b:c"', '"127.0.0.1:99999999"', '"127.0.0.1:-1"', '"[::1]:0"',
    '"unix:///x"', '"tcp://*:*"', '"inproc://x"', '"ipc:///tmp/x"', '"dns:///\\u0000"', "[]", "{}", "[[]]", "[null]",
    '["x"]', '["\\udfff"]', '{"a":{}}', '{"boot_id":"\\ud800","ipc_namespace":""}', "[" * 2_000 + "]" * 2_000,
    '"' + "x" * 5_000 + '"', '"' + "9" * 5_000 + '"', "[" + ",".join(['"x"'] * 5_000) + "]", "1" * 4_000,
)  # fmt: skip
_IDS = tuple(f"fuzz-{number}" for number in range(12))
_EVENTS_WORKER, _EVENTS_EPOCH = "fuzz-events", 77
_SUBSCRIBE_BOUND_S = 15.0
_CONNECTED_S = 2.0
_READ_S = 0.05
# Until every worker's next report: what was said in its name counts no longer.
_CORRECTED_S = 1.5
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(16) + b"\0" + bytes(31)


class EtcdRecords:
    """Puts records under the fleet's prefix, and takes them away again. The real workers' keys stay as they are."""

    def __init__(self, fleet: Fleet, told: Told) -> None:
        self._fleet = fleet
        self._told = told
        self._prefix = f"/quartet/{fleet.etcd.namespace}/".encode()

    async def play(self, draw: random.Random, num_inputs: int) -> None:
        """Put ``num_inputs`` records, or remove some of those put before."""
        async with _etcd(self._fleet) as kv:
            real = {item.key: item.value for item in await self._list(kv)}
            inputs = [self._draw(draw, list(real.items())) for _ in range(num_inputs)]
            try:
                await play_all([self._put(kv, key, value) for key, value in inputs if key not in real])
            finally:
                for item in await self._list(kv):
                    if item.key not in real:
                        await kv.DeleteRange(rpc.DeleteRangeRequest(key=item.key))
        self._told.num_inputs += num_inputs

    async def _list(self, kv: Any) -> Sequence[Any]:
        end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        found: Sequence[Any] = (await kv.Range(rpc.RangeRequest(key=self._prefix, range_end=end))).kvs
        return found

    def _put(self, kv: Any, key: bytes, value: bytes | None) -> Callable[[], Any]:
        async def put() -> None:
            if value is None:
                await kv.DeleteRange(rpc.DeleteRangeRequest(key=key))
                return
            try:
                await kv.Put(rpc.PutRequest(key=key, value=value))
            except grpc.aio.AioRpcError as error:  # etcd itself refuses what is longer than 1.5 MiB
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                    raise

        return put

    def _draw(self, draw: random.Random, real: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, bytes | None]:
        name, role = draw.choice(_IDS), draw.choice(_ROLES[:3])
        if draw.random() < 0.1:
            role = draw.choice(_ROLES)
        if draw.random() < 0.05:
            name = draw.choice(("", "/", "x" * 200, "..", "a b", "\u00e4", "-", "real/x", "fuzz-0/"))
        key = self._prefix + f"{role}/{name}".encode()
        if draw.random() < 0.03:
            key = self._prefix + draw.randbytes(draw.randrange(1, 40))
        if draw.random() < 0.1:
            return key, None
        return key, self._value(draw, json.loads(draw.choice(real)[1]), role, name)

    def _value(self, draw: random.Random, record: dict[str, object], role: str, name: str) -> bytes:
        record |= {"worker_id": name, "role": role, "epoch": str(draw.randrange(2**64))}
        record["model_name"] = draw.choice(("fuzz", "fuzz", "fuzz", MODEL))
        record["grpc_address"] = draw.choice(("127.0.0.1:1", "127.0.0.1:2", "localhost:3"))
        record["events_address"] = draw.choice(("tcp://127.0.0.1:1", "", "tcp://127.0.0.1:2"))
        texts = {key: json.dumps(value) for key, value in record.items()}
        for _ in range(draw.choice((0, 1, 1, 1, 2, 5))):
            texts[draw.choice(list(texts))] = draw.choice(_WILD_JSON)
        if draw.random() < 0.1:
            del texts[draw.choice(list(texts))]
        data = ("{" + ",".join(f"{json.dumps(key)}:{value}" for key, value in texts.items()) + "}").encode()
        if draw.random() < 0.1:
            data = data[: draw.randrange(len(data))]
        if draw.random() < 0.05:
            data = draw.choice((b"", b"\xff\xfe", b"null", b"[" * 100_000, draw.randbytes(100), data * 50))
        return data


class EventFrames:
    """Publishes to the router's subscriber as a worker that it has found in etcd."""

    def __init__(self, fleet: Fleet, told: Told) -> None:
        self._fleet = fleet
        self._told = told

    async def play(self, draw: random.Random, num_inputs: int) -> None:
        """Send ``num_inputs`` messages of some frames each."""
        maker = MessageMaker(draw, self._fleet.known)
        with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as socket_:
            socket_.setsockopt(zmq.SNDHWM, 0)
            socket_.setsockopt(zmq.LINGER, 0)
            port = socket_.bind_to_random_port("tcp://127.0.0.1")
            async with self._announced(port):
                async with asyncio.timeout(_SUBSCRIBE_BOUND_S):
                    await socket_.recv()  # the router has subscribed
                for number in range(num_inputs):
                    await socket_.send_multipart(self._frames(draw, maker, number))
                await asyncio.sleep(_CORRECTED_S)
        self._told.num_inputs += num_inputs

    @asynccontextmanager
    async def _announced(self, port: int) -> AsyncIterator[None]:
        prefix = f"/quartet/{self._fleet.etcd.namespace}/decode/"
        key, real = f"{prefix}{_EVENTS_WORKER}".encode(), f"{prefix}{DECODE}".encode()
        async with _etcd(self._fleet) as kv:
            record = json.loads((await kv.Range(rpc.RangeRequest(key=real))).kvs[0].value)
            record |= {"worker_id": _EVENTS_WORKER, "epoch": str(_EVENTS_EPOCH), "model_name": "fuzz"}
            record |= {"grpc_address": "127.0.0.1:1", "events_address": f"tcp://127.0.0.1:{port}"}
            await kv.Put(rpc.PutRequest(key=key, value=json.dumps(record).encode()))
            try:
                yield
            finally:
                await kv.DeleteRange(rpc.DeleteRangeRequest(key=key))

    def _frames(self, draw: random.Random, maker: MessageMaker, number: int) -> list[bytes]:
        topic = draw.choice((b"kv", b"load"))
        descriptor = kv_events_pb2.DESCRIPTOR.message_types_by_name["KvEventBatch" if topic == b"kv" else "WorkerLoad"]
        if draw.random() < 0.6:
            message: Any = maker.message(descriptor)
            if draw.random() < 0.8:
                message.worker_id, message.epoch = _EVENTS_WORKER, _EVENTS_EPOCH
            payload = message.SerializeToString()
        else:
            payload = maker.body(descriptor)
        count = draw.choice((number, number, number, 0, 1, 2**64 - 1, draw.randrange(2**64)))
        frames = [topic, struct.pack(">Q", count), payload]
        match draw.randrange(12):
            case 0:
                frames[0] += draw.choice((b"x", b"\0", b"", b"kv"))
            case 1:
                frames[1] = draw.randbytes(draw.choice((0, 1, 7, 9, 100)))
            case 2:
                del frames[draw.randrange(1, 3) :]
            case 3:
                frames += [b"", draw.randbytes(50)] * draw.choice((1, 40))
            case _:
                pass
        return frames


class ShmSockets:
    """Connects to the sockets that pass the workers' pools, without the token."""

    def __init__(self, fleet: Fleet, told: Told) -> None:
        self._fleet = fleet
        self._told = told

    async def play(self, draw: random.Random, num_inputs: int) -> None:
        """Connect ``num_inputs`` times."""
        paths = sorted(_shm_paths(self._fleet.pids.values()))
        scripts = [self._script(draw, draw.choice(paths)) for _ in range(num_inputs)]
        await play_all(scripts)
        self._told.num_inputs += num_inputs

    def _script(self, draw: random.Random, path: str) -> Callable[[], Any]:
        parts = [
            draw.randbytes(draw.choice((0, 1, 8, TOKEN_SIZE_BYTES - 1, TOKEN_SIZE_BYTES, TOKEN_SIZE_BYTES + 1, 5_000)))
            for _ in range(draw.choice((0, 1, 1, 2, 5)))
        ]
        passes_files, resets, waits = draw.random() < 0.1, draw.random() < 0.2, draw.random() < 0.5

        async def connect() -> None:
            loop = asyncio.get_running_loop()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_CONNECTED_S):
                        await loop.sock_connect(connection, abstract_address(path))
                        for part in parts:
                            if passes_files and part:
                                socket.send_fds(connection, [part], [0, 1, 2])
                            else:
                                await loop.sock_sendall(connection, part)
                        if waits:
                            await _read_some(connection)
                if resets:
                    _reset_at_close(connection)

        return connect


class BareTcp:
    """Writes bytes to the ports of gRPC, events and HTTP, as no client of theirs would."""

    def __init__(self, fleet: Fleet, told: Told) -> None:
        self._fleet = fleet
        self._told = told

    async def play(self, draw: random.Random, num_inputs: int) -> None:
        """Connect ``num_inputs`` times."""
        records = self._fleet.records.values()
        ports = [_port(address) for address in self._fleet.addresses.values()]
        ports += [_port(record.events_address) for record in records if record.events_address]
        ports += [_port(record.http_address) for record in records if record.http_address]
        await play_all([self._script(draw, draw.choice(ports)) for _ in range(num_inputs)])
        self._told.num_inputs += num_inputs

    def _script(self, draw: random.Random, port: int) -> Callable[[], Any]:
        greeting = draw.choice((b"", _HTTP2_PREFACE, _HTTP2_PREFACE, _ZMTP_GREETING, b"GET /metrics HTTP/1.1\r\n"))
        parts = [greeting, *(_frame(draw) for _ in range(draw.choice((0, 1, 2, 5))))]
        resets, waits = draw.random() < 0.3, draw.random() < 0.5

        async def connect() -> None:
            loop = asyncio.get_running_loop()
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_CONNECTED_S):
                        await loop.sock_connect(connection, ("127.0.0.1", port))
                        for part in parts:
                            await loop.sock_sendall(connection, part)
                        if waits:
                            await _read_some(connection)
                if resets:
                    _reset_at_close(connection)

        return connect


def _frame(draw: random.Random) -> bytes:
    """A frame of HTTP/2 whose fields are anything, or noise."""
    payload = draw.randbytes(draw.choice((0, 4, 5, 6, 8, 30, 300)))
    if draw.random() < 0.3:
        return payload
    length = len(payload) if draw.random() < 0.8 else draw.randrange(2**24)
    stream = draw.choice((0, 0, 1, 3, 2**31 - 1, draw.randrange(2**32)))
    return (
        struct.pack(">I", length)[1:] + struct.pack(">BBI", draw.randrange(12), draw.randrange(256), stream) + payload
    )


async def _read_some(connection: socket.socket) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_READ_S):
            await asyncio.get_running_loop().sock_recv(connection, 4096)


def _reset_at_close(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _port(address: str) -> int:
    port = urlsplit(address if "://" in address else f"//{address}").port
    assert port is not None, "a worker announces host:port"
    return port


def _shm_paths(pids: Iterable[int]) -> set[str]:
    """The abstract sockets of pools that these processes listen on."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(file))
    lines = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]
    fields = [line.split() for line in lines]
    return {
        item[7] for item in fields if len(item) > 7 and "@quartet-shm-" in item[7] and f"socket:[{item[6]}]" in inodes
    }


@asynccontextmanager
async def _etcd(fleet: Fleet) -> AsyncIterator[Any]:
    channel = open_channel(fleet.etcd.endpoints[0], None, {"grpc.keepalive_permit_without_calls": 0})
    try:
        yield rpc.KVStub(channel)
    finally:
        await channel.close()
