"""A sequence names its blocks as it grows, with the names that everybody else computes."""

from __future__ import annotations

import pytest

from quartet.errors import InvalidRequestError
from quartet.kvcache.block_hash import ExtraKey, MediaSpan, pack_token_ids, sequence_hashes
from quartet.kvcache.sequence import KnownBlocks, Sequence

ITEM = bytes(range(32))


def test_names_equal_those_of_the_whole_prompt_however_it_grew() -> None:
    media = (MediaSpan(ITEM, 3, 6),)
    extra_key = ExtraKey("adapter", "salt")
    seq = Sequence(range(10), block_size=4, extra_key=extra_key, media=media)
    names = [seq.sequence_hash(0)]
    for token_id in range(10, 25):
        seq.append(token_id)
        while len(names) < len(seq) // 4:
            names.append(seq.sequence_hash(len(names)))
    assert names == sequence_hashes(range(25), 4, extra_key, media)


def test_a_name_can_be_asked_for_in_any_order() -> None:
    seq = Sequence(range(12), block_size=4)
    assert seq.sequence_hash(2) == sequence_hashes(range(12), 4)[2]
    assert seq.sequence_hash(0) == sequence_hashes(range(12), 4)[0]


def test_a_blocks_content_is_its_tokens_and_its_media() -> None:
    seq = Sequence(range(8), block_size=4, media=(MediaSpan(ITEM, 5, 2),))
    assert seq.block_content(0) == pack_token_ids(range(4))
    assert seq.block_content(1) == pack_token_ids(range(4, 8)) + ITEM + (-1).to_bytes(8, "little", signed=True)


def test_a_partly_filled_block_has_no_name_yet() -> None:
    seq = Sequence(range(7), block_size=4)
    with pytest.raises(IndexError):
        seq.sequence_hash(1)
    seq.append(7)
    assert seq.sequence_hash(1) == sequence_hashes(range(8), 4)[1]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_partly_filled_block_counts(num_tokens: int, num_blocks: int) -> None:
    assert Sequence(range(num_tokens), block_size=4).num_blocks == num_blocks


def test_media_beyond_the_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sequence(range(4), block_size=4, media=(MediaSpan(ITEM, 3, 2),))
    assert caught.value.field == "media"


def test_known_blocks_are_not_hashed_again_and_later_ones_are() -> None:
    tokens = range(22)
    whole = Sequence(tokens, block_size=4)
    names = sequence_hashes(tokens, 4)
    marked = b"what somebody said of it"
    seq = Sequence(tokens, block_size=4, known=KnownBlocks([marked, whole.block_content(1)], names[:3]))
    assert [seq.block_content(index) for index in range(3)] == [marked, *map(whole.block_content, (1, 2))]
    assert [seq.sequence_hash(index) for index in range(5)] == names
