"""Golden vectors for every rule of the hash scheme: constants made by a second, slow implementation, kept here too."""

from __future__ import annotations

import struct
from array import array

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from quartet.errors import InvalidRequestError
from quartet.kvcache.block_hash import (
    ExtraKey,
    MediaSpan,
    chain_hash,
    hash_bytes,
    pack_token_ids,
    sequence_hashes,
)

ITEM_A = bytes(range(32))
ITEM_B = bytes(range(32, 64))


def slow_hash(content: bytes) -> int:
    digest = xxhash.xxh3_64(seed=1337)
    digest.update(content)
    return int.from_bytes(digest.digest(), "big")


def slow_sequence_hashes(
    token_ids: list[int], block_size: int, adapter: str = "", salt: str = "", media: tuple[MediaSpan, ...] = ()
) -> list[int]:
    hashes: list[int] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        content = b"".join(struct.pack("<I", token_id) for token_id in token_ids[start : start + block_size])
        for span in sorted(media, key=lambda span: span.first_position):
            if span.first_position < start + block_size and start < span.first_position + span.num_tokens:
                content += span.media_id + struct.pack("<q", start - span.first_position)
        own = slow_hash(content)
        if hashes:
            own = slow_hash(struct.pack("<QQ", hashes[-1], own))
        elif adapter or salt:
            a, s = adapter.encode(), salt.encode()
            key = slow_hash(struct.pack("<I", len(a)) + a + struct.pack("<I", len(s)) + s)
            own = slow_hash(struct.pack("<QQ", key, own))
        hashes.append(own)
    return hashes


def test_a_first_block_is_named_by_its_own_hash() -> None:
    assert sequence_hashes([1, 2, 3, 4], 4) == [0xCB38E4D7FB2DCA5C]


def test_a_later_block_is_named_by_its_parent_and_its_own_hash() -> None:
    token_ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 2**32 - 1]
    assert sequence_hashes(token_ids, 4) == [0xCB38E4D7FB2DCA5C, 0x44A2B2379D6D3C3D, 0x6A386A9EE77975F8]


@pytest.mark.parametrize(
    ("extra_key", "seed", "hashes"),
    [
        (ExtraKey(adapter="fr-legal"), 0x62162B1269C115DA, [0x31D98E975DE9210B, 0x5477F68531C57182]),
        (ExtraKey(cache_salt="tenant-7"), 0xD52F4CB8CC2254DF, [0xAA91BE92DF32BADC, 0x4BA655CE1A461D98]),
        (ExtraKey("fr-legal", "tenant-7"), 0xAC29FF48B19A345E, [0x51792E5000D27157, 0xCDB6E093BF119D47]),
    ],
)
def test_an_extra_key_is_the_first_blocks_parent(extra_key: ExtraKey, seed: int, hashes: list[int]) -> None:
    assert extra_key.hash_seed == seed
    assert sequence_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4, extra_key) == hashes


def test_an_empty_extra_key_is_no_parent() -> None:
    assert ExtraKey().hash_seed is None


def test_an_extra_keys_digest_is_sha256_of_its_canonical_bytes() -> None:
    assert ExtraKey("fr-legal", "tenant-7").digest.hex() == (
        "237b27149e31a90b61d595a5d473e9736c215b796543ee5b2c2fb91ae47050c5"
    )
    assert ExtraKey().digest.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_adapter_and_salt_cannot_be_shifted_into_each_other() -> None:
    assert ExtraKey("ab", "c").digest != ExtraKey("a", "bc").digest
    assert ExtraKey("ab", "").digest != ExtraKey("", "ab").digest


def test_a_block_that_overlaps_media_hashes_id_and_offset_per_item() -> None:
    media = (MediaSpan(ITEM_A, 2, 4), MediaSpan(ITEM_B, 6, 2))
    expected = [0xE00DC24EED098B77, 0x5CDE31025BEE7ED2]
    assert sequence_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4, media=media) == expected
    assert sequence_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4, media=media[::-1]) == expected


def test_media_touches_no_block_that_it_does_not_overlap() -> None:
    plain = sequence_hashes(range(12), 4)
    with_media = sequence_hashes(range(12), 4, media=(MediaSpan(ITEM_A, 4, 4),))
    assert with_media[0] == plain[0]
    assert with_media[1] != plain[1]
    assert with_media[2] == chain_hash(with_media[1], hash_bytes(pack_token_ids(range(8, 12))))
    assert sequence_hashes(range(6), 4, media=(MediaSpan(ITEM_A, 4, 2),)) == plain[:1]


def test_the_offset_of_an_item_in_its_block_is_part_of_the_hash() -> None:
    names = {tuple(sequence_hashes([7] * 4, 4, media=(MediaSpan(ITEM_A, first, 1),))) for first in range(4)}
    assert len(names) == 4


def test_only_full_blocks_have_a_name() -> None:
    assert sequence_hashes([1, 2, 3], 4) == []
    assert sequence_hashes([], 4) == []
    assert len(sequence_hashes([1] * 7, 4)) == 1


def test_tokens_are_packed_as_little_endian_u32() -> None:
    assert pack_token_ids([1, 0x01020304]) == b"\x01\x00\x00\x00\x04\x03\x02\x01"
    assert pack_token_ids(array("I", [1, 2])) == pack_token_ids([1, 2])


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_number_that_is_no_token_id_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        sequence_hashes([token_id], 1)


@pytest.mark.parametrize(
    ("media_id", "first_position", "num_tokens"), [(b"short", 0, 1), (ITEM_A, -1, 1), (ITEM_A, 0, 0)]
)
def test_an_impossible_media_span_is_refused(media_id: bytes, first_position: int, num_tokens: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        MediaSpan(media_id, first_position, num_tokens)
    assert caught.value.field == "media"


@pytest.mark.parametrize(
    "media", [(MediaSpan(ITEM_A, 0, 3), MediaSpan(ITEM_B, 2, 1)), (MediaSpan(ITEM_A, 7, 2),)], ids=["overlap", "beyond"]
)
def test_media_that_overlaps_or_goes_beyond_the_tokens_is_refused(media: tuple[MediaSpan, ...]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sequence_hashes(range(8), 4, media=media)
    assert caught.value.field == "media"


@given(
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    block_size=st.integers(1, 8),
    adapter=st.sampled_from(["", "a", "été"]),
    salt=st.sampled_from(["", "s", "a"]),
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), max_size=4),
)
def test_the_fast_way_equals_the_slow_one(
    token_ids: list[int], block_size: int, adapter: str, salt: str, lengths: list[tuple[int, int]]
) -> None:
    media: list[MediaSpan] = []
    position = 0
    for gap, num_tokens in lengths:
        if position + gap + num_tokens <= len(token_ids):
            media.append(MediaSpan(bytes([gap]) * 32, position + gap, num_tokens))
            position += gap + num_tokens
    fast = sequence_hashes(token_ids, block_size, ExtraKey(adapter, salt), tuple(media))
    assert fast == slow_sequence_hashes(token_ids, block_size, adapter, salt, tuple(media))
