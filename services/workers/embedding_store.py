"""Media embeddings on a worker: each item is written once, however many requests want it at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from quartet.errors import InvalidRequestError, MediaTooLargeError, OutOfBlocksError, ServingError
from quartet.kvcache.block_pool import BlockCounts
from quartet.kvcache.embedding_pool import EmbeddingPool, PooledItem

#: How long the first request in the queue waits for room; less than what health takes for a standstill. Meanwhile a
#: request that holds embeddings uses them, or its hand-off expires.
_ROOM_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Want:
    """An item that a request needs, and how it comes into the pool where it is not there.

    Attributes:
        make: writes it to these blocks; returns or raises, also when cancelled, once nothing writes there any more.
    """

    media_id: bytes
    num_tokens: int
    make: Callable[[tuple[int, ...]], Awaitable[None]]


class Hold:
    """A hold on an item's embeddings."""

    def __init__(self, store: EmbeddingStore, media_id: bytes, item: PooledItem) -> None:
        """Made by ``EmbeddingStore.obtain``."""
        self.block_ids = item.block_ids
        self._store: EmbeddingStore | None = store
        self._media_id = media_id

    def release(self) -> None:
        """Let go: the embeddings may be overwritten. May be called twice."""
        store, self._store = self._store, None
        if store is not None:
            store.release(self._media_id)


class EmbeddingStore:
    """Brings items into a pool for the requests that want them. Lives on the event loop.

    A request that wants an item that is being written waits for it. Should the writer fail or be cancelled, the next
    waiting request writes the item, to the same blocks. A request all of whose items are there or being written needs
    no room, and goes ahead at once.

    The other requests wait in a queue. The first one takes room for all that it lacks at once. Of those queued only the
    first holds those of its items that are there: every other holder needs no more room, so the first one gets its own
    when they are done. Requests that go ahead can keep it waiting, but no longer than its time-out.
    """

    def __init__(
        self,
        pool: EmbeddingPool,
        *,
        field: str,
        on_change: Callable[[], None] = lambda: None,
        room_timeout_s: float = _ROOM_TIMEOUT_S,
    ) -> None:
        """Bring items into ``pool``, which only this store uses.

        Args:
            pool: which item lies in which blocks.
            field: of a request, with its items; named where they are refused.
            on_change: called when something came, went, or changed hands; must not raise.
            room_timeout_s: how long the first request in the queue waits for others to release theirs.
        """
        self._pool = pool
        self._field = field
        self._on_change = on_change
        self._room_timeout_s = room_timeout_s
        self._writing: dict[bytes, _Writing] = {}
        self._queue: deque[Sequence[_WantedItem]] = deque()
        self._changed = asyncio.Event()

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in which state."""
        return self._pool.counts

    def has(self, media_id: bytes) -> bool:
        """Whether the item is there, wholly written."""
        return self._pool.find(media_id) is not None

    async def obtain(self, wants: Sequence[Want], on_hold: Callable[[int, Hold], None]) -> None:
        """Have all ``wants`` here; each is given to ``on_hold`` with its position as soon as it is.

        However this ends, the caller releases the holds that it was given. Nothing else is held then, and nothing that
        this call began to write is still being written.

        Raises:
            InvalidRequestError, MediaTooLargeError: naming ``field``: they never fit, or differ in length from
                what is here.
            OutOfBlocksError: it was first in the queue, and other requests held too much of the pool for too
                long.
            ServingError: what ``Want.make`` or ``on_hold`` raised; the others' are cancelled.
        """
        self._check_fit(wants)
        wanted = [_WantedItem(index, want, on_hold) for index, want in enumerate(wants)]
        try:
            await self._take_room(wanted)
            async with asyncio.TaskGroup() as group:
                for one in wanted:
                    if not one.is_given:
                        group.create_task(self._have(one))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for one in wanted:
                self._leave(one)

    def release(self, media_id: bytes) -> None:
        """End a hold: called by ``Hold.release``."""
        self._pool.release(media_id)
        self._notify()

    async def _take_room(self, wanted: Sequence[_WantedItem]) -> None:
        """Give what is there, and take blocks for what is not being written, once there is room for all of that."""
        if not self._absent(wanted):
            self._go_ahead(wanted)
            return
        self._queue.append(wanted)
        try:
            while self._queue[0] is not wanted:
                await self._change()
                if not self._absent(wanted):
                    self._go_ahead(wanted)
                    return
            async with asyncio.timeout(self._room_timeout_s):
                while not self._has_room(wanted):
                    await self._change()
            self._go_ahead(wanted)
        except TimeoutError:
            message = "the pool of embeddings is full of what others hold"
            raise OutOfBlocksError(message, retry_delay_s=1.0) from None
        finally:
            self._queue.remove(wanted)
            self._changed.set()

    async def _change(self) -> None:
        """Return after the next change of the pool, or of the queue."""
        self._changed.clear()
        await self._changed.wait()

    def _absent(self, wanted: Sequence[_WantedItem]) -> dict[bytes, _WantedItem]:
        """Those, each item once, that are neither there nor being written."""
        absent: dict[bytes, _WantedItem] = {}
        for one in wanted:
            media_id = one.want.media_id
            if not one.is_given and media_id not in self._writing and self._pool.find(media_id) is None:
                absent.setdefault(media_id, one)
        return absent

    def _has_room(self, wanted: Sequence[_WantedItem]) -> bool:
        """Give the first request of the queue what is there; whether the rest of it has room."""
        for one in wanted:
            if not one.is_given:
                self._give(one)
        return sum(self._num_blocks(one.want) for one in self._absent(wanted).values()) <= self._pool.num_available

    def _go_ahead(self, wanted: Sequence[_WantedItem]) -> None:
        """Give what is there; write what is absent, and wait for the writers of the rest."""
        for one in wanted:
            if not one.is_given:
                self._give(one)
        absent = self._absent(wanted)
        for media_id, one in absent.items():
            num_tokens = one.want.num_tokens
            self._writing[media_id] = _Writing(self._pool.allocate(media_id, num_tokens), num_tokens, one)
        for one in wanted:
            if not one.is_given and not self._is_writer(one):
                writing = self._writing[one.want.media_id]
                self._check_size(one, writing.num_tokens)
                writing.waiting.append(one)
        if absent:
            self._notify()

    async def _have(self, one: _WantedItem) -> None:
        if not self._is_writer(one):
            await one.turn.wait()
        if one.error is not None:
            raise one.error
        if one.is_given:
            return
        media_id = one.want.media_id
        await one.want.make(self._writing[media_id].block_ids)
        self._pool.commit(media_id)
        writing = self._writing.pop(media_id)
        # Give it to those that wait at once: by the time that they go on, it might have been evicted.
        for waiting in writing.waiting:
            try:
                self._give(waiting)
            except ServingError as error:
                waiting.error = error
            waiting.turn.set()
        self._give(one)
        self._notify()

    def _give(self, one: _WantedItem) -> bool:
        """Give what is there; whether it is."""
        media_id = one.want.media_id
        item = self._pool.find(media_id)
        if item is None:
            return False
        self._check_size(one, item.num_tokens)
        self._pool.hold(media_id)
        one.is_given = True
        one.on_hold(one.index, Hold(self, media_id, item))
        return True

    def _leave(self, one: _WantedItem) -> None:
        """A call has ended and writes nothing any more: the next one that waits writes what it left unwritten."""
        writing = self._writing.get(one.want.media_id)
        if writing is None:
            return
        if writing.writer is not one:
            if one in writing.waiting:
                writing.waiting.remove(one)
        elif writing.waiting:
            writing.writer = writing.waiting.popleft()
            writing.writer.turn.set()
        else:
            del self._writing[one.want.media_id]
            self._pool.discard(one.want.media_id)
            self._notify()

    def _is_writer(self, one: _WantedItem) -> bool:
        writing = self._writing.get(one.want.media_id)
        return writing is not None and writing.writer is one

    def _notify(self) -> None:
        self._changed.set()
        self._on_change()

    def _check_fit(self, wants: Sequence[Want]) -> None:
        num_blocks = sum({want.media_id: self._num_blocks(want) for want in wants}.values())
        if num_blocks > self._pool.num_blocks:
            message = f"the media take {num_blocks} blocks of embeddings, and there are {self._pool.num_blocks}"
            raise MediaTooLargeError(message, field=self._field)

    def _check_size(self, one: _WantedItem, num_tokens: int) -> None:
        if one.want.num_tokens != num_tokens:
            message = "a media item of this name is here, and fills another number of tokens"
            raise InvalidRequestError(message, field=f"{self._field}[{one.index}]")

    def _num_blocks(self, want: Want) -> int:
        return self._pool.num_blocks_of(want.num_tokens)


@dataclass(eq=False)
class _WantedItem:
    """One want of one call.

    Attributes:
        turn: set once it was given or refused, or is to write.
    """

    index: int
    want: Want
    on_hold: Callable[[int, Hold], None]
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    is_given: bool = False
    error: ServingError | None = None


@dataclass(eq=False)
class _Writing:
    """An item that is being written, and the wants that wait for it, in order."""

    block_ids: tuple[int, ...]
    num_tokens: int
    writer: _WantedItem
    waiting: deque[_WantedItem] = field(default_factory=deque)
