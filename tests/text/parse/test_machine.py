"""Properties of all parsers: any splitting gives the same, nothing hostile hurts, and little is held back."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.text.parse import Event, OutputParser, choose_format
from quartet.text.parse.events import CallArguments, CallBegin, CallEnd, Content, Reasoning
from quartet.text.parse.states import MAX_NAME, MAX_SPACE, QUOTES, Do, Format, Scan, Sink
from tests.text.parse.referee import PARSERS, fixtures, units_of

PAIRS = [
    ("deepseek_r1", "deepseek_v3"),
    ("deepseek_v3", "deepseek_v3_1"),
    ("deepseek_v3", "deepseek_v3_2"),
    ("gemma4", "gemma4"),
    ("glm45", "glm45"),
    ("gpt_oss", "harmony"),
    ("kimi_k2", "kimi_k2"),
    ("kimi_k3", "kimi_k3"),
    ("mistral", "mistral"),
    ("qwen3", "hermes"),
    ("qwen3", "llama3_json"),
    ("qwen3", "pythonic"),
    ("qwen3", "qwen3_coder"),
    ("", "hermes"),
    ("gpt_oss", ""),
    ("", "kimi_k3"),
]
# Of each of dozens of cases.
NUM_EXAMPLES = settings.default.max_examples // 4
TOOLS = {"f": {"properties": {"key": {"type": "string"}, "n": {"type": ["integer", "null"]}}}}

each_format = pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)


def parser(format: Format, *, streams_arguments: bool = False, prompt_end: str = "") -> OutputParser:
    return OutputParser(
        format, prompt_end=prompt_end, tools=TOOLS, streams_arguments=streams_arguments, make_id=lambda: "id"
    )


def merged(events: Iterable[Event]) -> list[tuple[object, ...]]:
    """The events with neighbouring texts of one kind as one."""
    whole: list[list[object]] = []
    for event in events:
        match event:
            case Content(text) | Reasoning(text):
                item = [type(event), 0, text]
            case CallArguments(index, text):
                item = [CallArguments, index, text]
            case CallBegin(index, call_id, name):
                item = [CallBegin, index, call_id, name]
            case CallEnd(index):
                item = [CallEnd, index]
        if whole and isinstance(item[-1], str) and item[0] is not CallBegin and whole[-1][:2] == item[:2]:
            whole[-1][2] = f"{whole[-1][2]}{item[2]}"
        else:
            whole.append(item)
    return [tuple(item) for item in whole]


def run(parser: OutputParser, deltas: Iterable[str]) -> list[Event]:
    events = [event for delta in deltas for event in parser.push(delta)]
    events += parser.finish()
    assert all(event.text for event in events if isinstance(event, Content | Reasoning | CallArguments))
    return events


def markers_of(format: Format) -> list[str]:
    """Also what objects are written with."""
    states = format.states.values()
    markers = {marker for state in states for edge in state.edges for marker in (edge.marker, *edge.follow)}
    quotes = {quote for state in states if state.scan is Scan.OBJECT for quote in QUOTES[state.quoting]}
    return sorted(markers | quotes)


#: What calls are made of, whole and broken.
FRAGMENTS = [
    *(
        "x",
        " ",
        "\n",
        "  \n",
        " " * 70,
        "word",
        "é東🌸",
        "\\",
        '\\"',
        "\\u00",
        "0",
        "-1.5e3",
        "null",
        "True",
        "<",
        "|>",
    ),
    *("f", "functions.f:0", "key", "n", "1", "analysis", "final", "commentary", "assistant", "functions.f", "]", "f("),
    *('{"name": "f", "arguments": {"key": "a"}}', '{"arguments": {"key": "a"}, "name": "f"}', '{"key": "v"}', "{", "}"),
    *(
        '{"name": "f", "parameters": ',
        '{"key": "',
        '"}',
        "key='v', n=None)",
        "[f(key='a'), f(n=1)]",
        ":",
        ",",
        "=",
        '">',
    ),
    *("{key:", ",n:[1,{b:true}]}", "call:f", "get weather", "{}", "()", "''", '"', '{"name": 1}', '{"a": 1} is'),
]


@cache
def samples(calls: str) -> list[list[str]]:
    """Outputs of models that write calls so, in units."""
    families = {family: rules for family, rules in PARSERS.items() if any(rule[2] == calls for rule in rules)}
    units = [units_of(fixture)[0] for fixture in fixtures().values() if fixture.family in families]
    return [unit for unit in units if len(unit) < 200]


@st.composite
def outputs(draw: st.DrawFn, format: Format, calls: str) -> tuple[str, list[str]]:
    """What a model wrote with some units gone, and markers and fragments among them; and the same split."""
    pieces = st.sampled_from([*markers_of(format), *FRAGMENTS])
    units = list(draw(st.one_of(st.sampled_from(samples(calls) or [[]]), st.just([]))))
    for _ in range(draw(st.integers(0, 4 if units else 24))):
        at = draw(st.integers(0, len(units)))
        units[at : at + draw(st.integers(0, 3))] = draw(st.lists(pieces, max_size=2))
    text = "".join(units)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]


@each_format
@pytest.mark.parametrize("streams_arguments", [False, True], ids=["whole calls", "streamed arguments"])
def test_any_splitting_gives_the_same_events(pair: tuple[str, str], streams_arguments: bool) -> None:
    format = choose_format(*pair)

    @settings(max_examples=NUM_EXAMPLES)
    @given(outputs(format, pair[1]), st.sampled_from(["", *format.starts]))
    def check(output: tuple[str, list[str]], prompt_end: str) -> None:
        text, deltas = output
        ways = {"one": [text], "some": deltas, "characters": text}
        results = {
            name: merged(run(parser(format, streams_arguments=streams_arguments, prompt_end=prompt_end), way))
            for name, way in ways.items()
        }
        assert results["some"] == results["one"]
        assert results["characters"] == results["one"]
        check_calls(results["one"], streams_arguments=streams_arguments)

    check()


def check_calls(events: Sequence[tuple[object, ...]], *, streams_arguments: bool) -> None:
    """Calls come one after the other, and a complete one has an object as arguments."""
    begins = [event for event in events if event[0] is CallBegin]
    assert [event[1] for event in begins] == list(range(len(begins)))
    for number, event in enumerate(events):
        if event[0] is CallEnd:
            (begin, _, _, name), (kind, _, arguments) = events[number - 2 : number]
            assert (begin, kind) == (CallBegin, CallArguments)
            assert name
            assert isinstance(json.loads(str(arguments)), dict)
        elif event[0] is CallBegin and not streams_arguments:
            assert events[number + 2] == (CallEnd, event[1])


#: What an answer may begin with: text, and what a call that nothing marks could begin with, but none of ``f`` does.
BEGINNINGS = [
    *(
        "word",
        "[",
        "[f",
        "[f,",
        "[Intro ",
        "{",
        '{ "',
        '{"na',
        '{"name": "',
        '{"name": "f',
        '{"id": "',
        '{"id": "1", "',
    ),
    *('{"type": "', '{"type": ', '{"arguments": {"key": "', '{"parameters": "', '{"name": "f", "arguments": "', "[f('"),
]
#: Calls of ``f`` that nothing marks, up to a text that they may go on with.
CALL_BEGINNINGS = [
    *(
        '{"name": "f", "parameters": {',
        '{"name": "f", "arguments": {"key": "',
        "[f(",
        "[f(key='",
        "[f(key='a'), f(key=\"",
    ),
]
PROSE = "once upon a time there was a quiet rabbit " * 20


def text_of(events: Iterable[Event]) -> str:
    """What a reader sees of them."""
    return "".join(event.text for event in events if isinstance(event, Content | Reasoning))


def count_shown_and_held(parser: OutputParser, deltas: Iterable[str]) -> tuple[int, int]:
    """Characters of text that came with ``deltas``, and that wait: those that would come if the output ended."""
    num_shown = sum(len(text_of(parser.push(delta))) for delta in deltas)
    return num_shown, len(text_of(parser.finish()))


@each_format
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["known functions", "any functions"])
def test_text_waits_only_for_the_longest_marker_and_some_whitespace(
    pair: tuple[str, str], tools: Mapping[str, Mapping[str, object]] | None
) -> None:
    format = choose_format(*pair)
    shows = [
        state
        for state in format.states.values()
        if state.sink in (Sink.CONTENT, Sink.REASONING) or state.scan is Scan.EXPECT
    ]
    # A run of whitespace before a marker, and where another one must follow it, a run between them.
    bound = max(
        MAX_SPACE + len(edge.marker) + (MAX_SPACE + max(map(len, edge.follow)) if edge.follow else 0)
        for state in shows
        for edge in state.edges
    )
    marks_none = any(edge.do is Do.OPEN_UNMARKED for edge in format.states["start"].edges)
    if marks_none:
        bound += MAX_NAME  # one name, or id, and what is written around it
    beginnings = [
        marker[:end] for marker in markers_of(format) for end in (1, len(marker) - 1) if 0 < end < len(marker)
    ]

    def check_held(beginning: str, deltas: Iterable[str], prompt_end: str = "") -> None:
        num_shown, num_held = count_shown_and_held(OutputParser(format, tools=tools, prompt_end=prompt_end), deltas)
        # One call, for as long as it can be one: then nothing at all is shown, and else as of any text.
        may_be_call = marks_none and beginning in CALL_BEGINNINGS and not num_shown
        assert may_be_call or num_held <= bound, deltas

    @settings(max_examples=NUM_EXAMPLES)
    @given(
        st.sampled_from([*BEGINNINGS, *CALL_BEGINNINGS]),
        st.lists(st.sampled_from([*beginnings, "word", " ", "\n", " " * 100, "'", '"', ")", "}", "]"]), max_size=30),
        st.sampled_from(["", PROSE]),
        st.sampled_from(["", *format.starts]),
    )
    def check(beginning: str, pieces: list[str], end: str, prompt_end: str) -> None:
        for deltas in ([beginning, *pieces, end], "".join([beginning, *pieces, end])):
            check_held(beginning, deltas, prompt_end)

    for beginning in (*BEGINNINGS, *CALL_BEGINNINGS):
        check_held(beginning, beginning + PROSE)
    check()


@pytest.mark.parametrize(
    ("calls", "beginning", "end"),
    [("llama3_json", '{"name": "f", "parameters": {"key": "', '" x'), ("pythonic", "[f(key='", "' x")],
)
def test_what_begins_as_a_call_of_a_known_function_waits_until_it_is_none(calls: str, beginning: str, end: str) -> None:
    format = choose_format("", calls)
    whole, streamed = parser(format), parser(format, streams_arguments=True)
    assert whole.push(beginning + PROSE) == []
    assert text_of(whole.push(end)) == beginning + PROSE + end
    assert whole.finish() == []
    begin, arguments = streamed.push(beginning + PROSE)
    assert begin == CallBegin(0, "id", "f")
    assert arguments == CallArguments(0, f'{{"key": "{PROSE}')
    assert not any(isinstance(event, CallEnd) for event in [*streamed.push(end), *streamed.finish()])
    assert (whole.num_failed_calls, streamed.num_failed_calls) == (0, 1)


#: What may stand behind a marker in a text about markers; no call goes on so.
SENTENCES = [
    " begins the next part. ",
    ", as the manual has it, ",
    "` is written\n\nby the model ",
    ". Then the text goes on. ",
]


@each_format
@pytest.mark.parametrize("streams_arguments", [False, True], ids=["whole calls", "streamed arguments"])
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["known functions", "any functions"])
def test_a_text_that_names_markers_loses_no_word(
    pair: tuple[str, str], streams_arguments: bool, tools: Mapping[str, Mapping[str, object]] | None
) -> None:
    format = choose_format(*pair)
    edges = [edge for state in format.states.values() for edge in state.edges]
    markers = [*markers_of(format), *sorted({edge.marker + marker for edge in edges for marker in edge.follow})]

    def check_words(named: Sequence[tuple[str, str]], prompt_end: str) -> None:
        text = "The markers: " + "".join(marker + sentence for marker, sentence in named)
        for deltas in ([text], text):
            events = run(
                OutputParser(format, tools=tools, prompt_end=prompt_end, streams_arguments=streams_arguments), deltas
            )
            assert not any(isinstance(event, CallBegin) for event in events)
            shown, at = text_of(events), 0
            for word in "".join(["The markers: ", *(sentence for _, sentence in named)]).split():
                at = shown.find(word, at) + len(word)
                assert at >= len(word), (text, word)

    @settings(max_examples=NUM_EXAMPLES)
    @given(
        st.lists(st.tuples(st.sampled_from(markers), st.sampled_from(SENTENCES)), max_size=8),
        st.sampled_from(["", *format.starts]),
    )
    def check(named: list[tuple[str, str]], prompt_end: str) -> None:
        check_words(named, prompt_end)

    for marker in markers:
        check_words([(marker, SENTENCES[0])], "")
    check_words([(marker, SENTENCES[0]) for marker in markers], "")
    check()


@each_format
def test_a_text_that_names_a_marker_is_shown_while_it_comes(pair: tuple[str, str]) -> None:
    format = choose_format(*pair)
    markers = markers_of(format)
    # What a section may hold before its first call, with whitespace around it.
    bound = 3 * MAX_SPACE + max(map(len, markers))
    for marker in markers:
        for beginning in ("", "The marker "):
            num_shown, _ = count_shown_and_held(parser(format), beginning + marker + PROSE)
            assert num_shown >= len(beginning + PROSE) - bound, marker


def count_calls(act: Callable[[], object]) -> int:
    """Calls of functions, also of built-in ones, while ``act`` runs."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    profile: Callable[..., object] | None = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(profile)
    return num_calls


class CountingParser(OutputParser):
    """Counts the characters that it reads, those that it reads again among them."""

    num_read = 0

    def _run(self, buffer: str) -> list[Event]:
        self.num_read += len(buffer)
        return super()._run(buffer)


def count_work(format: Format, text: str, *, delta: int, streams_arguments: bool) -> tuple[int, int]:
    """Calls of functions, and characters read."""
    a_parser = CountingParser(format, tools=TOOLS, streams_arguments=streams_arguments)
    deltas = [text[at : at + delta] for at in range(0, len(text), delta)]
    return count_calls(lambda: run(a_parser, deltas)), a_parser.num_read


#: What makes a parser of each family believe that a call has begun.
OPENERS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{",
    "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "deepseek_v3_2": '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="key" string="true">',
    "gemma4": "<|tool_call>call:f{key:",
    "glm45": "<tool_call>f<arg_key>key</arg_key><arg_value>",
    "harmony": "<|channel|>commentary to=functions.f<|message|>{",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument key="key"<|sep|>',
    "mistral": "[TOOL_CALLS]f[ARGS]{",
    "hermes": '<tool_call>{"name": "f", "arguments": {"key": "',
    "llama3_json": '{"name": "f", "arguments": ',
    "pythonic": "[f(key=",
    "qwen3_coder": "<tool_call><function=f><parameter=key>",
}


@pytest.mark.parametrize(
    ("pair", "call"),
    [
        (("glm45", "glm45"), "<tool_call>f{}</tool_call>|<arg_key>key</arg_key><arg_value>{}</arg_value>"),
        (
            ("qwen3", "qwen3_coder"),
            "<tool_call><function=f>{}</function></tool_call>|<parameter=key>{}</parameter>",
        ),
    ],
    ids=["glm45", "qwen3_coder"],
)
def test_a_call_that_gives_an_argument_twice_is_malformed(pair: tuple[str, str], call: str) -> None:
    """Readers of JSON disagree about which of two values counts."""
    whole, argument = call.split("|")
    format = choose_format(*pair)
    for num_arguments, num_failed in ((1, 0), (2, 1)):
        text = whole.format("".join(argument.format(value) for value in "ab"[:num_arguments]))
        for streams_arguments in (False, True):
            a_parser = parser(format, streams_arguments=streams_arguments)
            ends = [event for event in run(a_parser, [text]) if isinstance(event, CallEnd)]
            assert (len(ends), a_parser.num_failed_calls) == (1 - num_failed, num_failed)


@pytest.mark.parametrize("pair", PAIRS[:13], ids=" and ".join)
def test_the_work_is_linear_in_the_length_of_a_hostile_output(pair: tuple[str, str]) -> None:
    format = choose_format(*pair)
    units = [*markers_of(format), *FRAGMENTS[::6], '{"a":', "[[", "a=", '"\\', "x:", "'", "\\x4", " "]
    for number, unit in enumerate(dict.fromkeys(units)):
        for prefix in ("", OPENERS[pair[1]]):
            works = [
                count_work(format, prefix + unit * (length // len(unit)), delta=16, streams_arguments=bool(number % 2))
                for length in (300, 1_500)
            ]
            for few, many in zip(*works, strict=True):
                assert many < 5.5 * few + 1_000, (prefix, unit)


def test_a_megabyte_is_read_once() -> None:
    format = choose_format("qwen3", "hermes")
    for unit in ("<tool_call>{" + "x" * 99, " ", OPENERS["hermes"] + "x" * 99, OPENERS["hermes"] + "x" * 99_999):
        text = unit * (1_000_000 // len(unit))
        a_parser = CountingParser(format)
        run(a_parser, (text[at : at + 1_000] for at in range(0, len(text), 1_000)))
        assert a_parser.num_read < 1.1 * len(text)
