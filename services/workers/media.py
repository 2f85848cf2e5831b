"""Media of Prefill and Decode requests: pulled or encoded into the worker's pool before the engine gets the request.

``MediaGate`` holds each request until ``MediaStage`` has prepared its media, and keeps them until the request ends.
An engine that reads media by itself is given files, or the states that encode workers of its kind keep: such a hand-off
is kept alive while the request runs, and ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from quartet.engine.base import EngineStats, Generation
from quartet.engine.encoder import EncodeTimes
from quartet.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    NoHandOffError,
    PromptTooLongError,
    QueueFullError,
    RequestCancelledError,
    ServingError,
    TransferError,
    UnsupportedFieldError,
)
from quartet.kvcache.layout import EmbeddingsPayload, HandOff, OpaquePayload
from quartet.kvcache.media_spans import check_placeholders, expand_placeholders
from quartet.media.items import MediaFile, MediaItem
from quartet.rpc.errors import public_error
from quartet.streams.messages import MAX_UNCHUNKED_BYTES, WorkerStart
from quartet.supervision import report_failure
from quartet.telemetry.encode_metrics import EncodeMetrics
from quartet.transfer.base import Claim, PieceRun, Puller
from services.workers.embedding_store import EmbeddingStore, Hold, Want
from services.workers.files import FileEncoder, FileSizer, SizedItem

_LOG = logging.getLogger(__name__)

# The expanded prompt of a request with files is sent back in one message: 4 bytes a token.
_MAX_RETURNED_TOKENS = MAX_UNCHUNKED_BYTES // 4

# Waiting items are encoded within a few seconds.
_RETRY_DELAY_S = 1.0


@dataclass(frozen=True)
class ReadyMedia:
    """What an engine needs of a request whose media are ready.

    Attributes:
        generation: with the media's tokens in the prompt.
        media_blocks: blocks of the pool with each item; see ``EngineRequest``, as for ``media_inputs``.
        is_expanded: the prompt differs from the caller's.
        media_ids: of all items; if ``generation`` has no spans, the engine says where the items lie.
    """

    generation: Generation
    media_blocks: tuple[tuple[int, ...], ...]
    is_expanded: bool
    media_inputs: tuple[MediaFile | bytes | None, ...] = ()
    media_ids: tuple[bytes, ...] = ()


class MediaStage:
    """Prepares the media of requests before the engine gets them. Lives on the event loop."""

    def __init__(
        self,
        store: EmbeddingStore,
        puller: Puller,
        metrics: EncodeMetrics,
        *,
        files: FileEncoder | None,
        placeholder_id: int,
        tower_queue: TowerQueue,
        read_files: FileSizer | None = None,
        read_states: str | None = None,
    ) -> None:
        """Bring media into ``store``.

        Args:
            store: of the pool that the engine reads.
            puller: fetches hand-offs into that pool. The caller closes it, after this stage.
            metrics: counts items.
            files: encodes files into that pool; ``None``: files are refused.
            placeholder_id: the token that stands in a prompt for each file.
            tower_queue: bounds the files that wait for the vision tower.
            read_files: sizes files that the engine reads by itself, in place of ``files``; ``None``: it reads none.
            read_states: name of the engine whose opaque hand-offs it reads by itself; ``None``: it reads none.
        """
        self.store = store
        self.puller = puller
        self.metrics = metrics
        self.files = files
        self.placeholder_id = placeholder_id
        self.tower_queue = tower_queue
        self.read_files = read_files
        self.read_states = read_states
        self.num_pulls = 0
        self._endings: set[asyncio.Task[None]] = set()

    @property
    def num_steps(self) -> int:
        """Progress: batches encoded and items pulled, ever."""
        return self.num_pulls + (0 if self.files is None else self.files.num_steps)

    def open(self, start: WorkerStart) -> MediaUse:
        """Accept the media of ``start``: its hand-offs are renewed from now on.

        Raises:
            UnsupportedFieldError: it has files, and there is no vision tower.
            InvalidRequestError: its fields about media contradict each other.
            LayoutMismatchError, TransferError: a hand-off can't be taken over here.
            QueueFullError: too many files wait already.
        """
        if isinstance(start.media[0].source, MediaFile):
            self._check_files(start)
            return MediaUse(self, start, {}, self.tower_queue.enter(len(start.media)))
        hand_offs = [self._checked_hand_off(start, index) for index in range(len(start.media))]
        use = MediaUse(self, start, {})
        try:
            for index, hand_off in enumerate(hand_offs):
                use.claims[index] = self.puller.claim(hand_off)
        except BaseException:
            use.release(has_ended_well=False)
            raise
        return use

    def end(self, claim: Claim, *, was_taken: bool) -> None:
        """Notify the source that the engine took a hand-off itself, or that it is not needed any more."""
        ending = _notify_taken(claim) if was_taken else claim.release()
        task = asyncio.get_running_loop().create_task(ending, name="end-media")
        self._endings.add(task)
        task.add_done_callback(report_failure)
        task.add_done_callback(self._endings.discard)

    async def close(self) -> None:
        """Wait until every source was notified that its hand-off ended, or can't be. No request has media any more."""
        while self._endings:
            await asyncio.wait(self._endings)

    def _check_files(self, start: WorkerStart) -> None:
        if self.files is None and self.read_files is None:
            raise UnsupportedFieldError("this worker has no vision tower for media files", field="media")
        if start.hand_off is not None:
            raise InvalidRequestError("the media of a prompt whose KV is handed off are in it", field="media")

    def _checked_hand_off(self, start: WorkerStart, index: int) -> HandOff:
        """The hand-off of an item, checked against the prompt's span. Raises ``ServingError``."""
        item, span, field = start.media[index], start.generation.media[index], f"media[{index}]"
        payload = item.source.payload if isinstance(item.source, HandOff) else None
        if not isinstance(item.source, HandOff) or not isinstance(payload, EmbeddingsPayload | OpaquePayload):
            raise InvalidRequestError("a media item's hand-off is one of embeddings", field=f"{field}.hand_off")
        if isinstance(payload, OpaquePayload) and payload.engine != self.read_states:
            message = f"media of engine {payload.engine!r} cannot be taken over here"
            raise LayoutMismatchError(message, field=f"{field}.hand_off")
        if item.media_id != span.media_id:
            raise InvalidRequestError("the item is another one than that of its span", field=f"{field}.media_id")
        if isinstance(payload, EmbeddingsPayload) and payload.num_tokens != span.num_tokens:
            message = f"{payload.num_tokens} tokens were handed off, and the prompt has {span.num_tokens}"
            raise InvalidRequestError(message, field=f"{field}.hand_off")
        return item.source


class MediaUse:
    """The media of one request, from its arrival until the engine has ended it."""

    def __init__(
        self, stage: MediaStage, start: WorkerStart, claims: dict[int, Claim], waiting: WaitingMedia | None = None
    ) -> None:
        """Made by ``MediaStage.open``: ``claims`` of hand-offs that are not taken over yet, or ``waiting`` files."""
        self.claims = claims
        self.num_prompt_tokens = len(start.generation.prompt_token_ids)
        self._stage = stage
        self._start = start
        self._waiting = waiting
        self._arrived_at = time.monotonic()
        self._holds: dict[int, Hold] = {}
        self._made: set[int] = set()  # indices of items that were not in the pool yet
        self._inputs: dict[int, MediaFile | bytes] = {}  # items that the engine reads by itself
        self._media_ids = tuple(item.media_id for item in start.media)

    async def prepare(self) -> ReadyMedia:
        """Get all items into the pool, except those that the engine reads by itself.

        Raises:
            InvalidRequestError, InvalidMediaError, MediaTooLargeError: naming the item (``media[1].file``).
            PromptTooLongError: with its media, the prompt is too long to send back to the caller.
            TransferError, HandOffNotFoundError, StaleEpochError: the embeddings of a hand-off are lost.
            OutOfBlocksError: the pool has no room.
            QueueFullError: too many pixels wait to be decoded already.
            EngineError: the vision tower is dead.
        """
        if isinstance(self._start.media[0].source, MediaFile):
            generation = await self._encode_files()
        else:
            generation = self._start.generation
            await self._have_hand_offs()
        indices = range(len(self._start.media))
        blocks = tuple(self._holds[index].block_ids if index in self._holds else () for index in indices)
        return ReadyMedia(
            generation,
            blocks if self._holds else (),
            generation is not self._start.generation,
            tuple(self._inputs.get(index) for index in indices) if self._inputs else (),
            self._media_ids,
        )

    def release(self, *, has_ended_well: bool) -> None:
        """The request has ended, or never began: free all its media. May be called twice."""
        if self._waiting is not None:
            self._waiting.leave_all()
        for hold in self._holds.values():
            hold.release()
        claims, self.claims = list(self.claims.values()), {}
        for claim in claims:
            self._stage.end(claim, was_taken=has_ended_well)

    async def _have_hand_offs(self) -> None:
        wants: dict[int, Want] = {}
        for index, (item, span) in enumerate(zip(self._start.media, self._start.generation.media, strict=True)):
            if isinstance(item.source, HandOff) and isinstance(item.source.payload, OpaquePayload):
                self._inputs[index] = item.source.payload.state
                self._stage.metrics.count_item("handed_over")
            else:
                wants[index] = Want(span.media_id, span.num_tokens, partial(self._pull, index))
        indices = list(wants)
        await self._stage.store.obtain(list(wants.values()), lambda nth, hold: self._take(indices[nth], hold))

    async def _encode_files(self) -> Generation:
        stage, start = self._stage, self._start
        sizer = stage.files or stage.read_files
        assert sizer is not None and self._waiting is not None, "else files were refused"
        try:
            files = [(item.media_id, item.source) for item in start.media]
            items = [MediaItem(name, source) for name, source in files if isinstance(source, MediaFile)]
            sized = await sizer.size(items, "media", trust_domain=start.context.trust_domain)
            sizes = [item.size for item in sized]
            self._waiting.add_pixels([0 if item.size.is_cached else item.num_pixels for item in sized])
            self._media_ids = tuple(size.media_id for size in sizes)
            token_ids = start.generation.prompt_token_ids
            if stage.files is None:
                self._inputs.update((index, item.file) for index, item in enumerate(sized))
                if not all(size.num_tokens for size in sizes):  # the engine reports sizes once it has read the files
                    check_placeholders(token_ids, stage.placeholder_id, len(sizes))
                    return start.generation
            expanded, spans = expand_placeholders(token_ids, stage.placeholder_id, sizes)
            if len(expanded) > _MAX_RETURNED_TOKENS:
                message = f"a prompt with media files has {_MAX_RETURNED_TOKENS} tokens at most, not {len(expanded)}"
                raise PromptTooLongError(message, field="media")
            self.num_prompt_tokens = len(expanded)
            if stage.files is not None:
                await self._fill_pool(stage.files, sized)
        finally:
            self._waiting.leave_all()
        return replace(start.generation, prompt_token_ids=expanded, media=spans)

    async def _fill_pool(self, files: FileEncoder, sized: Sequence[SizedItem]) -> None:
        wants = [
            files.want(item, self._arrived_at, partial(self._note_encoded, index)) for index, item in enumerate(sized)
        ]
        await self._stage.store.obtain(wants, self._take)

    def _note_encoded(self, index: int, _times: EncodeTimes) -> None:
        self._made.add(index)

    async def _pull(self, index: int, block_ids: tuple[int, ...]) -> None:
        copies = PieceRun(0, block_ids)
        try:
            await self.claims[index].fetch(copies)
        except NoHandOffError as error:
            # By itself it says that this worker's KV goes nowhere. Here another encode worker may help.
            raise TransferError(error.message) from error
        del self.claims[index]
        self._made.add(index)
        self._stage.num_pulls += 1
        self._stage.metrics.count_item("pulled")

    def _take(self, index: int, hold: Hold) -> None:
        self._holds[index] = hold
        if index not in self._made:
            self._stage.metrics.count_item("cached")
        claim = self.claims.pop(index, None)
        if claim is not None:  # the item was in the pool already: its source may free it
            self._stage.end(claim, was_taken=False)


async def _notify_taken(claim: Claim) -> None:
    """Notify the source that the engine has read the item by itself: nothing is left to move."""
    try:
        await claim.fetch(())
    except ServingError as error:
        # Nothing of the request depends on it any more: at the latest, its source releases it on expiry.
        _LOG.info("the source of a media item could not be notified that it was taken: %s", error)
        await claim.release()


@dataclass
class _Preparing:
    use: MediaUse
    rank: int
    task: asyncio.Task[ReadyMedia]
    is_cancelled: bool = False


class MediaGate:
    """Holds requests until their media are ready, and keeps their media until they end.

    The engine does not know the waiting requests; ``add_to`` adds them to its load.
    """

    def __init__(
        self,
        stage: MediaStage,
        on_ready: Callable[[int, ReadyMedia], None],
        on_failed: Callable[[int, ServingError], None],
    ) -> None:
        """One call of ``on_ready`` or ``on_failed`` follows each ``begin``."""
        self._stage = stage
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._preparing: dict[int, _Preparing] = {}
        self._uses: dict[int, MediaUse] = {}

    @property
    def num_steps(self) -> int:
        """Progress: grows with every batch encoded and item pulled."""
        return self._stage.num_steps

    def begin(self, id: int, start: WorkerStart) -> None:
        """Prepare the media of request ``id``; call ``end`` when it has ended. Raises as ``MediaStage.open`` does."""
        use = self._uses[id] = self._stage.open(start)
        task = asyncio.get_running_loop().create_task(use.prepare(), name="media")
        self._preparing[id] = _Preparing(use, start.generation.data_parallel_rank, task)
        task.add_done_callback(partial(self._prepared, id))

    def cancel(self, id: int) -> bool:
        """End a request that waits for its media; ``on_failed`` follows. False: it does not wait here."""
        preparing = self._preparing.get(id)
        if preparing is None:
            return False
        preparing.is_cancelled = True
        preparing.task.cancel()
        return True

    def end(self, id: int, *, has_ended_well: bool) -> None:
        """A request has ended, in the engine or here: free its media."""
        use = self._uses.pop(id, None)
        if use is not None:
            use.release(has_ended_well=has_ended_well)

    def add_to(self, stats: Sequence[EngineStats]) -> Sequence[EngineStats]:
        """``stats`` of an engine, plus the requests here as waiting requests."""
        if not self._preparing:
            return stats
        ranks = list(stats)
        for preparing in self._preparing.values():
            rank = preparing.rank if preparing.rank < len(ranks) else 0
            num_tokens = preparing.use.num_prompt_tokens
            ranks[rank] = replace(
                ranks[rank],
                num_waiting=ranks[rank].num_waiting + 1,
                num_queued_prefill_tokens=ranks[rank].num_queued_prefill_tokens + num_tokens,
                num_unbegun_prefill_tokens=ranks[rank].num_unbegun_prefill_tokens + num_tokens,
            )
        return ranks

    def _prepared(self, id: int, task: asyncio.Task[ReadyMedia]) -> None:
        preparing = self._preparing.pop(id)
        error = None if task.cancelled() else task.exception()
        if preparing.is_cancelled or task.cancelled():
            self._on_failed(id, RequestCancelledError("cancelled by the caller"))
        elif error is not None:
            self._on_failed(id, public_error(error))
        else:
            self._on_ready(id, task.result())


class TowerQueue:
    """Counts the items that wait for the vision tower, and refuses more than allowed. Lives on the event loop.

    Pixels are bounded besides items, because a file of a kilobyte may take seconds to decode. While nothing waits, a
    request of any size is accepted.
    """

    def __init__(self, *, max_items: int, max_pixels: int) -> None:
        """Bound the waiting items and the pixels that they are decoded to."""
        self._max_items = max_items
        self._max_pixels = max_pixels
        self.num_items = 0
        self.num_pixels = 0

    def enter(self, num_items: int) -> WaitingMedia:
        """Count the items of a new request, until it leaves. Raises ``QueueFullError``: too many wait already."""
        if self.num_items and self.num_items + num_items > self._max_items:
            raise _full("items")
        self.num_items += num_items
        return WaitingMedia(self, num_items)

    def check_pixels(self, num_pixels: int) -> None:
        """Raise ``QueueFullError`` if so many more would be too many."""
        if num_pixels and self.num_pixels and self.num_pixels + num_pixels > self._max_pixels:
            raise _full("pixels")


class WaitingMedia:
    """The waiting items of one request."""

    def __init__(self, tower_queue: TowerQueue, num_items: int) -> None:
        """Made by ``TowerQueue.enter``, which counts the items."""
        self._tower_queue = tower_queue
        self._num_pixels = dict.fromkeys(range(num_items), 0)

    def add_pixels(self, num_pixels: Sequence[int]) -> None:
        """Count the decoded pixels of each item. Raises ``QueueFullError``: too many wait already."""
        self._tower_queue.check_pixels(sum(num_pixels))
        for index in self._num_pixels:
            self._num_pixels[index] = num_pixels[index]
            self._tower_queue.num_pixels += num_pixels[index]

    def leave(self, index: int) -> None:
        """An item no longer waits."""
        self._tower_queue.num_items -= 1
        self._tower_queue.num_pixels -= self._num_pixels.pop(index)

    def leave_all(self) -> None:
        """No item waits any longer. May be called twice."""
        for index in list(self._num_pixels):
            self.leave(index)


def _full(what: str) -> QueueFullError:
    message = f"the worker that encodes media has too many {what} waiting"
    return QueueFullError(message, retry_delay_s=_RETRY_DELAY_S)
