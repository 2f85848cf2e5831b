"""Choosing parsers: by name, by chat template, and what text they must see."""

import pytest

from quartet.errors import ConfigError
from quartet.text.parse import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    OutputParser,
    Reasoning,
    choose_format,
    choose_parsers,
)

KIMI_SECTION = "<|tool_calls_section_begin|>"
KIMI_CALL = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
HERMES_CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

#: Texts of chat templates, and the parsers that they call for.
TEMPLATES = [
    ("<|start|>assistant<|channel|>analysis<|message|>", "gpt_oss", "harmony"),
    ("{{ '<think>' }}</think><tool_call><function=", "qwen3", "qwen3_coder"),
    ("<tool_call></tool_call><|im_start|>", "", "hermes"),
    ("<tool_call></tool_call></think>", "qwen3", "hermes"),
    ("</think><tool_call><arg_key>", "glm45", "glm45"),
    ("<｜tool▁calls▁begin｜><｜tool▁sep｜>\n```json\n</think>", "deepseek_r1", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜><｜tool▁sep｜></think>", "deepseek_v3", "deepseek_v3_1"),
    ("<|tool_calls_section_begin|></think>", "kimi_k2", "kimi_k2"),
    ("<|open|>think<|sep|>", "kimi_k3", "kimi_k3"),
    ("[TOOL_CALLS][INST]", "", "mistral"),
    ("[TOOL_CALLS][THINK]", "mistral", "mistral"),
    ("<|channel>thought<|tool_call>call:", "gemma4", "gemma4"),
    ('<|start_header_id|>{"name": function name, "parameters": {}}', "", "llama3_json"),
    ('<|header_start|>{"name": function name, "parameters": {}}', "", "llama3_json"),
    ("<|header_start|>", "", "pythonic"),
    ("<|im_start|>", "", ""),
]


@pytest.mark.parametrize(("template", "reasoning", "calls"), TEMPLATES)
def test_a_chat_template_calls_for_parsers_that_are_not_named(template: str, reasoning: str, calls: str) -> None:
    assert choose_parsers(chat_template=template) == (reasoning, calls)
    assert choose_parsers("", "hermes", chat_template=template) == ("", "hermes"), "names count first"


@pytest.mark.parametrize(
    ("name", "alias"), [("deepseek_v3_2", "deepseek_v41"), ("harmony", "openai"), ("glm45", "glm47")]
)
def test_other_engines_names_are_known(name: str, alias: str) -> None:
    assert choose_parsers("", alias) == ("", name)
    assert choose_format("", alias) == choose_format("", name)


@pytest.mark.parametrize(
    ("reasoning", "calls"), [("unknown", ""), ("", "unknown"), ("gpt_oss", "hermes"), ("qwen3", "harmony")]
)
def test_parsers_that_are_unknown_or_do_not_go_together_are_refused(reasoning: str, calls: str) -> None:
    with pytest.raises(ConfigError):
        choose_format(reasoning, calls)


def test_a_format_needs_the_special_tokens_it_is_written_with_and_no_others() -> None:
    harmony, gemma, kimi = (
        choose_format("gpt_oss", "harmony"),
        choose_format("gemma4", "gemma4"),
        choose_format("kimi_k3"),
    )
    assert all(map(harmony.needs, ("<|channel|>", "<|call|>", "<|return|>", "<|constrain|>")))
    assert all(map(gemma.needs, ('<|"|>', "<|tool_call>", "<channel|>")))
    assert all(map(kimi.needs, ("<|open|>", "<|sep|>")))
    assert not any(map(choose_format("qwen3", "hermes").needs, ("<|im_end|>", "<|call|>", "")))


@pytest.mark.parametrize(
    ("reasoning", "calls", "output", "events"),
    [
        ("qwen3", "", "<think>\nHm</think>\n\n" + HERMES_CALL, [Reasoning("Hm"), Content(HERMES_CALL)]),
        ("", "hermes", "<think>Hm</think>" + HERMES_CALL, [Content("<think>Hm</think>"), CallBegin(0, "id", "f")]),
        ("gpt_oss", "", "<|channel|>commentary to=functions.f<|message|>{}<|call|>", [Content("{}")]),
        ("", "harmony", "<|channel|>analysis<|message|>Hm<|end|>", [Content("Hm")]),
        (
            "kimi_k3",
            "",
            "<|open|>think<|sep|>Hm<|close|>think<|sep|><|open|>tools<|sep|>",
            [Reasoning("Hm"), Content("<|open|>tools<|sep|>")],
        ),
    ],
)
def test_what_no_parser_is_chosen_for_stays_in_the_content(
    reasoning: str, calls: str, output: str, events: list[object]
) -> None:
    parser = OutputParser(choose_format(reasoning, calls), make_id=lambda: "id")
    found = [*parser.push(output), *parser.finish()]
    rest = [CallArguments(0, "{}"), CallEnd(0)] if isinstance(events[-1], CallBegin) else []
    assert found == [*events, *rest]


@pytest.mark.parametrize(
    ("calls", "output", "content", "num_failed"),
    [
        ("hermes", "Use <tool_call> for it.", "Use <tool_call> for it.", 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>.', None, 1),
        ("hermes", '<tool_call>{"name": "f", "argum', "", 1),
        ("llama3_json", '{"name": "g", "parameters": {}}', None, 0),  # no function of the request
        ("llama3_json", '{"name": "Fox", "color', None, 0),
        ("pythonic", "[1] See the note (of f).", None, 0),
        ("glm45", "<tool_call>is written so", None, 1),
        ("kimi_k2", f"The marker {KIMI_SECTION} opens a section. Then calls follow.", None, 1),
        ("kimi_k2", f"The marker {KIMI_SECTION} opens", None, 1),
        ("kimi_k2", f"A moment.{KIMI_SECTION}", "A moment.", 1),  # cut
        ("kimi_k2", f"A moment.{KIMI_SECTION}\n<|tool_calls_section_end|>", "A moment.", 0),
        ("kimi_k2", f"{KIMI_SECTION}{KIMI_CALL}[1]<|tool_call_end|><|tool_calls_section_end|>", None, 1),
        ("deepseek_v3", "The marker <｜tool▁calls▁begin｜> opens it.<｜tool▁calls▁end｜>", None, 1),
        ("deepseek_v3_1", "The marker <｜tool▁call▁begin｜> opens a call.", None, 1),
        ("deepseek_v3_2", "The marker <｜DSML｜tool_calls> opens a section.", None, 1),
        ("deepseek_v3_2", '<｜DSML｜invoke name="f"> is how a call begins', None, 1),
        ("kimi_k3", "<|open|>is a marker", None, 0),
        ("kimi_k3", "<|open|>tools<|sep|>opens a section", None, 1),
        ("harmony", "<|start|> begins a message", None, 1),
        (
            "harmony",
            "<|channel|>final<|message|>It has <|end|><|start|> between messages",
            "It has <|start|> between messages",
            1,
        ),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>[1]", None, 1),
        ("harmony", "<|channel|>commentary to=python<|message|>print(1)", "", 1),  # a tool of the model's own
    ],
)
def test_what_proves_to_be_no_call_stays_text(calls: str, output: str, content: str | None, num_failed: int) -> None:
    parser = OutputParser(choose_format("", calls), tools={"f": {}})
    events = [*parser.push(output), *parser.finish()]
    assert "".join(event.text for event in events if isinstance(event, Content)) == (
        output if content is None else content
    )
    assert parser.num_failed_calls == num_failed


@pytest.mark.parametrize(
    ("calls", "opening", "begin", "end"),
    [
        ("kimi_k2", KIMI_SECTION, KIMI_CALL, "{}<|tool_call_end|>"),
        ("deepseek_v3_1", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "{}<｜tool▁call▁end｜>"),
        ("deepseek_v3_2", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>"),
        ("kimi_k3", "<|open|>tools<|sep|>", '<|open|>call tool="f"<|sep|>', "<|close|>call<|sep|>"),
    ],
)
def test_a_section_shows_all_calls_and_what_is_none(calls: str, opening: str, begin: str, end: str) -> None:
    call, broken = begin + end, begin + "oops"
    for output, num_calls, num_failed in (
        (opening + call + "\n" + call, 2, 0),
        (opening + broken + call + call, 2, 1),  # the broken one is text
        (opening + call + "and this" + call, 2, 0),
        (opening + "I call" + call, 1, 1),  # what comes before a section's first call is left out, but counted
        (call, 1, 0),
    ):
        parser = OutputParser(choose_format("", calls), tools={"f": {}})
        events = [*parser.push(output), *parser.finish()]
        assert sum(isinstance(event, CallEnd) for event in events) == num_calls, output
        text = "".join(event.text for event in events if isinstance(event, Content))
        assert text == (opening + broken if broken + call in output else "and this" * ("this" in output)), output
        assert parser.num_failed_calls == num_failed, output


@pytest.mark.parametrize(
    ("calls", "output", "is_call"),
    [
        (
            "llama3_json",
            '{"id": "a-1", "type": "function", "name": "f\\u00e9", "parameters": {"a": "b c"}, "id2": 1}',
            False,
        ),
        ("llama3_json", '{"id": "a-1", "type": "function", "name": "f\\u00e9", "parameters": {"a": "b c"}}', True),
        ("llama3_json", '{ "name" : "f\u00e9" , "arguments" : " {}" }', True),
        ("llama3_json", '{"parameters": {}, "name": "f\u00e9"}', False),  # any object may have parameters
        ("llama3_json", '{"name": "f", "parameters": {}}', False),
        ("llama3_json", '{"name": "f\u00e9", "parameters": null}', False),
        ("pythonic", "[ f\u00e9 (a=1), f\u00e9()]", True),
        ("pythonic", "[f\u00e9(a=1), f()]", False),
        ("pythonic", "[f\u00e9('a')]", False),
    ],
)
def test_a_call_that_nothing_marks_names_a_known_function_first(calls: str, output: str, is_call: bool) -> None:
    for deltas in ([output], output):
        parser = OutputParser(choose_format("", calls), tools={"f\u00e9": {}})
        events = [event for delta in deltas for event in parser.push(delta)] + parser.finish()
        assert any(isinstance(event, CallEnd) for event in events) == is_call
        assert "".join(event.text for event in events if isinstance(event, Content)) == ("" if is_call else output)


def test_ids_of_the_model_are_kept_and_others_are_unlike() -> None:
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    mistral = '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc"}]'
    outputs = [("kimi_k2", kimi), ("mistral", mistral), ("hermes", HERMES_CALL), ("hermes", HERMES_CALL)]
    ids = [
        event.id
        for calls, output in outputs
        for event in OutputParser(choose_format("", calls)).push(output)
        if isinstance(event, CallBegin)
    ]
    assert ids[:3] == ["functions.f:7", "123456789", "abc"]
    assert ids[3] != ids[4]


def test_arguments_are_written_anew_as_json() -> None:
    written = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"a":"two\nlines, \\\'quoted\\\'","b":[True,1.50,]}}',
        "pythonic": r"""[f(a='\x41\u00e9"\'', b=[1, {'k': None}], c='''x''y''')]""",
        "gemma4": '<|tool_call>call:f{a:<|"|>"x"\\<|"|>,at:10:30,b:[],c:{}}<tool_call|>',
        "qwen3_coder": "<tool_call><function=f><parameter=n>\n7\n</parameter><parameter=s>\n7\n</parameter></function>",
    }
    schema = {"properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "s": {"type": "string"}}}
    for streams in (False, True):
        shown = {}
        for calls, output in written.items():
            parser = OutputParser(choose_format("", calls), tools={"f": schema}, streams_arguments=streams)
            events = [event for character in output for event in parser.push(character)] + parser.finish()
            shown[calls] = "".join(event.text for event in events if isinstance(event, CallArguments))
        assert shown == {
            "hermes": '{"a": "two\\nlines, \\\\\'quoted\\\\\'", "b": [true, 1.50]}',
            "pythonic": '{"a": "A\\u00e9\\"\'", "b": [1, {"k": null}], "c": "x\'\'y"}',
            "gemma4": '{"a": "\\"x\\"\\\\", "at": "10:30", "b": [], "c": {}}',
            "qwen3_coder": '{"n": 7, "s": "7"}',
        }
