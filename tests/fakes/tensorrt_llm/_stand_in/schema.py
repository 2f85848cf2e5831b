"""Classes and signatures made from ``api.json``, the description of TensorRT-LLM 1.2's API."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from tensorrt_llm._stand_in.switches import SWITCHES

API: dict[str, Any] = json.loads((Path(__file__).parents[1] / "api.json").read_text(encoding="utf-8"))
_CONFIG = pydantic.ConfigDict(
    extra="forbid",
    arbitrary_types_allowed=True,
    validate_default=True,
    validate_assignment=False,
    protected_namespaces=(),
)
_field: Any = pydantic.Field
_BOUNDS = {">=": "ge", ">": "gt"}


class StandInError(AssertionError):
    """A use of the package that would go wrong without its saying so, or that its description does not cover."""


def make_enum(name: str) -> Any:
    """The enum called ``name`` in the description."""
    known = [*API["enums"][name], *(API["enums"]["later"].get(name, []) if SWITCHES.is_1_4 else [])]
    members = {value: value for value in known}
    functional: Any = enum.Enum
    made = functional(name, members, type=str)
    NAMES[name] = made
    return made


#: What types in the description may refer to; any other name stands for anything.
NAMES: dict[str, Any] = {"Path": Path, "Literal": Literal}


def parse_type(text: str) -> Any:
    """Return the type that ``text`` describes, bounds included; anything where it is prose."""
    optional = text.endswith("| None")
    plain = text.removesuffix("| None").strip()
    if bound := re.fullmatch(r"(int|float) (>=|>) (\d+)", plain):
        kind: Any = Annotated[NUMBERS[bound[1]], _field(**{_BOUNDS[bound[2]]: int(bound[3])})]
    elif re.fullmatch(r"float in \[0,\s*1\]", plain):
        kind = Annotated[float, pydantic.Field(ge=0, le=1)]
    else:
        return _evaluate(text)
    return kind | None if optional else kind


NUMBERS = {"int": int, "float": float}


def _evaluate(text: str) -> Any:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return Any
    builtin = {kind.__name__: kind for kind in (str, int, float, bool, bytes, list, dict, set)}
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    known = {name: NAMES.get(name, builtin.get(name, Any)) for name in named}
    return eval(compile(tree, text, "eval"), {**known, "None": None})  # the text is our own file's


def params_of(name: str, *, uncertain: bool = False) -> dict[str, dict[str, Any]]:
    """Return the parameters of a class or method, those it inherits first."""
    entry = API["classes"].get(name) or API["methods"][name]
    inherited = params_of(entry["extends"]) if "extends" in entry else {}
    later = entry.get("later_params", {}) if SWITCHES.is_1_4 else {}
    gone = entry.get("not_in_1_4", []) if SWITCHES.is_1_4 else []
    own = {**entry["params"], **(entry.get("uncertain_params", {}) if uncertain else {}), **later}
    return {**inherited, **{name: param for name, param in own.items() if name not in gone}}


def make_model(
    name: str,
    base: type[Any] | None = None,
    *,
    only: set[str] | None = None,
    own: Mapping[str, Any] | None = None,
    **types: Any,
) -> type[Any]:
    """Return a pydantic class that forbids what the description lacks.

    Args:
        name: its name in the description.
        base: a class with its validators; must not have fields of its own.
        only: the fields that it has, if not all.
        own: fields that the description has in words: type and default, for pydantic.
        types: of fields whose description is prose.
    """
    bases = base or pydantic.BaseModel
    config = type(f"{name}Base", (bases,), {"model_config": _CONFIG, "__module__": __name__})
    fields = {
        field: (types.get(field) or _type_of(param), _pydantic_default(param))
        for field, param in params_of(name).items()
        if only is None or field in only
    }
    made: type[Any] = pydantic.create_model(name, __base__=config, **{**fields, **(own or {})})
    NAMES.setdefault(name, made)
    return made


def _type_of(param: Mapping[str, Any]) -> Any:
    return Literal[tuple(param["choices"])] if "choices" in param else parse_type(param["type"])


def _pydantic_default(param: Mapping[str, Any]) -> Any:
    options = {"validation_alias": pydantic.AliasChoices(param["alias"])} if "alias" in param else {}
    if param.get("required"):
        return _field(**options)
    if "default_factory" in param:
        return _field(default_factory=_factory(param["default_factory"]), **options)
    return _field(default=param.get("default"), **options)


def _factory(name: str) -> Callable[[], Any]:
    plain: dict[str, Callable[[], Any]] = {"dict": dict, "list": list}
    return plain[name] if name in plain else NAMES.get(name, dict)


class Unslotted:
    """The base of dataclasses without slots."""


def make_dataclass(
    name: str, base: type[Any] = object, *, uncertain: bool = False, without: tuple[str, ...] = (), kw_only: bool = True
) -> type[Any]:
    """Return a dataclass with slots and the description's fields; ``base`` brings methods."""
    fields: list[Any] = []
    for field, param in params_of(name, uncertain=uncertain).items():
        kind = parse_type(param["type"])
        if field in without:
            continue
        if param.get("required"):
            fields.append((field, kind))
        elif "default_factory" in param:
            fields.append((field, kind, dataclasses.field(default_factory=_factory(param["default_factory"]))))
        else:
            fields.append((field, kind, dataclasses.field(default=param.get("default"))))
    made = dataclasses.make_dataclass(name, fields, bases=(base,), slots=base is not Unslotted, kw_only=kw_only)
    made.__module__ = sys._getframe(1).f_globals["__name__"]  # as if its fields were written there: for pickle
    return made


def check_types(name: str, value: Any) -> None:
    """Raise a `TypeError` that names the first field of ``value`` whose type differs from the description."""
    for field, param in params_of(name, uncertain=True).items():
        if not hasattr(value, field):
            continue
        check_type(f"{name}.{field}", param["type"], getattr(value, field))


def check_type(name: str, text: str, value: Any) -> None:
    """Raise a `TypeError` that says ``name`` if ``value`` isn't of the type that ``text`` describes."""
    try:
        _adapter(text, len(NAMES)).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        raise TypeError(f"{name} must be {text}, is {type(value).__name__}") from error


@cache
def _adapter(text: str, _num_names: int) -> Any:
    """What checks values of the type that ``text`` describes by so many names; making it takes longer than a step."""
    return pydantic.TypeAdapter(_boxed(text), config=pydantic.ConfigDict(arbitrary_types_allowed=True))


def _boxed(text: str) -> Any:
    kind = parse_type(text)
    # A class of ours is compared by being one, not by its fields.
    instance_of: Any = pydantic.InstanceOf
    return instance_of[kind] if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel) else kind


def signed(name: str, *, self_name: str | None = "self") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function the signature of the description's ``name``.

    The function gets every argument by keyword, defaults filled in; what the signature lacks is a `TypeError`.
    """
    entry = API["classes"].get(name) or API["methods"][name]
    kind = inspect.Parameter.KEYWORD_ONLY if entry.get("keyword_only") else inspect.Parameter.POSITIONAL_OR_KEYWORD
    params = [
        inspect.Parameter(field, kind, default=_plain_default(param))
        for field, param in {**entry["params"], **(entry.get("later_params", {}) if SWITCHES.is_1_4 else {})}.items()
    ]
    if "extra_kwargs_from" in entry:
        params.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    signature = inspect.Signature(params)
    own = [inspect.Parameter(self_name, inspect.Parameter.POSITIONAL_ONLY)] if self_name else []

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[len(own) :]
            try:
                bound = signature.bind(*given, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}() {error}") from None
            bound.apply_defaults()
            extra = bound.arguments.pop("kwargs", {})
            return function(*args[: len(own)], **bound.arguments, **extra)

        call.__signature__ = signature.replace(parameters=[*own, *params])  # type: ignore[attr-defined]
        return call

    return decorate


def _plain_default(param: Mapping[str, Any]) -> Any:
    return inspect.Parameter.empty if param.get("required") else param.get("default")
