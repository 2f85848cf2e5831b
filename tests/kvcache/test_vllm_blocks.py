"""Our blocks in vLLM's form, and the names that are made of that form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.events.kv import Cleared, Contents, KvEvent, Removed, Stored, Tier
from quartet.events.vllm import AllBlocksCleared, BlockRemoved, BlockStored, EventForm, VllmBatch, encode_batch
from quartet.kvcache.block_hash import NO_EXTRA_KEY, ExtraKey, MediaSpan, sequence_hashes
from quartet.kvcache.block_pool import BlockManager, EventLog
from quartet.kvcache.sequence import Sequence
from quartet.kvcache.vllm_blocks import VllmTranslator, block_name
from tests.events import vllm_reader

BLOCK_SIZE = 2
MEDIA_ID = bytes(range(32))


def told(
    tokens: list[int], extra_key: ExtraKey = NO_EXTRA_KEY, media: tuple[MediaSpan, ...] = ()
) -> tuple[Sequence, list[KvEvent]]:
    """A computed sequence and the events of a pool that tells contents."""
    pool = BlockManager(len(tokens) + 1, BLOCK_SIZE, has_events=True, tells_contents=True)
    seq = Sequence(tokens, block_size=BLOCK_SIZE, extra_key=extra_key, media=media)
    pool.allocate(seq)
    pool.commit(seq, len(tokens))
    return seq, pool.take_events()


def named(event: BlockStored) -> list[int]:
    """The names of its blocks, made of what it says."""
    names: list[int] = []
    parent = event.parent_hash
    assert parent is None or isinstance(parent, int)
    for index in range(len(event.block_hashes)):
        tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
        keys = None if event.extra_keys is None else event.extra_keys[index]
        parent = block_name(parent, tokens, event.lora_name, keys)
        names.append(parent)
    return names


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], ExtraKey, tuple[MediaSpan, ...]]:
    tokens = draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=2, max_size=9))
    salt = draw(st.sampled_from(["", "salt", "fine", "ab" * 32]))
    extra_key = ExtraKey(draw(st.sampled_from(["", "fine"])), salt)
    first = draw(st.integers(0, len(tokens) - 1))
    span = MediaSpan(draw(st.binary(min_size=32, max_size=32)), first, draw(st.integers(1, len(tokens) - first)))
    return tokens, extra_key, draw(st.sampled_from([(), (span,)]))


@given(sequences())
def test_what_we_publish_is_named_as_we_name_it(case: tuple[list[int], ExtraKey, tuple[MediaSpan, ...]]) -> None:
    tokens, extra_key, media = case
    _, events = told(tokens, extra_key, media)
    [event] = VllmTranslator(BLOCK_SIZE).translate(events)
    assert isinstance(event, BlockStored)
    assert event.block_hashes == named(event) == sequence_hashes(tokens, BLOCK_SIZE, extra_key, media)
    assert event.token_ids == tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE]


def test_plain_text_has_nothing_but_tokens() -> None:
    _, events = told([1, 2, 3, 4, 5])
    assert VllmTranslator(BLOCK_SIZE).translate(events) == [
        BlockStored(
            block_hashes=sequence_hashes([1, 2, 3, 4], BLOCK_SIZE),
            parent_hash=None,
            token_ids=[1, 2, 3, 4],
            block_size=BLOCK_SIZE,
            medium="GPU",
            group_idx=0,
        )
    ]


def test_extra_keys_are_those_of_vllm_in_its_order() -> None:
    # Positions 1 to 3 are a picture: it begins 1 after the first block does, and 1 before the second.
    media = (MediaSpan(MEDIA_ID, 1, 3),)
    _, events = told([1, 9, 9, 9, 5, 6], ExtraKey("fine", "salt"), media)
    [event] = VllmTranslator(BLOCK_SIZE).translate(events)
    assert isinstance(event, BlockStored)
    assert event.lora_name == "fine"
    picture = MEDIA_ID.hex()
    assert event.extra_keys == [["fine", (picture, 1), "salt"], ["fine", (picture, -1)], ["fine"]]


@pytest.mark.parametrize("form", EventForm)
def test_a_reader_made_from_the_format_gets_adapter_medium_extra_keys_and_group(form: EventForm) -> None:
    tokens, extra_key, media = [1, 9, 9, 9, 5, 6], ExtraKey("fine", "salt"), (MediaSpan(MEDIA_ID, 1, 3),)
    _, stored = told(tokens, extra_key, media)
    names = sequence_hashes(tokens, BLOCK_SIZE, extra_key, media)
    moved = [Stored(names[1], names[2:], Tier.HOST), Removed(names[2:], Tier.DEVICE)]
    events = VllmTranslator(BLOCK_SIZE).translate([*stored, *moved])
    read = vllm_reader.read_maps if form is EventForm.MAP else vllm_reader.read_arrays
    batch = read(encode_batch(VllmBatch(time_s=1.0, events=events, data_parallel_rank=2), form))
    first, copy, removed = batch.events
    assert batch.data_parallel_rank == 2
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == (names, None, tokens)
    assert (first.block_size, first.medium, first.lora_name, first.lora_id) == (BLOCK_SIZE, "GPU", "fine", None)
    picture = MEDIA_ID.hex()
    keys = [[[*key] if isinstance(key, list) else key for key in of_block] for of_block in first.extra_keys]
    assert keys == [["fine", [picture, 1], "salt"], ["fine", [picture, -1]], ["fine"]]
    assert (copy.block_hashes, copy.parent_block_hash, copy.token_ids) == (names[2:], names[1], [5, 6])
    assert (copy.medium, copy.lora_name, copy.extra_keys) == ("CPU_TIER1", "fine", [("fine",)])
    assert (removed.block_hashes, removed.medium) == (names[2:], "GPU")
    assert {event.group_idx for event in batch.events} == {0}


def test_only_the_first_block_of_a_sequence_has_the_salt() -> None:
    pool = BlockManager(8, BLOCK_SIZE, has_events=True, tells_contents=True)
    seq = Sequence([1, 2, 3, 4], block_size=BLOCK_SIZE, extra_key=ExtraKey(cache_salt="salt"))
    pool.allocate(seq)
    translator = VllmTranslator(BLOCK_SIZE)
    keys: list[object] = []
    for num_tokens in (2, 4):
        pool.commit(seq, num_tokens)
        [event] = translator.translate(pool.take_events())
        assert isinstance(event, BlockStored)
        keys.append(event.extra_keys)
    assert keys == [[["salt"]], None]


def test_a_block_that_moves_is_stored_there_before_it_is_removed_here() -> None:
    translator = VllmTranslator(BLOCK_SIZE)
    log = EventLog()
    log.store(7, None, content=b"\1\0\0\0\2\0\0\0")
    log.move(7, Tier.DEVICE, Tier.HOST)
    log.move(7, Tier.HOST, Tier.DISK)
    events = translator.translate(log.take())
    media = [(type(event), event.medium) for event in events if not isinstance(event, AllBlocksCleared)]
    assert media == [
        (BlockStored, "GPU"),
        (BlockStored, "CPU_TIER1"),
        (BlockRemoved, "GPU"),
        (BlockStored, "CPU_TIER2"),
        (BlockRemoved, "CPU_TIER1"),
    ]
    assert all(event.token_ids == [1, 2] for event in events if isinstance(event, BlockStored))


def test_what_is_not_told_is_left_out_with_all_behind_it() -> None:
    translator = VllmTranslator(1)
    contents = Contents([b"\1\0\0\0"])
    assert translator.translate([Stored(None, [1, 2]), Stored(2, [3], Tier.DEVICE, contents), Removed([1, 3])]) == []
    assert translator.num_untold == 3


def test_after_a_clear_nothing_is_known() -> None:
    translator = VllmTranslator(1)
    stored = Stored(None, [1], Tier.DEVICE, Contents([b"\1\0\0\0"]))
    assert translator.translate([stored, Cleared(), Removed([1])])[1:] == [AllBlocksCleared()]


def test_a_pool_that_is_not_asked_to_tells_no_contents() -> None:
    pool = BlockManager(4, BLOCK_SIZE, has_events=True)
    seq = Sequence([1, 2], block_size=BLOCK_SIZE)
    pool.allocate(seq)
    pool.commit(seq, 2)
    [event] = pool.take_events()
    assert isinstance(event, Stored)
    assert event.contents is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["salt"], ["other"]),
        ([("ab" * 32, 1)], [("ab" * 32, 0)]),
        ([b"digest"], [b"other"]),
        (["fine", "salt"], ["salt"]),
        ([("opaque", 1)], None),
    ],
)
def test_other_extra_keys_are_other_names(first: list[object], second: list[object] | None) -> None:
    assert block_name(None, [1, 2], None, first) != block_name(None, [1, 2], None, second)
