"""Compares the installed TensorRT-LLM with what the adapter relies on; loads no model and touches no GPU.

    python -m quartet.engine.trtllm.inspection REPORT_FILE

in a process of its own: the import takes up to a minute, starts MPI, and crashes where that is broken. The package
prints what it likes, hence a file. A line that begins with ``PROGRESS`` says what comes next. Exit code ``ABSENT``:
there is no such package.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quartet.engine.trtllm.reliance import SYMBOLS, Default, Form, Symbol
from quartet.engine.trtllm.uncertain import QUESTIONS

#: Begins a line that says what comes next.
PROGRESS = "quartet-progress: "
ABSENT = 3
_PACKAGE = "tensorrt_llm"


@dataclasses.dataclass(frozen=True)
class Lack:
    """Something that the adapter relies on and that is not there.

    Attributes:
        path: what it is.
        loses: what does not work without it.
        is_needed: Quartet can't do without; else only somebody's ``engine_args`` name it, or little is lost.
        reason: why it can't be had, where more is known than that it is not there.
    """

    path: str
    loses: str
    is_needed: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class OtherDefault:
    """A default that is not what the adapter reckons with."""

    path: str
    expected: str
    found: str
    loses: str


@dataclasses.dataclass(frozen=True)
class Fact:
    """The answer to a question of `uncertain`; ``None``: it can't be told."""

    text: str
    holds: bool | None
    is_later: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """What an installed package is like."""

    version: str
    num_found: int
    lacks: tuple[Lack, ...]
    other_defaults: tuple[OtherDefault, ...]
    facts: tuple[Fact, ...]

    def to_json(self) -> str:
        """For the process that asked."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The inverse of ``to_json``."""
        told = json.loads(text)
        return cls(
            told["version"],
            told["num_found"],
            tuple(Lack(**lack) for lack in told["lacks"]),
            tuple(OtherDefault(**other) for other in told["other_defaults"]),
            tuple(Fact(**fact) for fact in told["facts"]),
        )


def inspect_package() -> Report:
    """Import the package and look at it. Raises whatever the import raises."""
    _tell(f"importing {_PACKAGE}")
    package: Any = import_module(_PACKAGE)
    _tell("comparing it with what Quartet relies on")
    num_found = 0
    lacks: list[Lack] = []
    others: list[OtherDefault] = []
    for symbol in SYMBOLS:
        for outcome in _compare(symbol):
            if isinstance(outcome, Lack):
                lacks.append(outcome)
                continue
            num_found += 1
            if outcome is not None:
                others.append(outcome)
    _tell("looking at what is uncertain")
    facts = tuple(Fact(question.text, _answer(question.holds), question.is_later) for question in QUESTIONS)
    return Report(str(getattr(package, "__version__", "unknown")), num_found, tuple(lacks), tuple(others), facts)


def _compare(symbol: Symbol) -> Iterator[Lack | OtherDefault | None]:
    """What is wrong with the symbol and with each name of it; ``None`` for each that is right."""
    try:
        found: Any = import_module(symbol.module)
        for part in symbol.name.split("."):
            found = getattr(found, part)
    except AttributeError:
        yield Lack(symbol.path, symbol.loses, is_needed=not symbol.is_optional)
        return
    except Exception as error:  # noqa: BLE001 - a module may fail in any way when it is imported, and is told of
        yield Lack(symbol.path, symbol.loses, is_needed=not symbol.is_optional, reason=repr(error))
        return
    yield None
    if symbol.form is None:
        return
    names = _names(found, symbol.form)
    for need in symbol.needs:
        for name, default in need.expected.items():
            path = f"{symbol.path}: {symbol.form} {name}"
            if name in names:
                yield _other_default(path, need.loses, names[name], default)
            else:
                yield Lack(path, need.loses, is_needed=not symbol.is_optional)
    needed = {name for need in symbol.needs for name in need.expected}
    for name in sorted(symbol.optional - needed - set(names)):
        yield Lack(f"{symbol.path}: {symbol.form} {name}", f"{name} in engine_args", is_needed=False)


def _other_default(path: str, loses: str, found: object, expected: object) -> OtherDefault | None:
    """``None``: ``found`` is what is expected."""
    if expected is Default.ANY or found is Default.ANY or _plain(found) == _plain(expected):
        return None
    return OtherDefault(path, str(_plain(expected)), str(_plain(found)), loses)


def _names(found: Any, form: Form) -> Mapping[str, object]:
    """The names of ``found`` that are of ``form``, with their defaults."""
    if form is Form.PARAMETERS:
        parameters = inspect.signature(found).parameters.values()
        return {
            parameter.name: Default.REQUIRED if parameter.default is parameter.empty else parameter.default
            for parameter in parameters
        }
    if form is Form.FIELDS:
        return _fields(found)
    return dict.fromkeys(_attributes(found), Default.ANY)


def _fields(found: Any) -> Mapping[str, object]:
    if hasattr(found, "model_fields"):
        return {name: _pydantic_default(field) for name, field in found.model_fields.items()}
    if dataclasses.is_dataclass(found):
        return {field.name: _dataclass_default(field) for field in dataclasses.fields(found)}
    return _names(found, Form.PARAMETERS)


def _pydantic_default(field: Any) -> object:
    if field.is_required():
        return Default.REQUIRED
    # What a factory makes is not asked for: it may read the GPU.
    return Default.ANY if field.default_factory is not None else field.default


def _dataclass_default(field: dataclasses.Field[Any]) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return Default.ANY if field.default_factory is not dataclasses.MISSING else Default.REQUIRED


def _attributes(found: Any) -> set[str]:
    """What instances have, as far as a class tells: an attribute that ``__init__`` assigns shows only in its code."""
    names = set(dir(found))
    for base in inspect.getmro(found):
        names.update(getattr(base, "__annotations__", {}), getattr(base, "__slots__", ()))
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else getattr(member, "fget", None)
            names.update(getattr(getattr(function, "__code__", None), "co_names", ()))
    return names


def _plain(value: object) -> object:
    """``value`` as somebody would write it: enums by name, names in any case."""
    if isinstance(value, Default):
        return value
    if isinstance(value, Enum):
        value = value.name
    return value.casefold() if isinstance(value, str) else value


def _answer(holds: Any) -> bool | None:
    try:
        return bool(holds())
    except Exception:  # noqa: BLE001 - the package may be like anything: no answer is an answer
        return None


def _tell(part: str) -> None:
    print(f"{PROGRESS}{part}", flush=True)


def _main() -> int:
    if find_spec(_PACKAGE) is None:
        return ABSENT
    Path(sys.argv[1]).write_text(inspect_package().to_json(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
