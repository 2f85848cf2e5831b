"""Which blocks count as private, and until when."""

from __future__ import annotations

from quartet.engine.trtllm.kv_events import PrivateBlocks
from quartet.kvcache.block_hash import pack_token_ids, sequence_hashes

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
ALWAYS = float("inf")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def blocks(max_ended: int = 8) -> tuple[PrivateBlocks, Clock]:
    clock = Clock()
    return PrivateBlocks(4, clock, max_ended), clock


def test_the_first_block_of_a_salted_prompt_is_private() -> None:
    private, _ = blocks()
    private.add(PROMPT)
    assert private.matches(None, pack_token_ids(PROMPT[:4]))
    assert not private.matches(None, pack_token_ids([1, 2, 3, 5]))
    assert not private.matches(77, pack_token_ids(PROMPT[:4])), "elsewhere in a sequence it is another one"


def test_before_media_blocks_are_plain() -> None:
    private, _ = blocks()
    private.add(PROMPT, first_position=5)
    [first, _] = sequence_hashes(PROMPT, 4)
    assert not private.matches(None, pack_token_ids(PROMPT[:4]))
    assert private.matches(first, pack_token_ids(PROMPT[4:]))


def test_a_block_that_is_not_full_yet_is_private_whatever_fills_it() -> None:
    private, _ = blocks()
    private.add(PROMPT[:2])
    assert private.matches(None, pack_token_ids([1, 2, 9, 9]))
    assert not private.matches(None, pack_token_ids([1, 3, 9, 9]))


def test_a_request_is_remembered_until_all_events_of_its_time_were_read() -> None:
    private, clock = blocks()
    first, second = private.add(PROMPT), private.add(PROMPT)
    private.forget(ALWAYS)
    first.close()
    first.close()
    private.forget(clock.now)
    assert len(private) == 2, "events lag behind"
    private.forget(clock.now + 60)
    assert len(private) == 1
    assert private.matches(None, pack_token_ids(PROMPT[:4])), "the other one runs on"
    second.close()
    private.forget(ALWAYS)
    assert len(private) == 0
    assert not private.matches(None, pack_token_ids(PROMPT[:4]))


def test_too_many_that_ended_make_everything_private_until_events_catch_up() -> None:
    private, clock = blocks(max_ended=2)
    for start in range(3):
        private.add([start, *PROMPT]).close()
    running = private.add(PROMPT)
    assert len(private) == 1, "memory is bounded"
    assert private.matches(None, pack_token_ids([6, 6, 6, 6]))
    private.forget(clock.now + 60)
    assert not private.matches(None, pack_token_ids([6, 6, 6, 6]))
    assert private.matches(None, pack_token_ids(PROMPT[:4]))
    running.close()
