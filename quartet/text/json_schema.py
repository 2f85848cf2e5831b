"""JSON schemas put so that llguidance takes nothing that they forbid.

It reads some formats and patterns more loosely than JSON Schema (https://json-schema.org/draft/2020-12) does, and does
not see that a property is repeated. ``exact`` puts such parts into other words; ``unfollowable`` finds the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# In these, keys are names, and values are schemas.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# In these are values, not schemas.
_VALUES = frozenset({"const", "enum", "default", "examples"})

# RFC 3339, which llguidance reads without leap years, and with leap seconds at any time. Python and many others have no
# year 0.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_CENTURY = "(0[48]|[2468][048]|[13579][26])"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    rf"|([0-9]{{2}}{_LEAP_CENTURY}|{_LEAP_CENTURY}00)-02-29)"
)
# Nanoseconds: a weak model ends no fraction by itself.
_FRACTION = r"(\.[0-9]{1,9})?"
_HOUR = "([01][0-9]|2[0-3])"
_TIME = (
    rf"({_HOUR}:[0-5][0-9]:[0-5][0-9]{_FRACTION}([zZ]|[+-]{_HOUR}:[0-5][0-9])"
    # A leap second is the last one of a day in UTC, and is written so.
    rf"|23:59:60{_FRACTION}([zZ]|[+-]00:00))"
)
# RFC 3986, for llguidance knows no IPv4 address at the end.
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_LAST = rf"({_GROUP}:{_GROUP}|({_BYTE}\.){{3}}{_BYTE})"
_IPV6 = "|".join(
    [
        rf"({_GROUP}:){{6}}{_LAST}",
        *(rf"(({_GROUP}:){{0,{4 - num}}}{_GROUP})?::({_GROUP}:){{{num}}}{_LAST}" for num in range(5)),
        rf"::({_GROUP}:){{5}}{_LAST}",
        rf"(({_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
        rf"(({_GROUP}:){{0,6}}{_GROUP})?::",
    ]
)
_FORMATS: Mapping[str, str] = {
    name: f"^({pattern})$"
    for name, pattern in {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}[tT]{_TIME}", "ipv6": _IPV6}.items()
}

# https://tc39.es/ecma262/#sec-white-space and the line terminators: not just what Unicode calls white space.
_ESCAPES: Mapping[str, str] = {r"\s": r"[\s\x{FEFF}--\x85]", r"\S": r"[^\s\x{FEFF}--\x85]"}
_ESCAPE = re.compile(r"\\.", re.DOTALL)

# Control characters without a short escape in JSON, and how patterns spell them: llguidance leaves out those that it
# may not write, and what is around them stays.
_CONTROL = re.compile(r"[\x00-\x07\x0B\x0E-\x1F\x7F]")
_CONTROL_IN_PATTERN = re.compile(
    r"[\x00-\x07\x0B\x0E-\x1F\x7F]|\\([av]|(x|u00)(0[0-7BEF]|1[0-9A-F]|7F)|[xu]\{0*([0-7BEF]|1[0-9A-F]|7F)\})",
    re.IGNORECASE,
)
_PIECE_OF_PATTERN = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|[xu]\{[0-9a-f]*\}|.)|.", re.DOTALL | re.IGNORECASE)


def exact(schema: Any) -> Any:
    """A copy of ``schema``, as JSON has it, with what llguidance would read too loosely put into other words."""
    copy = json.loads(json.dumps(schema))
    for one in _schemas(copy):
        if isinstance(one.get("pattern"), str):
            one["pattern"] = _ecma(one["pattern"])
        if isinstance(one.get("patternProperties"), dict):
            one["patternProperties"] = {_ecma(name): value for name, value in one["patternProperties"].items()}
        parts = one.get("allOf", [])
        if isinstance(one.get("format"), str) and one["format"] in _FORMATS and isinstance(parts, list):
            one["allOf"] = [*parts, {"pattern": _FORMATS[one.pop("format")]}]
    return copy


def unfollowable(schema: Any) -> str | None:
    """A keyword of ``schema`` that llguidance would follow too loosely whatever it was told, and where."""
    for one in _schemas(schema):
        if _counts_repeated_names(one):
            return "minProperties, where more than one property has a free name"
        for keyword in ("const", "enum"):
            if any(map(_CONTROL.search, _strings(one.get(keyword)))):
                return f"{keyword}, where it has a control character"
        for keyword, patterns in (
            ("pattern", [one.get("pattern")]),
            ("patternProperties", one.get("patternProperties")),
        ):
            if any(isinstance(pattern, str) and _needs_control(pattern) for pattern in patterns or ()):
                return f"{keyword}, where it asks for a control character"
    return None


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """``schema`` and all in it, those that no keyword leads to too: a reference may. May be changed as they come.

    Not recursive: schemas may be nested as deep as JSON may.
    """
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            yield one
            for keyword, value in one.items():
                if keyword in _MAPS and isinstance(value, dict):
                    waiting += value.values()
                elif keyword not in _VALUES and isinstance(value, dict | list):
                    waiting.append(value)


def _counts_repeated_names(schema: Mapping[str, Any]) -> bool:
    """Whether one property, written twice, might count as two: llguidance keeps only listed names from that."""
    least, required = schema.get("minProperties"), schema.get("required", [])
    num_listed = len(set(map(str, required))) if isinstance(required, list) else 0
    return isinstance(least, int | float) and least > num_listed + 1


def _strings(value: Any) -> Iterator[str]:
    """All strings in ``value`` that are no names."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one


def _needs_control(pattern: str) -> bool:
    """Whether ``pattern`` asks for one control character; a class of several, or without some, is followed."""
    if not _CONTROL_IN_PATTERN.search(pattern):
        return False
    members: list[str] | None = None  # of the class that is open
    for piece in _PIECE_OF_PATTERN.findall(pattern):
        if members is not None and piece != "]":
            members.append(piece)
        elif members is None and piece == "[":
            members = []
        else:
            asked = piece if members is None else members[0] if len(members) == 1 else ""
            members = None
            if _CONTROL_IN_PATTERN.fullmatch(asked):
                return True
    return False


def _ecma(pattern: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPES.get(found[0], found[0]), pattern)
