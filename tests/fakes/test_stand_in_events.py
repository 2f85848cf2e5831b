"""KV events and statistics: what they say, how they are fetched, what gets lost."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest

from tests.fakes.driving import (
    MODEL,
    SPELL,
    STORY,
    ended,
    engine,
    params,
    picture,
    prefill_engine,
    prefilled,
    token_ids_of,
)
from tests.fakes.installation import installed

with installed():
    from tensorrt_llm._stand_in.control import control
    from tensorrt_llm.llmapi import KvCacheConfig
    from tensorrt_llm.scheduling_params import SchedulingParams

BLOCK_SIZE = 4


def publishing(module: Any = None, **changes: Any) -> Any:
    """An engine that keeps events; of another installation, if one is given."""
    kv_cache = {"event_buffer_max_size": 1024, "tokens_per_block": BLOCK_SIZE, **changes.pop("kv_cache", {})}
    return (
        (module.LLM(MODEL, **{"kv_cache_config": kv_cache, **changes}))
        if module
        else engine(kv_cache_config=KvCacheConfig(**kv_cache), **changes)
    )


def events_of(llm: Any) -> list[dict[str, Any]]:
    return list(llm.get_kv_cache_events(0.01))


def stored(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [block for event in events if event["data"]["type"] == "stored" for block in event["data"]["blocks"]]


def tokens_in(block: dict[str, Any]) -> list[int]:
    return [token["token_id"] for token in block["tokens"]]


async def drained(iterator: Any) -> list[Any]:
    async with asyncio.timeout(30):
        return [item async for item in iterator]


async def test_blocks_of_a_prompt_and_its_answer_are_stored_in_a_chain() -> None:
    llm = publishing()
    result = await ended(llm.generate_async(STORY, params(10)))
    events = events_of(llm)
    assert [event["event_id"] for event in events] == list(range(len(events)))
    assert events[0]["data"] == {"type": "created", "num_blocks_per_cache_level": [512, 0]}
    assert events[0]["window_size"] == 4608
    assert all("attention_dp_rank" not in event for event in events)
    sequence = [*result.prompt_token_ids, *result.outputs[0].token_ids][:-1]
    blocks = stored(events)
    assert [token for block in blocks for token in tokens_in(block)] == sequence, "the last token is left out"
    assert [len(block["tokens"]) for block in blocks[:-1]] == [BLOCK_SIZE] * (len(blocks) - 1)
    assert 0 < len(blocks[-1]["tokens"]) <= BLOCK_SIZE, "and the last block may be partial"
    assert (blocks[0]["cache_level"], blocks[0]["priority"], blocks[0]["type"]) == (0, 35, "stored_block")
    assert {token["token_extra_id"] for block in blocks for token in block["tokens"]} == {0}
    parents = [event["data"]["parent_hash"] for event in events if event["data"]["type"] == "stored"]
    assert parents[0] is None
    assert set(parents[1:]) <= {block["block_hash"] for block in blocks}


async def test_hashes_use_all_64_bits() -> None:
    llm = publishing()
    await ended(llm.generate_async(list(range(8, 400)), params(1)))
    hashes = [block["block_hash"] for block in stored(events_of(llm))]
    assert min(hashes) >= 0
    assert 1 << 63 <= max(hashes) < 1 << 64


async def test_a_repeated_prompt_is_reported_as_cached_and_stores_nothing_again() -> None:
    llm = publishing()
    ids = token_ids_of(STORY)
    first = await ended(llm.generate_async(ids, params(1)))
    events_of(llm)
    again = await ended(llm.generate_async(ids, params(1)))
    assert first.cached_tokens == 0
    assert again.cached_tokens == (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert stored(events_of(llm)) == []
    salted = await ended(llm.generate_async(ids, params(1), cache_salt="tenant"))
    assert salted.cached_tokens == 0
    assert stored(events_of(llm))


async def test_without_reuse_there_are_no_events() -> None:
    llm = publishing(kv_cache={"enable_block_reuse": False})
    for _ in range(2):
        assert (await ended(llm.generate_async(STORY, params(4)))).cached_tokens == 0
    assert events_of(llm) == []


async def test_a_full_cache_removes_the_longest_unused() -> None:
    llm = publishing(kv_cache={"max_tokens": 64})
    for start in (100, 200, 300):
        await ended(llm.generate_async(list(range(start, start + 30)), params(1)))
    events = events_of(llm)
    gone = [value for event in events if event["data"]["type"] == "removed" for value in event["data"]["block_hashes"]]
    names = {block["block_hash"]: tokens_in(block) for block in stored(events)}
    assert gone
    assert all(100 <= names[value][0] < 130 for value in gone)
    assert names[gone[0]][0] > names[gone[-1]][0], "the end of a chain goes first"


async def test_blocks_move_to_the_host_and_back() -> None:
    llm = publishing(kv_cache={"max_tokens": 64, "host_cache_size": 16 * BLOCK_SIZE * 12_288})
    first = list(range(100, 130))
    for ids in (first, list(range(200, 260))):
        await ended(llm.generate_async(ids, params(1)))
    events = events_of(llm)
    assert events[0]["data"]["num_blocks_per_cache_level"] == [16, 16]
    moved = [event["data"] for event in events if event["data"]["type"] == "updated"]
    assert moved[0]["cache_level"] == {"type": "event_diff", "new_value": 1, "old_value": 0}
    assert moved[0]["priority"] is None
    assert not [event for event in events if event["data"]["type"] == "removed"]
    assert (await ended(llm.generate_async(first, params(1)))).cached_tokens > 0
    back = [event["data"] for event in events_of(llm) if event["data"]["type"] == "updated"]
    assert {"type": "event_diff", "new_value": 0, "old_value": 1} in [data["cache_level"] for data in back]


async def test_each_window_size_has_events_of_its_own() -> None:
    llm = publishing(kv_cache={"max_attention_window": [16, 4608]})
    await ended(llm.generate_async(list(range(100, 160)), params(1)))
    events = events_of(llm)
    created = [event["window_size"] for event in events if event["data"]["type"] == "created"]
    assert created == [4608, 16]
    removed = [event["window_size"] for event in events if event["data"]["type"] == "removed"]
    assert set(removed) == {16}, "what left the small window is gone there alone"


async def test_lost_events_leave_a_gap_in_the_numbers() -> None:
    llm = publishing()
    await ended(llm.generate_async(SPELL, params(1)))
    before = events_of(llm)
    control.of(llm).lose_events(2)
    await ended(llm.generate_async(STORY, params(20)))
    after = events_of(llm)
    assert after[0]["event_id"] == before[-1]["event_id"] + 3


async def test_a_small_buffer_drops_the_oldest_silently() -> None:
    llm = publishing(kv_cache={"event_buffer_max_size": 3})
    await ended(llm.generate_async(STORY, params(40, ignore_eos=True)))
    numbers = [event["event_id"] for event in events_of(llm)]
    assert len(numbers) == 3
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert numbers[0] > 0


async def test_ranks_count_by_themselves_and_can_be_chosen() -> None:
    llm = publishing(tensor_parallel_size=2, enable_attention_dp=True)
    await ended(llm.generate_async(STORY, params(1), scheduling_params=SchedulingParams(attention_dp_rank=1)))
    events = events_of(llm)
    assert [event["attention_dp_rank"] for event in events if event["event_id"] == 0] == [0, 1]
    assert {event["attention_dp_rank"] for event in events if event["data"]["type"] == "stored"} == {1}
    with pytest.raises(ValueError, match="attention_dp_rank"):
        llm.generate_async(STORY, params(1), scheduling_params=SchedulingParams(attention_dp_rank=2))


async def test_ids_begin_again_with_each_engine() -> None:
    for _ in range(2):
        llm = publishing()
        await ended(llm.generate_async(SPELL, params(1)))
        assert events_of(llm)[0]["event_id"] == 0


async def test_pictures_mark_their_tokens() -> None:
    llm = publishing()
    for colour in ("red", "blue"):
        inputs = {"prompt": "<|image|>", "multi_modal_data": {"image": picture(colour)}}
        result = await ended(llm.generate_async(inputs, params(1)))
        assert result.cached_tokens == 0
    extras = {token["token_extra_id"] for block in stored(events_of(llm)) for token in block["tokens"]}
    assert len(extras - {0}) == 2


async def test_over_rpc_each_call_fetches_and_works_at_once() -> None:
    llm = publishing()
    assert [event["data"]["type"] for event in await drained(llm.get_kv_cache_events_async(0.01))] == ["created"]
    assert await drained(llm.get_kv_cache_events_async(0.01)) == []
    await ended(llm.generate_async(STORY, params(1)))
    assert await drained(llm.get_kv_cache_events_async(0.01))


async def test_as_a_queue_it_begins_with_the_first_request_and_ends_until_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with installed(kv_event_form="queue") as other, publishing(other, enable_iter_perf_stats=True) as llm:
        monkeypatch.setattr(other._stand_in.feeds, "DISPATCH_S", 0.0)
        with pytest.raises(AssertionError):
            llm.get_kv_cache_events_async(0.01)
        assert await drained(llm.get_stats_async(0.01)) == []
        await ended(llm.generate_async(SPELL, other.SamplingParams(max_tokens=2)))
        assert len(await drained(llm.get_kv_cache_events_async(0.01))) > 1
        assert await drained(llm.get_kv_cache_events_async(0.01)) == []
        await ended(llm.generate_async(STORY, other.SamplingParams(max_tokens=2)))
        assert await drained(llm.get_kv_cache_events_async(0.01))
        llm._control.wait_until(lambda: llm._control.num_steps == 4)
        assert len(await drained(llm.get_stats_async(0.01))) == 4
        assert llm.get_kv_cache_events(0.01) == []


async def test_a_queue_wakes_for_events_that_come_later() -> None:
    with installed(kv_event_form="queue") as other, publishing(other) as llm:
        llm._control.steps.close()
        handle = llm.generate_async(STORY, other.SamplingParams(max_tokens=1))
        iterator = llm.get_kv_cache_events_async(30)
        assert (await anext(iterator))["data"]["type"] == "created"
        later = asyncio.ensure_future(anext(iterator))
        llm._control.steps.open()
        assert (await asyncio.wait_for(later, 30))["data"]["type"] == "stored"
        await ended(handle)


async def test_an_iterator_may_turn_out_to_yield_lists() -> None:
    with installed(kv_event_lists=True) as other, publishing(other) as llm:
        [[event]] = await drained(llm.get_kv_cache_events_async(0.01))
    assert event["data"]["type"] == "created"


async def test_events_may_turn_out_to_name_pictures() -> None:
    with installed(mm_keys=True) as other, publishing(other) as llm:
        inputs = {"prompt": "<|image|>", "multi_modal_data": {"image": picture()}}
        await ended(llm.generate_async(inputs, other.SamplingParams(max_tokens=1)))
        keys = [block["mm_keys"] for block in stored(events_of(llm))]
    assert any(keys)


@pytest.mark.parametrize("name", [None, "beach"])
async def test_a_later_line_names_salts_and_pictures(name: str | None) -> None:
    with installed(version="1.4.0rc1") as other, publishing(other) as llm:
        inputs = {"prompt": "a <|image|> b", "multi_modal_data": {"image": picture()}}
        inputs |= {"multi_modal_uuids": {"image": [name]}} if name else {}
        await ended(llm.generate_async(inputs, other.SamplingParams(max_tokens=1), cache_salt="pepper"))
        blocks = stored(events_of(llm))
    assert {block["cache_salt"] for block in blocks} == {"pepper"}
    assert not any(token["token_extra_id"] for block in blocks for token in block["tokens"])
    keys = [key for block in blocks for key in block["mm_keys"]]
    assert len({key["hash"] for key in keys}) == 1
    assert (keys[0]["hash"] == name) if name else len(keys[0]["hash"]) == 64
    offsets = [key["start_offset"] for key in keys]
    size = len(blocks[0]["tokens"])
    assert offsets == [0, *range(offsets[1], offsets[1] + size * (len(offsets) - 1), size)]
    assert 0 < offsets[1] < size, "the picture begins within a block"


async def test_statistics_have_the_description_s_keys_one_record_a_step() -> None:
    shapes = importlib.import_module("tensorrt_llm._stand_in.schema").API["shapes"]["iteration_stats"]
    llm = engine(enable_iter_perf_stats=True, enable_iter_req_stats=True, max_batch_size=1)
    control.of(llm).steps.close()
    handles = [llm.generate_async(STORY, params(2)) for _ in range(2)]
    control.of(llm).steps.open()
    for handle in handles:
        await ended(handle)
    control.of(llm).wait_until(lambda: control.of(llm).num_steps >= 3)
    records = llm.get_stats(0.01)
    for record in records:
        assert set(shapes["top"]) <= set(record)
        for part in ("kvCacheStats", "inflightBatchingStats"):
            assert set(record[part]) == set(shapes[part])
    assert records[0]["numQueuedRequests"] == 1
    assert records[0]["kvCacheStats"]["usedNumBlocks"] > 0
    assert records[0]["requestStats"]
    assert sum(record["numCompletedRequests"] for record in records) == 2
    assert [record["iter"] for record in records] == list(range(len(records)))
    assert llm.get_stats(0.01) == [], "an idle engine makes no records"


async def test_statistics_must_be_asked_for_and_may_lack_parts() -> None:
    llm = engine()
    await ended(llm.generate_async(SPELL, params(2)))
    assert await drained(llm.get_stats_async(0.01)) == []
    with installed(no_kv_cache_stats=True) as other, other.LLM(MODEL, enable_iter_perf_stats=True) as later:
        await ended(later.generate_async(SPELL, other.SamplingParams(max_tokens=2)))
        later._control.wait_until(lambda: later._control.num_steps == 2)
        records = later.get_stats(0.01)
    assert len(records) == 2
    assert all("kvCacheStats" not in record for record in records)


async def test_blocks_that_wait_to_be_pulled_count_as_used() -> None:
    llm = prefill_engine(enable_iter_perf_stats=True)
    await prefilled(llm)
    await prefilled(llm, SPELL)
    control.of(llm).wait_until(lambda: control.of(llm).num_steps == 2)
    assert llm.get_stats(0.01)[-1]["kvCacheStats"]["usedNumBlocks"] == control.of(llm).num_used_blocks() > 0
