"""Bad requests are refused by the name of the field, before any worker is touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quartet import errors
from quartet.api.chat import ChatPrompt, ToolChoice
from quartet.api.request import TextOptions, TextPrompt, TokenPrompt
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.errors import InvalidRequestError
from quartet.text.chat_message import ChatMessage, Tool
from quartet.text.chat_template import ChatTemplate
from quartet.text.json_object import JsonObject
from quartet.text.tokenizer import SpecialTokens
from tests.router.fakes import MODEL_TEXT, Fleet, collect
from tests.router.test_generate import make_start

LONG, HALF = JsonObject.of_value({}, 256 * 1024 + 1), JsonObject.of_value({}, 128 * 1024)


def chat(**fields: Any) -> ChatPrompt:
    return ChatPrompt((ChatMessage("user", "hi"),), **fields)


@pytest.mark.parametrize(
    ("template", "tools", "options", "is_refused"),
    [
        ("{{ messages }}", (Tool("f"),), TextOptions(), True),
        ("{{ messages }}{{ tools }}", (Tool("f"),), TextOptions(), True),
        ("{{ messages }}{{ tools }}", (Tool("f"),), TextOptions(raw_text=True), False),
        ("{{ messages }}{{ tools }}<tool_call>", (Tool("f"),), TextOptions(), False),
        ("{{ messages }}", (), TextOptions(), False),
    ],
)
async def test_tools_are_refused_where_they_would_not_be_shown_or_their_calls_not_found(
    template: str, tools: tuple[Tool, ...], options: TextOptions, is_refused: bool
) -> None:
    fleet = Fleet("decode-0")
    fleet.texts.text = replace(MODEL_TEXT, chat_template=ChatTemplate(template, SpecialTokens()))
    for choice in ToolChoice.AUTO, ToolChoice.NONE:
        prompt = chat(tools=tools, tool_choice=choice)
        start = make_start(prompt=prompt, text_options=options, sampling=Sampling(max_tokens=2))
        if is_refused and choice is ToolChoice.AUTO:
            with pytest.raises(errors.UnsupportedFieldError) as caught:
                await collect(fleet.generate(start))
            assert caught.value.field == "chat.tools"
        else:
            assert len((await collect(fleet.generate(start))).token_ids[0]) == 2
    fleet.assert_nothing_left()


_NARROW = ("temperature", "max_tokens")


@pytest.mark.parametrize(
    ("changes", "field", "kind"),
    [
        ({"model": "none"}, "model", errors.ModelNotFoundError),
        ({"prompt": TextPrompt("")}, "text", InvalidRequestError),
        ({"prompt": ChatPrompt(())}, "chat.messages", InvalidRequestError),
        ({"prompt": ChatPrompt((ChatMessage("user", "hi"),))}, "chat.messages", InvalidRequestError),
        ({"prompt": chat(tools=(Tool("f"),) * 1025)}, "chat.tools", InvalidRequestError),
        ({"prompt": chat(tools=(Tool("f"), Tool("g" * 257)))}, "chat.tools[1].name", InvalidRequestError),
        ({"prompt": chat(tools=(Tool("f", "", LONG),))}, "chat.tools[0].parameters", InvalidRequestError),
        ({"prompt": chat(tools=[Tool("f", "", HALF)] * 5)}, "chat.tools", InvalidRequestError),
        ({"prompt": chat(tool_name="f", tools=(Tool("f"),))}, "chat.tool_name", InvalidRequestError),
        (
            {"prompt": chat(tool_choice=ToolChoice.FUNCTION, tool_name="g", tools=(Tool("f"),))},
            "chat.tool_name",
            InvalidRequestError,
        ),
        (
            {"prompt": chat(tool_choice=ToolChoice.FUNCTION, tool_name="f", tools=(Tool("f"),))},
            "chat.tool_choice",
            errors.UnsupportedFieldError,
        ),
        ({"prompt": chat(template_arguments=LONG)}, "chat.template_arguments", InvalidRequestError),
        ({"prompt": TokenPrompt(())}, "token_ids.ids", InvalidRequestError),
        ({"prompt": TokenPrompt((1, MODEL_TEXT.vocab_size))}, "token_ids.ids", InvalidRequestError),
        ({"prompt": TokenPrompt((1,) * 2000)}, "token_ids.ids", errors.PromptTooLongError),
        ({"prompt": TextPrompt("word " * 5000)}, "text", errors.PromptTooLongError),
        ({"prompt": TokenPrompt((1,) * 1001)}, "token_ids.ids", errors.PromptTooLongError),
        ({"sampling": Sampling(max_tokens=982)}, "sampling.max_tokens", errors.PromptTooLongError),
        ({"sampling": Sampling(min_tokens=982)}, "sampling.min_tokens", errors.PromptTooLongError),
        ({"sampling": Sampling(stop_token_ids=(10**6,))}, "sampling.stop_token_ids", InvalidRequestError),
        ({"sampling": Sampling(logit_bias={10**6: 1.0})}, "sampling.logit_bias", InvalidRequestError),
        ({"num_choices": 0}, "num_choices", InvalidRequestError),
        ({"num_choices": 65}, "num_choices", InvalidRequestError),
        ({"timeout_s": 0.0}, "timeout", InvalidRequestError),
        ({"timeout_s": -1.0}, "timeout", InvalidRequestError),
        ({"timeout_s": float("nan")}, "timeout", InvalidRequestError),
        ({"ttft_target_s": -0.001}, "ttft_target", InvalidRequestError),
        ({"itl_target_s": float("inf")}, "itl_target", InvalidRequestError),
        ({"itl_target_s": float("nan")}, "itl_target", InvalidRequestError),
        ({"client_request_id": "é" * 65}, "client_request_id", InvalidRequestError),
        ({"tenant": "x" * 257}, "tenant", InvalidRequestError),
        ({"session_key": "x" * 257}, "session_key", InvalidRequestError),
        ({"cache_salt": "x" * 257}, "cache_salt", InvalidRequestError),
        ({"adapter": "none"}, "adapter", errors.UnsupportedFieldError),
        ({"text_options": TextOptions(stop_strings=("a",) * 17)}, "text_options.stop_strings", InvalidRequestError),
        ({"text_options": TextOptions(stop_strings=("",))}, "text_options.stop_strings", InvalidRequestError),
        ({"text_options": TextOptions(stop_strings=("é" * 513,))}, "text_options.stop_strings", InvalidRequestError),
        (
            {"text_options": TextOptions(stop_strings=("a",), omit_text=True)},
            "text_options.omit_text",
            InvalidRequestError,
        ),
    ],
)
async def test_an_impossible_request_is_refused(
    changes: dict[str, object], field: str, kind: type[errors.ServingError]
) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    with pytest.raises(kind) as caught:
        await collect(fleet.generate(make_start(**changes)))
    assert type(caught.value) is kind
    assert caught.value.field == field
    assert fleet.hops.calls == []
    fleet.assert_nothing_left()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling": Sampling(top_p=0.5)}, "sampling.top_p"),
        ({"sampling": Sampling(logit_bias={1: 1.0})}, "sampling.logit_bias"),
        ({"output": OutputOptions(logprobs=0)}, "output.logprobs"),
        ({"seed": 7}, "seed"),
        ({"output": OutputOptions(num_prompt_logprobs=0)}, "output.num_prompt_logprobs"),
    ],
)
async def test_a_field_that_a_pool_lacks_is_refused_not_ignored(changes: dict[str, object], field: str) -> None:
    fleet = Fleet("prefill-0")
    for worker_id in ("decode-0", "decode-1"):
        fleet.join(worker_id, sampling_fields=_NARROW)
    with pytest.raises(errors.UnsupportedFieldError) as caught:
        await collect(fleet.generate(make_start(**changes)))
    assert caught.value.field == field
    assert fleet.hops.calls == []


@pytest.mark.parametrize("odd", ["decode-1", "prefill-1"])
async def test_a_request_goes_past_one_odd_worker_to_those_that_take_it(odd: str) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    fleet.join(odd, sampling_fields=(), max_model_len=1)
    for _ in range(4):
        answer = await collect(fleet.generate(make_start(sampling=Sampling(top_p=0.5, max_tokens=5))))
        assert answer.finished
    assert odd not in {call.rank.worker_id for call in fleet.hops.calls}


async def test_the_longest_possible_request_is_taken() -> None:
    # 100 blocks of 10 hold all tokens but the last, to which nothing attends.
    fleet = Fleet("decode-0")
    answer = await collect(fleet.generate(make_start(sampling=Sampling(max_tokens=981))))
    assert len(answer.token_ids[0]) == 981


async def test_without_a_name_several_models_are_too_many() -> None:
    fleet = Fleet("decode-0")
    fleet.join("decode-1", model_name="other")
    with pytest.raises(InvalidRequestError, match="name one"):
        await collect(fleet.generate(make_start()))
    assert (await collect(fleet.generate(make_start(model="other")))).finished


@pytest.mark.parametrize("model", ["", "tiny"])
async def test_before_any_worker_came_models_are_not_known_now(model: str) -> None:
    with pytest.raises(errors.ModelUnavailableError) as caught:
        await collect(Fleet().generate(make_start(model=model)))
    assert caught.value.retry_delay_s
