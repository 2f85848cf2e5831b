"""Types as text, and whether a plain value, as YAML gives them, is of one.

``int``, ``float``, ``bool``, ``str``, ``dict``, ``list[X]``, ``set[X]`` (a list), ``dict[K,V]``, ``Literal['a','b']``,
``AnyCase['A','B']`` (the same in any case), ``int >= 0``, ``float in [0,1]``, and several by `` | ``. Another name is a
class, of which no plain value is an instance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache


def alternatives(text: str) -> tuple[str, ...]:
    """The types of which a value must be one."""
    return tuple(part.strip() for part in text.split("|"))


def fits(text: str, value: object) -> bool:
    """Whether ``value`` is of one of the types of ``text``."""
    return any(_checker(part)(value) for part in alternatives(text))


def misfit(text: str, value: object) -> str:
    """What is wrong with ``value``, for a message after the field's name."""
    choices = [choice for part in alternatives(text) for choice in _choices(part)]
    if not choices:
        return f"must be {text}, not {_shown(value)}"
    hint = f": write it {value.upper()}" if isinstance(value, str) and value.upper() in choices else ""
    return f"must be one of {', '.join(choices)}, not {_shown(value)}{hint}"


_Checker = Callable[[object], bool]
_QUOTED = re.compile(r"'([^']+)'")
_BOUND = re.compile(r"(int|float) (>=|>) (\d+)")
_OF_ITEMS = re.compile(r"(?:list|set)\[(.+)\]")
_BY_KEY = re.compile(r"dict\[(\w+), ?(.+)\]")


def _is_int(value: object) -> bool:
    # To Python true is a 1.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_int(value)


_PLAIN: dict[str, _Checker] = {
    "None": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "int": _is_int,
    "float": _is_number,
    "str": lambda value: isinstance(value, str),
    "dict": lambda value: isinstance(value, Mapping),
    "float in [0,1]": lambda value: isinstance(value, int | float) and _is_number(value) and 0 <= value <= 1,
}


@cache
def _checker(text: str) -> _Checker:
    if text in _PLAIN:
        return _PLAIN[text]
    if choices := _choices(text):
        return _one_of(choices, any_case=text.startswith("AnyCase"))
    if bound := _BOUND.fullmatch(text):
        return _bounded(_PLAIN[bound[1]], int(bound[3]), or_equal=bound[2] == ">=")
    if items := _OF_ITEMS.fullmatch(text):
        return _list_of(_checker(items[1]))
    if pairs := _BY_KEY.fullmatch(text):
        return _mapping_of(_checker(pairs[1]), _checker(pairs[2]))
    return lambda _: False


def _choices(text: str) -> tuple[str, ...]:
    return tuple(_QUOTED.findall(text)) if text.startswith(("Literal[", "AnyCase[")) else ()


def _one_of(choices: tuple[str, ...], *, any_case: bool) -> _Checker:
    return lambda value: isinstance(value, str) and (value.upper() if any_case else value) in choices


def _bounded(is_kind: _Checker, least: int, *, or_equal: bool) -> _Checker:
    def check(value: object) -> bool:
        if not is_kind(value) or not isinstance(value, int | float):
            return False
        return value >= least if or_equal else value > least

    return check


def _list_of(is_item: _Checker) -> _Checker:
    return lambda value: isinstance(value, list | tuple) and all(is_item(item) for item in value)


def _mapping_of(is_key: _Checker, is_value: _Checker) -> _Checker:
    return lambda value: isinstance(value, Mapping) and all(is_key(k) and is_value(v) for k, v in value.items())


def _shown(value: object) -> str:
    """``value`` itself only where it is short and plain: what is in a mapping may be nobody's business."""
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
