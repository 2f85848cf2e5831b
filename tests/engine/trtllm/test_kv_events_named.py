"""Blocks of salts and media, where events say whose they are: reported by the names that routers compute, or not."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.engine.trtllm.kv_events import RankMirror
from quartet.engine.trtllm.private_blocks import PrivateBlocks, PrivateRequest
from quartet.events.kv import Removed, Stored
from quartet.kvcache.block_hash import ExtraKey, MediaSpan, sequence_hashes
from tests.engine.trtllm.kv_truth import BLOCK_SIZE, Listener, RawEvents, names

PLACEHOLDER, BEYOND = 99, 1001
PICTURE, OTHER = bytes([1]) * 32, bytes([2]) * 32


def salted(salt: str, *token_ids: int) -> list[int]:
    return sequence_hashes(token_ids, BLOCK_SIZE, ExtraKey(cache_salt=salt))


def begun() -> tuple[RawEvents, Listener]:
    raw, listener = RawEvents(), Listener(names_private=True)
    listener.receive(raw.created())
    return raw, listener


def keys(*parts: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"type": "mm_key", "hash": name, "start_offset": offset} for name, offset in parts]


def test_a_salted_chain_is_reported_under_its_salt_alone() -> None:
    raw, listener = begun()
    listener.add(1, 2, 3, salt="pepper")
    named = listener.receive(raw.stored(None, [(1, [1, 2]), (2, [3, 4])], cache_salt="pepper"))
    first, second = salted("pepper", 1, 2, 3, 4)
    assert named == [Stored(None, [first, second])]
    assert not listener.replica.named & {*names(1, 2, 3, 4), *salted("salt", 1, 2, 3, 4)}
    assert listener.receive(raw.removed(2, 1)) == [Removed([second, first])]


def test_two_salts_and_none_have_names_of_their_own() -> None:
    raw, listener = begun()
    listener.add(1, 2, salt="a")
    listener.add(1, 2, salt="b")
    told = [raw.stored(None, [(number, [1, 2])], cache_salt=salt) for number, salt in ((1, "a"), (2, "b"))]
    listener.receive(*told)
    assert listener.replica.named == {*salted("a", 1, 2), *salted("b", 1, 2)}
    assert listener.receive(raw.removed(1)) == [Removed(salted("a", 1, 2))]


def test_a_prompt_shorter_than_a_block_is_known_by_its_front() -> None:
    raw, listener = begun()
    listener.add(1, salt="a")
    assert listener.receive(raw.stored(None, [(1, [1, 7])], cache_salt="a")) == [Stored(None, salted("a", 1, 7))]


@pytest.mark.parametrize(
    ("block", "salt"),
    [([1, 3], "a"), ([1, 2], "b"), ([1, 2], "A"), ([1, 2], None)],
    ids=["tokens", "salt", "case", "none"],
)
def test_a_block_of_no_request_of_that_salt_is_not_reported_nor_what_follows(
    block: list[int], salt: str | None
) -> None:
    raw, listener = begun()
    listener.add(1, 2, 3, 4, salt="a")
    assert listener.receive(raw.stored(None, [(1, block), (2, [3, 4])], cache_salt=salt)) == []


@pytest.mark.parametrize("salt", [None, "b"])
def test_a_block_that_lacks_its_sequence_s_salt_is_not_reported(salt: str | None) -> None:
    raw, listener = begun()
    listener.add(1, 2, 3, 4, salt="a")
    listener.receive(raw.stored(None, [(1, [1, 2])], cache_salt="a"))
    assert listener.receive(raw.stored(1, [(2, [3, 4])], cache_salt=salt), raw.stored(2, [(3, [5, 6])])) == []


def test_a_plain_chain_goes_on_plain() -> None:
    raw, listener = begun()
    listener.receive(raw.stored(None, [(1, [1, 2])], cache_salt=None))
    listener.add(1, 2, 3, 4, salt="a")
    assert listener.receive(raw.stored(1, [(2, [3, 4])], cache_salt="a")) == []


def test_a_salt_that_a_request_with_an_adapter_has_too_gets_no_name_meanwhile() -> None:
    raw, listener = begun()
    listener.add(1, 2, salt="a")
    adapted = listener.add(1, 2, salt="a", adapter="poems")
    assert listener.receive(raw.stored(None, [(1, [1, 2])], cache_salt="a")) == []
    adapted.close()
    listener.private.forget(float("inf"))
    assert listener.receive(raw.stored(None, [(2, [1, 2])], cache_salt="a")) == [Stored(None, salted("a", 1, 2))]


def test_releases_that_are_not_trusted_to_name_salts_get_no_names() -> None:
    raw, listener = RawEvents(), Listener()
    listener.add(1, 2, salt="a")
    assert listener.receive(raw.created(), raw.stored(None, [(1, [1, 2])], cache_salt="a")) == []


def test_a_salt_is_forgotten_with_its_requests() -> None:
    raw, listener = begun()
    listener.add(1, 2, salt="a").close()
    listener.private.forget(float("inf"))
    assert listener.receive(raw.stored(None, [(1, [1, 2])], cache_salt="a")) == []


def test_after_a_gap_a_salted_chain_gets_its_names_again() -> None:
    raw, listener = begun()
    listener.add(1, 2, salt="a").close()
    listener.receive(raw.stored(None, [(1, [1, 2])], cache_salt="a"))
    listener.private.forget(float("inf"))
    raw.removed(9)  # lost
    listener.receive(raw.stored(1, [(2, [3, 4])], cache_salt="a"))
    assert listener.replica.named == set(salted("a", 1, 2, 3, 4))


#: A picture of three tokens from the second position on, then text.
TOKENS = (5, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 6)
SPANS = [MediaSpan(PICTURE, 1, 3)]


def pictured(listener: Listener, spans: list[MediaSpan] = SPANS, salt: str = "", **more: Any) -> None:
    listed = [span.media_id.hex() for span in spans]
    listener.add(*TOKENS, salt=salt, media=spans, media_names=listed, **more)


def seen(raw: RawEvents, name: str = PICTURE.hex(), offsets: tuple[int, int] = (0, 1), **more: Any) -> dict[str, Any]:
    """The two blocks with the picture, and one of text."""
    stored = raw.stored(None, [(1, [5, BEYOND]), (2, [BEYOND, BEYOND]), (3, [6, 7])], **more)
    for block, offset in zip(stored["data"]["blocks"], offsets, strict=False):
        block["mm_keys"] = keys((name, offset))
    return stored


@pytest.mark.parametrize("salt", ["", "a"])
def test_a_picture_s_blocks_are_reported_by_its_media_id_and_place(salt: str) -> None:
    raw, listener = begun()
    pictured(listener, salt=salt)
    wanted = sequence_hashes((*TOKENS, 7), BLOCK_SIZE, ExtraKey(cache_salt=salt), SPANS)
    assert listener.receive(seen(raw, cache_salt=salt or None)) == [Stored(None, wanted)]


def test_of_two_pictures_of_one_size_each_has_its_names() -> None:
    raw, listener = begun()
    other = [MediaSpan(OTHER, 1, 3)]
    pictured(listener)
    pictured(listener, other)
    assert listener.receive(seen(raw, OTHER.hex())) == [Stored(None, sequence_hashes((*TOKENS, 7), 2, media=other))]


def test_the_digest_may_stand_for_the_first_token_and_the_name_under_uuid() -> None:
    raw, listener = begun()
    pictured(listener)
    stored = raw.stored(None, [(1, [5, "ab" * 32])])  # type: ignore[list-item]
    stored["data"]["blocks"][0]["mm_keys"] = [{**keys(("ab" * 32, 0))[0], "uuid": PICTURE.hex()}]
    assert listener.receive(stored) == [Stored(None, sequence_hashes(TOKENS[:2], 2, media=[MediaSpan(PICTURE, 1, 1)]))]


def test_the_answer_may_fill_a_picture_s_last_block() -> None:
    raw, listener = begun()
    spans = [MediaSpan(PICTURE, 0, 1)]
    listener.add(PLACEHOLDER, salt="", media=spans, media_names=[PICTURE.hex()])
    stored = raw.stored(None, [(1, [BEYOND, 8])], mm_keys=keys((PICTURE.hex(), 0)))
    assert listener.receive(stored) == [Stored(None, sequence_hashes((PLACEHOLDER, 8), 2, media=spans))]


@pytest.mark.parametrize(
    "said",
    [
        [],
        keys((OTHER.hex(), 0)),
        keys((PICTURE.hex(), 1)),
        keys((PICTURE.hex(), 0), (OTHER.hex(), 0)),
        [{"type": "mm_key", "hash": PICTURE.hex()}],
    ],
    ids=["nothing", "another picture", "another part", "one more", "no part"],
)
def test_a_picture_s_block_that_events_call_otherwise_is_not_reported(said: list[dict[str, Any]]) -> None:
    raw, listener = begun()
    pictured(listener)
    assert listener.receive(raw.stored(None, [(1, [5, BEYOND]), (2, [6, 7])], mm_keys=said)) == []


@pytest.mark.parametrize("block", [[5, 6], [4, BEYOND], [BEYOND, BEYOND]], ids=["text", "another text", "more of it"])
def test_a_block_that_has_the_picture_elsewhere_is_not_reported(block: list[int]) -> None:
    raw, listener = begun()
    pictured(listener)
    assert listener.receive(raw.stored(None, [(1, block)], mm_keys=keys((PICTURE.hex(), 0)))) == []


@pytest.mark.parametrize("salt", ["", "a"])
@pytest.mark.parametrize("name", [PICTURE.hex(), ""])
def test_a_picture_without_a_name_of_ours_is_not_reported(name: str, salt: str) -> None:
    raw, listener = begun()
    listener.add(*TOKENS, salt=salt, media=SPANS)
    assert listener.receive(seen(raw, name, cache_salt=salt or None)) == []


def test_what_is_no_text_behind_a_prompt_that_is_known_is_not_reported() -> None:
    raw, listener = begun()
    listener.add(PLACEHOLDER, salt="", media=[MediaSpan(PICTURE, 0, 1)], media_names=[PICTURE.hex()])
    assert listener.receive(raw.stored(None, [(1, [BEYOND, BEYOND])], mm_keys=keys((PICTURE.hex(), 0)))) == []


def test_a_picture_whose_place_is_unknown_is_not_reported_and_the_text_before_it_is() -> None:
    raw, listener = begun()
    listener.add(1, 2, PLACEHOLDER, 3, salt="a", unknown_from=2)
    stored = raw.stored(None, [(1, [1, 2]), (2, [BEYOND, BEYOND])], cache_salt="a")
    stored["data"]["blocks"][1]["mm_keys"] = keys((PICTURE.hex(), 0))
    assert listener.receive(stored) == [Stored(None, salted("a", 1, 2))]


def test_a_first_block_with_a_picture_at_an_unknown_place_is_not_reported_even_if_it_looks_like_text() -> None:
    raw, listener = begun()
    listener.add(1, PLACEHOLDER, 3, salt="a", unknown_from=1)
    assert listener.receive(raw.stored(None, [(1, [1, 3])], cache_salt="a")) == []


def test_within_a_salt_a_picture_that_looks_like_text_is_not_reported() -> None:
    """A model whose placeholder is an id of its vocabulary, and a release that does not name pictures."""
    raw, listener = begun()
    listener.add(1, 2, 44, 44, salt="a", media=[MediaSpan(PICTURE, 2, 2)], media_names=[PICTURE.hex()])
    stored = raw.stored(None, [(1, [1, 2]), (2, [44, 44])], cache_salt="a")
    assert listener.receive(stored) == [Stored(None, salted("a", 1, 2))]


def test_too_many_blocks_of_requests_that_ended_leave_all_without_names() -> None:
    private = PrivateBlocks(BLOCK_SIZE, max_ended=3, names_private=True)
    mirror, raw = RankMirror(0, private.contents), RawEvents()
    request = PrivateRequest(token_ids=TOKENS, media=SPANS, media_names=[PICTURE.hex()])
    assert private.add(request) is not None
    private.add(request).close()
    assert len(private) == 2, "one start and two blocks are not too many"
    private.add(PrivateRequest(token_ids=[8, 8], salt="a")).close()
    assert len(private) == 1
    reader = Listener()._reader
    for item in (raw.created(), seen(raw), raw.stored(None, [(4, [1, 1])])):
        mirror.apply(reader.read(item))
    assert mirror.take() == []
