"""Fields of JSON objects, read by tables: a name, and what reads its value. Every error names the field by its path."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from quartet.errors import InvalidRequestError, UnsupportedFieldError

#: Reads a value that is not null; gets the field's path. Raises ``InvalidRequestError`` naming it.
Reader: TypeAlias = Callable[[Any, str], Any]

_MAX_NAME_LENGTH = 64
_MAX_SHOWN_LENGTH = 40

_KINDS: Mapping[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def read_fields(found: Mapping[str, Any], table: Mapping[str, Reader], path: str = "") -> dict[str, Any]:
    """The values of an object's fields by name; a field that is null counts as absent.

    Raises:
        UnsupportedFieldError: a field is not in ``table``, or what it asks for is not offered.
        InvalidRequestError: a value is impossible.
    """
    values = {}
    for name, value in found.items():
        reader = table.get(name)
        if reader is None:
            shown = path + name[:_MAX_NAME_LENGTH]
            raise UnsupportedFieldError(f"{shown}: this server knows no such field", field=shown)
        if value is not None:
            values[name] = reader(value, path + name)
    return values


def wrong(value: Any, path: str, expected: str) -> InvalidRequestError:
    """The error for a ``value`` that is not what is ``expected``; it shows no text of it."""
    return InvalidRequestError(f"{path}: must be {expected}, not {_KINDS.get(type(value), 'a list')}", field=path)


def text(value: Any, path: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong(value, path, "a string")
    return value


def boolean(value: Any, path: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise wrong(value, path, "a boolean")
    return value


def number(value: Any, path: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(value, path, "a number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise InvalidRequestError(f"{path}: must be a finite number", field=path)
    return result


def integer(low: int, high: int) -> Reader:
    """A whole number from ``low`` to ``high``."""

    def read(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise (
                wrong(value, path, "a whole number")
                if not isinstance(value, float)
                else InvalidRequestError(f"{path}: must be a whole number", field=path)
            )
        if not low <= value <= high:
            raise InvalidRequestError(f"{path}: must be in [{low}, {high}]", field=path)
        return int(value)

    return read


def objects(value: Any, path: str) -> Mapping[str, Any]:
    """An object of any fields."""
    if not isinstance(value, dict):
        raise wrong(value, path, "an object")
    return value


def lists(value: Any, path: str) -> Sequence[Any]:
    """A list of anything; long ones of token ids come as arrays."""
    if not isinstance(value, list | array):
        raise wrong(value, path, "a list")
    return value


def list_of(reader: Reader, *, max_length: int) -> Reader:
    """A list of what ``reader`` reads."""

    def read(value: Any, path: str) -> tuple[Any, ...]:
        items = lists(value, path)
        if len(items) > max_length:
            raise InvalidRequestError(f"{path}: has at most {max_length} items, not {len(items)}", field=path)
        return tuple([reader(item, f"{path}[{index}]") for index, item in enumerate(items)])

    return read


def one_or_many(reader: Reader, *, max_length: int) -> Reader:
    """One of what ``reader`` reads, or a list of them."""
    many = list_of(reader, max_length=max_length)
    return lambda value, path: many(value if isinstance(value, list | array) else [value], path)


def fields_of(table: Mapping[str, Reader]) -> Reader:
    """An object whose fields ``table`` reads."""
    return lambda value, path: read_fields(objects(value, path), table, f"{path}.")


def only(*allowed: object) -> Reader:
    """One of these values, which change nothing; others ask for what is not offered."""

    def read(value: Any, path: str) -> Any:
        if not any(type(value) is type(one) and value == one for one in allowed):
            shown = " or ".join([repr(one) for one in allowed]).replace("True", "true").replace("False", "false")
            raise UnsupportedFieldError(f"{path}: this server supports only {shown}", field=path)
        return value

    return read


def choice(*allowed: str) -> Reader:
    """One of these words."""

    def read(value: Any, path: str) -> str:
        if text(value, path) not in allowed:
            shown = value if len(value) < _MAX_SHOWN_LENGTH else "something else"
            raise InvalidRequestError(f"{path}: must be {' or '.join(allowed)}, not {shown}", field=path)
        return str(value)

    return read


def anything(value: Any, _path: str) -> Any:
    """Any value, which is read later."""
    return value


def ignored(_value: Any, _path: str) -> None:
    """Anything: it changes nothing here."""


def empty(why: str) -> Reader:
    """A list without items, which changes nothing; what items ask for is not offered."""

    def read(value: Any, path: str) -> None:
        if lists(value, path):
            raise UnsupportedFieldError(f"{path}: must be empty: {why}", field=path)

    return read


def refused(why: str) -> Reader:
    """Nothing: the field is known and not supported."""

    def read(_value: Any, path: str) -> Any:
        raise UnsupportedFieldError(f"{path}: is not supported: {why}", field=path)

    return read
