"""TransferService: gives the pieces of a hand-off to the taker that shows its ticket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import TypeAlias

import grpc
import numpy as np

from quartet.discovery.base import HostIdentity
from quartet.errors import (
    HandOffNotFoundError,
    InvalidRequestError,
    NoHandOffError,
    ProtocolError,
    TransferTimeoutError,
)
from quartet.kvcache.hand_off import HandOffTicket, Offer
from quartet.kvcache.layout import OpaquePayload
from quartet.transfer.base import PoolMemory, TransferWay
from quartet.transfer.config import TransferConfig
from quartet.transfer.cuda.lent import CudaServer, to_opaque
from quartet.transfer.cuda.staging import StagingArea, StagingServer
from quartet.transfer.grpc.messages import (
    SERVICE,
    WAY_FROM_PB,
    frame_piece,
    host_from_pb,
    keep_freed_memory,
    serialize_response,
    split_piece,
    ticket_from_pb,
)
from quartet.transfer.life_line import LifeLineServer
from quartet.transfer.shm import ShmServer
from quartet.transfer.source import TransferSource
from quartet.v1 import transfer_pb2 as pb

_Context: TypeAlias = "grpc.aio.ServicerContext[pb.PullRequest, pb.PullResponse | bytes]"

# More than there are; further ones are not read.
_MAX_WAYS = 16


class TransferServicer:
    """Serves Pull from one source. Raises ``ServingError`` types: an interceptor makes them statuses."""

    def __init__(
        self,
        source: TransferSource,
        *,
        host: HostIdentity,
        config: TransferConfig,
        shm: ShmServer | None = None,
        cuda: CudaServer | None = None,
        staging: StagingArea | None = None,
        staging_server: StagingServer | None = None,
    ) -> None:
        """Serve ``source``.

        Args:
            source: what this worker offers.
            host: where this worker runs.
            config: the ways to speak, and bounds.
            shm: passes the pool to peers on this host, started; ``None`` to do without that way.
            cuda: lends a pool in GPU memory likewise.
            staging: where blocks in GPU memory are read by the CPU; ``None`` where the pool is in host memory.
            staging_server: passes that memory to peers on this host, started.
        """
        self.source = source
        self.config = config
        self._host = host
        self._shm = shm if TransferWay.SHM in config.ways else None
        self._cuda = cuda if TransferWay.CUDA_IPC in config.ways else None
        self.staging = staging
        self._staging_server = staging_server if TransferWay.SHM in config.ways else None
        keep_freed_memory()

    async def Pull(self, request_iterator: AsyncIterator[pb.PullRequest], context: _Context) -> None:
        """Serve one stream, as transfer.proto says."""
        await _PullStream(self, context).run()

    def grant(self, begin: pb.PullBegin) -> pb.PullGranted:
        """Choose the way: the first of the puller's that can be served. ``locate`` adds where the pieces are.

        Raises:
            NoHandOffError: none can: the source's pool is on a GPU and can't be staged, or the puller knows no staging.
            InvalidRequestError: none can, since the puller left grpc out.
        """
        # A hand-off without pieces ends by messages alone, wherever the pool is.
        is_on_host = self.source.memory is None or isinstance(self.source.memory, PoolMemory) or not begin.pieces
        sends = is_on_host or self.staging is not None
        is_here = host_from_pb(begin.host) == self._host
        for number in begin.ways[:_MAX_WAYS] or [pb.TRANSFER_WAY_GRPC]:
            way = WAY_FROM_PB.get(number)
            if way is TransferWay.GRPC and sends:
                return pb.PullGranted(way=number)
            if way is TransferWay.CUDA_IPC and self._cuda is not None and is_here:
                return pb.PullGranted(way=number)
            if way is TransferWay.STAGED and self.staging is not None and not is_on_host:
                return self._grant_staged(begin, is_here=is_here)
            if way is TransferWay.SHM and self._shm is not None and is_here:
                return pb.PullGranted(way=number, shm=_to_shm(self._shm, self._shm.memory.size_bytes))
        if not sends or pb.TRANSFER_WAY_CUDA_IPC in begin.ways:
            raise NoHandOffError("no way leads from the source's memory to the puller's: one of them is on a GPU")
        raise InvalidRequestError("none of the ways can be served; grpc always can", field="begin.ways")

    def _grant_staged(self, begin: pb.PullBegin, *, is_here: bool) -> pb.PullGranted:
        """Have the puller map the staging area if it can and the pull has room there; else the pieces are sent."""
        granted = pb.PullGranted(way=pb.TRANSFER_WAY_STAGED)
        server, area = self._staging_server, self.staging
        maps = is_here and pb.TRANSFER_WAY_SHM in begin.ways
        if maps and server is not None and area is not None and len(begin.pieces) <= area.num_slots:
            granted.shm.CopyFrom(_to_shm(server, area.size_bytes))
        return granted

    def locate(self, granted: pb.PullGranted, offer: Offer, pieces: Sequence[int]) -> None:
        """Say in ``granted`` how large a piece is and where each of ``pieces`` begins, unless it is sent or staged."""
        if isinstance(offer.payload, OpaquePayload):
            return
        size = granted.piece_size_bytes = offer.payload.layout.piece_size_bytes
        offsets = np.array([offer.block_ids[piece] for piece in pieces], np.int64) * size
        if granted.way == pb.TRANSFER_WAY_SHM:
            granted.shm.offsets.extend(offsets.tolist())
        elif granted.way == pb.TRANSFER_WAY_CUDA_IPC and self._cuda is not None:
            granted.opaque = to_opaque(self._cuda.lent, offsets)


def _to_shm(server: LifeLineServer, size_bytes: int) -> pb.ShmDescriptor:
    return pb.ShmDescriptor(socket_path=server.socket_path, token=server.token, pool_size_bytes=size_bytes)


def add_transfer_servicer(servicer: TransferServicer, server: grpc.aio.Server) -> None:
    """Register ``servicer`` as the generated function would, but let its responses be bytes already."""
    handlers = {
        "Pull": grpc.stream_stream_rpc_method_handler(
            servicer.Pull,
            request_deserializer=pb.PullRequest.FromString,
            response_serializer=serialize_response,
        )
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)


class _PullStream:
    """The source's end of one stream: which pull it has begun, and until when it may go on."""

    def __init__(self, servicer: TransferServicer, context: _Context) -> None:
        self._servicer = servicer
        self._source = servicer.source
        self._context = context
        self._begun: HandOffTicket | None = None
        self._limit = asyncio.timeout(servicer.config.hand_off_ttl_s)
        self._staged = AsyncExitStack()

    async def run(self) -> None:
        """Serve until an end. However the stream ends, the pull that it began has ended too, and holds nothing."""
        try:
            async with self._limit, self._staged:
                while not await self._serve_one():
                    pass
        except TimeoutError:
            raise TransferTimeoutError("nothing came on the stream for too long, or the pull took too long") from None
        finally:
            if self._begun is not None:
                self._cancel(self._begun)

    async def _serve_one(self) -> bool:
        """Read and answer one message; whether it was the last."""
        request: object = await self._context.read()
        if not isinstance(request, pb.PullRequest):  # the puller has closed its side
            return True
        match request.WhichOneof("message"):
            case "begin":
                await self._begin(request.begin)
                return False
            case "renew":
                await self._renew(request.renew)
                return False
            case "finish":
                await self._finish()
                return True
            case "abort":
                await self._abort(request.abort)
                return True
            case _:
                raise ProtocolError("a message of a pull says nothing that is known")

    async def _begin(self, begin: pb.PullBegin) -> None:
        if self._begun is not None:
            raise ProtocolError("a stream takes one hand-off")
        granted = self._servicer.grant(begin)
        ticket, pieces = ticket_from_pb(begin.ticket), list(begin.pieces)
        offer = self._source.begin(ticket, pieces)
        self._begun = ticket
        self._reschedule(self._servicer.config.max_pull_s)
        self._servicer.locate(granted, offer, pieces)
        if granted.way == pb.TRANSFER_WAY_STAGED and granted.HasField("shm"):
            await self._stage(granted.shm, offer, pieces)
        await self._context.write(pb.PullResponse(granted=granted))
        if granted.way in (pb.TRANSFER_WAY_GRPC, pb.TRANSFER_WAY_STAGED) and not granted.HasField("shm"):
            await self._send(offer, pieces)

    async def _stage(self, shm: pb.ShmDescriptor, offer: Offer, pieces: Sequence[int]) -> None:
        """Have the pieces in host memory until the stream ends, and say where."""
        assert self._servicer.staging is not None, "it was granted"
        block_ids = [offer.block_ids[piece] for piece in pieces]
        shm.offsets.extend(await self._staged.enter_async_context(self._servicer.staging.staged(block_ids)))
        self._source.check_pulling(offer)  # else the blocks may have held another request's KV when they were copied

    async def _send(self, offer: Offer, pieces: Sequence[int]) -> None:
        async def send(number: int, piece: memoryview) -> None:
            for offset, data in split_piece(piece):
                # The hand-off may have ended meanwhile, and its block may hold another request's KV by now.
                self._source.check_pulling(offer)
                await self._context.write(frame_piece(pieces[number], offset, data))

        memory = self._source.memory
        if isinstance(memory, PoolMemory):
            for number, piece in enumerate(pieces):
                await send(number, memory.piece(offer.block_ids[piece]))
        elif pieces:
            assert self._servicer.staging is not None, "a source of blocks sends from host memory"
            await self._servicer.staging.send([offer.block_ids[piece] for piece in pieces], send)

    async def _renew(self, renew: pb.PullRenew) -> None:
        time_to_live = self._source.renew(self._ticket(renew))
        if self._begun is None:
            self._reschedule(self._servicer.config.hand_off_ttl_s)
        renewed = pb.PullRenewed()
        renewed.time_to_live.FromTimedelta(time_to_live)
        await self._context.write(pb.PullResponse(renewed=renewed))

    async def _finish(self) -> None:
        if self._begun is None:
            raise ProtocolError("`finish` before `begin`")
        self._source.finish(self._begun)
        self._begun = None
        await self._context.write(pb.PullResponse(finished=pb.PullFinished()))

    async def _abort(self, abort: pb.PullAbort) -> None:
        self._source.abort(self._ticket(abort))
        await self._context.write(pb.PullResponse(aborted=pb.PullAborted()))

    def _ticket(self, message: pb.PullRenew | pb.PullAbort) -> HandOffTicket:
        """The ticket in ``message``, or the one that this stream began with."""
        if message.HasField("ticket"):
            return ticket_from_pb(message.ticket)
        if self._begun is None:
            raise ProtocolError("a ticket is needed before `begin`")
        return self._begun

    def _reschedule(self, delay_s: float) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time() + delay_s)

    def _cancel(self, begun: HandOffTicket) -> None:
        try:
            self._source.abort(begun)
        except HandOffNotFoundError:
            return  # it had ended already, by `abort`, by its time or by the worker
        finally:
            self._begun = None
