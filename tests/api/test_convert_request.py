"""Between clients and routers: nothing is lost on the wire, and nonsense is refused."""

from __future__ import annotations

import pytest
from hypothesis import given

from quartet.api.convert.answer import from_generate_response, to_generate_response
from quartet.api.convert.fleet import (
    from_explain_request,
    from_explain_response,
    from_model,
    from_worker_status,
    to_explain_request,
    to_explain_response,
    to_model,
    to_worker_status,
)
from quartet.api.convert.request import from_generate_start, to_generate_start
from quartet.api.fleet import Explanation, Model, WorkerStatus
from quartet.api.request import AnswerPart, ChatPrompt, GenerateStart, TextPrompt, TokenPrompt
from quartet.engine.base import FinishReason
from quartet.engine.sampling import Sampling
from quartet.errors import InvalidRequestError, ProtocolError
from quartet.media.items import MediaUrl
from quartet.text.chat_message import ChatMessage, ToolCall
from quartet.text.json_object import JsonObject
from quartet.v1 import router_pb2, types_pb2
from tests.api import strategies
from tests.streams.test_convert import over_the_wire

HI = TextPrompt("Hi")


@given(strategies.GENERATE_STARTS)
def test_a_start_survives(start: GenerateStart) -> None:
    assert from_generate_start(over_the_wire(to_generate_start(start))) == start


@given(strategies.ANSWER_PARTS)
def test_every_part_of_an_answer_survives(part: AnswerPart) -> None:
    assert from_generate_response(over_the_wire(to_generate_response(part))) == part


@given(strategies.WORKER_STATUSES)
def test_a_workers_status_survives(status: WorkerStatus) -> None:
    assert from_worker_status(over_the_wire(to_worker_status(status))) == status


@given(strategies.EXPLANATIONS)
def test_an_explanation_survives(explanation: Explanation) -> None:
    assert from_explain_response(over_the_wire(to_explain_response(explanation))) == explanation


@given(strategies.GENERATE_STARTS)
def test_an_explain_request_survives(start: GenerateStart) -> None:
    assert from_explain_request(over_the_wire(to_explain_request(start))).read() == start


def test_an_explain_request_without_a_start_and_a_rank_option_without_a_role_are_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        from_explain_request(router_pb2.ExplainRequest())
    assert caught.value.field == "start"
    with pytest.raises(ProtocolError):
        from_explain_response(router_pb2.ExplainResponse(options=[router_pb2.RankOption()]))


@given(strategies.MODELS)
def test_a_model_survives(model: Model) -> None:
    assert from_model(over_the_wire(to_model(model))) == model


def test_absent_fields_of_a_start_have_their_defaults() -> None:
    assert from_generate_start(router_pb2.GenerateStart(text="Hi")) == GenerateStart(prompt=HI)
    chat = router_pb2.ChatPrompt(messages=[router_pb2.ChatMessage(role="user", content="Hi")])
    assert from_generate_start(router_pb2.GenerateStart(chat=chat)).prompt == ChatPrompt((ChatMessage("user", "Hi"),))


def test_pieces_that_are_all_text_come_as_one() -> None:
    start = GenerateStart(prompt=ChatPrompt((ChatMessage("user", ("two ", "", "pieces")),)))
    one = ChatPrompt((ChatMessage("user", "two pieces"),))
    assert from_generate_start(over_the_wire(to_generate_start(start))).prompt == one


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (router_pb2.ChatMessage(content="Hi"), "chat.messages[1].role"),
        (
            router_pb2.ChatMessage(role="user", content="Hi", parts=[router_pb2.ContentPart(text="Hi")]),
            "chat.messages[1].content",
        ),
        (router_pb2.ChatMessage(role="user", parts=[router_pb2.ContentPart()]), "chat.messages[1].parts[0].part"),
        (
            router_pb2.ChatMessage(role="user", parts=[router_pb2.ContentPart(media=router_pb2.MediaPart())]),
            "chat.messages[1].parts[0].media",
        ),
        (
            router_pb2.ChatMessage(
                role="user",
                parts=[
                    router_pb2.ContentPart(text="Hi"),
                    router_pb2.ContentPart(media=router_pb2.MediaPart(data=b"")),
                ],
            ),
            "chat.messages[1].parts[1].media",
        ),
    ],
)
def test_a_message_that_makes_no_sense_is_refused_by_its_field(message: router_pb2.ChatMessage, field: str) -> None:
    first = router_pb2.ChatMessage(role="user", content="Hi")
    with pytest.raises(InvalidRequestError) as caught:
        from_generate_start(router_pb2.GenerateStart(chat=router_pb2.ChatPrompt(messages=[first, message])))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "part", [router_pb2.MediaPart(), router_pb2.MediaPart(url=""), router_pb2.MediaPart(embeddings=b"")]
)
def test_empty_media_are_refused(part: router_pb2.MediaPart) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        from_generate_start(router_pb2.GenerateStart(text="Hi", media=[part]))
    assert caught.value.field == "media"


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (GenerateStart(prompt=HI, seed=-1), "seed"),
        (GenerateStart(prompt=HI, seed=2**64), "seed"),
        (GenerateStart(prompt=TokenPrompt((1, 2**32))), "token_ids.ids"),
        (GenerateStart(prompt=TokenPrompt((-1,))), "token_ids.ids"),
        (GenerateStart(prompt=TextPrompt("\ud800")), None),
        (GenerateStart(prompt=HI, tenant="\ud800"), None),
        (GenerateStart(prompt=HI, media=(MediaUrl("\ud800"),)), None),
        (GenerateStart(prompt=HI, priority=2**31), None),
        (GenerateStart(prompt=HI, sampling=Sampling(stop_token_ids=(-1,))), None),
    ],
)
def test_a_value_that_a_message_cannot_hold_is_refused(start: GenerateStart, field: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        to_generate_start(start)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (ChatMessage("user", "Hi", name="x" * 257), "chat.messages[1].name"),
        (ChatMessage("tool", "Hi", tool_call_id="x" * 257), "chat.messages[1].tool_call_id"),
        (ChatMessage("assistant", "", tool_calls=(ToolCall("f"), ToolCall(""))), "chat.messages[1].tool_calls[1].name"),
        (ChatMessage("assistant", "", tool_calls=(ToolCall("f", id="x" * 257),)), "chat.messages[1].tool_calls[0].id"),
        (
            ChatMessage("assistant", "", tool_calls=(ToolCall("f", JsonObject.of_text("x" * (256 * 1024 + 1))),)),
            "chat.messages[1].tool_calls[0].arguments",
        ),
        (
            ChatMessage("assistant", "", tool_calls=(ToolCall("f", JsonObject.of_text("x" * 131_073)),) * 4),
            "chat.messages[1].tool_calls",
        ),
    ],
)
def test_names_and_calls_of_a_message_are_bounded(message: ChatMessage, field: str) -> None:
    start = to_generate_start(GenerateStart(prompt=ChatPrompt((ChatMessage("user", "Hi"), message))))
    with pytest.raises(InvalidRequestError) as caught:
        from_generate_start(start)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "message",
    [
        router_pb2.GenerateResponse(),
        router_pb2.GenerateResponse(finished=router_pb2.ChoiceFinished()),
        router_pb2.GenerateResponse(delta=router_pb2.Delta(logprobs=[types_pb2.TokenLogprobs(top_token_ids=[1])])),
        router_pb2.GenerateResponse(prompt_logprobs=types_pb2.PromptLogprobs(token_ids=[1], logprobs=[-1.0])),
        router_pb2.GenerateResponse(prompt_logprobs=types_pb2.PromptLogprobs(top_token_ids=[1], top_logprobs=[-1.0])),
    ],
)
def test_an_answer_that_makes_no_sense_is_the_routers_fault(message: router_pb2.GenerateResponse) -> None:
    with pytest.raises(ProtocolError):
        from_generate_response(message)


def test_a_worker_in_no_state_is_the_routers_fault() -> None:
    with pytest.raises(ProtocolError, match="no state"):
        from_worker_status(router_pb2.WorkerStatus())


def test_the_words_for_an_end_are_those_of_the_contract() -> None:
    named = {f"FINISH_REASON_{reason.name}" for reason in FinishReason}
    assert named == set(types_pb2.FinishReason.keys()) - {"FINISH_REASON_UNSPECIFIED"}
