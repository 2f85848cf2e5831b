"""Between the messages of ``transfer.proto`` and the types of this package, and the Pull method with raw pieces."""

from __future__ import annotations

from typing import TypeAlias

import grpc

from quartet.discovery.base import HostIdentity
from quartet.kvcache.layout import HandOff
from quartet.transfer.base import TransferWay
from quartet.transfer.piece_frame import PiecePart, parse_piece
from quartet.transfer.source import HandOffTicket
from quartet.v1 import transfer_pb2 as pb

SERVICE = "quartet.v1.TransferService"

#: What a puller reads: pieces with their data in place, everything else as generated.
PullMessage: TypeAlias = pb.PullResponse | PiecePart
PullCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.PullRequest, PullMessage]"

WAY_TO_PB = {
    TransferWay.GRPC: pb.TRANSFER_WAY_GRPC,
    TransferWay.SHM: pb.TRANSFER_WAY_SHM,
    TransferWay.CUDA_IPC: pb.TRANSFER_WAY_CUDA_IPC,
    TransferWay.NIXL: pb.TRANSFER_WAY_NIXL,
}
WAY_FROM_PB = {number: way for way, number in WAY_TO_PB.items()}


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
    """Where a puller runs."""
    return pb.HostIdentity(boot_id=host.boot_id, ipc_namespace=host.ipc_namespace)


def host_from_pb(host: pb.HostIdentity) -> HostIdentity:
    """Where a puller says that it runs; two empty strings where it says nothing."""
    return HostIdentity(boot_id=host.boot_id, ipc_namespace=host.ipc_namespace)


def _serialize_request(request: pb.PullRequest) -> bytes:
    return request.SerializeToString()
