"""Everything that repeats in a request is counted before any of it is converted."""

from __future__ import annotations

import pytest

from quartet.api.convert.answer import from_place_request, from_session_start, start_slot
from quartet.api.convert.request import from_generate_start, from_resume
from quartet.errors import InvalidRequestError
from quartet.v1 import router_pb2 as pb
from quartet.v1 import types_pb2

# Impossible each by itself, so converting them in turn would name the first one.
_NO_MESSAGE, _NO_PART, _NO_MEDIA = pb.ChatMessage(), pb.ContentPart(), pb.MediaPart()
_PART = pb.ContentPart(text="a")
_CALL, _NO_TOOL = pb.ToolCall(name="f"), pb.Tool()
_MANY_CALLS = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()] * 4096)
_MANY_PARTS = pb.ChatMessage(role="user", parts=[_NO_PART] * 4096)


def chat(*messages: pb.ChatMessage) -> pb.GenerateStart:
    return pb.GenerateStart(chat=pb.ChatPrompt(messages=messages))


def sampled(**fields: object) -> pb.GenerateStart:
    return pb.GenerateStart(text="Hi", sampling=types_pb2.Sampling(**fields))


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (chat(*[_NO_MESSAGE] * 4097), "chat.messages"),
        (chat(pb.ChatMessage(role="user", parts=[_NO_PART] * 4097)), "chat.messages[0].parts"),
        (chat(pb.ChatMessage(role="user", parts=[_PART]), _MANY_PARTS), "chat.messages[1].parts"),
        (chat(pb.ChatMessage(role="assistant", tool_calls=[_CALL]), _MANY_CALLS), "chat.messages[1].tool_calls"),
        (pb.GenerateStart(chat=pb.ChatPrompt(messages=[_NO_MESSAGE], tools=[_NO_TOOL] * 1025)), "chat.tools"),
        (pb.GenerateStart(token_ids=pb.TokenIds(ids=[1] * ((1 << 20) + 1))), "token_ids.ids"),
        (pb.GenerateStart(text="Hi", media=[_NO_MEDIA] * 4097), "media"),
        (
            pb.GenerateStart(text="Hi", text_options=pb.TextOptions(stop_strings=["a"] * 17)),
            "text_options.stop_strings",
        ),
        (sampled(stop_token_ids=[1] * 1025), "sampling.stop_token_ids"),
        (sampled(logit_bias=dict.fromkeys(range(1025), 999.0)), "sampling.logit_bias"),
    ],
)
def test_too_many_of_anything_are_refused_by_their_number(start: pb.GenerateStart, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"at most|must be in \[0, 1024\]") as caught:
        from_generate_start(start)
    assert caught.value.field == field
    with pytest.raises(InvalidRequestError):
        from_place_request(pb.PlaceRequest(start=start))[0].read()
    with pytest.raises(InvalidRequestError):
        from_session_start(pb.SessionStart(start=start)).start.read()


def test_the_tokens_to_go_on_after_are_counted_too() -> None:
    with pytest.raises(InvalidRequestError, match="at most") as caught:
        from_resume(pb.Resume(generated_token_ids=pb.TokenIds(ids=[1] * ((1 << 20) + 1))))
    assert caught.value.field == "resume.generated_token_ids"


def test_as_many_as_allowed_are_taken() -> None:
    user = pb.ChatMessage(role="user", parts=[pb.ContentPart(text="a")])
    assert len(from_generate_start(chat(*[user] * 4096)).prompt.messages) == 4096  # type: ignore[union-attr]


@pytest.mark.parametrize("slot", [0, 1, 127, 128, 70_000, 2**32 - 1])
def test_the_slot_of_a_start_is_read_from_its_first_bytes(slot: int) -> None:
    for text in ("", "x" * 100_000):
        request = pb.SessionRequest(start=pb.SessionStart(slot=slot, start=pb.GenerateStart(text=text)))
        assert start_slot(request.SerializeToString()[:32]) == slot


@pytest.mark.parametrize("head", [b"", b"\x12\x02\x08\x01", b"\x0a\x05\x08", b"\x0a\x05\x08" + b"\xff" * 29])
def test_what_is_no_start_has_no_slot(head: bytes) -> None:
    assert start_slot(head) is None
