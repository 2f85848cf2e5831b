"""What a running TensorRT-LLM tells of itself: which KV blocks could be shared, and how loaded it is."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from quartet.engine.trtllm.kv_events import EventReader, LlmEvent, UnreadableEventError
from quartet.engine.trtllm.kv_mirror import RankMirror
from quartet.engine.trtllm.poller import Poller, PollListener
from quartet.engine.trtllm.private_blocks import PrivateBlocks, PrivateTokens
from quartet.engine.trtllm.stats import LlmRankStats, read_record
from quartet.events.kv import RankEvents, StoredBlocks

logger = logging.getLogger(__name__)

# That nobody took yet. Older ones are dropped, and what is told begins anew at the gap.
_MAX_WAITING_EVENTS = 1 << 16
# Feeds, by the names of their threads.
_EVENTS, _STATS = "trtllm-kv-events", "trtllm-stats"


class LlmFeeds(Protocol):
    """``tensorrt_llm.LLM``, as far as it is needed here."""

    def get_kv_cache_events_async(self, timeout: float | None) -> AsyncIterator[object]:
        """KV events, until ``timeout`` seconds bring none."""
        ...

    def get_stats_async(self, timeout: float | None) -> AsyncIterator[object]:
        """Statistics, one record a step."""
        ...


class Feeds:
    """Reads both feeds on threads of its own. Its methods may be called on any thread; none but ``close`` waits.

    Events are kept as they came until ``take_kv_events`` follows them: so a snapshot is what those know who heard all
    that was taken, and nothing else.

    Of 1.2's statistics nobody says which rank they are of: with several, ``stats`` has what holds for all of them.
    """

    def __init__(
        self,
        llm: LlmFeeds,
        *,
        block_size: int,
        num_ranks: int,
        wants_events: bool,
        wants_stats: bool,
        on_change: Callable[[], None],
        on_record: Callable[[LlmRankStats], None] | None = None,
        media_token_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
    ) -> None:
        """Nothing is fetched before ``begin``.

        Args:
            llm: what is asked.
            block_size: tokens of a KV block.
            num_ranks: attention-data-parallel ranks.
            wants_events: it was made to keep KV events.
            wants_stats: it was made to keep statistics.
            on_change: there are events to take, or ``failure`` is another; called on a feed's thread, once until they
                are.
            on_record: hears of every step's record, on a feed's thread.
            media_token_ids: tokens that stand for media: blocks with one are never told of.
            vocab_size: tokens from here on stand for something else than text.
        """
        self._num_ranks, self._wants_events = num_ranks, wants_events
        self._on_change, self._on_record = on_change, on_record
        self._reader = EventReader(block_size, media_token_ids, vocab_size)
        self._private = PrivateBlocks(block_size)
        self._mirrors = [RankMirror(rank, self._private.matches) for rank in range(num_ranks)]
        self._waiting: deque[LlmEvent] = deque(maxlen=_MAX_WAITING_EVENTS)
        self._told_until = 0.0
        self._has_unreadable = False
        self._lock = threading.Lock()  # of what waits: never held for long
        self._mirror_lock = threading.Lock()
        self._latest: LlmRankStats | None = None
        self._latest_of_rank: dict[int, LlmRankStats] = {}
        self._num_busy_records = [0] * num_ranks
        self._num_prompt_records = [0] * num_ranks
        self._failures: dict[str, Exception] = {}
        self._has_gap = False
        self._pollers = self._make_pollers(llm, wants_stats)

    @property
    def failure(self) -> Exception | None:
        """Why a feed can't be fetched now; ``None``: all can. After a break every rank's blocks are told as gone."""
        return next(iter(list(self._failures.values())), None)

    def begin(self) -> None:
        """A request was submitted, the first or another one: there will be something to fetch."""
        for poller in self._pollers:
            poller.begin()

    def note_private(self, token_ids: Sequence[int], *, first_position: int = 0) -> PrivateTokens:
        """A request with a salt, an adapter or media is about to be submitted: its blocks are not to be told of.

        Args:
            token_ids: of its prompt and what is generated already.
            first_position: of its first media item; 0 with a salt or an adapter.

        Returns:
            Its ``end`` is to be called when the last output of the request came.
        """
        if not self._wants_events:
            return PrivateTokens(lambda: None)  # nothing is told of at all
        return self._private.add(token_ids, first_position)

    def take_kv_events(self) -> Sequence[RankEvents]:
        """What changed since the last call, in our names; ranks without a change are left out."""
        with self._mirror_lock:
            with self._lock:
                waiting, self._waiting = self._waiting, deque(maxlen=_MAX_WAITING_EVENTS)
                told_until, has_gap = self._told_until, self._has_gap
                self._has_gap = False
            for event in waiting:
                self._mirrors[event.rank].apply(event)
            if has_gap:
                for mirror in self._mirrors:
                    mirror.distrust()
            self._private.forget(told_until)
            taken = [(rank, mirror.take()) for rank, mirror in enumerate(self._mirrors)]
        return [RankEvents(rank, events) for rank, events in taken if events]

    def kv_snapshot(self) -> Sequence[StoredBlocks]:
        """All blocks that every rank could share once all that was taken is applied."""
        with self._mirror_lock:
            return [blocks for mirror in self._mirrors for blocks in mirror.stored_blocks()]

    def stats(self, rank: int) -> LlmRankStats | None:
        """What the latest record says of ``rank``; ``None`` before the first one."""
        own = self._latest_of_rank.get(rank)
        if own is not None or self._latest is None:
            return own
        return self._latest if self._num_ranks == 1 else self._latest.of_every_rank()

    @property
    def latest_record(self) -> LlmRankStats | None:
        """The latest record, whichever rank it is of."""
        return self._latest

    def num_blocks(self, rank: int) -> int | None:
        """KV blocks on the device; ``None``: not told yet."""
        stats = self.stats(rank)
        if stats is not None and stats.num_total_blocks is not None:
            return stats.num_total_blocks
        return self._mirrors[rank].num_blocks

    def num_named_blocks(self, rank: int) -> int:
        """Blocks on the device that are told of as shareable."""
        return self._mirrors[rank].num_named_device_blocks

    def num_busy_records(self, rank: int) -> int:
        """Records of steps that computed something; where they are of no rank, they count for the first."""
        return self._num_busy_records[rank]

    def num_prompt_records(self, rank: int) -> int:
        """Of these, steps that computed prompt tokens."""
        return self._num_prompt_records[rank]

    def stop(self) -> None:
        """Fetch no more: the engine is dead. Never blocks; may be called twice."""
        for poller in self._pollers:
            poller.stop()

    def close(self) -> None:
        """End the threads. Bounded in time; may be called twice."""
        for poller in self._pollers:
            poller.close()

    def _make_pollers(self, llm: LlmFeeds, wants_stats: bool) -> list[Poller]:
        pollers: list[Poller] = []
        if self._wants_events:
            listener = PollListener(
                on_items=self._take_events_in,
                on_told=self._take_told_in,
                on_break=self._lose_events,
                on_mended=lambda: self._mend(_EVENTS),
            )
            pollers.append(Poller(_EVENTS, llm.get_kv_cache_events_async, listener))
        if wants_stats:
            listener = PollListener(
                on_items=self._take_records_in,
                on_told=lambda _: None,
                on_break=self._lose_stats,
                on_mended=lambda: self._mend(_STATS),
            )
            pollers.append(Poller(_STATS, llm.get_stats_async, listener))
        return pollers

    def _take_events_in(self, items: Sequence[object]) -> None:
        events = [event for item in items if (event := self._read(item)) is not None]
        with self._lock:
            had_none = not self._waiting
            self._waiting.extend(events)
        if had_none and events:
            self._on_change()

    def _read(self, item: object) -> LlmEvent | None:
        try:
            event = self._reader.read(item)
        except UnreadableEventError as error:
            # It leaves a gap in the numbers, as a lost one does.
            if not self._has_unreadable:
                self._has_unreadable = True
                logger.warning("TensorRT-LLM tells of KV blocks in a way that is not known: %s", error)
            return None
        return event if 0 <= event.rank < self._num_ranks else None

    def _take_told_in(self, told_until: float) -> None:
        with self._lock:
            self._told_until = told_until

    def _lose_events(self, error: Exception) -> None:
        with self._lock:
            self._has_gap = True
        self._fail(_EVENTS, error)

    def _take_records_in(self, items: Sequence[object]) -> None:
        for item in items:
            stats = read_record(item)
            if stats is None or not 0 <= (stats.rank or 0) < self._num_ranks:
                continue
            if stats.rank is not None:
                self._latest_of_rank[stats.rank] = stats
            self._latest = stats
            self._num_busy_records[stats.rank or 0] += stats.did_something
            self._num_prompt_records[stats.rank or 0] += bool(stats.num_context)
            if self._on_record is not None:
                self._on_record(stats)

    def _lose_stats(self, error: Exception) -> None:
        # What was last heard is not so for long.
        self._latest, self._latest_of_rank = None, {}
        self._fail(_STATS, error)

    def _fail(self, name: str, error: Exception) -> None:
        self._failures[name] = error
        self._on_change()

    def _mend(self, name: str) -> None:
        self._failures.pop(name, None)
        self._on_change()
