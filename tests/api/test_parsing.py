"""Choices whose text is parsed: the same parts however tokens come, after every retry and every resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.output import ChoiceOutput, OutputSettings, make_outputs
from quartet.api.request import Resume, TextOptions
from quartet.engine.base import FinishReason
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import InvalidRequestError
from quartet.text.chat_message import Tool
from quartet.text.model_text import ModelText
from quartet.text.parsed import GivenParts, OutputParsing, Parsed, ParsedBuilder, ToolCallDelta
from quartet.text.tokenizer import Tokenizer
from tests.text import builders

SETTINGS = OutputSettings(num_prompt_tokens=1, arrived_at=0.0, tokenize_s=0.0, omits_token_ids=False)
REQUEST_ID = "0123456789abcdef0123456789abcdef"
ARGUMENTS = '{"city": "Köln", "days": [1, 2]}'
#: Parsers, an output of theirs, and its reasoning, content and names of calls.
OUTPUTS = [
    (
        ("gpt_oss", "harmony"),
        "<|channel|>analysis<|message|>Schön, hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Moment."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>",
        ("Schön, hm.", "Moment.", ["f"]),
    ),
    (
        ("qwen3", "hermes"),
        "<think>\nSchön, hm.\n</think>\n\nMoment. <tool>"
        + "".join(f'\n<tool_call>\n{{"name": "{name}", "arguments": {ARGUMENTS}}}\n</tool_call>' for name in "fg")
        + "</s>",
        ("Schön, hm.", "Moment. <tool>", ["f", "g"]),
    ),
]


@dataclass
class Shown:
    """Takes deltas, each of which begins where the one before ended."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    parsed: ParsedBuilder = field(default_factory=ParsedBuilder)

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        del choice
        assert token_offset == len(self.token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.text += text

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        raise AssertionError("nobody has asked for them")

    def add_parsed(
        self,
        choice: int,
        token_offset: int,
        token_ids: Sequence[int],
        parsed: Parsed,
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        assert parsed.reasoning or parsed.tool_calls
        self.add(choice, token_offset, token_ids, parsed.text, logprobs)
        self.parsed.add(parsed.reasoning, parsed.tool_calls)

    def resume_from(self) -> Resume:
        """What a client says that has what was shown here."""
        calls = self.parsed.tool_calls
        return Resume(
            request_id=REQUEST_ID,
            attempt=1,
            seed=0,
            generated_token_ids=tuple(self.token_ids),
            num_text_bytes=len(self.text.encode()),
            num_reasoning_bytes=len(self.parsed.reasoning.encode()),
            num_tool_calls=len(calls),
            num_argument_bytes=sum(len(call.arguments.encode()) for call in calls),
        )


@cache
def model_text() -> ModelText:
    backend = builders.byte_level_backend()
    backend.add_special_tokens(["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"])
    backend.add_tokens(["<tool_call>"])
    return ModelText(Tokenizer(backend, builders.SPECIAL_TOKENS), None, (1,), 500)


def parsing(parsers: tuple[str, str], **changes: object) -> OutputParsing:
    format = model_text().output_format(*parsers)
    tools = {name: Tool(name).parameters.value("") for name in "fg"}
    return OutputParsing(format=format, request_id=REQUEST_ID, tools=tools, **changes)  # type: ignore[arg-type]


def make_output(sink: Shown, parsed: OutputParsing, options: TextOptions | None = None) -> ChoiceOutput:
    tokenizer = model_text().tokenizer
    return make_outputs([0], sink, options or TextOptions(), tokenizer, (), SETTINGS, parsed)[0]


def encoded(output: str) -> list[int]:
    return model_text().tokenizer.encode(output, add_special_tokens=False)


def entries(token_ids: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -token_id / 10) for token_id in token_ids]


def run(output: ChoiceOutput, token_ids: Sequence[int], cuts: Sequence[int], overlap: int = 0) -> FinishReason:
    """Give ``token_ids`` in parts that end at ``cuts``; each begins ``overlap`` tokens early, in another attempt."""
    begin = len(output.token_ids)
    for end in sorted({*(cut for cut in cuts if begin < cut < len(token_ids)), len(token_ids)}):
        output.begin_attempt()
        first = max(begin - overlap, 0)
        output.take(first, token_ids[first:end], entries(token_ids[first:end]), float(end))
        begin = end
    return output.finish(FinishReason.STOP_ID).reason


def whole(parsers: tuple[str, str], output: str, choice: int = 0) -> Sequence[ToolCallDelta]:
    """The calls in ``output``, parsed at once."""
    text = parsing(parsers).start(choice)
    return text.join([*text.push(output), *text.finish()]).tool_calls


@pytest.mark.parametrize(("parsers", "output", "parts"), OUTPUTS, ids=["harmony", "hermes"])
@given(
    cuts=st.lists(st.integers(1, 120), max_size=12),
    overlap=st.integers(0, 3),
    streams=st.booleans(),
    resumed_after=st.none() | st.integers(0, max(len(encoded(output)) for _, output, _ in OUTPUTS)),
    stops=st.sampled_from([(), ("never",)]),
)
def test_the_parts_are_the_same_however_tokens_come(
    parsers: tuple[str, str],
    output: str,
    parts: tuple[str, str, list[str]],
    cuts: list[int],
    overlap: int,
    streams: bool,
    resumed_after: int | None,
    stops: tuple[str, ...],
) -> None:
    sink, token_ids, options = Shown(), encoded(output), TextOptions(stop_strings=stops)
    choice = make_output(sink, parsing(parsers, streams_arguments=streams), options)
    if resumed_after is not None:
        known = token_ids[:resumed_after]
        choice.begin_attempt()
        for number, token_id in enumerate(known):
            choice.take(number, [token_id], entries([token_id]), 1.0)
        resume = sink.resume_from()
        choice = make_output(sink, parsing(parsers, streams_arguments=streams), options)
        assert sum(choice.resume(resume)) >= 0
    reason = run(choice, token_ids, cuts, overlap)
    reasoning, content, names = parts
    assert sink.token_ids == token_ids
    assert sink.logprobs == entries(token_ids)
    assert (sink.parsed.reasoning, sink.text) == (reasoning, content)
    calls = sink.parsed.tool_calls
    assert [call.name for call in calls] == names
    assert all(call.is_complete and json.loads(call.arguments) == json.loads(ARGUMENTS) for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    # Those of a choice that nothing interrupts.
    assert [call.id for call in calls] == [call.id for call in whole(parsers, output)]
    assert reason is FinishReason.TOOL_CALLS


def test_the_second_call_is_left_out_where_only_one_is_allowed() -> None:
    parsers, output, _ = OUTPUTS[1]
    sink = Shown()
    run(make_output(sink, parsing(parsers, allows_parallel_calls=False)), encoded(output), [])
    assert [call.name for call in sink.parsed.tool_calls] == ["f"]
    assert sink.text == "Moment. <tool>"


def test_a_stop_string_ends_the_choice_within_its_reasoning_and_shows_what_was_held_back() -> None:
    parsers, output, _ = OUTPUTS[0]
    sink = Shown()
    choice = make_output(sink, parsing(parsers), TextOptions(stop_strings=(", hm",)))
    assert run(choice, encoded(output), []) is FinishReason.STOP_STRING
    assert (sink.parsed.reasoning, sink.text, sink.parsed.tool_calls) == ("Schön", "", ())


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CANCELLED])
def test_a_cut_call_is_left_out_and_the_reason_stays(reason: FinishReason) -> None:
    parsers, output, _ = OUTPUTS[0]
    sink, token_ids = Shown(), encoded(output)[:-3]
    choice = make_output(sink, parsing(parsers))
    choice.begin_attempt()
    choice.take(0, token_ids, entries(token_ids), 1.0)
    assert choice.finish(reason).reason is reason
    assert (sink.parsed.tool_calls, sink.text, sink.token_ids) == ((), "Moment.", token_ids)


def test_a_closing_marker_that_is_cut_is_no_content_and_its_call_is_complete() -> None:
    parsers, output, _ = OUTPUTS[1]
    for cut in ("</tool_", "<", "</tool_call>"):
        sink, token_ids = Shown(), encoded(output[: output.index("</tool_call>")] + cut)
        choice = make_output(sink, parsing(parsers))
        choice.begin_attempt()
        choice.take(0, token_ids, (), 1.0)
        assert choice.finish(FinishReason.LENGTH).reason is FinishReason.LENGTH
        assert ([call.name for call in sink.parsed.tool_calls], sink.text) == (["f"], "Moment. <tool>")


def test_choices_have_ids_of_their_own_and_mistrals_are_as_its_templates_want_them() -> None:
    output = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
    ids: list[str] = []
    for choice in range(2):
        ids += [call.id for call in whole(("", "mistral"), output, choice)]
    assert len(set(ids)) == 4
    assert all(len(one) == 9 and one.isalnum() for one in ids)


def test_what_a_client_has_must_end_between_two_characters() -> None:
    parsers, output, _ = OUTPUTS[0]
    choice = make_output(Shown(), parsing(parsers))
    resume = Resume(
        request_id=REQUEST_ID, attempt=1, seed=0, generated_token_ids=encoded(output), num_reasoning_bytes=4
    )
    with pytest.raises(InvalidRequestError):
        list(choice.resume(resume))


def test_parts_of_calls_are_joined_by_their_numbers() -> None:
    builder = ParsedBuilder()
    builder.add("a", [ToolCallDelta(0, "x", "f", "{"), ToolCallDelta(0, arguments="}", is_complete=True)])
    builder.add("b", [ToolCallDelta(1, "y", "g")])
    builder.add("", [ToolCallDelta(1, arguments="{}", is_complete=True)])
    assert builder.reasoning == "ab"
    assert builder.tool_calls == (ToolCallDelta(0, "x", "f", "{}", True), ToolCallDelta(1, "y", "g", "{}", True))
    assert builder.num_characters == 6


def test_an_end_that_is_said_again_makes_no_call() -> None:
    """As by a router that goes on with an answer whose client has both calls."""
    first, second = ToolCallDelta(0, "x", "f", "{}", True), ToolCallDelta(1, "y", "g", "{}", True)
    builder = ParsedBuilder()
    builder.add("", [first, second])
    builder.add("", [ToolCallDelta(0, is_complete=True), ToolCallDelta(1, is_complete=True)])
    assert builder.tool_calls == (first, second)


@pytest.mark.parametrize(("num_calls", "ends_again"), [(1, [0]), (2, [1])])
def test_only_the_end_of_the_last_call_that_a_client_has_is_said_again(num_calls: int, ends_again: list[int]) -> None:
    calls = [ToolCallDelta(index, f"id{index}", "f", "{}", True) for index in range(num_calls)]
    left = GivenParts(0, 0, num_calls, 2 * num_calls).leave_out(Parsed(tool_calls=calls))
    assert left.tool_calls == [ToolCallDelta(index, is_complete=True) for index in ends_again]
