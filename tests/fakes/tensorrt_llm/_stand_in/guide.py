"""Guided decoding for expressions and for schemas of flat objects: enough to see that a guide reached the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import regex  # type: ignore[import-untyped]
import torch
from tensorrt_llm._stand_in.drawing import Guide
from tensorrt_llm._stand_in.schema import StandInError

_STRING = r'"[A-Za-z0-9 ,.!?]{0,24}"'
_SIMPLE = {"string": _STRING, "integer": r"-?(0|[1-9][0-9]{0,8})", "boolean": "(true|false)", "null": "null"}


def make_guide(guided: Any, decode: Callable[[Sequence[int]], str], end_id: int) -> Guide:
    """Compile a guide.

    Raises:
        ValueError: it doesn't compile.
        StandInError: this kind of guide is not imitated.
    """
    try:
        pattern = regex.compile(_expression(guided))
    except (regex.error, json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"Grammar compilation failed: {type(error).__name__}") from error

    def allow(generated: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        text = decode(generated)
        allowed = torch.full_like(scores, float("-inf"))
        if pattern.fullmatch(text):
            allowed[end_id] = scores[end_id]
        for token_id in scores.argsort(descending=True).tolist():
            longer = decode([*generated, token_id])
            if token_id != end_id and longer != text and pattern.fullmatch(longer, partial=True):
                allowed[token_id] = scores[token_id]
        return allowed

    return allow


def _expression(guided: Any) -> str:
    if guided.regex is not None:
        return str(guided.regex)
    if guided.json is not None:
        schema = guided.json
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        return _of_schema(json.loads(schema) if isinstance(schema, str) else schema)
    if guided.json_object:
        return rf"\{{({_STRING}: {_STRING}(, {_STRING}: {_STRING}){{0,2}})?\}}"
    raise StandInError("grammars and structural tags are not imitated")


def _of_schema(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return "(" + "|".join(re.escape(json.dumps(value)) for value in schema["enum"]) + ")"
    if schema["type"] == "object":
        members = [rf'"{re.escape(name)}": {_of_schema(part)}' for name, part in schema["properties"].items()]
        return r"\{" + ", ".join(members) + r"\}"
    return _SIMPLE[schema["type"]]
