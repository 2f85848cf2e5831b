"""Arguments of tool calls as models write them, and as JSON."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from itertools import chain, islice
from typing import Any

from quartet.text.parse.states import QUOTES, Quoting, trie

#: A model that nests deeper writes no call; readers of JSON recurse.
_MAX_DEPTH = 100
#: Parts of a tool's schema that are looked at for the types of one argument: clients may send it of any size.
_MAX_SCHEMAS = 256
_TYPES = {float: "number", str: "string", list: "array", dict: "object", bool: "boolean", type(None): "null"}
_NO_STRINGS = frozenset([*_TYPES.values(), "integer"]) - {"string"}
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_LITERALS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_DECODER = json.JSONDecoder(parse_constant=_LITERALS.__getitem__)  # there is no NaN and no Infinity
_ESCAPE = r"\\(?:x[0-9a-fA-F]{0,2}|u[0-9a-fA-F]{0,4}|U[0-9a-fA-F]{0,8}|[\s\S]|\Z)"
# What is read outside of strings; what ends these; what may end them, or does not stand in strings of JSON as it is.
_TOKENS = {
    quoting: re.compile(rf"[{'=()' if quoting is Quoting.PYTHON else ''}:,{{}}\[\]]|{trie(quotes)}")
    for quoting, quotes in QUOTES.items()
}
_STRING_ENDS = {
    quote: re.compile(trie([quote]) + ("" if quote in QUOTES[Quoting.GEMMA] else f"|{_ESCAPE}"))
    for quote in chain(*QUOTES.values())
}
_SPECIALS = {quoting: re.compile(rf"[\x00-\x1f\"\\{''.join(quotes)}]") for quoting, quotes in QUOTES.items()}


class ObjectScan:
    """Turns an object that comes in pieces into JSON; of JSON itself, it mends what models get wrong in strings.

    It ``is_done`` or ``is_malformed``; ``values``, if asked for, are those at the top as JSON, by key, in pieces.
    """

    def __init__(self, quoting: Quoting, accepts: Callable[[str, str | None], bool] | None = None) -> None:
        """``accepts``: fill ``values``, and ask this whether a key, then ``None``, and later its JSON may be there."""
        self.is_done = self.is_malformed = self._owes_comma = False
        self.values: dict[str, list[str]] = {}
        self._quoting, self._quotes = quoting, QUOTES[quoting]
        self._tokens, self._specials = _TOKENS[quoting], _SPECIALS[quoting]
        self._accepts, self._is_json = accepts, quoting is Quoting.JSON
        self._closers, self._out, self._bare = list[str](), list[str](), list[str]()
        self.key = ""  # at the top, whose value is being read
        self._quote: str | None = None
        self._is_key = True  # whether a key comes next, or has come and its separator has not
        self._is_filled = False  # whether the key or value that is due here has come

    def take_json(self) -> str:
        """The JSON since the last call."""
        text, self._out = "".join(self._out), []
        return text

    def take_plain(self, text: str) -> bool:
        """Take ``text`` if a string goes on with all of it, as it is; returns whether one does."""
        is_plain = self._quote is not None and self._specials.search(text) is None
        if is_plain:
            self._out.append(text)
        return is_plain

    @property
    def word(self) -> str:
        """The key or value at the top that is being read, as JSON, with whitespace."""
        return "".join(self._out) + "".join(self._bare)

    def feed(self, text: str, at: int, stop: int) -> int:
        """Read ``text`` from ``at`` to ``stop``. Returns where it is: a few last characters may have to come again."""
        while at < stop and not self.is_done:
            pattern = self._tokens if self._quote is None else _STRING_ENDS[self._quote]
            match = pattern.search(text, at, stop)
            end = stop if match is None else match.start()
            piece = text[at:end]
            if self._quote is not None:
                # What is escaped in JSON stays so; but models forget to escape line ends.
                self._out.append(piece if self._specials.search(piece) is None else _escape(piece))
            else:
                self._bare.append(piece)
                # Before the object, after a string, or as a key of JSON, there can only be whitespace.
                is_blank = not self._closers or self._is_filled or (self._is_json and self._is_key)
                if is_blank and piece.strip():
                    self.is_malformed = True
                    return end - len(piece.lstrip())
            if match is None or (match.end() == stop and match.group() not in "=:,{}[]()"):
                return end  # a longer one may have begun
            token, at = match.group(), match.end()
            if self._quote is None:
                self.is_malformed = not self._take(token)
                if self.is_malformed:
                    return end
            elif token == self._quote:
                self._quote, self._is_filled = None, True
                self._out.append('"')
            else:
                self._out.append(_unescape(token, is_json=self._is_json))
        return at

    def _take(self, token: str) -> bool:
        if not self._closers:
            self._closers.append(_CLOSERS.get(token, ""))
            if self._accepts is None:
                self._out.append("{")
            return token == ("(" if self._quoting is Quoting.PYTHON else "{")
        if token == ":" and self._quoting is Quoting.GEMMA and not self._is_key:
            self._bare.append(token)  # of a bare value, such as a time
            return True
        bare = "".join(self._bare).strip()
        self._bare.clear()
        if token in ":=":
            return self._end_key(token, bare)
        if token in "{[" or token in self._quotes:
            return not bare and self._begin(token)
        return token in ",}])" and self._end_value(token, bare)

    def _end_key(self, token: str, bare: str) -> bool:
        if not self._is_key or bool(bare) == self._is_filled or (token == "=") != (self._closers == [")"]):
            return False
        self._is_key = self._is_filled = False
        if self._accepts is not None and len(self._closers) == 1:
            self.key = parse_json(self.take_json())
            is_new = self.key not in self.values
            self._out = self.values[self.key] = []
            return is_new and self._accepts(self.key, None)
        if bare:
            self._begin_item()
            self._out.append(json.dumps(bare, ensure_ascii=False))
        self._out.append(": ")
        return True

    def _begin(self, token: str) -> bool:
        if self._is_filled or (self._is_key and (token in "{[" or self._closers == [")"])):
            return False
        self._begin_item()
        self._out.append(token if token in "{[" else '"')
        if token not in "{[":
            self._quote = token
            return True
        self._closers.append(_CLOSERS[token])
        self._is_key = token == "{"
        return len(self._closers) <= _MAX_DEPTH

    def _end_value(self, token: str, bare: str) -> bool:
        if bare:
            value = _LITERALS.get(bare) or (bare if _NUMBER.fullmatch(bare) else None)
            if value is None and self._quoting is Quoting.GEMMA:
                value = json.dumps(bare, ensure_ascii=False)
            if value is None or self._is_key or self._is_filled:
                return False
            self._begin_item()
            self._out.append(value)
            self._is_filled = True
        is_top = self._accepts is not None and len(self._closers) == 1
        if self._accepts is not None and is_top and self._is_filled and not self._is_key:
            if not self._accepts(self.key, "".join(self._out)):
                return False
            self._out, self.key = [], ""
        is_object = self._closers[-1] != "]"
        if token == ",":
            if self._is_key or not self._is_filled:
                return False
            self._owes_comma, self._is_filled, self._is_key = not is_top, False, is_object
            return True
        # An object may end after a value or where a key could begin.
        if token != self._closers.pop() or (is_object and self._is_filled == self._is_key):
            return False
        self._out.append("}" if is_object else "]")
        self._owes_comma, self._is_filled, self._is_key = False, True, False
        self.is_done = not self._closers
        return True

    def _begin_item(self) -> None:
        if self._owes_comma:
            self._out.append(", ")
            self._owes_comma = False


def parse_json(text: str) -> Any:
    """The value of strict JSON; ``None`` also where ``text`` is none."""
    try:
        return _DECODER.decode(text)
    except (ValueError, KeyError, RecursionError):
        return None


def to_json(text: str, types: frozenset[str] | None) -> str:
    """The value that a model wrote as ``text`` of one of JSON Schema's ``types``; ``None``: it may be any.

    Strings come as they are, other values as JSON or as Python's ``True``, ``False`` or ``None``.
    """
    if types is None or types != {"string"}:
        literal = _LITERALS.get(text.strip(), text.strip())
        value = parse_json(literal)
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        names = {"integer", "number"} if is_whole else {_TYPES[type(value)]}
        if (value is not None or literal == "null") and names & (types if types is not None else _NO_STRINGS):
            return literal
    return json.dumps(text, ensure_ascii=False)


def argument_types(schema: Mapping[str, Any] | None, key: str) -> frozenset[str] | None:
    """The types that a tool's ``schema`` allows for the argument ``key``; ``None``: it does not say."""
    properties = (schema or {}).get("properties")
    schemas = [properties.get(key)] if isinstance(properties, dict) else []
    names: set[str] = set()
    for part in islice(schemas, _MAX_SCHEMAS):  # it grows meanwhile
        if isinstance(part, dict):
            kinds = part.get("type")
            names.update(kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
            unions = (part.get(union) for union in ("anyOf", "oneOf", "allOf"))
            schemas += [item for union in unions if isinstance(union, list) for item in union]
    return frozenset(names) or None


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _unescape(token: str, *, is_json: bool) -> str:
    """An escape in a string as text in a JSON string; what is none is a backslash and text."""
    if is_json:
        return token if parse_json(f'"{token}"') is not None else _escape(token)
    try:
        text = codecs.decode(token, "unicode_escape") if token[1] in "\n\\'\"abfnrtvxuU0" else token
    except UnicodeDecodeError:
        text = token
    return json.dumps(text)[1:-1]  # of surrogates, which are no characters, JSON can join two
