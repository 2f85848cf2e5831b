"""What workers are sent of a request, beside what the client said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quartet import errors
from quartet.engine.base import FinishReason
from quartet.engine.sampling import MAX_STOP_IDS, Sampling
from quartet.text.model_text import ModelText
from router.prepare import RouterRequest
from tests.router.fakes import EOS_ID, MODEL_TEXT, Fleet, Plan, collect
from tests.router.records import ALL_SAMPLING_FIELDS
from tests.router.test_generate import make_start


async def stop_token_ids(sampling: Sampling, **record: object) -> tuple[int, ...]:
    """Those that both workers are sent."""
    fleet = Fleet("prefill-0", "decode-0", **record)
    await collect(fleet.generate(make_start(sampling=sampling)))
    [sent] = {call.start.generation.sampling.stop_token_ids for call in fleet.hops.calls}
    return sent


def make_prepared(text: ModelText, stop_token_ids: tuple[int, ...]) -> RouterRequest:
    request = RouterRequest(make_start(sampling=Sampling(stop_token_ids=stop_token_ids)))
    request.pool = Fleet("decode-0").table.pools(0.0)[0]
    request.text = text
    request.prompt_token_ids = (1, 2)
    request.max_output_tokens = 12
    return request


async def test_workers_get_the_end_of_turn_token_that_only_the_tokenizer_names() -> None:
    assert await stop_token_ids(Sampling(max_tokens=2)) == (EOS_ID,)
    assert await stop_token_ids(Sampling(max_tokens=2, stop_token_ids=(7, EOS_ID, 7))) == (7, EOS_ID)


async def test_a_request_with_ignore_eos_gets_only_its_own_stop_ids() -> None:
    sampling = Sampling(max_tokens=2, ignore_eos=True, stop_token_ids=(7,))
    assert await stop_token_ids(sampling) == (7,)


async def test_workers_that_take_no_stop_ids_get_none() -> None:
    fields = tuple(name for name in ALL_SAMPLING_FIELDS if name != "stop_token_ids")
    assert await stop_token_ids(Sampling(max_tokens=2), sampling_fields=fields) == ()


def test_the_number_of_stop_ids_for_workers_is_bounded() -> None:
    given = tuple(range(EOS_ID + 1, EOS_ID + 1 + MAX_STOP_IDS))
    assert make_prepared(MODEL_TEXT, given).sampling.stop_token_ids == given
    assert make_prepared(MODEL_TEXT, given[1:]).sampling.stop_token_ids == (*given[1:], EOS_ID)


def test_an_end_of_turn_token_outside_the_vocabulary_is_not_sent() -> None:
    text = replace(MODEL_TEXT, eos_token_ids=(MODEL_TEXT.vocab_size, EOS_ID))
    assert make_prepared(text, ()).sampling.stop_token_ids == (EOS_ID,)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_before_min_tokens_an_end_of_sequence_is_a_token_like_any_other_also_after_a_loss(is_lost: bool) -> None:
    fleet = Fleet("decode-0")
    fleet.hops.eos_at = 3
    if is_lost:
        fleet.hops.plan("decode", Plan(error=errors.WorkerUnavailableError("gone"), fail_after=4))
    answer = await collect(fleet.generate(make_start(sampling=Sampling(max_tokens=8, min_tokens=4))))
    assert (answer.finished[0].reason, len(answer.token_ids[0])) == (FinishReason.LENGTH, 8)
