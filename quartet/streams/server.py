"""A worker's end of a Decode or Prefill stream: many requests by slot, exactly one terminal output for each start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from google.protobuf.message import Message

from quartet.errors import (
    ConfigError,
    NoSigningKeyError,
    PermissionDeniedError,
    ProtocolError,
    RequestCancelledError,
    ServingError,
    StreamIdleError,
)
from quartet.kvcache.block_hash import TOKEN_SIZE_BYTES
from quartet.rpc.channels import MAX_API_MESSAGE_BYTES
from quartet.rpc.server import StalledCalls
from quartet.streams.base import ServerStream
from quartet.streams.chunks import ChunkedStarts, StartMessage
from quartet.streams.convert.messages import from_start
from quartet.streams.messages import WorkerStart
from quartet.streams.outbox import Outbox
from quartet.streams.read_pace import Account, message_credit
from quartet.v1 import decode_pb2, prefill_pb2

if TYPE_CHECKING:
    import asyncio

OutboxT = TypeVar("OutboxT", bound=Outbox[Message])
OutboxT_contra = TypeVar("OutboxT_contra", contravariant=True)

_Request: TypeAlias = decode_pb2.DecodeRequest | prefill_pb2.PrefillRequest
# A caller that reads takes the ends of what it started at once: a few hundred kB. Past them nothing more is read.
_MAX_OWED_ENDS = 4096
# Smaller chunks cost their caller as much as other messages. Ours are as large as a message may be.
_MIN_PAID_CHUNK_BYTES = 1024
# Of a request: a start, the end of its chunks, a cancel.
_NUM_MESSAGES = 3


class Work(Protocol[OutboxT_contra]):
    """What runs the requests of streams."""

    def submit(self, start: WorkerStart, outbox: OutboxT_contra, slot: int, on_end: Callable[[], None]) -> int:
        """Run ``start``; its outputs go to ``outbox`` under ``slot``, and ``on_end`` is called at the terminal one.

        Returns:
            The id to cancel it by.

        Raises:
            ServingError: it can't run; nothing was started and ``outbox`` got nothing.
        """
        ...

    def cancel(self, id: int) -> None:
        """End a request early; its terminal output still comes. Unknown ids are ignored."""
        ...

    def abandon(self, ids: list[int]) -> None:
        """The stream is gone: end these requests; their outputs are dropped."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Bounds of one worker stream.

    Attributes:
        stall_timeout_s: a caller that takes nothing for so long, or starts nothing at first, loses its stream.
        idle_timeout_s: a stream ends on which no request ran for this long, or for up to half as much longer. Routers
            and the Python client end theirs after two minutes at most, so that no start meets that end.
        chunks_timeout_s: a chunked start must be complete within it.
        max_prompt_bytes: packed token ids of one start at most.
        max_media_bytes: media files of one start at most.

    Raises:
        ConfigError: naming the field.
    """

    stall_timeout_s: float = 10.0
    idle_timeout_s: float = 300.0
    chunks_timeout_s: float = 30.0
    max_prompt_bytes: int = MAX_API_MESSAGE_BYTES
    max_media_bytes: int = MAX_API_MESSAGE_BYTES

    def __post_init__(self) -> None:
        for name in ("stall_timeout_s", "idle_timeout_s", "chunks_timeout_s", "max_prompt_bytes", "max_media_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be above 0")

    def for_model(self, max_model_len: int) -> StreamLimits:
        """The same, but no start has more tokens than the model takes of prompt and output together."""
        return replace(self, max_prompt_bytes=min(self.max_prompt_bytes, TOKEN_SIZE_BYTES * max_model_len))


class StartVerifier(Protocol):
    """Opens signed starts (``quartet.streams.signed_start.SignedStartVerifier``)."""

    def open(self, message: decode_pb2.SignedDecodeStart) -> decode_pb2.DecodeStart:
        """The start inside, in the message's slot. Raises ``ServingError``: it is refused."""
        ...


class WorkerStream(ServerStream[_Request, Message], Generic[OutboxT]):
    """Serves one call of Decode or Prefill until the caller has half-closed and every request has ended.

    ``serve`` raises ``StreamIdleError``, in an ``ExceptionGroup``, where no request ran for too long.
    """

    def __init__(
        self,
        work: Work[OutboxT],
        outbox: OutboxT,
        limits: StreamLimits,
        *,
        account: Account | None = None,
        verifier: StartVerifier | None = None,
        takes_unsigned: bool = True,
    ) -> None:
        """Serve with ``work``, which brings its outputs to ``outbox``.

        ``account`` pays for the messages; ``None``: they are free. ``verifier`` opens signed starts.
        ``takes_unsigned``: this caller needs no signature.
        """
        stalled = StalledCalls(limits.stall_timeout_s)
        super().__init__(outbox, stalled, account, max_owed_ends=_MAX_OWED_ENDS, idle_timeout_s=limits.idle_timeout_s)
        self._work = work
        self._outbox = outbox
        self._verifier = verifier
        self._takes_unsigned = takes_unsigned
        self._ids: dict[int, int] = {}
        self._chunked: ChunkedStarts[StartMessage] = ChunkedStarts(
            timeout_s=limits.chunks_timeout_s,
            max_size_bytes=limits.max_prompt_bytes,
            max_media_bytes=limits.max_media_bytes,
            on_failed=self._fail,
        )

    def _handle(self, request: _Request, group: asyncio.TaskGroup) -> None:
        match request.WhichOneof("message"):
            case "start":
                self._start(request.start)
            case "chunk":
                if request.chunk.slot in self._chunked and len(request.chunk.data) >= _MIN_PAID_CHUNK_BYTES:
                    self._account.earn(message_credit(self._message_bytes))  # its bytes count, and have a bound
                self._chunked.append(request.chunk)
            case "start_done":
                self._complete(request.start_done.slot)
            case "cancel":
                self._cancel(request.cancel.slot)
            case "signed_start":
                assert isinstance(request, decode_pb2.DecodeRequest), "only Decode has it"
                self._start_signed(request.signed_start)
            case _:
                raise ProtocolError("a message must hold a start, chunk, start_done or cancel", field="message")

    def _check_unused(self, slot: int) -> None:
        # A slot is free only once its end was sent: before, the caller could not distinguish the two requests.
        if slot in self._ids or slot in self._chunked or self._outbox.owes(slot):
            raise ProtocolError(f"slot {slot} is still in use", field="start.slot")

    def _start(self, start: StartMessage) -> None:
        self._check_unused(start.slot)
        if not self._takes_unsigned:
            # Its chunks that follow are for an unknown slot and are ignored.
            error = PermissionDeniedError("a start that no router signed takes a router's or worker's identity")
            self._fail(start.slot, error)
        elif start.chunked:
            self._chunked.begin(start)
        else:
            self._submit(start)

    def _start_signed(self, signed: decode_pb2.SignedDecodeStart) -> None:
        self._check_unused(signed.slot)
        try:
            if self._verifier is None:
                raise NoSigningKeyError("this worker has no key for signed starts")
            start = self._verifier.open(signed)
        except ServingError as error:
            self._fail(signed.slot, error)
        else:
            self._submit(start, is_signed=True)

    def _complete(self, slot: int) -> None:
        start = self._chunked.complete(slot)
        if start is not None:
            self._submit(start)

    def _submit(self, start: StartMessage, *, is_signed: bool = False) -> None:
        slot = start.slot
        try:
            parsed = from_start(start)
            if is_signed:
                parsed = replace(parsed, is_signed=True)
            id = self._work.submit(parsed, self._outbox, slot, partial(self._ended, slot))
        except ServingError as error:
            self._fail(slot, error)
        else:
            self._ids[slot] = id
            self._account.ran(_NUM_MESSAGES)

    def _fail(self, slot: int, error: ServingError) -> None:
        """The start in ``slot`` is refused."""
        self._account.in_vain(self._message_bytes)
        self._outbox.failed(slot, error)

    def _ended(self, slot: int) -> None:
        self._ids.pop(slot, None)

    def _cancel(self, slot: int) -> None:
        if slot in self._ids:
            self._work.cancel(self._ids[slot])
        elif slot in self._chunked:
            self._chunked.end(slot, RequestCancelledError("cancelled by the caller"))
        else:
            self._outbox.recall(slot)

    def _half_closed(self) -> None:
        self._chunked.end_all(ProtocolError("the stream was half-closed within a chunked start"))
        self._outbox.ready.set()

    async def _next(self) -> Message | None:
        while (message := self._outbox.take()) is None:
            if self._is_half_closed and not self._ids:
                return None
            if self._is_idle():
                raise StreamIdleError(
                    "no request ran on the stream for too long: open another one for the next request"
                )
            await self._outbox.ready.wait()
        return message

    def _is_busy(self) -> bool:
        # Before the first start there is another bound, for silence.
        return bool(not self._num_starts or self._ids or self._chunked or self._outbox.num_ended)

    def _wake(self) -> None:
        self._outbox.ready.set()

    async def _end(self) -> None:
        ids, self._ids = list(self._ids.values()), {}
        self._work.abandon(ids)
        self._chunked.forget_all()
        self._outbox.close()
