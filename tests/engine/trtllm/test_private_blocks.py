"""Which blocks count as private, and until when."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.engine.trtllm.kv_events import LlmBlock
from quartet.engine.trtllm.private_blocks import PrivateBlocks, PrivateRequest
from quartet.kvcache.block_hash import MediaSpan, pack_token_ids, sequence_hashes

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
ALWAYS = float("inf")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def blocks(max_ended: int = 8) -> tuple[PrivateBlocks, Clock]:
    clock = Clock()
    return PrivateBlocks(4, clock, max_ended), clock


def salted(token_ids: Sequence[int]) -> PrivateRequest:
    return PrivateRequest(token_ids=token_ids, salt="pepper")


def is_plain(private: PrivateBlocks, parent: int | None, token_ids: Sequence[int]) -> bool:
    """Whether a block that looks plain has the contents that it seems to have."""
    packed = pack_token_ids(token_ids)
    contents = private.contents(parent, LlmBlock(1, packed))
    assert contents in (None, packed)
    return contents is not None


def test_the_first_block_of_a_salted_prompt_is_private() -> None:
    private, _ = blocks()
    private.add(salted(PROMPT))
    assert not is_plain(private, None, PROMPT[:4])
    assert is_plain(private, None, [1, 2, 3, 5])
    assert is_plain(private, 77, PROMPT[:4]), "elsewhere in a sequence it is another one"


def test_before_media_blocks_are_plain() -> None:
    private, _ = blocks()
    private.add(PrivateRequest(token_ids=PROMPT, media=[MediaSpan(bytes(32), 5, 3)]))
    [first, _] = sequence_hashes(PROMPT, 4)
    assert is_plain(private, None, PROMPT[:4])
    assert not is_plain(private, first, PROMPT[4:])


def test_a_block_that_is_not_full_yet_is_private_whatever_fills_it() -> None:
    private, _ = blocks()
    private.add(salted(PROMPT[:2]))
    assert not is_plain(private, None, [1, 2, 9, 9])
    assert is_plain(private, None, [1, 3, 9, 9])


def test_a_request_is_remembered_until_all_events_of_its_time_were_read() -> None:
    private, clock = blocks()
    first, second = private.add(salted(PROMPT)), private.add(salted(PROMPT))
    private.forget(ALWAYS)
    first.close()
    first.close()
    private.forget(clock.now)
    assert len(private) == 2, "events lag behind"
    private.forget(clock.now + 60)
    assert len(private) == 1
    assert not is_plain(private, None, PROMPT[:4]), "the other one runs on"
    second.close()
    private.forget(ALWAYS)
    assert len(private) == 0
    assert is_plain(private, None, PROMPT[:4])


def test_requests_that_were_forgotten_are_not_too_many() -> None:
    private, _ = blocks(max_ended=2)
    for start in range(5):
        private.add(salted([start, *PROMPT])).close()
        assert is_plain(private, None, [6, 6, 6, 6])
        private.forget(ALWAYS)


def test_too_many_that_ended_make_everything_private_until_events_catch_up() -> None:
    private, clock = blocks(max_ended=2)
    for start in range(3):
        private.add(salted([start, *PROMPT])).close()
    running = private.add(salted(PROMPT))
    assert len(private) == 1, "memory is bounded"
    assert not is_plain(private, None, [6, 6, 6, 6])
    private.forget(clock.now + 60)
    assert is_plain(private, None, [6, 6, 6, 6])
    assert not is_plain(private, None, PROMPT[:4])
    running.close()
