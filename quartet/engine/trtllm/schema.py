"""The arguments of ``LLM`` and its sub-configs in TensorRT-LLM 1.2, names and types, and a check of arguments by them.

The tables are in ``schema.toml``, from its documentation and sources. Quartet keeps them because the package itself
needs a GPU to show them, and because 1.2 calls a keyword of 1.3 just "invalid argument". ``check_arguments`` refuses
wrong names, types and literals before a model loads. Where a line after 1.2 is installed, what the tables lack may be
right: names, literals and missing fields then pass with a warning, and types of known fields are still checked.

Types are text: ``int``, ``float``, ``bool``, ``str``, ``dict``, ``list[X]``, ``set[X]`` (a list), ``dict[K,V]``,
``Literal['a','b']``, ``AnyCase['A','B']`` (the same in any case), ``int >= 0``, ``float in [0,1]``, and several by
`` | ``. Any other name is a class; no plain value from YAML is an instance of it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quartet.engine.trtllm.package import installed_version, line_of
from quartet.errors import ConfigError

_TABLES = tomllib.loads((Path(__file__).parent / "schema.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class ConfigTable:
    """The fields of one class.

    Attributes:
        types: the type of each field that 1.2 has.
        required: fields that must be given.
        later: fields that came with 1.3.
        preset: the one of ``later`` that stands for the required ones, if any.
    """

    types: Mapping[str, str]
    required: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    preset: str | None = None


@dataclass(frozen=True, kw_only=True)
class Gone:
    """An argument of ``LLM`` that a later line has no more.

    Attributes:
        line: the first line without it.
        instead: what holds in its place, for a message.
        idle: the values that ask for what holds anyway; an argument with one of these may be left out.
    """

    line: tuple[int, int]
    instead: str
    idle: tuple[object, ...]


def types_of(names_by_type: Mapping[str, str]) -> Mapping[str, str]:
    """Turn names by type, in one string for each type, into types by name."""
    return {name: kind for kind, names in names_by_type.items() for name in names.split()}


def _table(content: Mapping[str, Any]) -> ConfigTable:
    extended = _TABLES["configs"][content["extends"]]["types"] if "extends" in content else {}
    return ConfigTable(
        types={**types_of(extended), **types_of(content["types"])},
        required=tuple(content.get("required", "").split()),
        later=tuple(content.get("later", "").split()),
        preset=content.get("preset"),
    )


#: The first line that has the ``later`` fields.
LATER_LINE = (1, 3)

#: ``LLM(...)`` on the PyTorch backend.
LLM = _table(_TABLES["LLM"])

#: Keywords of the engine backend, which the PyTorch backend refuses.
REFUSED = frozenset(_TABLES["refused"].split())

#: The fields that every backend named AutoDeploy takes. Some backends take more; which fields is not known.
AUTODEPLOY = _table(_TABLES["AUTODEPLOY"])

#: The arguments that `MultimodalEncoder` uses: it loads the vision part alone, and keeps no KV.
ENCODER = frozenset(_TABLES["encoder"].split())

_GONE: Mapping[str, Gone] = {
    name: Gone(line=line_of(content["line"]), instead=content["instead"], idle=tuple(content["idle"]))
    for name, content in _TABLES["gone"].items()
}

#: The classes of sub-configs, by name.
CONFIGS: Mapping[str, ConfigTable] = {name: _table(content) for name, content in _TABLES["configs"].items()}

#: The class for each ``decoding_type`` of a ``speculative_config``. Classes without a table of their own have the
#: common fields, and others that are not known here.
DECODING_CLASSES: Mapping[str, str] = _TABLES["decoding_classes"]

#: Decoding types that the PyTorch backend refuses, and those that came with 1.3.
REFUSED_DECODING, LATER_DECODING = (frozenset(_TABLES[kind].split()) for kind in ("refused_decoding", "later_decoding"))

#: The types allow values below 1 here, and TensorRT-LLM may notice them only once the model is loaded.
_POSITIVE = frozenset(_TABLES["positive"].split())


def alternatives(text: str) -> tuple[str, ...]:
    """Split a type's text into its alternatives; a value must fit one of them."""
    return tuple(part.strip() for part in text.split("|"))


def fits(text: str, value: object) -> bool:
    """Whether ``value`` is of one of the types in ``text``."""
    return any(_checker(part)(value) for part in alternatives(text))


def misfit(text: str, value: object) -> str:
    """What is wrong with ``value``, for a message after the field's name."""
    choices = _all_choices(text)
    if not choices:
        return f"must be {text}, not {_shown(value)}"
    hint = f": write it {value.upper()}" if isinstance(value, str) and value.upper() in choices else ""
    return f"must be one of {', '.join(choices)}, not {_shown(value)}{hint}"


_Checker = Callable[[object], bool]

_QUOTED = re.compile(r"'([^']+)'")

_LITERAL = re.compile(r"(?:Literal|AnyCase)\[[^\]]*\]")

_BOUND = re.compile(r"(int|float) (>=|>) (\d+)")

_OF_ITEMS = re.compile(r"(?:list|set)\[(.+)\]")

_BY_KEY = re.compile(r"dict\[(\w+), ?(.+)\]")


def _is_int(value: object) -> bool:
    # In Python, True is also an int.
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
        change = str.upper if text.startswith("AnyCase") else str
        return lambda value: isinstance(value, str) and change(value) in choices
    if bound := _BOUND.fullmatch(text):
        return _bounded(_PLAIN[bound[1]], int(bound[3]), or_equal=bound[2] == ">=")
    if items := _OF_ITEMS.fullmatch(text):
        is_item = _checker(items[1])
        return lambda value: isinstance(value, list | tuple) and all(map(is_item, value))
    if pairs := _BY_KEY.fullmatch(text):
        is_key, is_item = _checker(pairs[1]), _checker(pairs[2])
        return lambda value: isinstance(value, Mapping) and all(is_key(k) and is_item(v) for k, v in value.items())
    return lambda _: False


def _choices(text: str) -> tuple[str, ...]:
    return tuple(_QUOTED.findall(text)) if text.startswith(("Literal[", "AnyCase[")) else ()


def _all_choices(text: str) -> list[str]:
    return [choice for part in alternatives(text) for choice in _choices(part)]


def _bounded(is_kind: _Checker, least: int, *, or_equal: bool) -> _Checker:
    def check(value: object) -> bool:
        if not is_kind(value) or not isinstance(value, int | float):
            return False
        return value >= least if or_equal else value > least

    return check


def _shown(value: object) -> str:
    """Show ``value`` itself only if it is short and plain: a mapping may hold private values."""
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def gone_arguments() -> Mapping[str, Gone]:
    """The arguments of ``LLM`` that the installed line has no more, by name."""
    line = line_of(installed_version() or "")
    return {name: gone for name, gone in _GONE.items() if line >= gone.line}


def check_arguments(values: Mapping[str, object], table: ConfigTable) -> tuple[str, ...]:
    """Check ``values`` from a configuration against ``table``; fields that the table lacks are unknown.

    Returns:
        Warnings; each begins with the full name of a field.

    Raises:
        ConfigError: its message begins with the full name of a field.
    """
    check = _Check()
    check.names(values, table, "")
    return tuple(check.warnings)


class _Check:
    """One check of a configuration. What only 1.2 is known to refuse is a warning where a later line is installed.

    Attributes:
        warnings: so far.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._gone = gone_arguments()
        version = installed_version() or ""
        self._later_version = version if line_of(version) >= LATER_LINE else None

    def names(self, values: Mapping[str, object], table: ConfigTable, prefix: str) -> None:
        """Check fields of the class of ``table``, whose full names begin with ``prefix``."""
        for name, value in values.items():
            path = f"{prefix}{name}"
            if table is LLM and name in self._gone:
                self._check_gone(path, value, self._gone[name])
            elif name in table.types:
                self._check_value(table.types[name], value, path)
                if path in _POSITIVE and isinstance(value, int) and value < 1:
                    raise ConfigError(f"{path}: must be at least 1, not {value}")
            else:
                self._check_unknown(name, path, table)
        for name in table.required:
            if name not in values and not (self._later_version and table.preset in values):
                self._doubt(f"{prefix}{name}", "is missing", "is missing, which 1.2 would refuse")

    def _doubt(self, path: str, refusal: str, doubt: str) -> None:
        """Refuse ``path`` for ``refusal``, or, where a later line is installed, warn of ``doubt``."""
        if self._later_version is None:
            raise ConfigError(f"{path}: {refusal}")
        self.warnings.append(f"{path}: {doubt}; TensorRT-LLM {self._later_version} alone checks it")

    def _check_gone(self, path: str, value: object, gone: Gone) -> None:
        text = f"{path}: TensorRT-LLM {self._later_version} has it no more, as {gone.instead}"
        if value not in gone.idle:
            raise ConfigError(text)
        self.warnings.append(f"{text}; left out")

    def _check_unknown(self, name: str, path: str, table: ConfigTable) -> None:
        if name in table.later:
            self._doubt(path, "TensorRT-LLM 1.2 does not know it; it came with 1.3", "came with 1.3")
        elif table is LLM and name in REFUSED:
            raise ConfigError(f"{path}: the PyTorch backend of TensorRT-LLM does not take it")
        elif table is LLM and name in AUTODEPLOY.types:
            why = "only the backend _autodeploy of TensorRT-LLM 1.2 takes it"
            self._doubt(path, why, why)
        else:
            near = difflib.get_close_matches(str(name), table.types)
            hint = f"; did you mean {near[0]}?" if near else ""
            self._doubt(path, f"TensorRT-LLM 1.2 does not know it{hint}", f"is not known of 1.2{hint}")

    def _check_value(self, kind: str, value: object, path: str) -> None:
        for name in alternatives(kind):
            if isinstance(value, Mapping) and name == "SpeculativeConfig":
                return self._check_speculative(value, path)
            if isinstance(value, Mapping) and name in CONFIGS:
                self.names(value, CONFIGS[name], f"{path}.")
                return self._check_rules(name, value, path)
        if fits(kind, value):
            return
        if not fits(_LITERAL.sub("str", kind), value):
            raise ConfigError(f"{path}: {misfit(kind, value)}")
        known = ", ".join(_all_choices(kind)) or kind
        self._doubt(path, misfit(kind, value), f"{_shown(value)} is not known of 1.2, which has {known}")

    def _check_rules(self, name: str, value: Mapping[str, object], path: str) -> None:
        if name == "CudaGraphConfig" and value.get("batch_sizes") and value.get("max_batch_size"):
            why = "set it or max_batch_size, not both"
            self._doubt(f"{path}.batch_sizes", why, f"{why} in 1.2")
        if name == "PeftCacheConfig" and value.get("lora_prefetch_dir") is not None:
            raise ConfigError(f"{path}.lora_prefetch_dir: TensorRT-LLM does not support it")

    def _check_speculative(self, value: Mapping[str, object], path: str) -> None:
        kind = value.get("decoding_type")
        where = f"{path}.decoding_type"
        if kind in REFUSED_DECODING:
            raise ConfigError(f"{where}: the PyTorch backend of TensorRT-LLM does not take {kind}")
        if not isinstance(kind, str):
            raise ConfigError(f"{where}: must be one of {', '.join(DECODING_CLASSES)}, not {kind!r}")
        if kind in LATER_DECODING:
            self._doubt(where, f"TensorRT-LLM 1.2 does not know {kind}; it came with 1.3", f"{kind} came with 1.3")
        elif kind not in DECODING_CLASSES:
            known = ", ".join(DECODING_CLASSES)
            self._doubt(
                where, f"must be one of {known}, not {kind!r}", f"{kind!r} is not known of 1.2, which has {known}"
            )
        fields = {name: item for name, item in value.items() if name != "decoding_type"}
        table = CONFIGS.get(DECODING_CLASSES.get(kind, ""))
        if table is None:
            table = CONFIGS["DecodingBaseConfig"]
            for name in [name for name in fields if name not in table.types]:
                version = self._later_version or "1.2"
                self.warnings.append(
                    f"{path}.{name}: whether TensorRT-LLM {version} has it for {kind} is not known here"
                )
                del fields[name]
        self.names(fields, table, f"{path}.")
        if kind == "Eagle" and not (fields.get("speculative_model") or fields.get("speculative_model_dir")):
            raise ConfigError(f"{path}.speculative_model: is missing; Eagle needs a draft model")
