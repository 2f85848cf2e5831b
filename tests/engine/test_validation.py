from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.engine.validation import EngineLimits, MediaLimits, check_request, limits_of
from quartet.errors import InvalidRequestError, LayoutMismatchError, PromptTooLongError, UnsupportedFieldError
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.layout import BlocksPayload, HandOff, OpaquePayload
from tests.engine.fakes import FakeRunner, fake_layout, make_request

LIMITS = EngineLimits(max_model_len=32, num_pool_tokens=24, vocab_size=64)
PREFILL = RequestKind.PREFILL


def _hand_off(payload: BlocksPayload | OpaquePayload) -> HandOff:
    return HandOff(
        hand_off_id=bytes(16),
        secret=bytes(16),
        worker_id="p",
        epoch=1,
        address="a:1",
        time_to_live=timedelta(seconds=1),
        payload=payload,
    )


def _blocks(num_tokens: int) -> HandOff:
    return _hand_off(BlocksPayload(fake_layout(), num_tokens))


@pytest.mark.parametrize(
    "request_",
    [
        make_request([63]),
        make_request(range(24), max_tokens=1),  # the last token needs no room
        make_request(range(5), max_tokens=20),
        make_request(range(24), max_tokens=8, kind=PREFILL),  # others decode it
        make_request(range(5), generated=[1, 2], max_tokens=3),
        make_request(range(5), max_tokens=None),
        make_request(range(5), generated=[1], hand_off=_blocks(5)),
    ],
)
def test_a_possible_request_passes(request_: EngineRequest) -> None:
    check_request(request_, LIMITS)


@pytest.mark.parametrize(
    ("num_tokens", "num_top", "has_media", "passes"),
    [
        (100_000, 0, False, True),
        (100_001, 0, False, False),
        (4_761, 20, False, True),
        (4_762, 20, False, False),
        (2, 0, True, False),
    ],
)
def test_reports_of_prompts_are_bounded_and_without_media(
    num_tokens: int, num_top: int, has_media: bool, passes: bool
) -> None:
    options = OutputOptions(num_prompt_logprobs=num_top)
    if passes:
        options.check_prompt(num_tokens, has_media=has_media)
        return
    with pytest.raises(InvalidRequestError) as caught:
        options.check_prompt(num_tokens, has_media=has_media)
    assert caught.value.field == "output.num_prompt_logprobs"


@pytest.mark.parametrize(("last", "passes"), [(63, True), (64, False), (2**32 - 1, False)])
def test_prompts_that_come_as_arrays_are_checked_alike(last: int, passes: bool) -> None:
    request = make_request([1])
    request = replace(request, generation=replace(request.generation, prompt_token_ids=array("I", [1, last])))
    if passes:
        check_request(request, LIMITS)
        return
    with pytest.raises(InvalidRequestError) as caught:
        check_request(request, LIMITS)
    assert caught.value.field == "prompt_token_ids"


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (make_request([]), InvalidRequestError, "prompt_token_ids"),
        (make_request([1, 64]), InvalidRequestError, "prompt_token_ids"),
        (make_request([1, -1]), InvalidRequestError, "prompt_token_ids"),
        (make_request([1], generated=[64]), InvalidRequestError, "generated_token_ids"),
        (make_request([1], sampling=Sampling(stop_token_ids=(64,))), InvalidRequestError, "sampling.stop_token_ids"),
        (make_request([1], sampling=Sampling(logit_bias={64: 1.0})), InvalidRequestError, "sampling.logit_bias"),
        (make_request([1], generated=[1, 2], max_tokens=2), InvalidRequestError, "generated_token_ids"),
        (make_request(range(25), max_tokens=1), PromptTooLongError, "prompt_token_ids"),
        (make_request(range(25), max_tokens=1, kind=PREFILL), PromptTooLongError, "prompt_token_ids"),
        (make_request(range(20), max_tokens=6), PromptTooLongError, "prompt_token_ids"),
        (make_request(range(20), max_tokens=13, kind=PREFILL), PromptTooLongError, "prompt_token_ids"),
        (make_request([1] * 32, max_tokens=None, kind=PREFILL), PromptTooLongError, "prompt_token_ids"),
        (make_request(range(5), generated=[1], hand_off=_blocks(6)), InvalidRequestError, "hand_off"),
        (make_request([1], hand_off=_blocks(0)), InvalidRequestError, "hand_off"),
        (make_request(range(5), kind=PREFILL, hand_off=_blocks(4)), InvalidRequestError, "hand_off"),
        (make_request(range(5), hand_off=_hand_off(OpaquePayload("x", b""))), LayoutMismatchError, "hand_off"),
    ],
)
def test_an_impossible_request_is_refused_naming_the_field(
    request_: EngineRequest, error: type[InvalidRequestError], field: str
) -> None:
    with pytest.raises(error) as caught:
        check_request(request_, LIMITS)
    assert caught.value.field == field


IMAGE = MediaSpan(bytes(32), 2, 6)
OTHER = MediaSpan(bytes(31) + b"1", 8, 4)
SEES = replace(LIMITS, media=MediaLimits(placeholder_id=63, block_size=4, num_blocks=5))


def _seen(
    spans: Sequence[MediaSpan] = (IMAGE, OTHER),
    blocks: Sequence[Sequence[int]] = ((4, 0), (2,)),
    prompt: Sequence[int] = (1, 2, *[63] * 10, 3),
    generated: Sequence[int] = (),
) -> EngineRequest:
    return make_request(prompt, generated=generated, media=tuple(spans), media_blocks=tuple(map(tuple, blocks)))


@pytest.mark.parametrize(
    "request_",
    [
        _seen(),
        _seen(spans=(OTHER, IMAGE), blocks=((2,), (4, 0))),
        _seen(blocks=()),  # its KV is cached, or comes by hand-off
        _seen(blocks=((4, 0, 1), (2, 3))),
        _seen(generated=(63, 63)),
        _seen(spans=(), blocks=(), prompt=(1, 2, 3), generated=(63,)),
    ],
)
def test_media_that_fits_its_prompt_passes(request_: EngineRequest) -> None:
    check_request(request_, SEES)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (_seen(spans=(IMAGE, replace(OTHER, first_position=7))), "media"),
        (_seen(spans=(IMAGE, replace(OTHER, num_tokens=6))), "media"),
        (_seen(spans=(IMAGE,), blocks=((4, 0),), prompt=(1, 2, *[63] * 5), generated=(63, 63)), "media"),
        (_seen(blocks=((4, 0),)), "media"),
        (_seen(spans=(), prompt=(1,)), "media"),
        (_seen(blocks=((4,), (2,))), "media"),
        (_seen(blocks=((4, 0), ())), "media"),
        (_seen(blocks=((4, 5), (2,))), "media"),
        (_seen(blocks=((4, -1), (2,))), "media"),
        (_seen(prompt=(1, 2, *[63] * 9, 3, 4)), "media"),
        (_seen(spans=(), blocks=(), prompt=(1, 63)), "prompt_token_ids"),
        (_seen(prompt=(1, 2, *[63] * 11)), "prompt_token_ids"),
    ],
)
def test_media_that_does_not_is_refused_naming_the_field(request_: EngineRequest, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(request_, SEES)
    assert caught.value.field == field


@pytest.mark.parametrize("request_", [_seen(), _seen(blocks=()), _seen(spans=())])
def test_media_is_refused_by_a_model_of_text(request_: EngineRequest) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        check_request(request_, LIMITS)
    assert caught.value.field == "media"


def test_prompts_may_be_arrays_and_stay_as_they_are() -> None:
    tuples = _seen()
    prompt = array("I", tuples.generation.prompt_token_ids)
    check_request(replace(tuples, generation=replace(tuples.generation, prompt_token_ids=prompt)), SEES)
    assert tuple(prompt) == tuples.generation.prompt_token_ids


def test_to_a_model_of_text_no_token_is_a_placeholder() -> None:
    check_request(make_request([63, 63]), LIMITS)
    check_request(
        make_request([63, 63]), replace(SEES, media=MediaLimits(placeholder_id=None, block_size=4, num_blocks=1))
    )


def test_limits_are_those_of_the_runner() -> None:
    runner = FakeRunner(num_embedding_blocks=5, placeholder_id=63, num_blocks=6, max_model_len=32)
    assert limits_of(runner) == SEES
    assert limits_of(FakeRunner(num_blocks=6, max_model_len=32)) == LIMITS


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        (Generation(prompt_token_ids=(1,), adapter="a"), "adapter"),
        (Generation(prompt_token_ids=(1,), data_parallel_rank=1), "data_parallel_rank"),
    ],
)
def test_an_option_that_the_engine_lacks_is_refused_not_ignored(generation: Generation, field: str) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        check_request(EngineRequest(id=1, kind=RequestKind.DECODE, generation=generation), LIMITS)
    assert caught.value.field == field
