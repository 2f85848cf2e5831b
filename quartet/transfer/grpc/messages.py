"""Between the messages of ``transfer.proto`` and the types of this package, and the Pull method with raw pieces.

``PullResponse{piece}`` is the one message that carries bulk, so it is put together and taken apart by hand here. The
bytes are ordinary protobuf, and generated classes read and write the same; but a generated class copies the data two
times more on each side (measured: 0.55 GB/s against 1.05). Field numbers are those of ``transfer.proto``, and a test
compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

import grpc

from quartet.discovery.base import HostIdentity
from quartet.kvcache.hand_off import HandOffTicket
from quartet.kvcache.layout import HandOff
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.transfer.base import TransferWay
from quartet.v1 import transfer_pb2 as pb

SERVICE = "quartet.v1.TransferService"

#: Tags and lengths around the data: less than 32 bytes for any 32-bit index and 64-bit offset.
MAX_DATA_SIZE_BYTES = MAX_STREAM_MESSAGE_BYTES - 32

# A tag is (field number << 3) | wire type; 2 is length-delimited, 0 a varint.
_RESPONSE_PIECE = 2 << 3 | 2
_PIECE_INDEX = 1 << 3
_PIECE_OFFSET = 2 << 3
_PIECE_DATA = 3 << 3 | 2

#: glibc's thresholds rise to 32 MiB at most (`DEFAULT_MMAP_THRESHOLD_MAX` in `malloc.c`). Freeing a block above that,
#: its head and the rest of its last page included, would change nothing.
_FREED_SIZE_BYTES = 31 << 20

#: The ways to move blocks, of pulls and of workers' records.
WAY_TO_PB = {
    TransferWay.GRPC: pb.TRANSFER_WAY_GRPC,
    TransferWay.SHM: pb.TRANSFER_WAY_SHM,
    TransferWay.CUDA_IPC: pb.TRANSFER_WAY_CUDA_IPC,
    TransferWay.NIXL: pb.TRANSFER_WAY_NIXL,
    TransferWay.STAGED: pb.TRANSFER_WAY_STAGED,
}

WAY_FROM_PB = {number: way for way, number in WAY_TO_PB.items()}


@dataclass(frozen=True)
class PiecePart:
    """Bytes of piece ``index`` from ``offset_bytes`` on; ``data`` views the message that carried them."""

    index: int
    offset_bytes: int
    data: memoryview = field(repr=False)


#: What a puller reads: pieces with their data in place, everything else as generated.
PullMessage: TypeAlias = pb.PullResponse | PiecePart

_serialize_request: Callable[[pb.PullRequest], bytes] = pb.PullRequest.SerializeToString

PullCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.PullRequest, PullMessage]"


def open_pull(channel: grpc.aio.Channel, timeout_s: float) -> PullCall:
    """Open a Pull stream that ends after ``timeout_s`` at the latest."""
    method = channel.stream_stream(
        f"/{SERVICE}/Pull",
        request_serializer=_serialize_request,
        response_deserializer=parse_response,
    )
    return method(timeout=timeout_s)


def ticket_to_pb(hand_off: HandOff) -> pb.HandOffTicket:
    """What names ``hand_off`` and proves the right to it."""
    return pb.HandOffTicket(hand_off_id=hand_off.hand_off_id, secret=hand_off.secret, worker_epoch=hand_off.epoch)


def ticket_from_pb(ticket: pb.HandOffTicket) -> HandOffTicket:
    """The ticket as the source checks it."""
    return HandOffTicket(ticket.hand_off_id, ticket.secret, ticket.worker_epoch)


def host_to_pb(host: HostIdentity) -> pb.HostIdentity:
    """Where a puller or a worker runs."""
    return pb.HostIdentity(boot_id=host.boot_id, ipc_namespace=host.ipc_namespace)


def host_from_pb(host: pb.HostIdentity) -> HostIdentity:
    """Where a puller or a worker says that it runs; two empty strings where it says nothing."""
    return HostIdentity(boot_id=host.boot_id, ipc_namespace=host.ipc_namespace)


def serialize_response(response: pb.PullResponse | bytes) -> bytes:
    """A response's bytes; a piece framed by hand is bytes already."""
    return response if isinstance(response, bytes) else response.SerializeToString()


def parse_response(message: bytes) -> PullMessage:
    """Read a response; a piece's data stays where gRPC put it.

    Raises:
        google.protobuf.message.DecodeError: not a response; gRPC then ends the call as INTERNAL.
    """
    part = parse_piece(message)
    if part is not None:
        return part
    response = pb.PullResponse.FromString(message)
    if response.WhichOneof("message") != "piece":
        return response
    # Valid, though in another order of fields than we write.
    return PiecePart(response.piece.index, response.piece.offset_bytes, memoryview(response.piece.data))


def split_piece(piece: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Cut a piece into as few parts as fit a message, about equally long: (offset, bytes) each."""
    num_parts = max(1, -(-len(piece) // MAX_DATA_SIZE_BYTES))
    part_size = -(-len(piece) // num_parts)
    for offset in range(0, len(piece), part_size or 1):
        yield offset, piece[offset : offset + part_size]


def frame_piece(index: int, offset_bytes: int, data: memoryview) -> bytes:
    """The message that carries ``data``, by one copy of it."""
    head = bytearray()
    # proto3 leaves out fields that are 0.
    for tag, value in ((_PIECE_INDEX, index), (_PIECE_OFFSET, offset_bytes)):
        if value:
            head.append(tag)
            head += _varint(value)
    head.append(_PIECE_DATA)
    head += _varint(len(data))
    outer = bytes([_RESPONSE_PIECE]) + _varint(len(head) + len(data))
    return b"".join((outer, head, data))


def parse_piece(message: bytes) -> PiecePart | None:
    """Read a message that looks as ``frame_piece`` writes it, without a copy of its data.

    Returns:
        ``None`` for anything else, valid or not: the generated class decides about that.
    """
    if not message or message[0] != _RESPONSE_PIECE:
        return None
    try:
        size, position = _read_varint(message, 1)
        if position + size != len(message):
            return None
        values = {_PIECE_INDEX: 0, _PIECE_OFFSET: 0}
        while (tag := message[position]) in values:
            values[tag], position = _read_varint(message, position + 1)
        size, position = _read_varint(message, position + 1)
    except IndexError:
        return None
    if tag != _PIECE_DATA or position + size != len(message):
        return None
    return PiecePart(values[_PIECE_INDEX], values[_PIECE_OFFSET], memoryview(message)[position:])


@cache  # once: the next such block comes from what is kept, and that is zeroed by hand
def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed messages for the next ones.

    By default it maps each block of over 128 KiB afresh, or gives the end of the heap back as soon as twice that is
    free, and every page then costs a fault again: measured with messages of 256 KiB, 1.4 s of CPU a GB in the sender
    instead of 0.5. Its thresholds rise to the largest block that was ever freed, so freeing one large block, never
    written to, is enough. Another C library ignores it.
    """
    _ = bytes(_FREED_SIZE_BYTES)  # zeroed by the kernel, on first use: costs nothing


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """The varint at ``position``, and where it ends. Raises ``IndexError`` past the end or past 10 bytes."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError("a varint has at most 10 bytes")
