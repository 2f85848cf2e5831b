"""Failures of requests: which error the caller gets, which side acts on it, and that the engine goes on."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from quartet.engine.base import EngineRequest, Failed, Generation, Prefilled, RequestKind
from quartet.engine.sampling import GrammarKind, GuidedDecoding, Sampling
from quartet.engine.trtllm.errors import failure, refusal
from quartet.errors import (
    EngineError,
    HandOffStateError,
    InvalidRequestError,
    LayoutMismatchError,
    PromptTooLongError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
    TransferError,
    UnsupportedFieldError,
    WorkerUnavailableError,
)
from quartet.kvcache.layout import BlocksPayload, OpaquePayload
from tests.engine.fakes import fake_layout
from tests.engine.trtllm.engines import ON_1_2, Running, asked, decode_of, hand_off_of, running, stand_in
from tests.fakes.driving import STORY, token_ids_of

PREFILL = RequestKind.PREFILL
GUIDED = GuidedDecoding(GrammarKind.REGEX, "(")
_SHORT = {"max_num_tokens": 8, "enable_chunked_prefill": False}


class RequestError(RuntimeError):
    pass


async def error_of(engine: Running, request: EngineRequest) -> ServingError:
    end = await engine.end_of(request)
    assert isinstance(end, Failed), end
    return end.error


async def assert_serves(engine: Running) -> None:
    assert engine.engine.is_alive
    assert not isinstance(
        await engine.end_of(asked("hi", 2, kind=next(iter(engine.engine.capabilities.kinds)))), Failed
    )


@pytest.mark.parametrize(
    ("raised", "kind", "field"),
    [
        (ValueError("require 0 <= top_p <= 1, got 2"), InvalidRequestError, "sampling.top_p"),
        (ValueError("lora_path (x) does not exist."), InvalidRequestError, "adapter"),
        (ValueError("Only one guide can be used for a request"), InvalidRequestError, None),
        (ValueError("The guided decoding regex is wrong"), InvalidRequestError, "sampling.guided"),
        (TypeError("cache_salt must be a str"), InvalidRequestError, "cache_salt"),
        (TypeError("what is that"), InvalidRequestError, None),
        (ValueError("prompt length (9) should not exceed max_num_tokens (8)"), PromptTooLongError, "prompt_token_ids"),
        (
            RequestError("prompt length (9) should not exceed max_num_tokens (8)"),
            PromptTooLongError,
            "prompt_token_ids",
        ),
        (RequestError("refused"), InvalidRequestError, None),
        (RuntimeError("LLM is shutting down"), WorkerUnavailableError, None),
        (RuntimeError("CUDA error"), EngineError, None),
        (AttributeError("what"), EngineError, None),
        (UnsupportedFieldError("ours", field="media"), UnsupportedFieldError, "media"),
    ],
)
def test_an_error_that_a_call_raises_becomes_a_serving_error(
    raised: Exception, kind: type[ServingError], field: str | None
) -> None:
    error = refusal(raised, RequestError)
    assert (type(error), error.field) == (kind, field)
    assert isinstance(raised, ServingError) or str(raised) not in error.message, "it may quote what was asked for"


@pytest.mark.parametrize(
    ("raised", "is_pulling", "kind"),
    [
        (RequestError("KV cache transfer failed"), True, TransferError),
        (RequestError("whatever"), True, TransferError),
        (RequestError("KV cache transfer failed"), False, TransferError),
        (RequestError("The prompt of 9 tokens exceeds max_seq_len"), True, PromptTooLongError),
        (RequestError("KV cache transfer failed: longer than max_tokens_in_buffer"), True, TransferError),
        (
            RequestError("The prompt of 9 tokens exceeds max_seq_len or the KV cache's capacity"),
            False,
            PromptTooLongError,
        ),
        (RequestError("Grammar can't be compiled"), False, InvalidRequestError),
        (RequestError("whatever"), False, EngineError),
        (RuntimeError("LLM is shutting down"), False, WorkerUnavailableError),
        (LayoutMismatchError("ours"), False, LayoutMismatchError),
        (RuntimeError("CUDA error"), True, None),
        (AssertionError(), False, EngineError),
        (AssertionError(), True, EngineError),
    ],
)
def test_an_error_that_a_handle_raises_becomes_a_serving_error(
    raised: Exception, is_pulling: bool, kind: type[ServingError] | None
) -> None:
    request = asked_for(Sampling(guided=GUIDED))
    error = failure(raised, RequestError, request, is_pulling=is_pulling)
    assert type(error) is (kind or type(None))
    if isinstance(raised, AssertionError):
        assert failure(raised, RequestError, request, is_pulling=is_pulling, is_gone=True) is None


def asked_for(sampling: Sampling) -> EngineRequest:
    return EngineRequest(id=1, kind=PREFILL, generation=Generation(prompt_token_ids=(5,), sampling=sampling))


@pytest.mark.parametrize("long_prompt_error", ["request_error", "value_error"])
async def test_a_prompt_beyond_one_step_is_too_long(long_prompt_error: str) -> None:
    with stand_in(long_prompt_error=long_prompt_error):
        async with running(override_engine_args=_SHORT) as decode:
            error = await error_of(decode, asked(STORY))
            assert (type(error), error.field) == (PromptTooLongError, "prompt_token_ids")
            await assert_serves(decode)


async def test_a_failure_of_a_request_is_its_own(package: Any) -> None:
    async with running() as decode:
        decode.control.fail_next_request("something about it")
        assert type(await error_of(decode, asked(STORY))) is EngineError
        await assert_serves(decode)


async def test_a_request_that_the_engine_gives_up_has_timed_out(package: Any) -> None:
    async with running() as decode:
        decode.control.steps.close()
        request = asked(STORY, 64)
        decode.engine.submit(request)
        decode.control.steps.let_through(2)
        await decode.consumer.wait_tokens(request, 1)
        decode.control.time_out_requests()
        decode.control.steps.open()
        end = await decode.consumer.wait_terminal(request)
        assert isinstance(end, Failed)
        assert isinstance(end.error, RequestTimeoutError)


async def test_a_request_that_the_engine_aborts_by_itself_is_cancelled(package: Any) -> None:
    async with running() as decode:
        decode.control.steps.close()
        request = asked(STORY, 64)
        decode.engine.submit(request)
        decode.control.steps.let_through(2)
        await decode.consumer.wait_tokens(request, 1)
        [in_engine] = decode.control._engine._requests
        decode.control._engine.abort(in_engine)
        decode.control.steps.open()
        end = await decode.consumer.wait_terminal(request)
        assert isinstance(end, Failed)
        assert isinstance(end.error, RequestCancelledError)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"adapter": "none"}, "adapter"),
        ({"sampling": Sampling(logit_bias={5: 1.0})}, "sampling.logit_bias"),
        ({"sampling": Sampling(guided=GUIDED)}, "sampling.guided"),
        ({"sampling": Sampling(stop_token_ids=(5_000,))}, "sampling.stop_token_ids"),
        ({"prompt_token_ids": ()}, "prompt_token_ids"),
        ({"prompt_token_ids": (5_000,)}, "prompt_token_ids"),
        ({"prompt_token_ids": (5,) * 5_000}, "prompt_token_ids"),
        ({"generated_token_ids": (5,) * 4}, "generated_token_ids"),
    ],
)
async def test_a_request_that_the_engine_cannot_serve_is_refused_by_its_field(
    package: Any, changes: Any, field: str
) -> None:
    async with running() as decode:
        request = asked(STORY, 4)
        error = await error_of(decode, replace(request, generation=replace(request.generation, **changes)))
        assert isinstance(error, InvalidRequestError)
        assert error.field == field
        await assert_serves(decode)


async def test_a_prefill_takes_no_hand_off(package: Any) -> None:
    async with running(PREFILL) as prefill:
        request = asked(STORY, kind=PREFILL)
        prefilled = await prefill.end_of(request)
        assert (await error_of(prefill, decode_of(request, prefilled, kind=PREFILL))).field == "hand_off"


@ON_1_2
async def test_a_hand_off_is_checked_before_it_is_claimed_and_used_once(package: Any) -> None:
    async with running(PREFILL) as prefill, running() as decode:
        request = asked(STORY, kind=PREFILL)
        prefilled = await prefill.end_of(request)
        assert isinstance(prefilled, Prefilled)
        good = hand_off_of(prefilled)
        opaque = prefilled.opaque or b""
        for payload, kind in (
            (OpaquePayload("other", opaque), LayoutMismatchError),
            (BlocksPayload(fake_layout(), 3), LayoutMismatchError),
            (OpaquePayload("trtllm", opaque.replace(b'"block_size":32', b'"block_size":64')), LayoutMismatchError),
            (OpaquePayload("trtllm", opaque[:20]), InvalidRequestError),
        ):
            error = await error_of(decode, decode_of(request, prefilled, hand_off=replace(good, payload=payload)))
            assert (type(error), error.field) == (kind, "hand_off")
        other = replace(prefilled, token_id=prefilled.token_id + 1)
        assert (await error_of(decode, decode_of(request, other))).field == "hand_off"
        longer = asked(STORY + " and", kind=PREFILL)
        assert (await error_of(decode, decode_of(longer, prefilled))).field == "hand_off"
        assert not decode.puller.claims
        assert not isinstance(await decode.end_of(decode_of(request, prefilled, hand_off=good)), Failed)
        error = await error_of(decode, decode_of(request, prefilled, hand_off=good))
        assert isinstance(error, HandOffStateError)
        await assert_serves(decode)


async def test_blocks_that_prefill_has_released_are_a_failed_transfer_and_the_hand_off_ends(package: Any) -> None:
    async with running(PREFILL) as prefill, running() as decode:
        request = asked(STORY, kind=PREFILL)
        prefilled = await prefill.end_of(request)
        prefill.control.expire_transfers()
        assert type(await error_of(decode, decode_of(request, prefilled))) is TransferError
        [claim] = decode.puller.claims
        await claim.ended.wait()
        assert (claim.has_fetched, claim.num_releases) == (False, 1)
        await assert_serves(decode)


async def test_a_prompt_that_is_too_long_for_the_transfer_is_refused_by_prefill(package: Any) -> None:
    buffer = {"cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": 4}}
    async with running(PREFILL, override_engine_args=buffer) as prefill:
        assert isinstance(await error_of(prefill, asked(STORY, kind=PREFILL)), PromptTooLongError)
        await assert_serves(prefill)


async def test_an_engine_with_another_cache_does_not_pull(package: Any) -> None:
    async with running(PREFILL) as prefill, running(block_size=64) as decode:
        request = asked(STORY, kind=PREFILL)
        prefilled = await prefill.end_of(request)
        assert isinstance(await error_of(decode, decode_of(request, prefilled)), LayoutMismatchError)
        assert not decode.puller.claims


async def test_an_engine_with_another_transceiver_does_not_pull(package: Any) -> None:
    def by(backend: str) -> dict[str, Any]:
        return {"override_engine_args": {"cache_transceiver_config": {"backend": backend}}}

    async with running(PREFILL) as prefill, running(**by("UCX")) as other, running(**by("DEFAULT")) as unknown:
        request = asked(STORY, kind=PREFILL)
        prefilled = await prefill.end_of(request)
        error = await error_of(other, decode_of(request, prefilled))
        assert isinstance(error, LayoutMismatchError)
        assert (error.field, error.message) == (
            "hand_off",
            "the hand-off goes by cache_transceiver_config.backend NIXL, here it is UCX",
        )
        assert not other.puller.claims
        assert not isinstance(await unknown.end_of(decode_of(request, prefilled)), Failed), "variables decide there"


async def test_prompts_as_they_come_from_the_wire_are_taken(package: Any) -> None:
    async with running() as decode:
        request = asked(STORY, 3)
        prompt = array("I", token_ids_of(STORY))
        request = replace(request, generation=replace(request.generation, prompt_token_ids=prompt))
        assert not isinstance(await decode.end_of(request), Failed)
