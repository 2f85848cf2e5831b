"""The tables of the families: reasoning between markers, and tool calls.

Sources: the models' published chat templates and encoders. What is accepted beyond them is what models are known to
write: a closing tag left out, a call without its opening marker, a value that quotes the markers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quartet.text.parse.states import BACK, KEY, NAME, NOISE, WORD, Do, Edge, Format, Quoting, Scan, Sink, State, trie


@dataclass(frozen=True)
class ReasoningTable:
    """Reasoning that markers enclose, ``pairs`` of opener and closer, where an output begins."""

    pairs: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    strips: bool = False  # whitespace around them is the template's, not the model's
    is_anywhere: bool = False  # the first pair may also enclose reasoning within content


#: Tool calls between content: states by name. ``content``: the edges out of content; ``start``: those where content
#: begins; ``reasoning``: those of models that forget to end their reasoning before a call.
CallTable = Mapping[str, State]


def join_tables(reasoning: ReasoningTable | None, calls: CallTable | None) -> Format:
    """The format of models that write reasoning and calls so; ``None``: it stays in the content."""
    reasoning = reasoning or ReasoningTable(())
    states, starts, strips = dict(calls or {}), {}, reasoning.strips
    content, start, in_reasoning = (states.get(name, State()).edges for name in ("content", "start", "reasoning"))
    states[BACK] = states["after_call"] = _expect(otherwise="content", drops_space=any(edge.strips for edge in content))
    states["answer"] = _expect(*start, otherwise="content", drops_space=strips)
    for number, (opener, closer) in enumerate(reasoning.pairs):
        name, begin = f"reasoning_{number}", f"begin_reasoning_{number}"
        states[name] = State((Edge(closer, "answer", strips=strips), *in_reasoning), sink=Sink.REASONING)
        # The model may repeat what the template has written.
        states[begin] = _expect(Edge(opener, name), otherwise=name, drops_space=strips)
        starts[opener] = begin
        start += (Edge(opener, begin),)
        if reasoning.is_anywhere and not number:
            content += (Edge(opener, begin, strips=strips),)
    states["start"] = _expect(*start, otherwise="content", drops_space=False)
    states["content"] = State(content, sink=Sink.CONTENT)
    return Format(states, starts=starts)


def _expect(*edges: Edge, otherwise: str | None = None, drops_space: bool = True, skips_cut: bool = False) -> State:
    return State(edges, Scan.EXPECT, otherwise=otherwise, drops_space=drops_space, skips_cut=skips_cut)


def _field(*edges: Edge, shape: str = KEY) -> State:
    is_value = any(edge.do is Do.VALUE for edge in edges)
    return State(edges, sink=Sink.FIELD, shape=None if is_value else shape)


# <tool_call>{"name": "f", "arguments": {}}</tool_call>
HERMES: CallTable = {
    "content": State((Edge("<tool_call>", "open", Do.OPEN, strips=True),)),
    "open": _expect(Edge("{", "call", keeps=True)),
    "call": State(scan=Scan.CALL, then="close"),
    "close": _expect(Edge("</tool_call>", BACK), otherwise=BACK, skips_cut=True),
}

# {"name": "f", "parameters": {}}, perhaps after <|python_tag|>; several with ; between
LLAMA3_JSON: CallTable = {
    "content": State((Edge("<|python_tag|>", "open", Do.OPEN),)),
    "open": _expect(Edge("{", "call", keeps=True)),
    "call": State(scan=Scan.CALL, then="close"),
    "close": _expect(Edge(";", "next"), otherwise="content", drops_space=False),
    "next": _expect(Edge("{", "call", Do.OPEN_UNMARKED, keeps=True), otherwise="content", drops_space=False),
    "start": State((Edge("{", "call", Do.OPEN_UNMARKED, keeps=True),)),
}

# [f(a=1), g()], perhaps between <|python_start|> and <|python_end|>
PYTHONIC: CallTable = {
    "content": State((Edge("<|python_start|>", "open", Do.OPEN),)),
    "open": _expect(Edge("[", "callee")),
    "callee": _field(Edge("(", "keywords", Do.NAME, keeps=True), shape=rf"(?![\d.\-]){WORD}"),
    "keywords": State(scan=Scan.OBJECT, quoting=Quoting.PYTHON, then="more", ends=False),
    "more": _expect(Edge(",", "callee", Do.NEXT), Edge("]", "close", ends=True)),
    "close": _expect(Edge("<|python_end|>", "content"), otherwise="content", drops_space=False, skips_cut=True),
    "start": State((Edge("[", "callee", Do.OPEN_UNMARKED),)),
}

# [TOOL_CALLS]f[ARGS]{}, perhaps with [CALL_ID]id before [ARGS]; or [TOOL_CALLS][{"name": "f", "arguments": {}}]
MISTRAL: CallTable = {
    "content": State((Edge("[TOOL_CALLS]", "open", Do.OPEN),)),
    "open": _expect(Edge("[", "list"), otherwise="name"),
    "list": _expect(Edge("{", "call", Do.OPEN, keeps=True), Edge(",", "list"), Edge("]", BACK)),
    "call": State(scan=Scan.CALL, then="after_listed"),
    "after_listed": _expect(Edge(",", "list"), Edge("]", BACK), otherwise=BACK),
    "name": _field(
        Edge("[ARGS]", "arguments", Do.NAME, strips=True),
        Edge("[CALL_ID]", "id", Do.NAME, strips=True),
        Edge("{", "arguments", Do.NAME, keeps=True, strips=True),
        shape=NAME,
    ),
    "id": _field(Edge("[ARGS]", "arguments", Do.ID), shape=NAME),
    "arguments": State(scan=Scan.OBJECT),
}


def _calls_in(section: Sequence[Edge], calls: Sequence[Edge], ends: Sequence[Edge], *closers: str) -> CallTable:
    """Calls, also outside of their ``section``, up to one of its ``ends``. After a call, and its ``closers``: more."""
    return {
        "content": State((*section, *calls)),
        "section": _field(*calls, *(replace(end, do=Do.END_SECTION) for end in ends), shape=NOISE),
        "more": _expect(*calls, *ends, *(Edge(m, "more") for m in closers), otherwise="content", skips_cut=True),
    }


def _section(markers: Sequence[str], fields: Mapping[str, State], *closers: str) -> CallTable:
    """Calls with JSON arguments; ``markers`` of section and call, begin and end; ``fields``: before the arguments."""
    begin, end, call_begin, call_end = markers
    section, calls = Edge(begin, "section", Do.OPEN), Edge(call_begin, next(iter(fields)), Do.OPEN)
    where = _calls_in([section], [calls], [Edge(end, "content")], *closers, call_end)
    return {**where, **fields, "arguments": State(scan=Scan.OBJECT, then="more")}


_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_TYPE = _field(Edge("<｜tool▁sep｜>", "name"), shape=NAME)
_DEEPSEEK_NAME = _field(Edge("\n```json\n", "arguments", Do.NAME), shape=NAME)
DEEPSEEK_V3 = _section(_DEEPSEEK_SECTION, {"type": _DEEPSEEK_TYPE, "name": _DEEPSEEK_NAME}, "```")
DEEPSEEK_V31 = _section(_DEEPSEEK_SECTION, {"name": _field(Edge("<｜tool▁sep｜>", "arguments", Do.NAME), shape=NAME)})
_KIMI_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ID = _field(Edge("<|tool_call_argument_begin|>", "arguments", Do.NAMED_ID), shape=NAME)
KIMI_K2 = _section(_KIMI_SECTION, {"id": _KIMI_ID})


def _dsml_calls() -> CallTable:
    """DeepSeek 3.2 and later: names of sections differ, and 4.1 writes a space before each tag's name."""
    sections = ("function_calls", "tool_calls", " calls")
    invokes, parameters = ([f"<｜DSML｜{space}{tag}" for space in ("", " ")] for tag in ("invoke", "parameter"))
    ends = [f"</{invoke[1:]}>" for invoke in invokes]
    follow = (*parameters, *ends)
    begins = [Edge(f"<｜DSML｜{name}>", "section", Do.OPEN, strips=True) for name in sections]
    calls = [Edge(f'{invoke} name="', "name", Do.OPEN, strips=True) for invoke in invokes]
    next_parameter = [Edge(f'{name} name="', "key") for name in parameters]
    return {
        **_calls_in(begins, calls, [Edge(f"</｜DSML｜{name}>", "after_call") for name in sections]),
        "name": _field(Edge('">', "parameters", Do.NAME), Edge('"/>', "more", Do.NAME, ends=True), shape=NAME),
        "parameters": _expect(*next_parameter, *(Edge(end, "more", ends=True) for end in ends)),
        "key": _field(
            Edge('" string="true">', "value", Do.KEY_OF_STRING),
            Edge('" string="false">', "value", Do.KEY_OF_JSON),
            Edge('">', "value", Do.KEY),
        ),
        "value": _field(*(Edge(f"</{name[1:]}>", "parameters", Do.VALUE, follow=follow) for name in parameters)),
    }


DEEPSEEK_DSML = _dsml_calls()

# <tool_call><function=f><parameter=key>value</parameter></function></tool_call>
_PARAMETERS_FOLLOW = ("<parameter=", "</function>")
_XML_OPENERS = Edge("<tool_call>", "open", Do.OPEN, strips=True), Edge("<function=", "name", Do.OPEN, strips=True)
QWEN3_XML: CallTable = {
    "content": State(_XML_OPENERS),
    "reasoning": State(_XML_OPENERS),
    "open": _expect(Edge("<function=", "name")),
    "name": _field(Edge(">", "parameters", Do.NAME), shape=NAME),
    "parameters": _expect(Edge("<parameter=", "key"), Edge("</function>", "close", ends=True)),
    "key": _field(Edge(">", "value", Do.KEY), Edge(">\n", "value", Do.KEY)),
    "value": _field(
        Edge("\n</parameter>", "parameters", Do.VALUE, follow=_PARAMETERS_FOLLOW),
        Edge("</parameter>", "parameters", Do.VALUE, follow=_PARAMETERS_FOLLOW),
        # Left out at times; a value can hold both, but then hardly at the beginning of a line.
        Edge("\n<parameter=", "key", Do.VALUE),
        Edge("\n</function>", "close", Do.VALUE, ends=True, follow=("</tool_call>",)),
    ),
    "close": _expect(Edge("</tool_call>", BACK), otherwise=BACK, skips_cut=True),
}

# <tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
GLM: CallTable = {
    "content": State((Edge("<tool_call>", "name", Do.OPEN, strips=True),)),
    "name": _field(
        Edge("<arg_key>", "key", Do.NAME, strips=True),
        Edge("</tool_call>", BACK, Do.NAME, ends=True, strips=True),
        shape=NAME,
    ),
    "key": _field(Edge("</arg_key>", "after_key", Do.KEY)),
    "after_key": _expect(Edge("<arg_value>", "value")),
    "value": _field(
        Edge("</arg_value>", "after_value", Do.VALUE, follow=("<arg_key>", "</tool_call>")),
        Edge("</tool_call>", BACK, Do.VALUE, ends=True, follow=("<tool_call>",)),  # its end left out
    ),
    "after_value": _expect(Edge("<arg_key>", "key"), Edge("</tool_call>", BACK, ends=True)),
}

# <|tool_call>call:f{key:<|"|>value<|"|>}<tool_call|>
GEMMA4: CallTable = {
    "content": State((Edge("<|tool_call>", "open", Do.OPEN),)),
    "open": _expect(Edge("call:", "name")),
    "name": _field(Edge("{", "object", Do.NAME, keeps=True), shape=NAME),
    "object": State(scan=Scan.OBJECT, quoting=Quoting.GEMMA, then="close"),
    "close": _expect(Edge("<tool_call|>", BACK), otherwise=BACK, drops_space=False, skips_cut=True),
}


def harmony(*, has_reasoning: bool, has_calls: bool) -> Format:
    """``<|channel|>analysis<|message|>text<|end|><|start|>assistant to=functions.f<|channel|>final<|message|>{}``."""
    ends, parts = ("<|end|>", "<|return|>", "<|call|>"), ("<|channel|>", "<|constrain|>", "to=")
    # A text may quote them: only the ones that another message or nothing follows end it.
    ending = tuple(Edge(end, "between", follow=("<|start|>",)) for end in ends)
    begin, *others = (Edge(marker, "header", Do.OPEN) for marker in ("<|start|>", "<|message|>", *parts))
    starts = (begin, *(replace(edge, keeps=True) for edge in others))
    # The author, right after its marker, and what follows; the marker of a type may be left out.
    header = rf"(?:(?<!\s)(?!to=){WORD})?(?:(?:\s?{trie(parts)}{NAME}){{1,5}}+(?:\s{WORD})?)?"
    states = {
        "start": _expect(*starts, otherwise="content", drops_space=False),
        "header": _field(Edge("<|message|>", "content", Do.HEADER), shape=header),
        "between": _expect(begin, otherwise="content"),
        "content": State(ending, sink=Sink.CONTENT),
        "reasoning": State(ending, sink=Sink.REASONING if has_reasoning else Sink.CONTENT),
        "built_in": State(ending),
    }
    if has_calls:
        states["arguments"] = State(scan=Scan.OBJECT, then="rest")
        rest = (begin, *(Edge(end, "between") for end in ends))
        states["rest"] = _expect(*rest, otherwise="content", skips_cut=True)
    return Format(states)


def kimi_k3(*, has_reasoning: bool, has_calls: bool) -> Format:
    """``<|open|>think<|sep|>text<|close|>think<|sep|>``, and so on: response, tools, call, argument."""
    thinks, responds, opens_tools = (f"<|open|>{name}<|sep|>" for name in ("think", "response", "tools"))
    parts = (Edge(responds, "content"), *([Edge(opens_tools, "section", Do.OPEN)] if has_calls else []))
    calls = [Edge('<|open|>call tool="', "name", Do.OPEN)] if has_calls else []
    ends = [Edge(f"<|close|>{name}<|sep|>", "between") for name in ("response", "tools", "message")]
    sink = Sink.REASONING if has_reasoning else Sink.CONTENT
    argument, ends_call = '<|open|>argument key="', "<|close|>call<|sep|>"
    states = {
        "start": _expect(Edge("<|open|>", "between", keeps=True), otherwise="content", drops_space=False),
        "reasoning": State((Edge("<|close|>think<|sep|>", "between"), *parts), sink=sink),
        **_calls_in([], calls, ends[1:2]),
        "between": _expect(Edge(thinks, "reasoning"), *parts, *ends[1:], otherwise="content", skips_cut=True),
        "content": State((ends[0], *calls), sink=Sink.CONTENT),
        "name": _field(Edge('"', "index", Do.NAME), shape=NAME),
        "index": _field(Edge("<|sep|>", "arguments")),
        "arguments": _expect(Edge(argument, "key"), Edge(ends_call, "more", ends=True)),
        "key": _field(
            Edge('" type="string"<|sep|>', "value", Do.KEY_OF_STRING), Edge('" type="', "type", Do.KEY_OF_JSON)
        ),
        "type": _field(Edge("<|sep|>", "value")),
        "value": _field(Edge("<|close|>argument<|sep|>", "arguments", Do.VALUE, follow=(argument, ends_call))),
    }
    return Format(states, starts={thinks: "reasoning", responds: "content"})


PLAIN_REASONING = ReasoningTable()
SPACED_REASONING = replace(PLAIN_REASONING, strips=True)
MISTRAL_REASONING = ReasoningTable((("[THINK]", "[/THINK]"), ("<think>", "</think>")), is_anywhere=True)
GEMMA4_REASONING = ReasoningTable((("<|channel>thought", "<channel|>"),), strips=True, is_anywhere=True)
