"""The feeds of a running TensorRT-LLM: which KV blocks can be shared, and how loaded it is.

``Feeds`` merges them, a ``Poller`` is the thread that fetches one of them in either of upstream's two ways, and
``LlmRankStats`` holds the statistics of a step; any part of them may be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from quartet.engine.life_cycle import call_on_loop
from quartet.engine.trtllm.errors import trace_of
from quartet.engine.trtllm.kv_events import EventReader, LlmEvent, RankMirror, UnreadableEventError
from quartet.engine.trtllm.private_blocks import PrivateBlocks, PrivateRequest
from quartet.events.kv import RankEvents, StoredBlocks

logger = logging.getLogger(__name__)

# Events that ``take_kv_events`` has not applied yet. Older ones are dropped; after that gap, reporting begins anew.
_MAX_UNAPPLIED_EVENTS = 1 << 16

# How long a fetch may wait for an item. Short: the fetch may block, and a new item may not wake it. But longer than the
# 0.2 s that upstream's dispatcher takes between two rounds: an iterator whose time is over before yields nothing until
# the next request is submitted.
_FETCH_S = 0.5

# An iterator that waited this long for an item had already yielded everything before it.
_WAITED_S = 0.02

# A feed that has had no items and no requests for this long is idle; the poller then fetches it only now and then.
_IDLE_AFTER_S, _IDLE_FETCH_EVERY_S = 5.0, 1.0

_CLOSE_S = 5.0

# The pause after the first failure. Each further failure doubles it, up to the second figure.
_RETRY_S, _MAX_RETRY_S = 0.5, 30.0

_MAX_DOUBLINGS = 10


class LlmFeeds(Protocol):
    """The part of ``tensorrt_llm.LLM`` that the feeds need."""

    def get_kv_cache_events_async(self, timeout: float | None) -> AsyncIterator[object]:
        """KV events, until ``timeout`` seconds bring none."""
        ...

    def get_stats_async(self, timeout: float | None) -> AsyncIterator[object]:
        """Statistics, one record a step."""
        ...


class Feeds:
    """Reads both feeds on threads of its own. Its methods may be called on any thread; none but ``close`` waits.

    Events are kept until ``take_kv_events`` applies them. So a snapshot is exactly what a receiver of all taken
    events knows. After a fetch of events failed, all ranks' blocks are reported as gone.

    The statistics of 1.2 don't name their rank: with several ranks, ``figures`` have only what holds for all of them.
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
        names_private: bool = False,
    ) -> None:
        """Nothing is fetched before ``begin``.

        Args:
            llm: the engine to fetch from.
            block_size: tokens of a KV block.
            num_ranks: attention-data-parallel ranks.
            wants_events: ``llm`` was made to keep KV events.
            wants_stats: ``llm`` was made to keep statistics.
            on_change: called on a feed's thread when there are events to take, once until they are taken, and when a
                fetch failed.
            on_record: called on a feed's thread with every step's record.
            media_token_ids: tokens that stand for media.
            vocab_size: tokens from here on stand for something other than text.
            names_private: events may say whose blocks of a salt or of media are: report those, too.
        """
        self._num_ranks, self._wants_events = num_ranks, wants_events
        self._on_change, self._on_record = on_change, on_record
        self._reader = EventReader(block_size, media_token_ids, vocab_size)
        self._private = PrivateBlocks(block_size, names_private=names_private)
        self._mirrors = [RankMirror(rank, self._private.contents) for rank in range(num_ranks)]
        self._unapplied: deque[LlmEvent] = deque(maxlen=_MAX_UNAPPLIED_EVENTS)
        self._reported_until = 0.0
        self._has_unreadable = False
        self._lock = threading.Lock()  # guards the events that are not applied yet; never held for long
        self._mirror_lock = threading.Lock()
        self._latest: LlmRankStats | None = None
        self._latest_of_rank: dict[int, LlmRankStats] = {}
        self._num_busy_records = [0] * num_ranks
        self._num_prompt_records = [0] * num_ranks
        self._has_gap = False
        self._pollers = self._make_pollers(llm, wants_stats)

    def begin(self) -> None:
        """Call this after each submitted request, from the first on: there will be something to fetch."""
        for poller in self._pollers:
            poller.begin()

    def note_private(self, request: PrivateRequest) -> ExitStack:
        """Call this before submitting a request with a salt, an adapter or media: its blocks are not plain ones.

        Returns:
            The caller closes it when the last output of the request came.
        """
        if not self._wants_events:
            return ExitStack()  # no block is reported at all
        return self._private.add(request)

    def take_kv_events(self) -> Sequence[RankEvents]:
        """Return the changes since the last call, in our names; ranks without a change are left out."""
        with self._mirror_lock:
            with self._lock:
                unapplied, self._unapplied = self._unapplied, deque(maxlen=_MAX_UNAPPLIED_EVENTS)
                reported_until, has_gap = self._reported_until, self._has_gap
                self._has_gap = False
            for event in unapplied:
                self._mirrors[event.rank].apply(event)
            if has_gap:
                for mirror in self._mirrors:
                    mirror.distrust()
            self._private.forget(reported_until)
            taken = [(rank, mirror.take()) for rank, mirror in enumerate(self._mirrors)]
        return [RankEvents(rank, events) for rank, events in taken if events]

    def kv_snapshot(self) -> Sequence[StoredBlocks]:
        """All blocks that each rank can share, as of the last ``take_kv_events``."""
        with self._mirror_lock:
            return [blocks for mirror in self._mirrors for blocks in mirror.stored_blocks()]

    @property
    def latest_record(self) -> LlmRankStats | None:
        """The latest record of any rank; ``None`` before the first one."""
        return self._latest

    def figures(self, rank: int) -> RankFigures:
        """What is known of ``rank`` now."""
        stats, mirror = self._stats(rank), self._mirrors[rank]
        num_reported = None if stats is None else stats.num_total_blocks
        return RankFigures(
            stats=stats,
            num_blocks=mirror.num_blocks if num_reported is None else num_reported,
            num_named_blocks=mirror.num_named_device_blocks,
            num_busy_records=self._num_busy_records[rank],
            num_prompt_records=self._num_prompt_records[rank],
        )

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
            fetch = llm.get_kv_cache_events_async
            pollers.append(
                Poller("trtllm-kv-events", fetch, self._take_events_in, self._lose_events, self._note_reported)
            )
        if wants_stats:
            pollers.append(Poller("trtllm-stats", llm.get_stats_async, self._take_records_in, self._lose_stats))
        return pollers

    def _stats(self, rank: int) -> LlmRankStats | None:
        own = self._latest_of_rank.get(rank)
        if own is not None or self._latest is None:
            return own
        return self._latest if self._num_ranks == 1 else self._latest.of_every_rank()

    def _take_events_in(self, items: Sequence[object]) -> None:
        events = [event for item in items if (event := self._read(item)) is not None]
        with self._lock:
            had_none = not self._unapplied
            self._unapplied.extend(events)
        if had_none and events:
            self._on_change()

    def _read(self, item: object) -> LlmEvent | None:
        try:
            event = self._reader.read(item)
        except UnreadableEventError as error:
            # An unreadable event leaves a gap in the numbers, as a lost one does.
            if not self._has_unreadable:
                self._has_unreadable = True
                logger.warning("TensorRT-LLM reports KV blocks in a form that is not known: %s", error)
            return None
        return event if 0 <= event.rank < self._num_ranks else None

    def _note_reported(self, reported_until: float) -> None:
        with self._lock:
            self._reported_until = reported_until

    def _lose_events(self) -> None:
        with self._lock:
            self._has_gap = True
        self._on_change()

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

    def _lose_stats(self) -> None:
        # The latest records soon stop being true.
        self._latest, self._latest_of_rank = None, {}
        self._on_change()


class Poller:
    """Fetches from the first ``begin`` until ``close``.

    The iterator of a queue fails before the first request. Once it has ended, it yields nothing until another request
    is submitted: then ``begin`` makes the poller fetch again at once. Over RPC each call fetches, and blocks, but only
    this thread. An iterator may yield items, or lists of them. After any other error the poller tries again, ever less
    often.
    """

    def __init__(
        self,
        name: str,
        fetch: Callable[[float], AsyncIterator[object]],
        on_items: Callable[[Sequence[object]], None],
        on_break: Callable[[], None],
        on_complete: Callable[[float], None] = lambda _until: None,
    ) -> None:
        """The last three are called on the poller's thread.

        Args:
            name: of the thread.
            fetch: ``get_..._async``: it takes the seconds to wait.
            on_items: takes items of the feed, in order.
            on_break: a fetch failed, and items of the meantime may be missing. Called once until a fetch works again.
            on_complete: the items so far include all that the engine reported before this moment, in monotonic seconds.
        """
        self._fetch = fetch
        self._on_items, self._on_break, self._on_complete = on_items, on_break, on_complete
        self._wake_up = threading.Event()
        self._closing = threading.Event()
        self._num_failures = 0
        self._began_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        # A daemon: a call that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._start_lock = threading.Lock()

    def begin(self) -> None:
        """Call this after each submitted request. Never blocks; any thread may call."""
        self._began_at = time.monotonic()
        with self._start_lock:
            if self._thread.ident is None and not self._closing.is_set():
                self._thread.start()
        self._wake_up.set()

    def stop(self) -> None:
        """Fetch no more. Never blocks; may be called twice."""
        with self._start_lock:
            self._closing.set()
        self._wake_up.set()
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            call_on_loop(loop, task.cancel)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Stop, and return once the thread ended, or ``timeout_s`` later. May be called twice."""
        self.stop()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _main(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._poll_until_closed())

    async def _poll_until_closed(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        last_item_at = time.monotonic()
        while not self._closing.is_set():
            self._wake_up.clear()  # before fetching: a request from here on makes this loop fetch again at once
            began_at = time.monotonic()
            try:
                has_items = await self._poll()
            except Exception as error:  # noqa: BLE001 - one fetch ends here, and `_break` logs
                self._break(error)
                continue
            self._mend()
            if has_items:
                last_item_at = time.monotonic()
                continue
            now = time.monotonic()
            is_idle = now - max(last_item_at, self._began_at) > _IDLE_AFTER_S
            pause_s = _IDLE_FETCH_EVERY_S if is_idle else _FETCH_S - (now - began_at)
            if pause_s > 0:
                # This loop has nothing else to do.
                self._wake_up.wait(pause_s)

    def _break(self, error: Exception) -> None:
        """Report the failure and pause. The pause may block this loop, and a new request does not shorten it."""
        if self._closing.is_set():
            return
        if not self._num_failures:
            logger.warning("%s could not be fetched, which is tried again: %s", self._thread.name, trace_of(error))
            self._on_break()
        self._num_failures += 1
        self._closing.wait(min(_RETRY_S * 2 ** (min(self._num_failures, _MAX_DOUBLINGS) - 1), _MAX_RETRY_S))

    def _mend(self) -> None:
        if self._num_failures:
            self._num_failures = 0
            logger.info("%s is fetched again", self._thread.name)

    async def _poll(self) -> bool:
        """Fetch once; return whether anything came."""
        began_at = time.monotonic()
        try:
            iterator = self._fetch(_FETCH_S)
        except (AssertionError, TimeoutError):
            return False  # there was no request yet, or nothing in time
        has_items = False
        while not self._closing.is_set():
            asked_at = time.monotonic()
            try:
                item = await anext(iterator)
            except (StopAsyncIteration, TimeoutError):
                break
            if time.monotonic() - asked_at > _WAITED_S:
                self._on_complete(asked_at)
            has_items = True
            self._on_items(item if isinstance(item, list) else [item])
        # An iterator that ends at once with nothing had ended before, and items may wait behind it.
        if has_items or time.monotonic() - began_at > _FETCH_S * 0.8:
            self._on_complete(began_at)
        return has_items


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What TensorRT-LLM reports of one rank.

    Attributes:
        stats: what the latest record says of it; ``None`` before the first one.
        num_blocks: KV blocks on the device; ``None``: not known yet.
        num_named_blocks: blocks on the device that are reported as shareable.
        num_busy_records: records of steps that computed something; records without a rank count for the first rank.
        num_prompt_records: those of ``num_busy_records`` whose steps computed prompt tokens.
    """

    stats: LlmRankStats | None = None
    num_blocks: int | None = None
    num_named_blocks: int = 0
    num_busy_records: int = 0
    num_prompt_records: int = 0


@dataclass(frozen=True, kw_only=True)
class LlmRankStats:
    """The record of one step; a field is ``None`` if the record does not have it.

    Attributes:
        rank: attention-data-parallel rank of the record; 1.2 does not say.
        iteration: number of the step.
        latency_s: duration of the step.
        num_active: requests that the engine has taken up, paused ones included.
        num_queued: requests that it has not taken up.
        num_scheduled: requests that the step computed for: ``num_context`` prompts, which had ``num_context_tokens``
            tokens in the step, and ``num_generating`` requests that generate.
        max_step_tokens: tokens that a step computes at most.
        max_running: requests that a step computes for at most.
        num_total_blocks, num_used_blocks, num_free_blocks: KV blocks on the device; those only kept for reuse are free.
        num_reused_blocks, num_missed_blocks: prompts' blocks since the start, found in the cache and not found.
    """

    rank: int | None = None
    iteration: int | None = None
    latency_s: float | None = None
    num_active: int | None = None
    num_queued: int | None = None
    num_paused: int | None = None
    num_scheduled: int | None = None
    num_context: int | None = None
    num_generating: int | None = None
    num_context_tokens: int | None = None
    max_step_tokens: int | None = None
    max_running: int | None = None
    num_total_blocks: int | None = None
    num_used_blocks: int | None = None
    num_free_blocks: int | None = None
    num_reused_blocks: int | None = None
    num_missed_blocks: int | None = None

    @property
    def did_something(self) -> bool:
        """Whether the step computed anything; assumed so if the record does not say."""
        return self.num_scheduled is None or self.num_scheduled > 0

    def of_every_rank(self) -> LlmRankStats:
        """The values that hold for all other ranks too: ranks step together, and have equal pools."""
        return LlmRankStats(
            iteration=self.iteration,
            latency_s=self.latency_s,
            max_step_tokens=self.max_step_tokens,
            max_running=self.max_running,
            num_total_blocks=self.num_total_blocks,
        )


def read_record(record: object) -> LlmRankStats | None:
    """Read ``record``; ``None`` if it is not a record."""
    if not isinstance(record, Mapping):
        return None
    batching, cache = _part(record, "inflightBatchingStats"), _part(record, "kvCacheStats")
    latency_ms = _number(record, "iterLatencyMS")
    return LlmRankStats(
        rank=_count(record, "attentionDpRank"),
        iteration=_count(record, "iter"),
        latency_s=None if latency_ms is None else latency_ms / 1e3,
        num_active=_count(record, "numActiveRequests"),
        num_queued=_count(record, "numQueuedRequests"),
        num_paused=_count(batching, "numPausedRequests"),
        num_scheduled=_count(batching, "numScheduledRequests"),
        num_context=_count(batching, "numContextRequests"),
        num_generating=_count(batching, "numGenRequests"),
        num_context_tokens=_count(batching, "numCtxTokens"),
        max_step_tokens=_count(record, "maxNumTokensRuntime") or _count(record, "maxNumTokensStatic"),
        max_running=_count(record, "maxBatchSizeRuntime") or _count(record, "maxBatchSizeStatic"),
        num_total_blocks=_count(cache, "maxNumBlocks"),
        num_used_blocks=_count(cache, "usedNumBlocks"),
        num_free_blocks=_count(cache, "freeNumBlocks"),
        num_reused_blocks=_count(cache, "reusedBlocks"),
        num_missed_blocks=_count(cache, "missedBlocks"),
    )


def _part(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = record.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def _count(record: Mapping[str, Any], name: str) -> int | None:
    value = _number(record, name)
    return None if value is None else int(value)
