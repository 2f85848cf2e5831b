"""A session's starts survive the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.convert.answer import from_session_start, to_session_start
from quartet.api.convert.request import to_generate_start
from quartet.api.request import GenerateStart, Relayed, Resume, SessionStart
from quartet.errors import InvalidRequestError
from quartet.v1 import router_pb2
from tests.api.strategies import GENERATE_STARTS, TOKEN_ARRAYS
from tests.streams.strategies import TEXT, U32, U64
from tests.streams.test_convert import over_the_wire

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
RELAYED = st.builds(
    Relayed,
    request_id=st.just("") | st.text("0123456789abcdef", min_size=32, max_size=32),
    prefill_namespaces=st.lists(TEXT.filter(bool), max_size=3, unique=True).map(tuple),
    sent_at_unix_ns=U64,
).filter(lambda relayed: relayed != Relayed())
STARTS = st.builds(
    SessionStart,
    slot=U32,
    start=GENERATE_STARTS,
    resume=st.none() | RESUMES,
    traceparent=TEXT,
    relayed=st.none() | RELAYED,
)


@given(STARTS)
def test_a_start_survives(asked: SessionStart) -> None:
    assert isinstance(asked.start, GenerateStart)
    message = to_session_start(
        asked.slot,
        to_generate_start(asked.start),
        asked.resume,
        asked.traceparent,
        asked.relayed or Relayed(),
    )
    came = from_session_start(over_the_wire(message))
    resume = None if came.resume is None else came.resume.read()
    assert replace(came, start=came.start.read(), resume=resume) == asked


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": "F" * 32}, "request_id"),
        ({"prefill_namespaces": [f"n{number}" for number in range(65)]}, "prefill_namespaces"),
        ({"prefill_namespaces": ["n", "m", "n"]}, "prefill_namespaces"),
    ],
)
def test_what_names_no_request_is_refused(fields: dict[str, object], field: str) -> None:
    start = router_pb2.GenerateStart(text="a")
    with pytest.raises(InvalidRequestError) as refused:
        from_session_start(router_pb2.SessionStart(start=start, **fields))
    assert refused.value.field == field
