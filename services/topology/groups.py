"""Groups of workers in a topology's settings before these are checked: found by name, and changed from a command line.

What has a wrong type here is left as it is: ``quartet.config.build`` says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

from quartet.config import override
from quartet.errors import ConfigError

Settings: TypeAlias = dict[str, Any]

_WORKERS = "workers"

_GPUS = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?", re.ASCII)

# More would only fill the memory: no host has as many.
_MAX_GPU = 1023


@dataclass(frozen=True, kw_only=True)
class GroupChoices:
    """What a command line changes in groups of workers, which it names as ``find_groups`` does.

    Attributes:
        replicas: ``NAME=N``, how many workers; 0: the group is left out. If a group has GPUs, it keeps those of the
            first workers, and further workers get the GPUs that follow, each as many as the first.
        gpus: ``NAME=GPUS``, their GPUs, as in ``share_out``.
        engine_args: ``NAME=FILE``, their ``extra_engine_args``.
    """

    replicas: Sequence[str] = ()
    gpus: Sequence[str] = ()
    engine_args: Sequence[str] = ()

    def apply(self, settings: Settings) -> None:
        """Change ``settings``.

        Raises:
            ConfigError: a choice is not of its form, or a name is that of no group, or of several to share GPUs.
        """
        for change, choices in (
            (_set_replicas, self.replicas),
            (_set_gpus, self.gpus),
            (_set_engine_args, self.engine_args),
        ):
            for choice in choices:
                change(settings, choice)


def copied(value: Any) -> Any:
    """A deep copy of ``value`` with mappings and lists that can be changed."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list | tuple) else value


def groups_of(settings: Settings) -> list[tuple[str, Settings]]:
    """The groups of workers, each with its path in the settings."""
    groups = settings.get(_WORKERS)
    listed = groups if isinstance(groups, list) else []
    return [(f"{_WORKERS}[{number}]", group) for number, group in enumerate(listed) if isinstance(group, dict)]


def below(settings: Settings, *path: str) -> Settings:
    """The mapping at ``path``, created if there is none."""
    for depth, name in enumerate(path):
        inner = settings.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(path[: depth + 1])}: must be a mapping with names as keys, not {inner!r}")
        settings = inner
    return settings


def found(settings: Mapping[str, Any], *path: str) -> Settings:
    """The mapping at ``path``, or a new one outside ``settings``."""
    inner: Any = settings
    for name in path:
        inner = inner.get(name) if isinstance(inner, dict) else None
    return inner if isinstance(inner, dict) else {}


def assign(settings: Settings, assignment: str, own_keys: Collection[str]) -> Settings:
    """A copy of ``settings`` with one value set, by ``NAME.NAME=VALUE``.

    ``workers.NAME.KEY`` is a key of each group of that name, role or number, or of one worker (``decode-1``), which
    becomes a group of its own. What is not in ``own_keys``, the keys of a group, is a key of its workers' settings.

    Raises:
        ConfigError: not of that form, nothing has the name, or the path leads through something that is no mapping.
    """
    path, equals, value = assignment.partition("=")
    first, _, rest = path.strip().partition(".")
    if first != _WORKERS or not equals or not rest:
        return override(settings, assignment)
    name, _, key = rest.partition(".")
    where = f"{_WORKERS}.{name}"
    if not key:
        raise ConfigError(f"{where}: must be followed by a key of these workers ({where}.engine.num_blocks=64)")
    changed: Settings = copied(settings)
    try:
        groups = find_groups(changed, name)
    except ConfigError:
        groups = [_split_off(changed, name)]
        if key == "replicas":
            raise ConfigError(f"{where}.replicas: {name} is one worker; its group has replicas") from None
    is_own = key.partition(".")[0] in own_keys
    for group in groups:
        try:
            group |= override(group, f"{key if is_own else f'overrides.{key}'}={value}")
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    return changed


def find_groups(settings: Settings, name: str) -> list[Settings]:
    """The groups that are called ``name``, or else those with that role or number.

    Raises:
        ConfigError: there is none.
    """
    groups = [group for _, group in groups_of(settings)]
    # A group without a name is called as its role is.
    chosen = [group for group in groups if _process_name(group) == name]
    chosen = chosen or [group for group in groups if group.get("role") == name]
    if not chosen and name.isdecimal() and int(name) < len(groups):
        chosen = [groups[int(name)]]
    if not chosen:
        raise ConfigError(f"{_WORKERS}: none is called {name}; known here: {', '.join(_names(groups)) or 'nothing'}")
    return chosen


def share_out_gpus(settings: Settings) -> None:
    """Replace GPUs that are given as text, such as ``0-3``, by a list for each worker of their group.

    Raises:
        ConfigError: naming the group; the text is none of GPUs, or they can't be shared out evenly.
    """
    for where, group in groups_of(settings):
        gpus = group.get("gpus")
        if isinstance(gpus, str | int) and not isinstance(gpus, bool):
            try:
                group["gpus"] = share_out(str(gpus), _num_replicas(group))
            except ConfigError as error:
                raise ConfigError(f"{where}.gpus: {error}") from error
        elif gpus is None and "gpus" in group:
            group["gpus"] = []


def share_out(text: str, replicas: int) -> list[list[int]]:
    """The GPUs of each of ``replicas`` workers, in the order of ``text``: ``0,1``, ``0-3`` or both; empty: none.

    Raises:
        ConfigError: it names something else, or can't be shared out evenly.
    """
    gpus: list[int] = []
    for part in text.replace(",", " ").split():
        match = _GPUS.fullmatch(part)
        first, last = (int(match["first"]), int(match["last"] or match["first"])) if match else (0, -1)
        if not first <= last <= _MAX_GPU:
            raise ConfigError(f"must be numbers of GPUs, as in 0,1 or 0-3, not {part!r}")
        gpus += range(first, last + 1)
    if not gpus:
        return []
    each, rest = divmod(len(gpus), replicas)
    if rest or not each:
        raise ConfigError(f"{len(gpus)} GPUs can't be shared out evenly to {replicas} workers")
    return [gpus[start : start + each] for start in range(0, len(gpus), each)]


def _set_replicas(settings: Settings, choice: str) -> None:
    group, value = _one_group(settings, choice, "replicas")
    if not value.isdecimal():
        raise ConfigError(f"replicas: {choice} must have the form NAME=N with N of at least 0")
    if not int(value):
        settings[_WORKERS] = [other for other in settings[_WORKERS] if other is not group]
        return
    group["replicas"] = replicas = int(value)
    gpus = group.get("gpus")
    if _are_lists(gpus):
        group["gpus"] = [*gpus[:replicas], *_following(gpus, replicas - len(gpus))]


def _set_gpus(settings: Settings, choice: str) -> None:
    group, value = _one_group(settings, choice, "gpus")
    try:
        group["gpus"] = share_out(value, _num_replicas(group))
    except ConfigError as error:
        raise ConfigError(f"gpus: {choice}: {error}") from error


def _set_engine_args(settings: Settings, choice: str) -> None:
    name, value = _parted(choice, "engine_args")
    for group in find_groups(settings, name):
        below(group, "overrides", "engine")["extra_engine_args"] = value


def _one_group(settings: Settings, choice: str, what: str) -> tuple[Settings, str]:
    name, value = _parted(choice, what)
    groups = find_groups(settings, name)
    if len(groups) > 1:
        raise ConfigError(f"{what}: {len(groups)} groups are called {name}; say --set workers.NUMBER.{what}=...")
    return groups[0], value


def _parted(choice: str, what: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in choice.partition("="))
    if not (name and equals and value):
        raise ConfigError(f"{what}: {choice!r} must have the form NAME=VALUE, with the name or role of workers")
    return name, value


def _split_off(settings: Settings, worker: str) -> Settings:
    """Make ``worker`` a group of its own, and return that. The names of workers stay what they are."""
    num_of_name: Counter[str] = Counter()
    groups = settings.get(_WORKERS)
    for number, group in enumerate(groups if isinstance(groups, list) else []):
        if not isinstance(group, dict):
            continue
        name, replicas = _process_name(group), _num_replicas(group)
        begin, _, index = worker.rpartition("-")
        index_here = int(index) - num_of_name[name] if index.isdecimal() else -1
        num_of_name[name] += replicas
        if begin == name and 0 <= index_here < replicas:
            parts = [_part(group, start, end) for start, end in _cuts(index_here, replicas)]
            settings[_WORKERS][number : number + 1] = parts
            return parts[1 if index_here else 0]
    names = [f"{name}-{index}" for name, count in num_of_name.items() for index in range(count)]
    known = [*_names([group for _, group in groups_of(settings)]), *names]
    raise ConfigError(f"{_WORKERS}.{worker}: none is called so; known here: {', '.join(known) or 'nothing'}")


def _cuts(index: int, replicas: int) -> list[tuple[int, int]]:
    """Ranges before, at and after ``index``; no empty ones."""
    return [(start, end) for start, end in ((0, index), (index, index + 1), (index + 1, replicas)) if start < end]


def _part(group: Settings, start: int, end: int) -> Settings:
    part: Settings = {**copied(group), "replicas": end - start}
    if _are_lists(part.get("gpus")):
        part["gpus"] = part["gpus"][start:end]
    return part


def _following(gpus: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """GPUs of ``count`` more workers: as many each as the first has, from the first after all that are named."""
    each, begin = len(gpus[0]), max(max(those) for those in gpus) + 1
    return [[*range(begin + index * each, begin + (index + 1) * each)] for index in range(count)]


def _are_lists(gpus: object) -> TypeGuard[list[list[int]]]:
    return (
        isinstance(gpus, list)
        and bool(gpus)
        and all(isinstance(those, list) and those and all(type(gpu) is int for gpu in those) for those in gpus)
    )


def _num_replicas(group: Settings) -> int:
    replicas = group.get("replicas", 1)
    return replicas if type(replicas) is int and replicas > 0 else 1


def _process_name(group: Settings) -> str:
    return str(group.get("name") or group.get("role"))


def _names(groups: Sequence[Settings]) -> list[str]:
    return [*dict.fromkeys(_process_name(group) for group in groups)]
