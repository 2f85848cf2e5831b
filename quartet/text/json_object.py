"""JSON objects within requests: parameters and arguments of tools, variables of templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from quartet.errors import InvalidRequestError

#: A client's JSON may be nested so deep; templates and what reads JSON recurse.
MAX_JSON_DEPTH = 64

_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_ALIKE = str.maketrans("{}", "[]")


class JsonObject:
    """A JSON object as its text, or as a value that was read already. It is read once, when it is first needed.

    Two are equal if their texts are.

    Attributes:
        num_characters: of its text, or about so many.
    """

    __slots__ = ("_text", "_value", "num_characters")

    def __init__(self, text: str | None, value: Mapping[str, Any] | None, num_characters: int) -> None:
        """Use ``of_text`` or ``of_value``."""
        self._text = text
        self._value = value
        self.num_characters = num_characters

    @classmethod
    def of_text(cls, text: str) -> JsonObject:
        """The object that ``text`` is; nothing is looked at yet."""
        return cls(text, None, len(text))

    @classmethod
    def of_value(cls, value: Mapping[str, Any], num_characters: int) -> JsonObject:
        """The object of plain JSON values, about ``num_characters`` long, nested as deep as its maker allows."""
        return cls(None, value, num_characters)

    @property
    def text(self) -> str:
        """Its text."""
        if self._text is None:
            self._text = json.dumps(self._value, ensure_ascii=False)
        return self._text

    def value(self, field: str) -> Mapping[str, Any]:
        """Its value. Raises ``InvalidRequestError`` naming ``field``: it is no JSON object, or nested too deep."""
        if self._value is None:
            self._value = _read(self._text or "", field)
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsonObject) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        """It may hold what users wrote."""
        return f"<JSON of {self.num_characters} characters>"


def _read(text: str, field: str) -> Mapping[str, Any]:
    if _is_deep(text):
        raise InvalidRequestError(f"the JSON is nested deeper than {MAX_JSON_DEPTH}", field=field)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        # Its message may quote the text.
        raise InvalidRequestError("the text is no JSON", field=field) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the JSON must be an object", field=field)
    return value


def _is_deep(text: str) -> bool:
    """Whether it is nested deeper than ``MAX_JSON_DEPTH``. Text that is no JSON may be called either.

    Each round takes away the innermost brackets, at the speed of ``str.replace``.
    """
    if text.count("{") + text.count("[") <= MAX_JSON_DEPTH:
        return False
    brackets = _NO_BRACKETS.sub("", _STRING.sub("", text)).translate(_ALIKE)
    for _ in range(MAX_JSON_DEPTH):
        if "[]" not in brackets:
            return False
        brackets = brackets.replace("[]", "")
    return "[]" in brackets


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
