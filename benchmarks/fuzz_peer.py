"""A source of hand-offs that lies: a decode worker that pulls from it must only fail the request.

It answers ``Pull`` with anything, and passes anything through the Unix socket that it names for its pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from benchmarks.fuzz_calls import Caller, End, Script, Told, play_all
from benchmarks.fuzz_fleet import DECODE, Fleet
from benchmarks.fuzz_messages import MessageMaker
from quartet.transfer.life_line import abstract_address
from quartet.v1 import decode_pb2, transfer_pb2, types_pb2

_SERVICE = "quartet.v1.TransferService"
_DECODE = "/quartet.v1.DecodeService/Decode"
_RESPONSE = transfer_pb2.DESCRIPTOR.message_types_by_name["PullResponse"]
_SIZES = (0, 1, 4096, 1 << 20, 1 << 40)
# So that calls of a source that says nothing more end by the puller's limits.
_SILENT_S = 8.0


class LyingSource:
    """Starts requests at the decode worker whose KV it offers itself."""

    def __init__(self, fleet: Fleet, told: Told) -> None:
        self._fleet = fleet
        self._told = told
        self._socket_path = f"@quartet-fuzz-{secrets.token_hex(8)}"
        self._draw = random.Random()
        self._num_sent = 0

    async def play(self, draw: random.Random, num_inputs: int) -> None:
        """Start requests until ``num_inputs`` answers and files were sent, or a process has ended: it pulls no more."""
        if not self._fleet.hand_offs:
            await self._fleet.make_hand_offs(1)
        self._draw, self._num_sent = draw, 0
        told = Told()
        async with self._serving() as address:
            caller = Caller(self._fleet.addresses[DECODE], told)
            try:
                while self._num_sent < num_inputs and not self._fleet.ended:
                    scripts = [self._script(draw, address) for _ in range(32)]
                    await play_all([lambda script=script: caller.play(script) for script in scripts])  # type: ignore[misc]
            finally:
                await caller.close()
        self._told.num_calls += told.num_calls
        self._told.num_inputs += self._num_sent
        self._told.codes += told.codes
        self._told.hangs += told.hangs

    def _script(self, draw: random.Random, address: str) -> Script:
        """A start that is all right but for where its KV lies."""
        hand_off = types_pb2.HandOff.FromString(self._fleet.hand_offs[0].hand_off)
        hand_off.address = address
        hand_off.worker_id, hand_off.epoch = f"liar-{draw.randrange(10)}", draw.randrange(2**64)
        hand_off.hand_off_id = draw.randbytes(16)
        if draw.random() < 0.2:
            hand_off.time_to_live.Clear()
            hand_off.time_to_live.nanos = draw.choice((0, 1, 50_000_000))
        start = decode_pb2.DecodeStart.FromString(self._fleet.hand_offs[0].start)
        start.hand_off.CopyFrom(hand_off)
        message = decode_pb2.DecodeRequest(start=start).SerializeToString()
        end = End.HALF_CLOSE if draw.random() < 0.8 else End.CANCEL
        return Script(_DECODE, [message], end, frozenset(), True, None)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[str]:
        server = grpc.aio.server()
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self._pull, transfer_pb2.PullRequest.FromString, None
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Pull": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        passing = asyncio.create_task(self._pass_files())
        try:
            yield f"127.0.0.1:{port}"
        finally:
            passing.cancel()
            await asyncio.wait([passing])
            await server.stop(None)

    async def _pull(self, requests: AsyncIterator[transfer_pb2.PullRequest], context: Any) -> None:
        draw, num_pieces = self._draw, 3
        request = await anext(requests, None)
        if request is not None:
            num_pieces = len(request.begin.pieces)
        maker = MessageMaker(draw, self._fleet.known)
        for message in self._answers(draw, maker, num_pieces):
            await context.write(message)
            self._num_sent += 1
        if draw.random() < 0.1:
            await asyncio.sleep(_SILENT_S)
        if draw.random() < 0.3:
            code = draw.choice([code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
            await context.abort(code, draw.choice(("", "x" * 500, "\u00e4")))

    def _answers(self, draw: random.Random, maker: MessageMaker, num_pieces: int) -> Sequence[bytes]:
        is_granted = draw.random() < 0.8
        answers = [self._grant(draw, num_pieces)] if is_granted else []
        for _ in range(draw.choice((0, 1, num_pieces, 20))):
            match draw.randrange(4):
                case 0:
                    answers.append(maker.body(_RESPONSE))
                case 1:
                    answers.append(_response(piece=self._piece(draw)))
                case 2:
                    answers.append(_response(finished=transfer_pb2.PullFinished()))
                case _:
                    answers.append(_response(renewed=transfer_pb2.PullRenewed()))
        # A hand-off that is whole by chance is a lie that no puller can notice. The mock engine does, by its stamps,
        # and rightly stops.
        return [answer for answer in answers if not (is_granted and _finishes(answer))]

    def _grant(self, draw: random.Random, num_pieces: int) -> bytes:
        layout_size = self._fleet.hand_offs[0].piece_size_bytes
        way: Any = draw.choice((1, 1, 2, 2, 2, 3, 4, 0))
        granted = transfer_pb2.PullGranted(way=way, piece_size_bytes=layout_size)
        if draw.random() < 0.1:
            granted.piece_size_bytes = draw.choice((0, 1, 2**64 - 1))
        if granted.way == transfer_pb2.TRANSFER_WAY_SHM or draw.random() < 0.1:
            granted.shm.socket_path = (
                self._socket_path if draw.random() < 0.9 else draw.choice(("", "@", "/", "@\0", "x" * 500))
            )
            granted.shm.token = draw.randbytes(draw.choice((0, 16, 16, 16, 1000)))
            granted.shm.pool_size_bytes = draw.choice((*_SIZES, 2**63, 2**64 - 1))
            count = num_pieces if draw.random() < 0.8 else draw.randrange(20)
            granted.shm.offsets.extend(draw.choice((0, 4096, 2**62, 2**64 - 1)) for _ in range(count))
        return _response(granted=granted)

    def _piece(self, draw: random.Random) -> transfer_pb2.Piece:
        size = draw.choice((0, 1, self._fleet.hand_offs[0].piece_size_bytes))
        return transfer_pb2.Piece(
            index=draw.choice((0, 0, 1, 2**32 - 1)),
            offset_bytes=draw.choice((0, 0, 0, 1, 2**64 - 1)),
            data=bytes(min(size, 900_000)),
        )

    async def _pass_files(self) -> None:
        """Pass anything to every client that connects, with the token or without."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
            listener.bind(abstract_address(self._socket_path))
            listener.listen()
            async with asyncio.TaskGroup() as group:
                while True:
                    connection, _ = await loop.sock_accept(listener)
                    group.create_task(self._pass(connection))

    async def _pass(self, connection: socket.socket) -> None:
        draw, loop = self._draw, asyncio.get_running_loop()
        self._num_sent += 1
        with connection, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_SILENT_S):
                if draw.random() < 0.9:
                    await loop.sock_recv(connection, 64)
                files = _files(draw)
                try:
                    if files:
                        socket.send_fds(connection, [b"\0" * draw.choice((1, 2, 100))], files)
                    elif draw.random() < 0.5:
                        await loop.sock_sendall(connection, draw.randbytes(draw.choice((1, 100))))
                finally:
                    for file in files:
                        os.close(file)
                if draw.random() < 0.7:
                    await loop.sock_recv(connection, 1)  # until the puller hangs up


def _files(draw: random.Random) -> list[int]:
    match draw.randrange(6):
        case 0:
            return []
        case 1:
            return [os.open("/dev/null", os.O_RDONLY)]
        case 2:
            return list(os.pipe())
        case kind:
            file = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
            os.ftruncate(file, draw.choice(_SIZES))
            if kind > 3:
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | (fcntl.F_SEAL_GROW if kind > 4 else 0))
            return [file] * draw.choice((1, 1, 1, 0)) or [file, os.dup(file), os.dup(file)]


def _finishes(answer: bytes) -> bool:
    try:
        return transfer_pb2.PullResponse.FromString(answer).HasField("finished")
    except DecodeError:
        return False


def _response(**fields: Any) -> bytes:
    return transfer_pb2.PullResponse(**fields).SerializeToString()
