"""Each rank's load, from what the adapter and TensorRT-LLM know."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.engine.base import EngineRequest, EngineStats, Generation, RequestKind
from quartet.engine.trtllm.book import RequestBook, engine_stats
from quartet.engine.trtllm.feeds import LlmRankStats, RankFigures, read_record

BLOCK_SIZE = 4
RECORD = LlmRankStats(
    num_active=1,
    num_queued=1,
    num_paused=0,
    num_scheduled=1,
    max_step_tokens=512,
    max_running=8,
    num_total_blocks=100,
    num_used_blocks=20,
    num_free_blocks=80,
)


@dataclass
class Figures:
    """Feeds that report of every rank what a test sets."""

    record: LlmRankStats | None = RECORD
    num_blocks: int | None = None
    num_named: int = 0
    num_busy: int = 0
    num_prompts: int = 0

    def figures(self, rank: int) -> RankFigures:
        num_reported = self.record and self.record.num_total_blocks
        return RankFigures(
            stats=self.record,
            num_blocks=num_reported or self.num_blocks,
            num_named_blocks=self.num_named,
            num_busy_records=self.num_busy,
            num_prompt_records=self.num_prompts,
        )


def request(id: int, num_tokens: int = 10, kind: RequestKind = RequestKind.DECODE, rank: int = 0) -> EngineRequest:
    return EngineRequest(
        id=id, kind=kind, generation=Generation(prompt_token_ids=[1] * num_tokens, data_parallel_rank=rank)
    )


def book_of(*requests: EngineRequest, num_ranks: int = 1) -> RequestBook:
    book = RequestBook(num_ranks=num_ranks, block_size=BLOCK_SIZE, max_step_tokens=256, max_running=4)
    for each in requests:
        book.add(each)
    return book


def assert_blocks_add_up(stats: EngineStats) -> None:
    parts = (stats.num_in_use_blocks, stats.num_held_blocks, stats.num_cached_blocks, stats.num_free_blocks)
    assert min(parts) >= 0
    assert sum(parts) == stats.num_total_blocks


def test_a_request_waits_until_its_first_output_then_decodes() -> None:
    book = book_of(request(1))
    [stats] = engine_stats(book, Figures(None))
    assert (stats.num_waiting, stats.num_running, stats.num_queued_prefill_tokens) == (1, 0, 10)
    assert stats.num_unbegun_prefill_tokens == 10
    book.begin(1, num_cached_tokens=4)
    book.grow(1, 3)
    book.finish_turn()
    [stats] = engine_stats(book, Figures(None))
    assert (stats.num_waiting, stats.num_running, stats.num_decoding, stats.num_context_tokens) == (0, 1, 1, 13)
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (6, 4, 3)
    assert (stats.num_queued_prefill_tokens, stats.num_steps, stats.num_prompt_steps) == (0, 1, 1)
    book.end(1)
    [stats] = engine_stats(book, Figures(None))
    assert (stats.num_running, stats.num_context_tokens, stats.max_step_tokens) == (0, 0, 256)
    assert stats.max_running == 4


def test_records_say_how_many_are_in_the_batch_and_the_eldest_are() -> None:
    book = book_of(request(1, 10), request(2, 20), request(3, 30))
    [stats] = engine_stats(book, Figures())
    assert (stats.num_running, stats.num_waiting) == (1, 2)
    assert (stats.num_queued_prefill_tokens, stats.num_unbegun_prefill_tokens) == (60, 50)
    assert (stats.max_step_tokens, stats.max_running) == (512, 8)


def test_a_record_of_more_requests_than_there_are_is_old() -> None:
    book = book_of(request(1))
    [stats] = engine_stats(book, Figures(LlmRankStats(num_active=9, num_paused=1)))
    assert (stats.num_running, stats.num_waiting) == (1, 0)


def test_a_prefill_s_blocks_are_held_until_they_are_released() -> None:
    book = book_of(request(1, 10, RequestKind.PREFILL))
    book.begin(1)
    book.end(1, is_held=True)
    book.end(1)
    [stats] = engine_stats(book, Figures(num_named=5))
    assert (stats.num_held_blocks, stats.num_in_use_blocks, stats.num_cached_blocks) == (3, 0, 2)
    assert (stats.num_running, stats.num_decoding) == (0, 0)
    assert_blocks_add_up(stats)
    book.release(1)
    book.release(1)
    [stats] = engine_stats(book, Figures(num_named=5))
    assert (stats.num_held_blocks, stats.num_cached_blocks, stats.num_free_blocks) == (0, 5, 95)


def test_without_records_of_blocks_their_use_is_reckoned() -> None:
    book = book_of(request(1, 10), request(2, 10))
    book.begin(1)
    [stats] = engine_stats(book, Figures(LlmRankStats(num_active=1), num_blocks=50))
    assert (stats.num_total_blocks, stats.num_in_use_blocks, stats.num_free_blocks) == (50, 3, 47)


def test_a_pool_of_unreported_size_has_the_size_that_is_assumed() -> None:
    book = book_of(request(1, 10))
    book.begin(1)
    book.assume_num_blocks(30)
    [stats] = engine_stats(book, Figures(None))
    assert (stats.num_total_blocks, stats.num_in_use_blocks) == (30, 3)
    [stats] = engine_stats(book, Figures())
    assert stats.num_total_blocks == 100


def test_an_idle_engine_uses_nothing_whatever_its_last_record_says() -> None:
    [stats] = engine_stats(book_of(), Figures())
    assert (stats.num_in_use_blocks, stats.num_free_blocks, stats.num_total_blocks) == (0, 100, 100)


def test_progress_stands_still_when_neither_outputs_nor_records_come() -> None:
    book, figures = book_of(request(1)), Figures()
    book.finish_turn()
    assert engine_stats(book, figures)[0].num_steps == 0
    figures.num_busy, figures.num_prompts = 2, 2
    [stats] = engine_stats(book, figures)
    assert (stats.num_steps, stats.num_prompt_steps) == (2, 2)
    book.begin(1)
    book.grow(1, 1)
    book.finish_turn()
    book.finish_turn()
    assert engine_stats(book, figures)[0].num_steps == 3


def test_ranks_are_counted_apart_and_unknown_ids_do_nothing() -> None:
    book = book_of(request(1, rank=0), request(2, rank=1), num_ranks=2)
    book.begin(2)
    for act in (book.begin, book.end, book.release):
        act(77)
    book.grow(77, 5)
    book.finish_turn()
    first, second = engine_stats(book, Figures(RECORD.of_every_rank()))
    assert (first.num_waiting, first.num_steps, second.num_running, second.num_steps) == (1, 0, 1, 1)
    assert (first.num_total_blocks, second.num_in_use_blocks) == (100, 3)


def test_a_hand_off_has_nothing_to_prefill() -> None:
    handed = request(1)
    object.__setattr__(handed, "hand_off", object())
    book = book_of(handed)
    assert engine_stats(book, Figures(None))[0].num_queued_prefill_tokens == 0
    book.begin(1, num_cached_tokens=9)
    book.finish_turn()
    [stats] = engine_stats(book, Figures(None))
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_prompt_steps) == (0, 0, 0)


def test_step_times_are_learned_of_records() -> None:
    book = book_of()
    for tokens in range(100, 200, 10):
        book.observe(LlmRankStats(num_context_tokens=tokens, num_generating=0, latency_s=0.01 + tokens * 1e-4))
    step_time = engine_stats(book, Figures(None))[0].step_time
    assert step_time is not None
    assert step_time.prefill_s(150) == pytest.approx(0.025, rel=0.2)


def test_a_record_without_a_rank_is_ignored_if_there_are_several_ranks() -> None:
    book = book_of(num_ranks=2)
    for _ in range(20):
        book.observe(LlmRankStats(num_context_tokens=10, num_generating=0, latency_s=0.01))
        book.observe(LlmRankStats(rank=1, num_context_tokens=10, num_generating=0, latency_s=0.01))
    first, second = engine_stats(book, Figures(None))
    assert first.step_time is None
    assert second.step_time is not None


counts = st.one_of(st.none(), st.integers(0, 40))


@given(counts, counts, counts, st.integers(0, 60), st.integers(0, 5), st.integers(0, 5))
def test_blocks_always_add_up(
    total: int | None, used: int | None, created: int | None, named: int, num_running: int, num_held: int
) -> None:
    book = book_of(*(request(id, 10 * id + 1) for id in range(num_running + num_held)))
    for id in range(num_running + num_held):
        book.begin(id)
        if id >= num_running:
            book.end(id, is_held=True)
    record = LlmRankStats(num_total_blocks=total, num_used_blocks=used)
    [stats] = engine_stats(book, Figures(record, created, named))
    assert_blocks_add_up(stats)
    assert stats.num_total_blocks == (total or created or 0)


@pytest.mark.parametrize("record", [None, "text", []])
def test_a_malformed_record_is_ignored(record: object) -> None:
    assert read_record(record) is None


def test_a_record_is_read_as_far_as_it_goes() -> None:
    assert read_record({}) == LlmRankStats()
    odd = {"iter": "7", "iterLatencyMS": -1, "kvCacheStats": None, "inflightBatchingStats": {"numPausedRequests": 2}}
    assert read_record(odd) == LlmRankStats(num_paused=2)
    assert read_record({"attentionDpRank": 1, "iterLatencyMS": 5, "maxNumTokensStatic": 8}) == LlmRankStats(
        rank=1, latency_s=0.005, max_step_tokens=8
    )
    sizes = {"maxBatchSizeStatic": 16, "maxBatchSizeRuntime": 12}
    assert (read_record(sizes), read_record({**sizes, "maxBatchSizeRuntime": 0})) == (
        LlmRankStats(max_running=12),
        LlmRankStats(max_running=16),
    )


def test_only_steps_that_computed_something_are_progress() -> None:
    assert LlmRankStats().did_something
    assert not LlmRankStats(num_scheduled=0).did_something
