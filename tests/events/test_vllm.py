"""vLLM's form: what is written, read by a reader made from the format, and what of others is read."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.events.vllm import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventForm,
    VllmBatch,
    decode_batch,
    decode_number,
    encode_batch,
    to_medium,
)
from quartet.events.wire import MalformedFrameError
from tests.events import vllm_reader

STORED = BlockStored(
    block_hashes=[7, (1 << 64) - 1],
    parent_hash=5,
    token_ids=[1, 2, 3, 4],
    block_size=2,
    medium="GPU",
    lora_name="fine",
    extra_keys=[["fine"], None],
    group_idx=0,
)
BATCH = VllmBatch(
    time_s=12.5,
    events=[STORED, BlockRemoved(block_hashes=[7], medium="CPU_TIER1", group_idx=0), AllBlocksCleared()],
    data_parallel_rank=3,
)

HASHES = st.integers(0, (1 << 64) - 1) | st.binary(min_size=32, max_size=32)
MEDIA = st.sampled_from([None, "GPU", "CPU_TIER1"])
KEYS = st.none() | st.lists(st.text() | st.integers(-9, 9) | st.binary(), min_size=1, max_size=3)


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    hashes = draw(st.lists(HASHES, min_size=1, max_size=3))
    size = draw(st.integers(1, 3))
    token = st.integers(0, (1 << 32) - 1)
    num_tokens = draw(st.sampled_from([0, size * len(hashes)]))
    return BlockStored(
        block_hashes=hashes,
        parent_hash=draw(st.none() | HASHES),
        token_ids=draw(st.lists(token, min_size=num_tokens, max_size=num_tokens)),
        block_size=size,
        medium=draw(MEDIA),
        lora_name=draw(st.none() | st.text()),
        extra_keys=draw(st.none() | st.lists(KEYS, min_size=len(hashes), max_size=len(hashes))),
        group_idx=draw(st.sampled_from([None, 0])),
    )


EVENTS = (
    stored()
    | st.builds(BlockRemoved, block_hashes=st.lists(HASHES, min_size=1, max_size=3), medium=MEDIA)
    | st.builds(AllBlocksCleared)
)


def decoded(events: list[object], batch: type = list) -> VllmBatch:
    """What is read of ``events``, in a batch that is an array or a map."""
    content = [1.0, events, None] if batch is list else {"ts": 1.0, "events": events}
    return decode_batch(msgspec.msgpack.encode(content))


@given(st.lists(EVENTS, max_size=4), st.none() | st.integers(0, 9), st.sampled_from(EventForm))
def test_a_batch_comes_back_as_it_was(events: list[object], rank: int | None, form: EventForm) -> None:
    batch = VllmBatch(time_s=1.5, events=events, data_parallel_rank=rank)  # type: ignore[arg-type]
    assert decode_batch(encode_batch(batch, form)) == batch


def test_a_reader_of_maps_reads_all_fields() -> None:
    batch = vllm_reader.read_maps(encode_batch(BATCH))
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    assert batch.events == [
        vllm_reader.BlockStored([7, (1 << 64) - 1], 5, [1, 2, 3, 4], 2, None, "GPU", "fine", [("fine",), None], 0),
        vllm_reader.BlockRemoved([7], "CPU_TIER1", 0),
        vllm_reader.AllBlocksCleared(),
    ]


def test_a_reader_of_arrays_reads_all_fields() -> None:
    batch = vllm_reader.read_arrays(encode_batch(BATCH, EventForm.ARRAY))
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    assert batch.events == [
        vllm_reader.ArrayStored([7, (1 << 64) - 1], 5, [1, 2, 3, 4], 2, None, "GPU", "fine", [("fine",), None], 0),
        vllm_reader.ArrayRemoved([7], "CPU_TIER1", 0),
        vllm_reader.ArrayCleared(),
    ]


def test_events_of_a_running_vllm_are_read() -> None:
    # The fields of an event that a user of vLLM 0.26 has published, with other tokens.
    event = {
        "type": "BlockStored",
        "block_hashes": [15760518052499183552],
        "parent_block_hash": None,
        "token_ids": [9, 8],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    [read] = decoded([event]).events
    assert read == BlockStored(
        block_hashes=[15760518052499183552],
        parent_hash=None,
        token_ids=[9, 8],
        block_size=2,
        medium="GPU",
        extra_keys=[None],
        group_idx=0,
    )


def test_events_of_the_first_vllm_are_read() -> None:
    stored, removed = decoded([["BlockStored", [3], None, [1, 2], 2, None], ["BlockRemoved", [3]]]).events
    assert stored == BlockStored(block_hashes=[3], parent_hash=None, token_ids=[1, 2], block_size=2)
    assert removed == BlockRemoved(block_hashes=[3])


def test_events_of_tensorrt_llm_as_dynamo_publishes_them_are_read() -> None:
    # Signed hashes, no medium, no name of an adapter.
    event = {"type": "BlockStored", "block_hashes": [-1], "parent_block_hash": -2, "token_ids": [1], "block_size": 1}
    [read] = decoded([event]).events
    assert isinstance(read, BlockStored)
    assert (read.block_hashes, read.parent_hash) == ([(1 << 64) - 1], (1 << 64) - 2)


def test_an_array_with_room_for_media_in_the_form_of_dynamo_is_read() -> None:
    [read] = decoded([["BlockStored", [3], None, [1], 1, None, "GPU", None, None, [None], 0]]).events
    assert isinstance(read, BlockStored)
    assert read.group_idx == 0


def test_a_batch_may_be_a_map() -> None:
    batch = decode_batch(msgspec.msgpack.encode({"ts": 2, "events": [["AllBlocksCleared"]], "data_parallel_rank": 1}))
    assert batch == VllmBatch(time_s=2.0, events=[AllBlocksCleared()], data_parallel_rank=1)


def stored_fields(**fields: object) -> dict[str, object]:
    base = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    return base | fields


@pytest.mark.parametrize(
    "event",
    [
        stored_fields(group_idx=1),
        stored_fields(group_idx=0, kv_cache_spec_kind="sliding_window"),
        stored_fields(locality="REMOTE"),
        stored_fields(block_mm_infos=[{"mm_objects": []}]),
        stored_fields(token_ids=[[1, 2]]),
        ["BlockStored", [1], None, [1], 1, None, "GPU", None, None, [{"mm_objects": []}], 0],
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 2},
        {"type": "BlockMoved"},
    ],
)
def test_what_says_nothing_of_prompts_is_ignored_and_counted(event: object) -> None:
    batch = decoded([event, ["AllBlocksCleared"]])
    assert batch.events == [AllBlocksCleared()]
    assert batch.num_ignored == 1


def test_another_group_of_full_attention_counts() -> None:
    assert len(decoded([stored_fields(group_idx=1, kv_cache_spec_kind="full_attention")]).events) == 1


def test_a_removed_copy_of_several_is_no_removal() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU", "remaining_copy_counts": [1, 0]}
    assert decoded([removed]).events == [BlockRemoved(block_hashes=[2], medium="GPU")]


@pytest.mark.parametrize(
    "event",
    [
        stored_fields(block_hashes=[]),
        stored_fields(block_hashes=["text"]),
        stored_fields(block_hashes=[1 << 63, 1.5]),
        stored_fields(token_ids=[1, 2]),
        stored_fields(token_ids=[1 << 40]),
        stored_fields(token_ids=["a"]),
        stored_fields(token_ids=7),
        stored_fields(block_size=True),
        stored_fields(extra_keys=[None, None]),
        stored_fields(extra_keys=["text"]),
        stored_fields(medium=4),
        stored_fields(medium="m" * 65),
        stored_fields(block_hashes=[b"h" * 65]),
        stored_fields(parent_block_hash=b"h" * 65),
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "m" * 65},
        stored_fields(group_idx="0", kv_cache_spec_kind="full_attention"),
        {"type": "BlockStored"},
        ["BlockRemoved"],
        [],
        5,
        {"no": "type"},
    ],
)
def test_what_has_another_form_is_refused(event: object) -> None:
    with pytest.raises(MalformedFrameError):
        decoded([event])


@given(st.binary(max_size=64))
def test_garbage_is_refused_or_read_but_never_anything_else(payload: bytes) -> None:
    with suppress(MalformedFrameError):
        decode_batch(payload)


@pytest.mark.parametrize("content", [b"\x91" * 100_000, b"\xc1", msgspec.msgpack.encode([1.0]), b"\xa1\xff"])
def test_a_hostile_payload_is_refused(content: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        decode_batch(content)


def test_a_number_has_eight_bytes() -> None:
    assert decode_number(b"\0" * 7 + b"\5") == 5
    with pytest.raises(MalformedFrameError):
        decode_number(b"\5")


def test_media_have_common_names() -> None:
    assert [to_medium(name) for name in (None, "GPU", "CPU", "CPU_TIER1", "STORAGE", "elsewhere")] == [
        "GPU",
        "GPU",
        "CPU_TIER1",
        "CPU_TIER1",
        "CPU_TIER2",
        "elsewhere",
    ]
