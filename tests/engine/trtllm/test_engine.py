"""The engine on the stand-in, which really generates: what comes out is what the model says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quartet.engine.base import Finished, FinishReason, Prefilled, RequestKind
from quartet.engine.sampling import Sampling
from tests.engine.fakes import make_request
from tests.engine.trtllm.engines import decode_of, running, stand_in
from tests.fakes.driving import SPELL, STORY, greedy, token_ids_of

PREFILL = RequestKind.PREFILL


@pytest.fixture(autouse=True)
def _stand_in() -> Iterator[None]:
    with stand_in():
        yield


def greedily(max_tokens: int | None, **changes: object) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=max_tokens, **changes)  # type: ignore[arg-type]


async def test_an_answer_is_the_model_s() -> None:
    async with running() as decode:
        request = make_request(token_ids_of(STORY), sampling=greedily(12))
        assert await decode.end_of(request) == Finished(request.id, FinishReason.LENGTH, 12)
        assert decode.tokens_of(request) == greedy(STORY, 12)
        assert decode.consumer.offsets[request.id] == list(range(12))


async def test_decode_goes_on_where_prefill_ended_and_no_token_is_doubled_or_lost() -> None:
    async with running(PREFILL) as prefill, running() as decode:
        request = make_request(token_ids_of(STORY), kind=PREFILL, sampling=greedily(12))
        prefilled = await prefill.end_of(request)
        assert isinstance(prefilled, Prefilled)
        expected = greedy(STORY, 12)
        assert (prefilled.token_id, prefilled.finished, prefilled.block_ids) == (expected[0], None, ())
        assert prefilled.num_tokens == len(token_ids_of(STORY))
        going_on = decode_of(request, prefilled)
        assert await decode.end_of(going_on) == Finished(going_on.id, FinishReason.LENGTH, 12)
        assert decode.tokens_of(going_on) == expected[1:]
        assert decode.consumer.offsets[going_on.id] == list(range(1, 12))
        assert decode.puller.claims[0].has_fetched, "the source is notified that it may release them"
        prefill.engine.release(request.id)


async def test_a_whole_answer_ends_with_its_end_id() -> None:
    async with running() as decode:
        request = make_request(token_ids_of(SPELL), sampling=greedily(64))
        finished = await decode.end_of(request)
        assert (finished.reason, decode.tokens_of(request)) == (FinishReason.STOP_ID, greedy(SPELL, 64))
