"""The tables of the families: reasoning between markers, and tool calls.

Sources: the models' published chat templates and encoders. What is accepted beyond them is what models are known to
write: a closing tag left out, a call without its opening marker, a value that quotes the markers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from quartet.text.parse.states import BACK, MAX_NAME, NAME, SPACE, Do, Edge, Format, Quoting, Scan, Sink, State


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


def _skip(*edges: Edge) -> State:
    return State(edges)


def _field(*edges: Edge, shape: str | None = None) -> State:
    return State(edges, sink=Sink.FIELD, shape=None if shape is None else re.compile(SPACE + shape + SPACE))


# <tool_call>{"name": "f", "arguments": {}}</tool_call>
HERMES: CallTable = {
    "content": _skip(Edge("<tool_call>", "open", Do.OPEN, strips=True)),
    "open": _expect(Edge("{", "call", keeps=True)),
    "call": State(scan=Scan.CALL, then="close"),
    "close": _expect(Edge("</tool_call>", BACK), otherwise=BACK, skips_cut=True),
}

# {"name": "f", "parameters": {}}, perhaps after <|python_tag|>; several with ; between
LLAMA3_JSON: CallTable = {
    "content": _skip(Edge("<|python_tag|>", "open", Do.OPEN)),
    "open": _expect(Edge("{", "call", keeps=True)),
    "call": State(scan=Scan.CALL, then="close"),
    "close": _expect(Edge(";", "next"), otherwise="content", drops_space=False),
    "next": _expect(Edge("{", "call", Do.OPEN_UNMARKED, keeps=True), otherwise="content", drops_space=False),
    "start": _skip(Edge("{", "call", Do.OPEN_UNMARKED, keeps=True)),
}

# [f(a=1), g()], perhaps between <|python_start|> and <|python_end|>
PYTHONIC: CallTable = {
    "content": _skip(Edge("<|python_start|>", "open", Do.OPEN)),
    "open": _expect(Edge("[", "callee")),
    "callee": _field(Edge("(", "keywords", Do.NAME, keeps=True), shape=rf"(?![\d.\-])[\w.\-]{{0,{MAX_NAME}}}+"),
    "keywords": State(scan=Scan.OBJECT, quoting=Quoting.PYTHON, then="more", ends=False),
    "more": _expect(Edge(",", "callee", Do.NEXT), Edge("]", "close", ends=True)),
    "close": _expect(Edge("<|python_end|>", "content"), otherwise="content", drops_space=False, skips_cut=True),
    "start": _skip(Edge("[", "callee", Do.OPEN_UNMARKED)),
}

# [TOOL_CALLS]f[ARGS]{}, perhaps with [CALL_ID]id before [ARGS]; or [TOOL_CALLS][{"name": "f", "arguments": {}}]
MISTRAL: CallTable = {
    "content": _skip(Edge("[TOOL_CALLS]", "open", Do.OPEN)),
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
    "id": _field(Edge("[ARGS]", "arguments", Do.ID)),
    "arguments": State(scan=Scan.OBJECT),
}


def _section(begin: str, end: str, call_begin: str, call_end: str, fields: Mapping[str, State]) -> CallTable:
    """Calls with JSON arguments in a section from ``begin`` to ``end``; ``fields``: what comes before the arguments."""
    to_content = Edge(end, "content")
    return {
        "content": _skip(Edge(begin, "section")),
        "section": _skip(Edge(call_begin, next(iter(fields)), Do.OPEN), to_content),
        **fields,
        "arguments": State(scan=Scan.OBJECT, then="rest"),
        "rest": _skip(Edge(call_end, "section"), to_content),
    }


_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_NAME = _field(Edge("\n```json\n", "arguments", Do.NAME))
DEEPSEEK_V3 = _section(*_DEEPSEEK_SECTION, {"type": _field(Edge("<｜tool▁sep｜>", "name")), "name": _DEEPSEEK_NAME})
DEEPSEEK_V31 = _section(*_DEEPSEEK_SECTION, {"name": _field(Edge("<｜tool▁sep｜>", "arguments", Do.NAME))})
_KIMI_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_K2 = _section(*_KIMI_SECTION, {"id": _field(Edge("<|tool_call_argument_begin|>", "arguments", Do.NAMED_ID))})


def _dsml_calls() -> CallTable:
    """DeepSeek 3.2 and later: names of sections differ, and 4.1 writes a space before each tag's name."""
    sections = ("function_calls", "tool_calls", " calls")
    invokes, parameters = ([f"<｜DSML｜{space}{tag}" for space in ("", " ")] for tag in ("invoke", "parameter"))
    ends = [f"</{invoke[1:]}>" for invoke in invokes]
    follow = (*parameters, *ends)
    section = [Edge(f'{invoke} name="', "name", Do.OPEN) for invoke in invokes]
    section += [Edge(f"</｜DSML｜{name}>", "after_call") for name in sections]
    next_parameter = [Edge(f'{name} name="', "key") for name in parameters]
    return {
        "content": _skip(*(Edge(f"<｜DSML｜{name}>", "section", strips=True) for name in sections)),
        "section": _skip(*section),
        "name": _field(Edge('">', "parameters", Do.NAME), Edge('"/>', "section", Do.NAME, ends=True)),
        "parameters": _expect(*next_parameter, *(Edge(end, "section", ends=True) for end in ends)),
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
    "content": _skip(*_XML_OPENERS),
    "reasoning": _skip(*_XML_OPENERS),
    "open": _expect(Edge("<function=", "name")),
    "name": _field(Edge(">", "parameters", Do.NAME), shape=NAME),
    "parameters": _expect(Edge("<parameter=", "key"), Edge("</function>", "close", ends=True)),
    "key": _field(Edge(">", "value", Do.KEY), Edge(">\n", "value", Do.KEY), shape=rf"[^\n<]{{0,{MAX_NAME}}}+"),
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
    "content": _skip(Edge("<tool_call>", "name", Do.OPEN, strips=True)),
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
    "content": _skip(Edge("<|tool_call>", "open", Do.OPEN)),
    "open": _expect(Edge("call:", "name")),
    "name": _field(Edge("{", "object", Do.NAME, keeps=True), shape=NAME),
    "object": State(scan=Scan.OBJECT, quoting=Quoting.GEMMA, then="close"),
    "close": _expect(Edge("<tool_call|>", BACK), otherwise=BACK, drops_space=False, skips_cut=True),
}


def harmony(*, has_reasoning: bool, has_calls: bool) -> Format:
    """``<|channel|>analysis<|message|>text<|end|><|start|>assistant to=functions.f<|channel|>final<|message|>{}``."""
    ends = ("<|end|>", "<|return|>", "<|call|>")
    # A text may quote them: only the ones that another message or nothing follows end it.
    ending = tuple(Edge(end, "between", follow=("<|start|>",)) for end in ends)
    to_between = tuple(Edge(end, "between") for end in ends)
    header = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "to=")
    states = {
        "start": _expect(*(Edge(m, "header", keeps=True) for m in header), otherwise="content", drops_space=False),
        "header": _field(Edge("<|message|>", "content", Do.HEADER), *to_between),
        "between": _skip(Edge("<|start|>", "header")),
        "content": State(ending, sink=Sink.CONTENT),
        "reasoning": State(ending, sink=Sink.REASONING if has_reasoning else Sink.CONTENT),
        "built_in": State(ending),
    }
    if has_calls:
        states["arguments"] = State(scan=Scan.OBJECT, then="rest")
        states["rest"] = State((*to_between, Edge("<|start|>", "header")))
    return Format(states)


def kimi_k3(*, has_reasoning: bool, has_calls: bool) -> Format:
    """``<|open|>think<|sep|>text<|close|>think<|sep|>``, and so on: response, tools, call, argument."""
    thinks, responds, opens_tools = (f"<|open|>{name}<|sep|>" for name in ("think", "response", "tools"))
    parts = (Edge(responds, "content"), *([Edge(opens_tools, "tools")] if has_calls else []))
    sink = Sink.REASONING if has_reasoning else Sink.CONTENT
    argument, ends_call = '<|open|>argument key="', "<|close|>call<|sep|>"
    states = {
        "start": _expect(Edge("<|open|>", "between", keeps=True), otherwise="content", drops_space=False),
        "reasoning": State((Edge("<|close|>think<|sep|>", "between"), *parts), sink=sink),
        "between": _skip(Edge(thinks, "reasoning"), *parts),
        "content": State((Edge("<|close|>response<|sep|>", "between"),), sink=Sink.CONTENT),
        "tools": _skip(Edge('<|open|>call tool="', "name", Do.OPEN), Edge("<|close|>tools<|sep|>", "between")),
        "name": _field(Edge('"', "index", Do.NAME)),
        "index": _skip(Edge("<|sep|>", "arguments")),
        "arguments": _expect(Edge(argument, "key"), Edge(ends_call, "tools", ends=True)),
        "key": _field(
            Edge('" type="string"<|sep|>', "value", Do.KEY_OF_STRING), Edge('" type="', "type", Do.KEY_OF_JSON)
        ),
        "type": _skip(Edge("<|sep|>", "value")),
        "value": _field(Edge("<|close|>argument<|sep|>", "arguments", Do.VALUE, follow=(argument, ends_call))),
    }
    return Format(states, starts={thinks: "reasoning", responds: "content"})


PLAIN_REASONING = ReasoningTable()
SPACED_REASONING = replace(PLAIN_REASONING, strips=True)
MISTRAL_REASONING = ReasoningTable((("[THINK]", "[/THINK]"), ("<think>", "</think>")), is_anywhere=True)
GEMMA4_REASONING = ReasoningTable((("<|channel>thought", "<channel|>"),), strips=True, is_anywhere=True)
