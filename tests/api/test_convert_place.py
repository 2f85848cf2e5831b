"""Placements on the wire: nothing is lost, and nonsense is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.convert.answer import from_place_request, from_place_response, to_place_request, to_place_response
from quartet.api.placement import PlacedChoice, PlacedRequest
from quartet.api.request import GenerateStart, Relayed, Resume
from quartet.errors import InvalidRequestError, ProtocolError
from quartet.streams.convert.messages import to_signed_decode_start
from quartet.streams.messages import SignedPlacement
from quartet.v1 import router_pb2
from tests.api.strategies import FINISHED, GENERATE_STARTS, PLACEMENTS, SECONDS, TOKEN_ARRAYS
from tests.streams.strategies import LOGPROBS, TEXT, U32
from tests.streams.test_convert import over_the_wire

U64 = st.integers(0, 2**64 - 1)
IDS = st.lists(U32, max_size=3).map(tuple)
RESUMES = st.builds(
    Resume,
    request_id=TEXT,
    attempt=U32,
    seed=U64,
    choice=U32,
    generated_token_ids=TOKEN_ARRAYS,
    num_text_bytes=U64,
    model_fingerprint=TEXT,
)
SIGNED = st.builds(SignedPlacement, address=TEXT, signed_start=st.binary(), key_id=TEXT, mac=st.binary())
CHOICES = st.builds(
    PlacedChoice,
    choice=U32,
    placement=st.none() | PLACEMENTS,
    token_ids=IDS,
    logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
    next=SIGNED | FINISHED,
    num_cached_tokens=U32,
    num_attempts=U32,
    router_queue_s=st.none() | SECONDS,
    prefill_s=st.none() | SECONDS,
    prefill_queue_s=st.none() | SECONDS,
)
PLACED = st.builds(
    PlacedRequest,
    request_id=TEXT,
    attempt=U32,
    seed=U64,
    num_prompt_tokens=U32,
    choices=st.lists(CHOICES, max_size=2).map(tuple),
    model=TEXT,
    model_fingerprint=TEXT,
    prompt_tail_token_ids=IDS,
    tokenize_s=SECONDS,
    sent_at_unix_ns=U64,
)


@given(start=GENERATE_STARTS, resume=st.none() | RESUMES)
def test_a_request_survives(start: GenerateStart, resume: Resume | None) -> None:
    relayed = Relayed(request_id="0f" * 16, prefill_namespaces=("a", "b"), sent_at_unix_ns=5)
    asked, resumed, came = from_place_request(over_the_wire(to_place_request(start, resume, relayed)))
    assert came == relayed
    assert (asked.read(), None if resumed is None else resumed.read()) == (start, resume)


@given(placed=PLACED)
def test_a_placement_survives(placed: PlacedRequest) -> None:
    assert from_place_response(over_the_wire(to_place_response(placed, placed.sent_at_unix_ns))) == placed


@given(signed=SIGNED, slot=U32)
def test_a_signed_start_is_forwarded_unchanged(signed: SignedPlacement, slot: int) -> None:
    message = over_the_wire(to_signed_decode_start(slot, signed))
    assert message.slot == slot
    assert (message.signed_start, message.key_id, message.mac) == (signed.signed_start, signed.key_id, signed.mac)


def test_a_request_without_a_start_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        from_place_request(router_pb2.PlaceRequest())
    assert caught.value.field == "start"


def test_a_choice_that_goes_nowhere_is_refused() -> None:
    with pytest.raises(ProtocolError):
        from_place_response(router_pb2.PlaceResponse(choices=[router_pb2.PlacedChoice()]))
