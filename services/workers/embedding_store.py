"""Media embeddings on a worker: each item is written once, however many want it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from quartet.errors import InvalidRequestError, MediaTooLargeError, OutOfBlocksError
from quartet.kvcache.block_pool import BlockCounts
from quartet.kvcache.embedding_pool import EmbeddingPool, PooledItem

# Less than what health takes for a standstill. Who holds embeddings uses them, or loses the lease.
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


class Lease:
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
            store.let_go(self._media_id)


class EmbeddingStore:
    """Has items in a pool for whoever wants them. Lives on the event loop.

    Whoever wants an item that is being written waits for it. Should its writer fail or be cancelled, the next one who
    waits writes it. Room for all of a request's items is taken at once, request by request: so none of those that wait
    for it holds what another one needs.
    """

    def __init__(
        self,
        pool: EmbeddingPool,
        *,
        field: str,
        on_change: Callable[[], None] = lambda: None,
        room_timeout_s: float = _ROOM_TIMEOUT_S,
    ) -> None:
        """Have items in ``pool``, of which nobody else keeps the book.

        Args:
            pool: the book.
            field: of a request, with its items; named where they are refused.
            on_change: called when something came, went, or changed hands; must not raise.
            room_timeout_s: how long a request waits for others to let go.
        """
        self._pool = pool
        self._field = field
        self._on_change = on_change
        self._room_timeout_s = room_timeout_s
        self._writing: dict[bytes, asyncio.Event] = {}
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in which state."""
        return self._pool.counts

    def has(self, media_id: bytes) -> bool:
        """Whether the item is there, wholly written."""
        return self._pool.find(media_id) is not None

    async def obtain(self, wants: Sequence[Want], on_lease: Callable[[int, Lease], None]) -> None:
        """Have all ``wants`` here; each is given to ``on_lease`` with its position as soon as it is.

        However this ends, leases that were given are whoever's they were given to, to be released; nothing else is
        held then, and nothing of what this call began to write is still being written.

        Raises:
            InvalidRequestError, MediaTooLargeError: naming ``field``: they never fit, or not what is here.
            OutOfBlocksError: others held too much of the pool for too long.
            ServingError: what ``Want.make`` raised; the others' are cancelled.
        """
        self._check_fit(wants)
        obtaining = _Obtaining(wants, on_lease)
        try:
            await self._take_room(obtaining, range(len(wants)))
            async with asyncio.TaskGroup() as group:
                for index in obtaining.left:
                    group.create_task(self._have(obtaining, index))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for media_id in list(obtaining.mine):
                self._pool.discard(media_id)
                self._end_writing(obtaining, media_id)

    def let_go(self, media_id: bytes) -> None:
        """Of a lease: its hold ends."""
        self._pool.release(media_id)
        self._tell()

    async def _have(self, obtaining: _Obtaining, index: int) -> None:
        want = obtaining.wants[index]
        while not self._give(obtaining, index):
            if obtaining.mine.get(want.media_id) == index:
                await want.make(obtaining.block_ids[index])
                self._pool.commit(want.media_id)
                self._end_writing(obtaining, want.media_id)
                continue
            writing = self._writing.get(want.media_id)
            if writing is not None:
                await writing.wait()
            else:  # its writer gave up
                await self._take_room(obtaining, [index])

    def _give(self, obtaining: _Obtaining, index: int) -> bool:
        """Give out what is there; whether it is."""
        want = obtaining.wants[index]
        item = self._pool.find(want.media_id)
        if item is None:
            return False
        if item.num_tokens != want.num_tokens:
            message = "a media item of this name is here, and fills another number of tokens"
            raise InvalidRequestError(message, field=f"{self._field}[{index}]")
        self._pool.hold(want.media_id)
        obtaining.left.discard(index)
        obtaining.on_lease(index, Lease(self, want.media_id, item))
        return True

    async def _take_room(self, obtaining: _Obtaining, indices: Collection[int]) -> None:
        """Give out those that are there, and take blocks for those that nobody writes."""
        try:
            async with asyncio.timeout(self._room_timeout_s), self._turn:
                while True:
                    absent = self._absent(obtaining, indices)
                    num_wanted = sum(self._num_blocks(obtaining.wants[index]) for index in absent.values())
                    if num_wanted <= self._pool.num_available:
                        break
                    self._changed.clear()
                    await self._changed.wait()
                self._allocate(obtaining, absent)
        except TimeoutError:
            message = "the pool of embeddings is full of what others hold"
            raise OutOfBlocksError(message, retry_delay_s=1.0) from None

    def _absent(self, obtaining: _Obtaining, indices: Collection[int]) -> dict[bytes, int]:
        absent: dict[bytes, int] = {}
        for index in indices:
            media_id = obtaining.wants[index].media_id
            if index in obtaining.left and not self._give(obtaining, index) and media_id not in self._writing:
                absent.setdefault(media_id, index)
        return absent

    def _allocate(self, obtaining: _Obtaining, absent: dict[bytes, int]) -> None:
        for media_id, index in absent.items():
            obtaining.block_ids[index] = self._pool.allocate(media_id, obtaining.wants[index].num_tokens)
            obtaining.mine[media_id] = index
            self._writing[media_id] = asyncio.Event()
        if absent:
            self._tell()

    def _end_writing(self, obtaining: _Obtaining, media_id: bytes) -> None:
        del obtaining.mine[media_id]
        self._writing.pop(media_id).set()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._on_change()

    def _check_fit(self, wants: Sequence[Want]) -> None:
        num_blocks = sum({want.media_id: self._num_blocks(want) for want in wants}.values())
        if num_blocks > self._pool.num_blocks:
            message = f"the media take {num_blocks} blocks of embeddings, and there are {self._pool.num_blocks}"
            raise MediaTooLargeError(message, field=self._field)

    def _num_blocks(self, want: Want) -> int:
        return self._pool.num_blocks_of(want.num_tokens)


class _Obtaining:
    """One call of ``obtain``: positions of what is still to be given, and items that it has to write, by position."""

    def __init__(self, wants: Sequence[Want], on_lease: Callable[[int, Lease], None]) -> None:
        self.wants = wants
        self.on_lease = on_lease
        self.left = set(range(len(wants)))
        self.mine: dict[bytes, int] = {}
        self.block_ids: dict[int, tuple[int, ...]] = {}
