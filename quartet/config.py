"""Configuration: YAML to frozen dataclasses, strictly. A value that doesn't fit is refused by its full path.

A component's settings are one frozen ``kw_only`` dataclass with defaults, checked in its ``__post_init__``; this module
knows none of them. Types of fields: ``bool``, ``int``, ``float``, ``str``, ``Path``, enums (by value), nested
dataclasses, ``tuple[X, ...]``, ``Mapping[str, X]``, ``X | None``, and ``object`` for what another component checks.
Durations are floats named ``*_s``. In each ``Path`` and ``PathText``, ``~`` and ``$VAR`` are replaced, and the names of
files that ship with Quartet.
"""

from __future__ import annotations

import difflib
import errno
import math
import os
import re
import secrets
import stat
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from quartet.errors import ConfigError, ServingError
from quartet.shipped import find_shipped

ConfigT = TypeVar("ConfigT")

#: What YAML gives: mappings, lists, strings, numbers, booleans and ``None``.
Value: TypeAlias = object

#: Type of a field that holds a path or something else, such as a repository's name: text, but expanded as paths are.
PathText: TypeAlias = Annotated[str, "path"]

# ``$${`` stands for ``${``; a ``${`` that begins no variable is a mistake.
_IN_VALUES = re.compile(
    r"\$(?P<escaped>\$\{)|\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^{}]*))?\}|(?P<wrong>\$\{)", re.ASCII
)
_IN_PATHS = re.compile(r"\$(?:(?P<escaped>\$)|(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})", re.ASCII)


def load_yaml(path: Path, variables: Mapping[str, str] | None = None) -> dict[str, Value]:
    """The mapping that the file holds; an empty file is an empty one.

    With ``variables``, values may name them: ``${NAME}``, or ``${NAME:-default}`` for one that is unset or empty, and
    ``$${`` stands for ``${``. A value outside quotes gets its type afterwards: ``port: ${PORT:-8000}`` is a number.

    Raises:
        ConfigError: it can't be read, is not YAML, is not a mapping, has a key twice, or names a variable that is unset
            (names the field).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    content = _parse(text, str(path), variables)
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: must hold a mapping with names as keys")
    return content


def override(mapping: Mapping[str, Value], assignment: str) -> dict[str, Value]:
    """A copy of ``mapping`` with one value set: ``server.address=127.0.0.1:50051``. The value is read as YAML.

    Raises:
        ConfigError: not of that form, or the path leads through something that is no mapping.
    """
    path, equals, text = assignment.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise ConfigError(f"{assignment!r} must have the form name.name=value")
    return with_value(mapping, path.strip(), _parse(text, path))


def with_value(mapping: Mapping[str, Value], path: str, value: Value) -> dict[str, Value]:
    """A copy of ``mapping`` with ``value`` at ``path`` (``server.address``); mappings on the way are made.

    Raises:
        ConfigError: the path leads through something that is no mapping.
    """
    return _with_value(mapping, path.split("."), value, path)


def build(cls: type[ConfigT], mapping: Mapping[str, Value], where: str = "") -> ConfigT:
    """An instance of the dataclass ``cls`` from ``mapping``, nested ones included.

    Args:
        cls: a dataclass.
        mapping: values by field name; fields left out have their defaults.
        where: path of ``mapping`` in the whole configuration, for messages; empty for the top.

    Raises:
        ConfigError: naming the full path of an unknown key (and names like it), a missing one, or one whose value
            has a wrong type or is refused by the dataclass.
    """
    hints = type_hints(cls)
    known = {item.name: item for item in fields(cls) if item.init}  # type: ignore[arg-type]
    for key in mapping:
        if key not in known:
            raise ConfigError(f"{_join(where, key)}: unknown; {_hint(key, list(known))}")
    values = {name: _convert(hints[name], value, _join(where, name)) for name, value in mapping.items()}
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{_join(where, name)}: is missing")
    try:
        return cls(**values)
    except ConfigError as error:
        # It begins with the field's name; where that stands in the whole only we know.
        raise ConfigError(_join(where, str(error))) from error
    except (ValueError, ServingError) as error:
        raise ConfigError(f"{where}: {error}" if where else str(error)) from error


def type_hints(cls: type) -> Mapping[str, Any]:
    """The type of each field of the dataclass ``cls``, by name."""
    return _type_hints(cls)


@cache  # evaluating them took longer than all else that `build` does
def _type_hints(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls, include_extras=True)


def expand_path(text: str) -> str:
    """``text`` with ``~`` at its beginning and ``$VAR`` or ``${VAR}`` anywhere replaced; ``$$`` stands for ``$``.

    This is how every setting that is a path is read. What ``escape_path`` gives of an absolute path comes back as that.
    Paths below ``models/tiny`` and ``configs`` are those that ship with Quartet, where the working directory has none.

    Raises:
        ConfigError: a variable is unset, or ``~`` names no user's home.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"] or match["braced"]
        if name is None:
            return match["escaped"]
        try:
            return os.environ[name]
        except KeyError:
            raise ConfigError(f"the variable {name}, which {text!r} names, is not set ($$ stands for $)") from None

    home, slash, rest = text.partition("/")
    # The folder of a user whose name has a dollar is written ./~ followed by it.
    begin = os.path.expanduser(home) if home.startswith("~") else ""
    if begin.startswith("~"):
        raise ConfigError(f"{home}, which {text!r} begins with, is nobody's home (./~ stands for a file named so)")
    return find_shipped(begin + _IN_PATHS.sub(replace, slash + rest if begin else text))


def escape_path(path: str) -> str:
    """The text that ``expand_path`` reads as ``path``."""
    path = path.replace("$", "$$")
    return f"./{path}" if path.startswith("~") else path


def read_secret_file(path: Path, setting: str, max_bytes: int) -> bytes:
    """What the file that ``setting`` names holds, ``max_bytes`` bytes at most; the rest is left out.

    Raises:
        ConfigError: naming ``setting``; the file can't be read, or users beside its owner and group may open it.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(max_bytes)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    if stat.S_IMODE(mode) & stat.S_IRWXO:
        raise ConfigError(f"{setting}: {path} is open to everybody: chmod o-rwx (for a Kubernetes secret, defaultMode)")
    return content


def write_secret_file(path: Path, content: bytes) -> Path:
    """Write a new file that only its owner can open, whole or not at all; returns its path.

    Raises:
        OSError: the file exists already or can't be written.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    return write_whole_file(path, content)


def write_whole_file(path: Path, content: bytes, *, mode: int = 0o600) -> Path:
    """Write a file, or replace the one that is there; whoever reads it finds all of either. Returns its path.

    Args:
        path: the file.
        content: all of it.
        mode: its permissions, less the process's umask. By default only its owner can open it.

    Raises:
        OSError: it can't be written. Then ``path`` is as it was.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a machine that loses power may be left with the new name and no content
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    return path


def _convert(hint: Any, value: Value, path: str) -> Any:
    if hint is object:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_optional(hint, value, path)
    if origin is tuple:
        return _convert_tuple(hint, value, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _convert_mapping(hint, value, path)
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, _checked_mapping(value, path), path)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _convert_enum(hint, value, path)
    if hint in _SCALARS:
        is_fitting, wanted = _SCALARS[hint]
        if not is_fitting(value):
            raise _wrong_type(path, wanted, value)
        return _expanded(hint, str(value), path) if hint in (Path, PathText) else hint(value)
    raise TypeError(f"{path}: fields of type {hint} are not supported")


def _expanded(hint: Any, text: str, path: str) -> Any:
    try:
        text = expand_path(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return Path(text) if hint is Path else text


def _convert_optional(hint: Any, value: Value, path: str) -> Any:
    members = [member for member in get_args(hint) if member is not types.NoneType]
    if len(members) != 1 or len(members) == len(get_args(hint)):
        raise TypeError(f"{path}: of unions only X | None is supported, not {hint}")
    return None if value is None else _convert(members[0], value, path)


def _convert_tuple(hint: Any, value: Value, path: str) -> tuple[Any, ...]:
    item_hint, *rest = get_args(hint)
    if rest != [...]:
        raise TypeError(f"{path}: of tuples only tuple[X, ...] is supported, not {hint}")
    if not isinstance(value, list | tuple):
        raise _wrong_type(path, "a list", value)
    return tuple(_convert(item_hint, item, f"{path}[{index}]") for index, item in enumerate(value))


def _convert_mapping(hint: Any, value: Value, path: str) -> dict[str, Any]:
    _, value_hint = get_args(hint)
    return {key: _convert(value_hint, item, _join(path, key)) for key, item in _checked_mapping(value, path).items()}


def _convert_enum(kind: type[Enum], value: Value, path: str) -> Enum:
    try:
        return kind(value)
    except ValueError as error:
        allowed = [str(member.value) for member in kind]
        raise ConfigError(f"{path}: must be one of {', '.join(allowed)}, not {value!r}") from error


def _is_number(value: Value) -> TypeGuard[int | float]:
    # To Python true is a 1.
    return isinstance(value, int | float) and not isinstance(value, bool)


#: Which values each type takes, and what to say of others.
_SCALARS: dict[object, tuple[Callable[[Value], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: _is_number(value) and isinstance(value, int), "a whole number"),
    float: (lambda value: _is_number(value) and math.isfinite(value), "a number"),
    str: (lambda value: isinstance(value, str), "text (in quotes where it looks like something else)"),
    Path: (lambda value: isinstance(value, str | Path) and str(value) != "", "a path"),
    PathText: (lambda value: isinstance(value, str), "text (in quotes where it looks like something else)"),
}


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML's own answer is that the last one silently wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of ``node``; the signature is PyYAML's."""
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parse(text: str, source: str, variables: Mapping[str, str] | None = None) -> Value:
    try:
        # A subclass of SafeLoader: it makes nothing but plain values.
        loader = _StrictLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if variables is not None:
                _Expansion(loader, variables).expand(node, "")
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise ConfigError(f"{source}: is nested too deeply") from error
    # PyYAML lets some through: a date in month 99, a mapping as a key.
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{source}: not YAML: {error}") from error


class _Expansion:
    """Puts variables into the values of a document, before they get their types."""

    def __init__(self, loader: _StrictLoader, variables: Mapping[str, str]) -> None:
        self._loader, self._variables = loader, variables
        # By identity: an alias is the same node as its anchor. Kept here, so that no id is used twice.
        self._seen: dict[int, yaml.Node] = {}

    def expand(self, node: yaml.Node, path: str) -> None:
        """Expand ``node``, which stands at ``path``, and all below it."""
        if id(node) in self._seen:
            return
        self._seen[id(node)] = node
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self.expand(value, _join(path, str(key.value)))
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.expand(item, f"{path}[{index}]")
        elif isinstance(node, yaml.ScalarNode) and "${" in node.value:
            node.value = _IN_VALUES.sub(lambda match: self._replacement(match, path), node.value)
            if node.style is None:
                node.tag = self._loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]

    def _replacement(self, match: re.Match[str], path: str) -> str:
        if match["escaped"]:
            return match["escaped"]
        if match["wrong"]:
            raise ConfigError(f"{path}: a variable is ${{NAME}} or ${{NAME:-default}} ($${{ stands for ${{)")
        value = self._variables.get(match["name"], "")
        if not value and match["default"] is not None:
            return match["default"]
        if match["name"] not in self._variables:
            raise ConfigError(
                f"{path}: the variable {match['name']} is not set, and ${{{match['name']}}} has no default"
            )
        return value


def _with_value(mapping: Mapping[str, Value], names: list[str], value: Value, path: str) -> dict[str, Value]:
    first, *rest = names
    if not rest:
        return {**mapping, first: value}
    below = mapping.get(first)
    if below is None:
        below = {}
    if not isinstance(below, Mapping):
        raise ConfigError(f"{path}: {first} is not a mapping")
    return {**mapping, first: _with_value(below, rest, value, path)}


def _checked_mapping(value: Value, path: str) -> Mapping[str, Value]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong_type(path, "a mapping with names as keys", value)
    return value


def _wrong_type(path: str, wanted: str, value: Value) -> ConfigError:
    return ConfigError(f"{path}: must be {wanted}, not {value!r}")


def _hint(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known)
    return f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(known) or 'nothing'}"


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
