"""Prefills for other routers survive the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.convert.prefill import (
    AskedPrefill,
    PrefilledFor,
    from_prefill_for_request,
    from_prefill_for_response,
    to_prefill_for_request,
    to_prefill_for_response,
)
from quartet.discovery.base import Rank
from quartet.engine.base import Prefilled
from quartet.errors import InvalidRequestError
from quartet.kvcache.layout import HandOff
from quartet.streams.convert.messages import from_prefill_result, to_prefill_result
from quartet.streams.messages import WorkerStart
from quartet.v1 import router_pb2
from tests.streams.strategies import HAND_OFFS, PREFILLED, WORKER_STARTS
from tests.streams.test_convert import assert_context, over_the_wire


@given(WORKER_STARTS)
def test_a_prompt_without_media_survives_and_one_with_media_is_refused(start: WorkerStart) -> None:
    asked = AskedPrefill(model_name="tiny", model_fingerprint="f00d", start=replace(start, hand_off=None))
    message = over_the_wire(to_prefill_for_request(asked))
    if start.media or start.generation.media:
        with pytest.raises(InvalidRequestError, match="media") as refused:
            from_prefill_for_request(message)
        assert refused.value.field == "start.media"
        return
    came = from_prefill_for_request(message)
    context, generation = start.context, start.generation
    assert (came.model_name, came.model_fingerprint) == ("tiny", "f00d")
    assert (came.tenant, came.priority, came.adapter) == (context.tenant, context.priority, generation.adapter)
    assert came.num_tokens == len(generation.prompt_token_ids) + len(generation.generated_token_ids)
    assert came.num_salt_characters == len(generation.cache_salt)
    assert (came.timeout_s is None) == (context.timeout_s is None)
    read = came.read()
    assert_context(read.context, context)
    assert read.generation == generation
    assert came.for_tenant("another").read().context.tenant == "another"


@given(PREFILLED, st.none() | HAND_OFFS)
def test_an_outcome_survives(prefilled: Prefilled, hand_off: HandOff | None) -> None:
    # As it comes from the worker.
    outcome = from_prefill_result(to_prefill_result(prefilled, hand_off))
    given = PrefilledFor(outcome=outcome, rank=Rank("prefill-0", 3))
    came = from_prefill_for_response(over_the_wire(to_prefill_for_response(given)))
    assert (came.rank, to_prefill_result_of(came)) == (given.rank, to_prefill_result_of(given))


def to_prefill_result_of(prefilled: PrefilledFor) -> bytes:
    """The result in bytes: log probabilities hold arrays, which have no equality of their own."""
    return to_prefill_for_response(prefilled).result.SerializeToString(deterministic=True)


def test_a_prefill_of_nothing_or_for_too_long_a_name_is_refused() -> None:
    message = router_pb2.PrefillForRequest(model="tiny")
    with pytest.raises(InvalidRequestError) as refused:
        from_prefill_for_request(message)
    assert refused.value.field == "start"
    message.start.context.tenant = "t" * 257
    with pytest.raises(InvalidRequestError) as refused:
        from_prefill_for_request(message)
    assert refused.value.field == "start.context.tenant"
