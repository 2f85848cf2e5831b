"""Records the adapter's own requests and, with TensorRT-LLM's figures, works out each rank's load."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from quartet.engine.base import EngineRequest, EngineStats, RequestKind
from quartet.engine.step_time import StepTimeFit
from quartet.engine.trtllm.feeds import Feeds, LlmRankStats, RankFigures
from quartet.kvcache.block_pool import BlockCounts


@dataclass
class _Entry:
    """A request that runs, waits, or whose blocks are held."""

    rank: int
    decodes: bool
    num_prefill_tokens: int  # to compute before its first output
    num_tokens: int  # given and generated
    is_held: bool = False


class _RankBook:
    """One rank's requests. The caller holds the lock."""

    def __init__(self) -> None:
        # In the order of arrival, in which TensorRT-LLM also takes them up.
        self.waiting: dict[int, _Entry] = {}
        self.begun: dict[int, _Entry] = {}
        self.held: dict[int, _Entry] = {}
        self.has_moved = False
        self.num_steps = self.num_prompt_steps = 0
        self.num_prompt_tokens = self.num_output_tokens = self.num_cached_tokens = 0
        self.num_begun_now = 0
        self.fit = StepTimeFit()

    @property
    def num_in_flight(self) -> int:
        return len(self.waiting) + len(self.begun)

    @property
    def num_context_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.begun.values() if entry.decodes)

    def unbegun(self, stats: LlmRankStats | None) -> list[_Entry]:
        """The requests whose prompt no step has begun to compute, by the latest record.

        Assume that the oldest requests without output are in a step: as many as the record has, less those begun.
        """
        num_active = 0
        if stats is not None:
            num_active = max((stats.num_active or 0) - (stats.num_paused or 0), 0)
        return list(self.waiting.values())[max(num_active - len(self.begun), 0) :]


class RequestBook:
    """Requests from ``add`` until ``end``, and beyond while their blocks are held. Thread-safe; never waits for long.

    Unknown ids are ignored. A request waits until its first output: TensorRT-LLM's statistics say how many requests it
    has taken up, but not which.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        block_size: int,
        max_step_tokens: int | None = None,
        max_running: int | None = None,
    ) -> None:
        """``max_step_tokens`` and ``max_running`` are each rank's, unless TensorRT-LLM reports others."""
        self._block_size, self._max_step_tokens, self._max_running = block_size, max_step_tokens, max_running
        self._lock = threading.Lock()
        self._ranks = [_RankBook() for _ in range(num_ranks)]
        self._rank_of: dict[int, int] = {}
        self._assumed_num_blocks = 0

    def assume_num_blocks(self, num_blocks: int) -> None:
        """Take each rank to have ``num_blocks`` KV blocks on the device, unless TensorRT-LLM reports another number."""
        self._assumed_num_blocks = num_blocks

    def add(self, request: EngineRequest) -> None:
        """Record a submitted request on the rank that it names, one of ``num_ranks``."""
        generation = request.generation
        num_tokens = len(generation.prompt_token_ids) + len(generation.generated_token_ids)
        entry = _Entry(
            rank=generation.data_parallel_rank,
            decodes=request.kind is RequestKind.DECODE,
            num_prefill_tokens=0 if request.hand_off is not None else num_tokens,
            num_tokens=num_tokens,
        )
        with self._lock:
            self._rank_of[request.id] = entry.rank
            self._ranks[entry.rank].waiting[request.id] = entry

    def begin(self, id: int, num_cached_tokens: int = 0) -> None:
        """Record a request's first output: its prompt is computed, except for ``num_cached_tokens``."""
        with self._lock:
            book = self._book_of(id)
            entry = book.waiting.pop(id, None) if book else None
            if book is None or entry is None:
                return
            book.begun[id] = entry
            book.has_moved = True
            book.num_begun_now += entry.num_prefill_tokens > 0
            num_cached = min(num_cached_tokens, entry.num_prefill_tokens)
            book.num_cached_tokens += num_cached
            book.num_prompt_tokens += entry.num_prefill_tokens - num_cached

    def grow(self, id: int, num_tokens: int) -> None:
        """Record ``num_tokens`` more output tokens."""
        with self._lock:
            book = self._book_of(id)
            entry = book.begun.get(id) if book else None
            if book is not None and entry is not None:
                entry.num_tokens += num_tokens
                book.num_output_tokens += num_tokens
                book.has_moved = True

    def end(self, id: int, *, is_held: bool = False) -> None:
        """Record a request's last output, or its failure; ``is_held``: its blocks stay until ``release``."""
        with self._lock:
            book = self._book_of(id)
            if book is None:
                return
            # Count no step: a refused, cancelled or timed-out request also ends in an engine that hangs.
            entry = book.waiting.pop(id, None) or book.begun.pop(id, None)
            if entry is not None and is_held:
                book.held[id] = entry
            elif id not in book.held:
                del self._rank_of[id]

    def release(self, id: int) -> None:
        """Record that a request's blocks are no longer held."""
        with self._lock:
            book = self._book_of(id)
            if book is not None and book.held.pop(id, None) is not None:
                del self._rank_of[id]

    def finish_turn(self) -> None:
        """Count one step for each rank that had outputs in this turn. Call this after all outputs of a turn."""
        with self._lock:
            for book in self._ranks:
                book.num_steps += book.has_moved
                book.num_prompt_steps += book.num_begun_now > 0
                book.has_moved, book.num_begun_now = False, 0

    def observe(self, stats: LlmRankStats) -> None:
        """Learn from a step's record how long steps take. With several ranks, a record without a rank is ignored."""
        if stats.latency_s is None or stats.num_context_tokens is None or (stats.rank is None and len(self._ranks) > 1):
            return
        with self._lock:
            book = self._ranks[stats.rank or 0]
            # The context tokens of now; the record is from a moment ago.
            num_context_tokens = book.num_context_tokens if stats.num_generating else 0
            if not stats.num_generating or num_context_tokens:
                book.fit.observe(stats.num_context_tokens, num_context_tokens, stats.latency_s)

    def rank_stats(self, rank: int, figures: RankFigures) -> EngineStats:
        """The load of one rank."""
        stats = figures.stats
        with self._lock:
            book = self._ranks[rank]
            unbegun = book.unbegun(stats)
            blocks = self._blocks(book, figures)
            return EngineStats(
                num_running=book.num_in_flight - len(unbegun),
                num_waiting=len(unbegun),
                max_running=(stats.max_running if stats else None) or self._max_running or 0,
                num_queued_prefill_tokens=sum(entry.num_prefill_tokens for entry in book.waiting.values()),
                num_unbegun_prefill_tokens=sum(entry.num_prefill_tokens for entry in unbegun),
                num_decoding=sum(entry.decodes for entry in book.begun.values()),
                num_context_tokens=book.num_context_tokens,
                max_step_tokens=(stats.max_step_tokens if stats else None) or self._max_step_tokens or 0,
                step_time=book.fit.step_time,
                num_in_use_blocks=blocks.in_use,
                num_held_blocks=blocks.held,
                num_cached_blocks=blocks.cached,
                num_free_blocks=blocks.free,
                num_total_blocks=blocks.total,
                num_steps=book.num_steps + figures.num_busy_records,
                num_prompt_steps=max(book.num_prompt_steps, figures.num_prompt_records),
                num_prompt_tokens=book.num_prompt_tokens,
                num_output_tokens=book.num_output_tokens,
                num_cached_tokens=book.num_cached_tokens,
            )

    @property
    def num_ranks(self) -> int:
        """Attention-data-parallel ranks."""
        return len(self._ranks)

    def _book_of(self, id: int) -> _RankBook | None:
        rank = self._rank_of.get(id)
        return None if rank is None else self._ranks[rank]

    def _blocks(self, book: _RankBook, figures: RankFigures) -> BlockCounts:
        stats, total = figures.stats, figures.num_blocks or self._assumed_num_blocks
        held = min(sum(self._num_blocks(entry) for entry in book.held.values()), total)
        own = sum(self._num_blocks(entry) for entry in book.begun.values())
        used = own + held if stats is None or stats.num_used_blocks is None else stats.num_used_blocks
        # An idle engine makes no records: its last one is from when it was busy.
        in_use = min(max(used - held, 0), total - held) if book.num_in_flight else 0
        left = total - held - in_use
        cached = min(max(figures.num_named_blocks - held - in_use, 0), left)
        return BlockCounts(free=left - cached, cached=cached, held=held, in_use=in_use, total=total)

    def _num_blocks(self, entry: _Entry) -> int:
        return -(-entry.num_tokens // self._block_size)


def engine_stats(book: RequestBook, feeds: Feeds) -> tuple[EngineStats, ...]:
    """Every rank's load; any thread may ask, and nothing waits.

    The adapter knows each rank's requests, tokens and outputs, and which blocks are named. TensorRT-LLM 1.2's records
    don't name their rank. With one rank, the records give the blocks in use and how many requests are taken up. With
    several ranks, the adapter counts these itself: blocks in use are those that requests with output fill, and a
    request waits until its first output.

    - ``num_steps`` counts turns that brought outputs and records of steps that computed something (a long prompt makes
      no output for long): it stands still when neither comes.
    - Held blocks are the adapter's figure. The number of cached blocks is a lower bound: named blocks, less all blocks
      in use, as if everything in use were named. TensorRT-LLM counts cached blocks as free.
    """
    return tuple(book.rank_stats(rank, feeds.figures(rank)) for rank in range(book.num_ranks))
