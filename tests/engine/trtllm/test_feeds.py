"""The feeds of a running engine, in both of upstream's ways, and what becomes of them when it dies."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from typing import Any

import pytest

from quartet.engine.trtllm.feeds import Feeds, LlmRankStats, Poller
from quartet.engine.trtllm.private_blocks import PrivateRequest
from quartet.events.kv import Cleared
from quartet.kvcache.block_hash import sequence_hashes
from tests.engine.trtllm.kv_truth import RawEvents, TierReplica
from tests.fakes.driving import MODEL, STORY, ended, token_ids_of
from tests.fakes.installation import installed

BLOCK_SIZE = 4
WAIT_S = 30.0
BROKEN = "could not be fetched"
FORMS = [
    {"kv_event_form": "rpc"},
    {"kv_event_form": "queue"},
    {"kv_event_form": "rpc", "kv_event_lists": True},
    {"kv_event_form": "queue", "kv_event_lists": True, "mm_keys": True},
    {"kv_event_form": "rpc", "version": "1.4.0rc1"},
]


class Reader:
    """Takes what the feeds have as soon as they report a change."""

    def __init__(self, llm: Any, num_ranks: int = 1, *, wants_events: bool = True, wants_stats: bool = False) -> None:
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        self.replicas = [TierReplica() for _ in range(num_ranks)]
        self.records: list[LlmRankStats] = []
        self.has_cleared = False
        self.feeds = Feeds(
            llm,
            block_size=BLOCK_SIZE,
            num_ranks=num_ranks,
            wants_events=wants_events,
            wants_stats=wants_stats,
            on_change=self._change,
            on_record=self._record,
        )

    @property
    def named(self) -> set[int]:
        return {name for replica in self.replicas for name in replica.named}

    async def until(self, condition: Callable[[], bool], again: Callable[[], object] = lambda: None) -> None:
        """Return once ``condition`` holds; ``again`` submits something more, as a queue may wait for that."""
        async with asyncio.timeout(WAIT_S):
            while not (self._take() or condition()):
                try:
                    async with asyncio.timeout(1.0):
                        await self._changed.wait()
                except TimeoutError:
                    again()
                self._changed.clear()

    def _take(self) -> None:
        for changed in self.feeds.take_kv_events():
            self.replicas[changed.data_parallel_rank].apply(changed.events)
            self.has_cleared |= Cleared() in changed.events
        for rank, replica in enumerate(self.replicas):
            replica.assert_is([blocks for blocks in self.feeds.kv_snapshot() if blocks.data_parallel_rank == rank])

    def _change(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    def _record(self, record: LlmRankStats) -> None:
        self.records.append(record)
        self._change()


@contextmanager
def read_engine(switches: dict[str, Any], **changes: Any) -> Any:
    """An engine, and a reader of its feeds: ``(module, llm, reader)``; all is gone after it."""
    num_ranks = changes.get("tensor_parallel_size", 1)
    kv_cache = {"event_buffer_max_size": 1024, "tokens_per_block": BLOCK_SIZE, **changes.pop("kv_cache", {})}
    with installed(**switches) as module, module.LLM(MODEL, kv_cache_config=kv_cache, **changes) as llm:
        reader = Reader(llm, num_ranks, wants_stats=changes.get("enable_iter_perf_stats", False))
        try:
            yield module, llm, reader
        finally:
            reader.feeds.close()
            reader.feeds.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trtllm-")]


def submit(module: Any, llm: Any, reader: Reader, inputs: Any, max_tokens: int = 2, **more: Any) -> Any:
    handle = llm.generate_async(inputs, module.SamplingParams(max_tokens=max_tokens), **more)
    reader.feeds.begin()
    return handle


def names_of(result: Any) -> set[int]:
    """Of a result's full blocks; TensorRT-LLM does not have the last token's KV."""
    sequence = [*result.prompt_token_ids, *result.outputs[0].token_ids]
    return set(sequence_hashes(sequence[:-1], BLOCK_SIZE))


@pytest.mark.parametrize("switches", FORMS, ids=str)
async def test_an_answer_s_blocks_are_reported_in_our_names_however_events_come(
    switches: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with read_engine(switches) as (module, llm, reader):
        result = await ended(submit(module, llm, reader, STORY, 10))
        expected = names_of(result)
        await reader.until(
            lambda: reader.named >= expected, lambda: submit(module, llm, reader, result.prompt_token_ids, 1)
        )
        assert reader.named == expected
        assert reader.feeds.figures(0).num_blocks == 512
        assert reader.feeds.figures(0).num_named_blocks == len(expected)
        assert BROKEN not in caplog.text


@pytest.mark.parametrize("switches", FORMS[:2], ids=str)
async def test_events_that_wait_behind_an_ended_iterator_come_with_the_next_request(switches: dict[str, Any]) -> None:
    with read_engine(switches) as (module, llm, reader):
        first = await ended(submit(module, llm, reader, STORY))
        await reader.until(lambda: reader.named >= names_of(first), lambda: submit(module, llm, reader, STORY, 1))
        second = await ended(submit(module, llm, reader, list(range(8, 40))))
        await reader.until(lambda: reader.named >= names_of(second), lambda: submit(module, llm, reader, STORY, 1))


async def test_lost_events_clear_what_was_reported() -> None:
    with read_engine({}) as (module, llm, reader):
        first = await ended(submit(module, llm, reader, STORY))
        await reader.until(lambda: reader.named == names_of(first))
        llm._control.lose_events(1)
        second = await ended(submit(module, llm, reader, list(range(8, 40))))
        third = await ended(submit(module, llm, reader, list(range(50, 90))))
        await reader.until(lambda: reader.named >= names_of(third))
        assert reader.has_cleared
        assert reader.named <= names_of(second) | names_of(third), "the first one's may be gone"


async def test_ranks_are_reported_separately() -> None:
    with read_engine({}, tensor_parallel_size=2, enable_attention_dp=True) as (module, llm, reader):
        from tensorrt_llm.scheduling_params import SchedulingParams

        on_second = SchedulingParams(attention_dp_rank=1)
        result = await ended(submit(module, llm, reader, STORY, scheduling_params=on_second))
        await reader.until(lambda: reader.replicas[1].named == names_of(result))
        assert reader.replicas[0].named == set()
        assert [blocks.data_parallel_rank for blocks in reader.feeds.kv_snapshot()] == [0, 1]


async def test_a_salted_request_s_blocks_are_not_reported_and_plain_ones_of_before_stay() -> None:
    with read_engine({}) as (module, llm, reader):
        plain = await ended(submit(module, llm, reader, STORY))
        await reader.until(lambda: reader.named == names_of(plain))
        salted_prompt = [9, 9, *token_ids_of(STORY)]
        notes = [
            reader.feeds.note_private(PrivateRequest(token_ids=ids, salt="tenant"))
            for ids in (salted_prompt, plain.prompt_token_ids)
        ]
        for ids in (salted_prompt, plain.prompt_token_ids):
            await ended(submit(module, llm, reader, ids, 12, cache_salt="tenant"))
        for note in notes:
            note.close()
        other = await ended(submit(module, llm, reader, list(range(8, 40))))
        await reader.until(lambda: reader.named >= names_of(other))
        assert reader.named == names_of(plain) | names_of(other)


@pytest.mark.parametrize("switches", [*FORMS[:2], {"no_kv_cache_stats": True}], ids=str)
async def test_statistics_are_read_whatever_they_lack(switches: dict[str, Any]) -> None:
    with read_engine(switches, enable_iter_perf_stats=True) as (module, llm, reader):
        assert reader.feeds.figures(0).stats is None
        await ended(submit(module, llm, reader, STORY, 6))
        await reader.until(lambda: len(reader.records) >= 6, lambda: submit(module, llm, reader, STORY, 1))
        stats = reader.feeds.figures(0).stats
        assert stats is not None
        assert reader.records[0].num_context == 1
        assert reader.records[0].num_context_tokens == len(token_ids_of(STORY))
        assert (stats.num_used_blocks is None) == ("no_kv_cache_stats" in switches)
        assert reader.feeds.figures(0).num_busy_records >= 6 > reader.feeds.figures(0).num_prompt_records >= 1
        await reader.until(
            lambda: reader.feeds.figures(0).num_blocks == 512, lambda: submit(module, llm, reader, STORY, 1)
        )


class Script:
    """An LLM whose feeds do what a test says: each fetch takes the next thing, or waits for one if that is an event."""

    def __init__(self, *fetches: object) -> None:
        self._fetches = list(fetches)
        self.num_fetches = 0
        self.has_fetched = threading.Semaphore(0)

    def get_kv_cache_events_async(self, timeout: float | None) -> AsyncIterator[object]:
        self.num_fetches += 1
        fetched = self._fetches.pop(0) if self._fetches else []
        self.has_fetched.release()
        if isinstance(fetched, threading.Event):
            assert fetched.wait(WAIT_S)
            fetched = self._fetches.pop(0)
        if isinstance(fetched, Exception):
            raise fetched
        assert isinstance(fetched, list)
        return _items(fetched)

    get_stats_async = get_kv_cache_events_async


async def _items(items: list[object]) -> AsyncIterator[object]:
    for item in items:
        yield item


async def test_a_feed_that_breaks_is_fetched_again_and_what_was_reported_before_is_taken_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "quartet")
    raw, may_go_on = RawEvents(), threading.Event()
    first, second = raw.stored(None, [(1, [1, 2, 3, 4])]), raw.stored(None, [(2, [5, 6, 7, 8])])
    script = Script([raw.created(), first], RuntimeError("gone"), KeyError("still"), may_go_on, [second])
    reader = Reader(script)
    reader.feeds.begin()
    await reader.until(lambda: BROKEN in caplog.text)
    assert "RuntimeError" in caplog.text
    await reader.until(lambda: reader.has_cleared)
    assert reader.named == set()
    may_go_on.set()
    await reader.until(lambda: bool(reader.named))
    assert reader.named == set(sequence_hashes([5, 6, 7, 8], BLOCK_SIZE))
    await reader.until(lambda: "is fetched again" in caplog.text)
    reader.feeds.close()


async def test_a_feed_that_stays_broken_is_logged_once_and_asked_ever_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    script = Script(*[RuntimeError("what somebody asked for")] * 12)
    feeds = Feeds(script, block_size=4, num_ranks=1, wants_events=True, wants_stats=False, on_change=lambda: None)
    [poller] = feeds._pollers
    has_waited = threading.Semaphore(0)

    def wait(timeout: float | None = None) -> bool:
        waits.append(timeout or 0.0)
        has_waited.release()
        return False

    monkeypatch.setattr(poller._closing, "wait", wait)
    feeds.begin()
    for _ in range(12):
        assert await asyncio.to_thread(has_waited.acquire, timeout=WAIT_S)
    feeds.close()
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert set(waits[7:]) == {30.0}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "RuntimeError" in warnings[0]
    assert "asked for" not in warnings[0]


async def test_a_dead_engine_s_feeds_end() -> None:
    script = Script(RuntimeError("gone"))
    feeds = Feeds(script, block_size=4, num_ranks=1, wants_events=True, wants_stats=False, on_change=lambda: None)
    feeds.begin()
    assert await asyncio.to_thread(script.has_fetched.acquire, timeout=WAIT_S)
    feeds.stop()
    [poller] = feeds._pollers
    await asyncio.to_thread(poller._thread.join, WAIT_S)
    assert not poller._thread.is_alive()
    feeds.close()


async def test_a_private_request_that_ended_is_remembered_for_events_that_lag() -> None:
    raw, may_go_on = RawEvents(), threading.Event()
    late = [raw.created(), raw.stored(None, [(1, [1, 2, 3, 4])]), raw.stored(None, [(2, [5, 6, 7, 8])])]
    reader = Reader(Script([late[0]], may_go_on, late[1:]))
    reader.feeds.note_private(PrivateRequest(token_ids=[1, 2, 3, 4, 5], salt="tenant")).close()
    reader.feeds.begin()
    await reader.until(lambda: reader.feeds.figures(0).num_blocks is not None)
    may_go_on.set()
    await reader.until(lambda: bool(reader.named))
    assert reader.named == set(sequence_hashes([5, 6, 7, 8], BLOCK_SIZE))
    reader.feeds.close()


async def test_statistics_that_break_leave_none_behind(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader(Script([{"iter": 1}], RuntimeError("gone")), wants_events=False, wants_stats=True)
    reader.feeds.begin()
    await reader.until(lambda: BROKEN in caplog.text)
    assert reader.records == [LlmRankStats(iteration=1)]
    assert reader.feeds.figures(0).stats is None
    assert reader.feeds.figures(0).num_busy_records == 1
    reader.feeds.close()


async def test_an_unreadable_event_counts_as_a_loss() -> None:
    raw = RawEvents()
    first = [raw.created(), raw.stored(None, [(1, [1, 2, 3, 4])])]
    strange = raw.event({"type": "teleported"})
    reader = Reader(Script(first, [strange, "no event"], [raw.stored(None, [(2, [5, 6, 7, 8])])]))
    reader.feeds.begin()
    await reader.until(lambda: reader.has_cleared)
    assert reader.named == set(sequence_hashes([5, 6, 7, 8], BLOCK_SIZE))
    reader.feeds.close()


async def test_a_fetch_that_fails_before_the_first_request_is_tried_again() -> None:
    raw = RawEvents()
    script = Script(AssertionError("not there yet"), TimeoutError(), [raw.created(7)])
    reader = Reader(script)
    assert script.num_fetches == 0
    assert reader.feeds.kv_snapshot()[0].parent_hashes == {}
    reader.feeds.begin()
    await reader.until(lambda: reader.feeds.figures(0).num_blocks == 7)
    reader.feeds.close()


def test_an_idle_feed_waits_between_fetches() -> None:
    script = Script()
    feeds = Feeds(script, block_size=4, num_ranks=1, wants_events=True, wants_stats=False, on_change=lambda: None)
    feeds.begin()
    # Iterators that end at once are no reason to ask at once again.
    assert script.has_fetched.acquire(timeout=WAIT_S)
    assert script.has_fetched.acquire(timeout=WAIT_S)
    assert not script.has_fetched.acquire(timeout=0.05)
    feeds.begin()
    assert script.has_fetched.acquire(timeout=WAIT_S), "but a request is"
    feeds.close()


def test_without_feeds_there_are_no_threads() -> None:
    feeds = Feeds(Script(), block_size=4, num_ranks=2, wants_events=False, wants_stats=False, on_change=lambda: None)
    feeds.begin()
    assert (feeds.take_kv_events(), feeds.figures(1).stats, feeds.figures(1).num_blocks) == ([], None, None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trtllm-")]
    feeds.close()
    feeds.begin()


def test_a_call_that_hangs_does_not_keep_close() -> None:
    is_open, has_fetched = threading.Event(), threading.Event()

    def fetch(timeout_s: float) -> AsyncIterator[object]:
        has_fetched.set()
        is_open.wait(WAIT_S)
        return _items([])

    poller = Poller("trtllm-hangs", fetch, lambda _items: None, lambda: None)
    poller.begin()
    assert has_fetched.wait(WAIT_S)
    poller.close(timeout_s=0.01)
    assert not is_open.is_set(), "it did not wait for the call"
    is_open.set()
    poller.close()
