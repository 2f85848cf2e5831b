"""The puller's end of one Pull stream: every wait bounded, every failure a ``ServingError``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from quartet.errors import ServingError, TransferError, TransferTimeoutError
from quartet.transfer.grpc.messages import PullMessage, open_pull
from quartet.transfer.grpc.status import to_error
from quartet.transfer.piece_frame import PiecePart
from quartet.v1 import transfer_pb2 as pb

#: What counts has come by then; a cancelled call would only look odd in the source's log.
_END_TIMEOUT_S = 0.5


class PullStream:
    """One stream to a source; ``cancel`` it when it is no longer needed."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_s: float, stall_timeout_s: float) -> None:
        """Open the stream, for ``timeout_s`` in all and ``stall_timeout_s`` for each step."""
        self._stall_timeout_s = stall_timeout_s
        self._call = open_pull(channel, timeout_s)
        self._writing: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has not ended yet, as far as is known here."""
        return not self._call.done()

    async def send(self, request: pb.PullRequest) -> None:
        """Begin to send one message, once the one before it is out.

        Nothing comes of a failure but what ``receive`` raises then.

        Raises:
            TransferTimeoutError: the one before it has not gone out in time.
        """
        if self._writing is not None and not self._writing.done():
            async with self._bounded(self._stall_timeout_s):
                await asyncio.wait([self._writing])
        # Nobody waits for the write's own end: that would be one more turn of two threads before reading begins.
        self._writing = asyncio.ensure_future(self._call.write(request))
        self._writing.add_done_callback(_ignore_outcome)
        await asyncio.sleep(0)  # it begins now, also when the caller goes on to something that takes long

    async def ask(self, request: pb.PullRequest) -> PullMessage:
        """Send one message and wait for the next one that comes. Raises as ``receive`` does."""
        await self.send(request)
        return await self.receive()

    async def receive(self) -> PullMessage:
        """The next message.

        Raises:
            TransferTimeoutError: nothing came in time.
            TransferError: the stream ended, by either side, without a message.
            ServingError: what the source answered instead.
        """
        async with self._bounded(self._stall_timeout_s):
            message: object = await self._call.read()
        if isinstance(message, (pb.PullResponse, PiecePart)):
            return message
        raise TransferError("the source ended the stream early")

    async def end(self) -> None:
        """Close our side and let the source close its own. Never raises, and waits but shortly."""
        with contextlib.suppress(ServingError):
            async with self._bounded(_END_TIMEOUT_S):
                await self._call.done_writing()
                while await self._call.read() is not grpc.aio.EOF:
                    pass

    def cancel(self) -> None:
        """Give up; the source takes that for a lost stream. Does nothing to a stream that has ended."""
        self._call.cancel()
        if self._writing is not None:
            self._writing.cancel()

    @contextlib.asynccontextmanager
    async def _bounded(self, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise TransferTimeoutError("the source of the hand-off said nothing for too long") from None
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from None
        except asyncio.CancelledError:
            # gRPC says so too when somebody closed the channel under the call, with nobody cancelling this task.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise TransferError("the channel to the source was closed") from None


def _ignore_outcome(task: asyncio.Future[None]) -> None:
    if not task.cancelled():
        task.exception()
