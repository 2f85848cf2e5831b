"""A session's starts survive the wire."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from quartet.api.convert.answer import from_session_start
from quartet.api.convert.request import to_generate_start, to_resume
from quartet.api.request import Resume, SessionStart
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
STARTS = st.builds(SessionStart, slot=U32, start=GENERATE_STARTS, resume=st.none() | RESUMES, traceparent=TEXT)


@given(STARTS)
def test_a_start_survives(asked: SessionStart) -> None:
    message = router_pb2.SessionStart(
        slot=asked.slot,
        start=to_generate_start(asked.start),
        resume=None if asked.resume is None else to_resume(asked.resume),
        traceparent=asked.traceparent,
    )
    came = from_session_start(over_the_wire(message))
    resume = None if came.resume is None else came.resume.read()
    assert replace(came, start=came.start.read(), resume=resume) == asked
