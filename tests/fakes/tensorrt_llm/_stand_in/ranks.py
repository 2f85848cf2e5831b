"""The ranks of attention data parallelism: each has its own blocks and its own numbering of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorrt_llm._stand_in.kv_blocks import BlockBook, Holding, Keys
from tensorrt_llm._stand_in.kv_events import EventLog
from tensorrt_llm._stand_in.request import Request, Sequence
from tensorrt_llm._stand_in.switches import SWITCHES


class Rank:
    """One rank's books: one a window size, the largest first, which says what is reused."""

    def __init__(self, args: Any, number: int, max_seq_len: int, was_put: Callable[[], None]) -> None:
        config = args.kv_cache_config
        self.number, self.reuse = number, config.enable_block_reuse
        publishes = config.event_buffer_max_size > 0 and config.enable_block_reuse
        dp_rank = number if args.enable_attention_dp else None
        is_v2 = getattr(config, "use_kv_cache_manager_v2", False)
        self.log = EventLog(config.event_buffer_max_size, dp_rank, was_put, is_v2=is_v2) if publishes else None
        size, num_blocks = config.tokens_per_block, SWITCHES.num_kv_blocks
        if config.max_tokens is not None:
            num_blocks = min(num_blocks, config.max_tokens // size)
        # A stand-in for bytes: a host block takes what the tiny model's does.
        num_host_blocks = (config.host_cache_size or 0) // (size * 12_288)
        windows = sorted({min(w, max_seq_len) for w in config.max_attention_window or [max_seq_len]}, reverse=True)
        self.books = [BlockBook(window, num_blocks, num_host_blocks, size, self.log) for window in windows]
        self.num_running = 0

    def never_fits(self, request: Request) -> bool:
        """Say whether a prompt is too long for all blocks together."""
        num_blocks = -(-len(request.prompt.token_ids) // self.books[0].block_size)
        return num_blocks * len(request.sequences) > self.books[0].num_blocks

    def admit(self, request: Request, max_seq_len: int) -> bool:
        """Give all sequences of ``request`` room for all they may need (GUARANTEED_NO_EVICT), or nothing."""
        num_tokens = min(len(request.prompt.token_ids) + request.params.max_tokens, max_seq_len)
        num_tokens = min(num_tokens, self.books[0].num_blocks // len(request.sequences) * self.books[0].block_size)
        keys = _keys(request, [])
        reuse = self.reuse and request.params.prompt_logprobs is None
        for seq in request.sequences:
            for book in self.books:
                holding = _holding(request)
                if not book.admit(holding, keys, num_tokens, reuse=reuse):
                    self.release(request)
                    return False
                seq.holdings.append(holding)
        request.num_cached_tokens = request.sequences[0].holdings[0].num_cached_tokens
        return True

    def store(self, request: Request, seq: Sequence, *, partial: bool = False) -> None:
        """Make what ``seq`` computed reusable."""
        keys = _keys(request, seq.token_ids)
        for book, holding in zip(self.books, seq.holdings, strict=False):
            book.store(holding, keys, reuse=self.reuse, partial=partial)

    def release(self, request: Request) -> None:
        """Give back all that ``request`` holds."""
        for seq in request.sequences:
            num_tokens = len(request.prompt.token_ids) + len(seq.token_ids)
            for book, holding in zip(self.books, seq.holdings, strict=False):
                book.release(holding, num_tokens)
            seq.holdings = []

    def kv_stats(self) -> dict[str, Any]:
        """``kvCacheStats`` of the largest window."""
        book = self.books[0]
        total = book.num_reused + book.num_missed
        return {
            "maxNumBlocks": book.num_blocks,
            "freeNumBlocks": book.num_blocks - book.num_used,
            "usedNumBlocks": book.num_used,
            "tokensPerBlock": book.block_size,
            "allocTotalBlocks": book.num_allocated,
            "allocNewBlocks": book.num_allocated,
            "reusedBlocks": book.num_reused,
            "missedBlocks": book.num_missed,
            "cacheHitRate": book.num_reused / total if total else 0.0,
        }


def _holding(request: Request) -> Holding:
    told = request.salt if request.adapter_path is None else request.salt.rpartition("#")[0]
    return Holding(request.salt, told, request.prompt.items())


def _keys(request: Request, generated: list[int]) -> Keys:
    ids, extras = request.prompt.token_ids, request.prompt.extra_ids()
    return list(zip([*ids, *generated], [*extras, *([0] * len(generated))], strict=True))
