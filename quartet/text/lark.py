"""Pieces of Lark grammars as llguidance reads them: literals, special tokens, JSON by a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from quartet.text.json_schema import exact

#: The id of the special token that is spelled so; ``None``: there is none, it is ordinary text.
SpecialToken: TypeAlias = Callable[[str], int | None]

#: How JSON is laid out: on one line or indented. Where any whitespace may come, a weak model writes nothing else.
#: Letters are not written as ``\\u0061``: as the name of a property that would pass for another one than ``a``.
JSON_OPTIONS: Any = {"whitespace_pattern": r"(\n {0,32}| ?)", "json_allowed_escapes": 'nrbtf\\"'}

#: The terminal of any text, special tokens apart.
ANY_TEXT = "/(.|\\n)*/"

# What special tokens look like; other texts may look so, too.
_MARKERS = re.compile(r"(<[^<>\s]+>|\[[A-Z_/]+\])")


def quoted(text: str) -> str:
    """``text`` as a literal."""
    return json.dumps(text, ensure_ascii=False)


def literals(text: str, special_token: SpecialToken) -> str:
    """``text`` as parts of a rule: its special tokens by their ids, what is between as literals; empty for no text."""
    parts = []
    for piece in _MARKERS.split(text):
        token_id = special_token(piece) if piece else None
        if token_id is not None:
            parts.append(f"<[{token_id}]>")
        elif piece:
            parts.append(quoted(piece))
    return " ".join(parts)


def json_rule(schema: Mapping[str, Any]) -> str:
    """JSON that follows ``schema``, as a part of a rule. What it says by ``x-guidance`` counts."""
    own = schema.get("x-guidance")
    options = {**JSON_OPTIONS, **own} if isinstance(own, dict) else dict(JSON_OPTIONS)
    return "%json " + json.dumps({**exact(schema), "x-guidance": options})


def text_until(name: str, end: str, special_token: SpecialToken) -> tuple[str, str]:
    """Any text up to the first ``end``, and that: what to write in a rule, and the line that defines it as ``name``."""
    token_id = special_token(end)
    if token_id is not None:
        return f"{name} <[{token_id}]>", f"{name}: {ANY_TEXT}"
    return name, f"{name}[lazy]: {ANY_TEXT} {quoted(end)}"
