"""What is reported of one rank's blocks, in our names."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.engine.trtllm.kv_events import EventReader, UnreadableEventError
from quartet.events.kv import Cleared, Removed, Stored, Tier
from tests.engine.trtllm.kv_truth import BLOCK_SIZE, WINDOW, Listener, RawEvents, names, stored_block

HIGH = (1 << 63) + 5
TEXT = "ab" * 32


def test_a_chain_is_reported_in_our_names_whatever_the_size_of_theirs() -> None:
    raw, listener = RawEvents(), Listener()
    events = listener.receive(raw.created(), raw.stored(None, [(HIGH, [1, 2]), (7, [3, 4])]))
    first, second, third = names(1, 2, 3, 4, 5, 6)
    assert events == [Stored(None, [first, second])]
    assert listener.receive(raw.stored(7, [((1 << 64) - 1, [5, 6])])) == [Stored(second, [third])]
    assert listener.receive(raw.removed((1 << 64) - 1, 7)) == [Removed([third, second])]
    assert listener.receive(raw.removed(HIGH)) == [Removed([first])]
    assert listener.mirror.num_blocks == 64


def test_a_name_of_theirs_may_be_any_text() -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created())
    first, second = names(1, 2, 3, 4)
    assert listener.receive(raw.stored(None, [(TEXT, [1, 2]), ("07", [3, 4])])) == [Stored(None, [first, second])]
    assert listener.receive(raw.moved("07", 1))[0] == Stored(first, [second], Tier.HOST)
    assert listener.receive(raw.removed(TEXT)) == [Removed([first])]


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_salt": "pepper"},
        {"mm_keys": [{"type": "mm_key", "hash": "00" * 32, "uuid": "9dc26f865941d289", "start_offset": 0}]},
        # As upstream's manager of 1.3 wrote it before it named items: the digest stands for the first token.
        {
            "tokens": [
                {"type": "unique_token", "token_id": text, "token_extra_id": 0} for text in ("00" * 32, "01" * 32)
            ]
        },
    ],
)
def test_a_block_that_a_later_event_says_is_private_is_not_reported(changes: dict[str, Any]) -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created())
    stored = raw.stored(None, [(1, [1, 2])])
    stored["data"]["blocks"][0] |= {"cache_salt": None, "mm_keys": [], **changes}
    assert listener.receive(stored) == []
    plain = raw.stored(None, [(2, [3, 4])])
    plain["data"]["blocks"][0] |= {"cache_salt": None, "mm_keys": []}
    assert listener.receive(plain) == [Stored(None, names(3, 4))]


def test_the_removal_of_an_unreported_block_is_not_reported() -> None:
    raw, listener = RawEvents(), Listener()
    assert listener.receive(raw.created(), raw.removed(1, 2), raw.moved(3, 1)) == []


def test_a_partial_block_is_not_reported_nor_its_end_nor_what_follows_it() -> None:
    raw, listener = RawEvents(), Listener()
    reported = listener.receive(raw.created(), raw.stored(None, [(1, [1, 2]), (2, [3])]), raw.stored(2, [(3, [4, 5])]))
    assert reported == [Stored(None, names(1, 2))]
    assert listener.receive(raw.removed(3, 2)) == []


def test_a_block_whose_parent_is_unknown_is_not_reported_nor_are_its_children() -> None:
    raw, listener = RawEvents(), Listener()
    assert listener.receive(raw.created(), raw.stored(50, [(1, [1, 2])]), raw.stored(1, [(2, [3, 4])])) == []
    assert listener.receive(raw.removed(2, 1)) == []


def test_a_block_whose_parent_was_unknown_is_reported_once_it_is_stored_after_a_known_one() -> None:
    raw, listener = RawEvents(), Listener()
    assert listener.receive(raw.created(), raw.stored(1, [(2, [3, 4])])) == []
    again = RawEvents()
    listener.receive(again.created())
    assert listener.receive(again.stored(None, [(1, [1, 2]), (2, [3, 4])])) == [Stored(None, names(1, 2, 3, 4))]


def test_a_move_to_the_host_and_back_is_reported_by_tier() -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created(), raw.stored(None, [(1, [1, 2]), (2, [3, 4])]))
    first, second = names(1, 2, 3, 4)
    moved = listener.receive(raw.moved(2, 1), raw.moved(1, 1))
    assert listener.replica.parents[Tier.HOST] == {second: first, first: None}
    assert listener.replica.parents[Tier.DEVICE] == {}
    assert moved[0] == Stored(first, [second], Tier.HOST), "it is never said to be nowhere"
    listener.receive(raw.moved(1, 0))
    assert listener.replica.parents[Tier.DEVICE] == {first: None}
    assert listener.receive(raw.removed(2)) == [Removed([second], Tier.HOST)]


def test_a_block_that_is_stored_on_the_host_is_reported_apart_from_the_one_before_it() -> None:
    raw, listener = RawEvents(), Listener()
    reported = listener.receive(
        raw.created(), raw.stored(None, [(1, [1, 2])]), raw.stored(1, [(2, [3, 4])], cache_level=1)
    )
    first, second = names(1, 2, 3, 4)
    assert reported == [Stored(None, [first]), Stored(first, [second], Tier.HOST)]


def test_a_change_of_priority_alone_is_not_reported() -> None:
    raw, listener = RawEvents(), Listener()
    diff = {"type": "event_diff", "new_value": 80, "old_value": 35}
    updated = {"type": "updated", "block_hash": 1, "cache_level": None, "priority": diff}
    listener.receive(raw.created(), raw.stored(None, [(1, [1, 2])]))
    assert listener.receive(raw.event(updated)) == []


def test_blocks_that_are_stored_again_are_reported_once() -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created(), raw.stored(None, [(1, [1, 2])]))
    assert listener.receive(raw.stored(None, [(1, [1, 2]), (2, [3, 4])])) == [
        Stored(names(1, 2)[0], names(1, 2, 3, 4)[1:])
    ]


def test_two_blocks_of_one_name_are_there_while_either_is() -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created(), raw.stored(None, [(1, [1, 2])]), raw.stored(None, [(2, [1, 2])]))
    assert listener.receive(raw.removed(1)) == []
    assert listener.receive(raw.removed(2)) == [Removed(names(1, 2))]


@pytest.mark.parametrize("order", [(WINDOW, 16), (16, WINDOW)])
def test_only_the_largest_window_counts(order: tuple[int, int]) -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(*(raw.created(64, window_size=size) for size in order))
    both = [raw.stored(None, [(1, [1, 2]), (2, [3, 4])], window_size=size) for size in order]
    listener.receive(*both, raw.removed(1, window_size=16))
    assert listener.replica.named == set(names(1, 2, 3, 4))
    assert listener.receive(raw.stored(2, [(3, [5, 6])], window_size=16)) == []


def test_blocks_reported_of_a_smaller_window_are_forgotten_with_a_larger_one() -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created(window_size=16), raw.stored(None, [(1, [1, 2])], window_size=16))
    assert listener.receive(raw.created()) == [Cleared()]
    assert listener.receive(raw.stored(1, [(2, [3, 4])])) == []


def test_nothing_is_reported_before_any_window_is_announced() -> None:
    raw, listener = RawEvents(), Listener()
    raw.created()
    assert listener.receive(raw.stored(None, [(1, [1, 2])])) == []


def test_a_gap_makes_everything_doubtful_until_blocks_are_stored_after_it() -> None:
    raw, listener = RawEvents(), Listener()
    chain = [(1, [1, 2]), (2, [3, 4])]
    listener.receive(raw.created(), raw.stored(None, chain), raw.stored(None, [(9, [7, 7])]))
    raw.removed(9)  # lost
    first, second, third = names(1, 2, 3, 4, 5, 6)
    assert listener.receive(raw.stored(2, [(3, [5, 6])])) == [Cleared(), Stored(None, [first, second, third])]
    assert listener.replica.named == {first, second, third}
    assert listener.receive(raw.removed(3, 9)) == [Removed([third])]


def test_after_a_gap_what_follows_a_block_that_is_gone_is_not_reported() -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created(), raw.stored(None, [(1, [1, 2]), (2, [3, 4])]))
    raw.moved(1, 1)  # lost
    assert listener.receive(raw.removed(1)) == [Cleared()]
    assert listener.receive(raw.stored(2, [(3, [5, 6])])) == []


def test_after_a_gap_what_follows_a_block_that_is_private_now_is_not_reported() -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created(), raw.stored(None, [(1, [1, 2]), (2, [3, 4])]))
    raw.moved(1, 1)  # lost
    listener.receive(raw.removed(1))
    listener.add(1, 2)
    assert listener.receive(raw.stored(None, [(1, [1, 2])]), raw.stored(2, [(3, [5, 6])])) == []


def test_two_blocks_of_one_name_are_counted_anew_after_a_gap() -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created(), raw.stored(None, [(1, [1, 2])]), raw.stored(None, [(2, [1, 2])]))
    raw.removed(1)  # lost
    listener.receive(raw.stored(None, [(2, [1, 2])]))
    assert listener.receive(raw.removed(2)) == [Removed(names(1, 2))]


def test_numbers_that_begin_anew_clear_and_the_new_engine_is_followed() -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created(), raw.stored(None, [(1, [1, 2])]))
    again = RawEvents()
    assert listener.receive(again.created(32, 0)) == [Cleared()]
    assert listener.receive(again.stored(None, [(4, [8, 8])])) == [Stored(None, names(8, 8))]
    assert listener.replica.named == set(names(8, 8))
    assert listener.mirror.num_blocks == 32


def test_the_smaller_window_of_an_engine_that_began_anew_is_still_not_followed() -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created(), raw.stored(None, [(1, [1, 2])]))
    again = RawEvents()
    listener.receive(again.created(window_size=16))
    again.created()  # lost
    assert listener.receive(again.stored(None, [(1, [1, 2])], window_size=16)) == []
    assert listener.receive(again.stored(None, [(1, [1, 2])])) == [Stored(None, names(1, 2))]


@pytest.mark.parametrize(
    "more",
    [{"extra_id": 4}, {"mm_keys": [{"type": "mm_key", "hash": "00"}]}, {"cache_salt": "tenant"}],
    ids=["extra id", "picture", "salt"],
)
def test_a_block_with_more_than_tokens_in_it_is_not_reported(more: dict[str, Any]) -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created(), raw.stored(None, [(1, [1, 2])]))
    assert listener.receive(raw.stored(1, [(2, [3, 4])], **more), raw.stored(2, [(3, [5, 6])])) == []


@pytest.mark.parametrize("token", [99, 1000, -1])
def test_a_block_with_tokens_that_are_no_text_is_not_reported(token: int) -> None:
    raw, listener = RawEvents(), Listener()
    assert listener.receive(raw.created(), raw.stored(None, [(1, [1, token])])) == []


def test_blocks_with_a_private_request_s_tokens_are_not_reported_nor_what_follows() -> None:
    raw, listener = RawEvents(), Listener()
    listener.receive(raw.created(), raw.stored(None, [(1, [1, 2])]))
    listener.add(1, 2, 3, 4)
    assert listener.receive(raw.stored(None, [(11, [1, 2]), (12, [3, 4])]), raw.stored(12, [(13, [5, 6])])) == []
    assert listener.receive(raw.stored(None, [(5, [2, 2])])), "others are"
    assert listener.receive(raw.removed(13, 12, 11)) == []
    assert listener.receive(raw.removed(1)) == [Removed(names(1, 2))], "and the plain one is still followed"


def test_a_private_request_s_blocks_stay_unreported_beyond_a_gap() -> None:
    raw, listener = RawEvents(), Listener()
    private = listener.add(1, 2)
    listener.receive(raw.created(), raw.stored(None, [(11, [1, 2])]))
    private.close()
    listener.private.forget(float("inf"))
    raw.removed(99)  # lost
    assert listener.receive(raw.stored(11, [(12, [3, 4])])) == []


@pytest.mark.parametrize(
    "item",
    [
        None,
        [],
        {"event_id": 1},
        {"event_id": 1, "data": {"type": "moved"}},
        {"event_id": 1, "data": {"type": "stored", "parent_hash": None, "blocks": [{"block_hash": 1}]}},
        {"event_id": 1, "data": {"type": "created", "num_blocks_per_cache_level": []}},
    ],
)
def test_a_malformed_event_is_refused(item: object) -> None:
    with pytest.raises(UnreadableEventError):
        EventReader(BLOCK_SIZE).read(item)


def test_the_envelope_may_lack_what_there_is_but_one_of() -> None:
    block = stored_block(1, [1, 2])
    event = EventReader(BLOCK_SIZE).read(
        {"event_id": 3, "data": {"type": "stored", "parent_hash": None, "blocks": [block]}}
    )
    assert (event.rank, event.number, event.window_size) == (0, 3, 0)
