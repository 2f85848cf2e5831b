"""Grammars of answers that call tools, in the way in which a model writes its calls.

Calls are written as the models' chat templates show them; the parsers of ``quartet.text.parse`` read them back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quartet.errors import UnsupportedFieldError
from quartet.text.lark import ANY_TEXT, SpecialToken, json_rule, literals, quoted, text_until
from quartet.text.parse.formats import ReasoningTable
from quartet.text.parse.names import REASONING_PARSERS

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class CallableTool:
    """A function and its parameters' JSON schema; ``None``: any JSON object.

    ``is_strict``: the schema is followed whole, or refused.
    """

    name: str
    schema: Mapping[str, Any] | None
    is_strict: bool = False


@dataclass(frozen=True, kw_only=True)
class CallRules:
    """What an answer may or must call.

    Attributes:
        tools: that it may call.
        is_needed: it is nothing but calls, at least one; else text, with calls where the model begins one.
        allows_parallel: more than one.
    """

    tools: Sequence[CallableTool]
    is_needed: bool
    allows_parallel: bool


def call_grammar(parser: str, rules: CallRules, special_token: SpecialToken) -> str | None:
    """The rule ``answer`` of a Lark grammar, and those that it needs; ``None``: such calls can't be guided.

    Args:
        parser: a name of ``TOOL_CALL_PARSERS``.
        rules: what is allowed.
        special_token: those of the model.

    Raises:
        UnsupportedFieldError: the schema of a strict tool can't be followed in calls that are written so; names the
            keyword.
    """
    make = _FORMS.get(parser)
    return None if make is None else make(special_token).grammar(rules, special_token)


@dataclass(frozen=True)
class ReasoningMarkers:
    """What begins and ends reasoning, and what follows it in any answer."""

    begin: str
    end: str
    rest: str = ""


def reasoning_markers(parser: str) -> ReasoningMarkers | None:
    """How a model with this one of ``REASONING_PARSERS`` reasons; ``None``: that can't be guided."""
    table = REASONING_PARSERS.get(parser)
    if isinstance(table, ReasoningTable):
        return ReasoningMarkers(*table.pairs[0])
    return _HARMONY_REASONING if parser == "gpt_oss" else None


def content_head(parser: str) -> str:
    """What a model with this one of ``REASONING_PARSERS`` writes before the text of an answer."""
    return "<|channel|>final<|message|>" if parser == "gpt_oss" else ""


def with_reasoning(
    answer: str, markers: ReasoningMarkers | None, special_token: SpecialToken, *, has_begun: bool
) -> str:
    """A whole grammar: reasoning, then ``answer``, the rule of that name and those that it needs.

    Args:
        answer: as ``call_grammar`` makes it.
        markers: of its reasoning; ``None``: the model does not reason.
        special_token: those of the model.
        has_begun: the prompt has begun the reasoning; else the model may.
    """
    if markers is None:
        return f"start: answer\n{answer}"
    thought, line = text_until("thought", markers.end, special_token)
    begin = "" if has_begun else literals(markers.begin, special_token)
    rest = literals(markers.rest, special_token) or "SPACE"
    reasoning = f"reasoning: {begin} {thought} {rest}\n{line}\nSPACE: /\\n{{0,4}}/"
    return f"start: reasoning{'' if has_begun else '?'} answer\n{reasoning}\n{answer}"


@dataclass(frozen=True)
class _JsonCalls:
    """Calls with their arguments as a JSON object.

    Attributes:
        head, tail: around the arguments; ``NAME`` stands for the function's name, ``NUMBER`` for any number.
        between: two calls.
        begin, end: of all calls.
        trigger: how the first call begins, within text; empty: such text can't be told from a call.
        quotes_name: the name is in a JSON string.
        is_single: an output ends with its first call.
    """

    head: str
    tail: str = ""
    between: str = ""
    begin: str = ""
    end: str = ""
    trigger: str = ""
    quotes_name: bool = False
    is_single: bool = False

    def grammar(self, rules: CallRules, special_token: SpecialToken) -> str | None:
        names, lines = [], []
        for number, tool in enumerate(rules.tools):
            name = json.dumps(tool.name)[1:-1] if self.quotes_name else tool.name
            head = _literals(_rest_of_head(self, rules), name, special_token)
            schema = json_rule(_ANY_ARGUMENTS if tool.schema is None else tool.schema)
            names.append(f"call_{number}")
            lines.append(f"call_{number}: {head} {schema} {literals(self.tail, special_token)}")
        return _answer(names, lines, rules, self, special_token)


@dataclass(frozen=True)
class _ParameterCalls:
    """Calls with a tag for each argument: text as it is, everything else as JSON.

    Attributes: as ``_JsonCalls``, and
        key_head, key_tail, value_tail: around an argument's name and after its value.
    """

    head: str
    tail: str
    between: str
    key_head: str
    key_tail: str
    value_tail: str
    trigger: str
    begin: str = ""
    end: str = ""
    is_single: bool = False

    def grammar(self, rules: CallRules, special_token: SpecialToken) -> str | None:
        names, lines = [], []
        for number, tool in enumerate(rules.tools):
            schema = _ANY_ARGUMENTS if tool.schema is None else tool.schema
            properties, required = schema.get("properties", {}), schema.get("required", [])
            if not isinstance(properties, dict) or not isinstance(required, list):
                return None
            if tool.is_strict and (keyword := _untagged(schema)):
                why = f"a strict tool's schema has what can't be followed where calls are written in tags: {keyword}"
                raise UnsupportedFieldError(why, field="chat.tools")
            parts = []
            for index, (key, value) in enumerate(properties.items()):
                name = f"argument_{number}_{index}"
                lines += self._argument(name, key, value, schema, special_token)
                parts.append(name if key in required else f"{name}?")
            head = _literals(_rest_of_head(self, rules), tool.name, special_token)
            tail = literals(self.tail, special_token)
            names.append(f"call_{number}")
            lines.append(f"call_{number}: {head} {' '.join(parts)} {tail}")
        return _answer(names, lines, rules, self, special_token)

    def _argument(
        self, name: str, key: str, schema: Any, whole: Mapping[str, Any], special_token: SpecialToken
    ) -> list[str]:
        head = literals(f"{self.key_head}{key}{self.key_tail}", special_token)
        texts = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(schema, dict) and schema.get("type") == "string" and texts is None:
            value, line = text_until(f"text_of_{name}", self.value_tail, special_token)
            return [f"{name}: {head} {value}", line]
        tail = literals(self.value_tail, special_token)
        if isinstance(texts, list) and texts and all(isinstance(text, str) and text for text in texts):
            return [f"{name}: {head} ({' | '.join(map(quoted, texts))}) {tail}"]
        definitions = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        return [f"{name}: {head} {json_rule({**definitions, **schema} if isinstance(schema, dict) else {})} {tail}"]


# What says nothing of the arguments.
_REMARKS = frozenset({"$schema", "$id", "$comment", "title", "description", "default", "examples", "x-guidance"})
_OF_OBJECTS = _REMARKS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXTS = _REMARKS | {"type", "enum"}


def _untagged(schema: Mapping[str, Any]) -> str | None:
    """A keyword that ``_ParameterCalls`` does not follow, as values stand between tags; ``None``: there is none."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for keyword in sorted(schema.keys() - _OF_OBJECTS):
        return str(keyword)
    if schema.get("type", "object") != "object":
        return "type"
    if any(name not in properties for name in required):
        return "required, where it names no property"
    if isinstance(schema.get("additionalProperties"), dict):
        return "additionalProperties, where it is a schema"
    for name, value in properties.items():
        if isinstance(value, dict) and value.get("type") == "string":
            for keyword in sorted(value.keys() - _OF_TEXTS):
                return f"{keyword} of {name}"
    return None


_Calls: TypeAlias = _JsonCalls | _ParameterCalls


def _literals(head: str, name: str, special_token: SpecialToken) -> str:
    """The literals of a head; a name that looks like a marker is none."""
    parts = []
    for number, piece in enumerate(head.split("NAME")):
        if number:
            parts.append(quoted(name))
        for index, text in enumerate(piece.split("NUMBER")):
            if index:
                parts.append("/[0-9]{1,3}/")
            parts.append(literals(text, special_token))
    return " ".join(filter(None, parts))


def _rest_of_head(calls: _Calls, rules: CallRules) -> str:
    """A call's head; within text the trigger has come already."""
    return calls.head if rules.is_needed or calls.begin else calls.head.removeprefix(calls.trigger)


def _answer(
    names: Sequence[str], lines: Sequence[str], rules: CallRules, calls: _Calls, special_token: SpecialToken
) -> str | None:
    """The rule of the answer, with ``names`` of the rules of calls, which ``lines`` define."""
    begin, between, end = (literals(text, special_token) for text in (calls.begin, calls.between, calls.end))
    section = f"call ({between} call)*" if rules.allows_parallel and not calls.is_single else "call"
    lines = [f"call: {' | '.join(names)}", *lines]
    if rules.is_needed:
        return "\n".join([f"answer: {begin} {section} {end}", *lines])
    if not calls.trigger:
        return None
    # After its trigger, a call goes on as the tools' calls must. What comes before is any text.
    before, line = text_until("before", calls.trigger, special_token)
    if calls.begin:
        section = f"{literals(calls.begin.removeprefix(calls.trigger), special_token)} {section} {end}"
    else:
        section = "call"
    return "\n".join([f"answer: ({before} {section})* TEXT", *lines, line, f"TEXT: {ANY_TEXT}"])


def _hermes(_special_token: SpecialToken) -> _Calls:
    return _JsonCalls(
        '<tool_call>\n{"name": "NAME", "arguments": ',
        "}\n</tool_call>",
        between="\n",
        trigger="<tool_call>",
        quotes_name=True,
    )


def _llama3(_special_token: SpecialToken) -> _Calls:
    return _JsonCalls('{"name": "NAME", "parameters": ', "}", between="; ", quotes_name=True)


def _mistral(special_token: SpecialToken) -> _Calls:
    if special_token("[ARGS]") is not None:
        return _JsonCalls("[TOOL_CALLS]NAME[ARGS]", trigger="[TOOL_CALLS]")
    return _JsonCalls(
        '{"name": "NAME", "arguments": ',
        "}",
        between=", ",
        begin="[TOOL_CALLS] [",
        end="]",
        trigger="[TOOL_CALLS]",
        quotes_name=True,
    )


_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001


def _deepseek_v3(_special_token: SpecialToken) -> _Calls:
    return _JsonCalls(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",  # noqa: RUF001
        "\n```<｜tool▁call▁end｜>",  # noqa: RUF001
        between="\n",
        begin=_DEEPSEEK_BEGIN,
        end=_DEEPSEEK_END,
        trigger=_DEEPSEEK_BEGIN,
    )


def _deepseek_v31(_special_token: SpecialToken) -> _Calls:
    return _JsonCalls(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",  # noqa: RUF001
        "<｜tool▁call▁end｜>",  # noqa: RUF001
        begin=_DEEPSEEK_BEGIN,
        end=_DEEPSEEK_END,
        trigger=_DEEPSEEK_BEGIN,
    )


def _kimi_k2(_special_token: SpecialToken) -> _Calls:
    begin = "<|tool_calls_section_begin|>"
    return _JsonCalls(
        "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        begin=begin,
        end="<|tool_calls_section_end|>",
        trigger=begin,
    )


def _qwen3_coder(_special_token: SpecialToken) -> _Calls:
    return _ParameterCalls(
        head="<tool_call>\n<function=NAME>\n",
        tail="</function>\n</tool_call>",
        between="\n",
        key_head="<parameter=",
        key_tail=">\n",
        value_tail="\n</parameter>\n",
        trigger="<tool_call>",
    )


def _glm(_special_token: SpecialToken) -> _Calls:
    return _ParameterCalls(
        head="<tool_call>NAME\n",
        tail="</tool_call>",
        between="\n",
        key_head="<arg_key>",
        key_tail="</arg_key>\n<arg_value>",
        value_tail="</arg_value>\n",
        trigger="<tool_call>",
    )


def _harmony(_special_token: SpecialToken) -> _Calls:
    # What ends a call ends the output.
    return _JsonCalls("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", is_single=True)


_HARMONY_REASONING = ReasoningMarkers("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant")
_FORMS: Mapping[str, Callable[[SpecialToken], _Calls]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3_1": _deepseek_v31,
    "glm45": _glm,
    "harmony": _harmony,
    "hermes": _hermes,
    "kimi_k2": _kimi_k2,
    "llama3_json": _llama3,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
}
