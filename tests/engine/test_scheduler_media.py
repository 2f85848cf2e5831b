"""Prompts with media: computed from embeddings, shared by equal media only, ended where what they need is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from quartet.engine.base import EngineRequest, RequestKind
from quartet.engine.runner import RequestState
from quartet.kvcache.block_hash import MediaSpan
from tests.engine.fakes import expected_output, make_request, write_embeddings
from tests.engine.stepping import Stepper

PLACEHOLDER = 63
NUM_IMAGE_TOKENS = 10


def stepper(**settings: Any) -> Stepper:
    """One whose pool of embeddings has picture ``n`` in blocks ``3 * n .. 3 * n + 2``."""
    made = Stepper(num_embedding_blocks=12, placeholder_id=PLACEHOLDER, **settings)
    assert made.runner.embeddings is not None
    for number in range(4):
        write_embeddings(made.runner.embeddings, blocks_of(number), span_of(number, 0))
    return made


def blocks_of(number: int) -> tuple[int, ...]:
    return tuple(range(3 * number, 3 * number + 3))


def span_of(number: int, first_position: int) -> MediaSpan:
    return MediaSpan(hashlib.sha256(bytes([number])).digest(), first_position, NUM_IMAGE_TOKENS)


def picture_request(
    before: Sequence[int], number: int, after: Sequence[int], *, has_blocks: bool = True, **settings: Any
) -> EngineRequest:
    """A prompt with picture ``number`` between two texts."""
    return make_request(
        [*before, *[PLACEHOLDER] * NUM_IMAGE_TOKENS, *after],
        media=(span_of(number, len(before)),),
        media_blocks=(blocks_of(number),) if has_blocks else (),
        **settings,
    )


def decode_of(stepper: Stepper, before: Sequence[int], number: int, after: Sequence[int]) -> EngineRequest:
    """A decode of a prompt with a picture that was prefilled elsewhere."""
    whole = picture_request(before, number, after, max_tokens=8)
    generated = expected_output(whole.generation)[:1]
    hand_off = stepper.puller.offer_prefix([*whole.generation.prompt_token_ids, *generated], whole.generation.media)
    return picture_request(
        before, number, after, has_blocks=False, generated=generated, hand_off=hand_off, max_tokens=8
    )


def end_pull(stepper: Stepper) -> None:
    [pull] = stepper.pulls
    stepper.pulls.clear()
    stepper.copy(pull)
    stepper.scheduler.end_pull(pull.id, succeeded=True)


def num_cached_tokens(stepper: Stepper, request: EngineRequest) -> int:
    stepper.add(request)
    stepper.step()
    num = stepper.scheduler.live[request.id].num_cached_tokens
    stepper.run()
    assert stepper.outputs[request.id] == expected_output(request.generation)
    return num


@pytest.mark.parametrize("max_num_batched_tokens", [8, 9, 11, 64])
def test_chunks_may_begin_and_end_inside_an_item(max_num_batched_tokens: int) -> None:
    made = stepper(max_num_batched_tokens=max_num_batched_tokens)
    request = picture_request([1, 2, 3], 0, [4, 5])
    made.add(request)
    made.run()
    assert made.outputs[request.id] == expected_output(request.generation)


def test_equal_text_with_equal_media_shares_blocks_and_with_other_media_those_before_it() -> None:
    made = stepper()
    # Blocks of 4: the picture fills positions 6 to 15, blocks 1 to 3.
    assert num_cached_tokens(made, picture_request(range(6), 0, [7, 8])) == 0
    assert num_cached_tokens(made, picture_request(range(6), 0, [7, 8])) == 16
    assert num_cached_tokens(made, picture_request(range(6), 1, [7, 8])) == 4
    assert num_cached_tokens(made, picture_request(range(6), 0, [9, 9, 9])) == 16
    assert num_cached_tokens(made, picture_request(range(7), 0, [7, 8])) == 4


def test_a_cached_prefix_may_end_inside_an_item() -> None:
    made = stepper()
    num_cached_tokens(made, picture_request(range(5), 0, []))
    assert num_cached_tokens(made, picture_request(range(5), 0, [1, 2])) == 12


def test_a_preempted_request_computes_its_media_again() -> None:
    made = stepper(num_blocks=9)
    first, second = (picture_request([n], n, [n], max_tokens=12) for n in (0, 1))
    made.add(first, second)
    made.run()
    assert made.scheduler.num_preemptions > 0
    for request in (first, second):
        assert made.outputs[request.id] == expected_output(request.generation)


def test_without_embeddings_pulled_blocks_are_enough() -> None:
    made = stepper()
    made.add(request := decode_of(made, range(6), 0, [7]))
    made.step()
    end_pull(made)
    made.run()
    assert made.outputs[request.id] == expected_output(request.generation)[1:]
    assert not made.media_lost


@pytest.mark.parametrize("kind", RequestKind)
def test_without_embeddings_cached_blocks_are_enough(kind: RequestKind) -> None:
    made = stepper()
    made.add(picture_request(range(6), 0, [7]))
    made.run()
    made.add(request := picture_request(range(6), 0, [8, 9], has_blocks=False, kind=kind))
    made.run()
    assert made.outputs[request.id] == expected_output(request.generation)[: 1 if kind is RequestKind.PREFILL else None]


@pytest.mark.parametrize("num_cached", [0, 12])
def test_without_embeddings_a_prompt_whose_media_is_not_all_cached_is_lost(num_cached: int) -> None:
    made = stepper()
    if num_cached:
        made.add(picture_request(range(5), 0, []))
        made.run()
    lost = picture_request(range(5), 0, [1, 2], has_blocks=False)
    later = make_request([1, 2])
    made.add(lost, later)
    made.run()
    assert made.media_lost == {lost.id}
    assert made.outputs[later.id] == expected_output(later.generation), "others go on"
    assert made.counts.in_use == 0
    assert not made.scheduler.live


def test_a_hand_off_that_leaves_a_token_of_media_to_compute_is_lost() -> None:
    made = stepper()
    whole = picture_request([1], 0, [])
    hand_off = made.puller.offer_prefix(whole.generation.prompt_token_ids, whole.generation.media)
    made.add(request := picture_request([1], 0, [], has_blocks=False, hand_off=hand_off))
    made.run()
    assert (made.media_lost, made.pulls) == ({request.id}, [])


def _preempt(made: Stepper, request: EngineRequest) -> None:
    """Let ``request`` be pulled, and lose its blocks to one that ranks higher."""
    made.add(request)
    made.step()
    end_pull(made)
    made.step()
    made.add(make_request([9] * 4, max_tokens=25, priority=1))
    while not made.scheduler.num_preemptions:
        made.step()
    assert made.scheduler.live[request.id].state is RequestState.WAITING


def test_preempted_without_embeddings_it_ends_where_its_blocks_were_taken() -> None:
    made = stepper(num_blocks=7)
    _preempt(made, request := decode_of(made, range(6), 0, [7]))
    made.run()
    assert made.media_lost == {request.id}
    shown = made.outputs[request.id]
    assert shown == expected_output(request.generation)[1 : 1 + len(shown)]
    assert made.counts.in_use == 0


def test_preempted_without_embeddings_it_goes_on_where_its_blocks_are_cached_still() -> None:
    made = stepper(num_blocks=7)
    _preempt(made, request := decode_of(made, range(6), 0, [7]))
    for running in list(made.scheduler.running):
        made.scheduler.cancel(running.id)
    made.run()
    assert not made.media_lost
    assert made.outputs[request.id] == expected_output(request.generation)[1:]
