"""Checks of Python, the platform, and the versions of the packages that matter."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from cli.doctor.finding import Finding, ok, warning, wrong

_MIN_PYTHON = (3, 11)
#: Their versions decide whether processes understand each other and whether models run.
_WATCHED = ("grpcio", "protobuf", "aetcd", "pyzmq", "tokenizers", "numpy", "uvloop", "torch", "transformers")
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*([^;]*)(;.*)?$")
_BOUND = re.compile(r"(>=|<=|==|<|>)\s*([0-9][0-9.]*)")


@dataclass(frozen=True)
class Requirement:
    """A package, and its versions with which Quartet works.

    Attributes:
        bounds: pairs such as ``(">=", "1.85.1")``.
        is_optional: only an extra needs it.
    """

    name: str
    bounds: tuple[tuple[str, str], ...]
    is_optional: bool

    def allows(self, found: str) -> bool:
        """Whether the version ``found`` is within the bounds; a suffix such as ``+cu128`` does not count."""
        return all(_holds(_numbers(found), sign, _numbers(bound)) for sign, bound in self.bounds)

    @property
    def range(self) -> str:
        """The bounds, as pip takes them."""
        return ",".join(sign + bound for sign, bound in self.bounds)


async def check_packages() -> Sequence[Finding]:
    """Python and the packages."""
    return [_python(), *_packages(requires("quartet") or [])]


def parse_requirement(text: str) -> Requirement | None:
    """Parse a line of a package's metadata; ``None``: it has another form."""
    matched = _REQUIREMENT.match(text)
    if matched is None:
        return None
    name, bounds, marker = matched.groups()
    return Requirement(name.lower(), tuple(_BOUND.findall(bounds)), "extra ==" in (marker or ""))


def judge_package(requirement: Requirement, found: str | None) -> Finding:
    """What the installed version ``found`` means; ``None``: the package is not installed."""
    name = requirement.name
    if found is None and requirement.is_optional:
        return ok(name, "not installed: the engine `torch` needs it, `mock` and the router don't")
    install = f"pip install '{name}{requirement.range}'"
    if found is None:
        return wrong(name, f"not installed; Quartet needs {requirement.range}", install)
    if not requirement.allows(found) and requirement.is_optional:
        others = "those with TensorRT-LLM have the versions that it needs"
        return warning(
            name, f"{found}; the engine `torch` needs {requirement.range}, {others}", f"for `torch`: {install}"
        )
    if not requirement.allows(found):
        return wrong(name, f"{found}, but Quartet needs {requirement.range}", install)
    return ok(name, found)


def _python() -> Finding:
    where = f"{platform.python_version()} ({sys.executable}) on {platform.system()} {platform.release()}"
    where += f" {platform.machine()}"
    if sys.version_info < _MIN_PYTHON:
        return wrong("Python", where, "Quartet needs Python 3.11 or later")
    if sys.platform != "linux":
        return warning("Python", where, "transfers over shared memory and `quartet up`'s guard need Linux")
    return ok("Python", where)


def _packages(lines: Sequence[str]) -> Iterator[Finding]:
    found: dict[str, Requirement] = {}
    for requirement in filter(None, map(parse_requirement, lines)):
        # Several extras may name a package; the first range counts.
        found.setdefault(requirement.name, requirement)
    for name in _WATCHED:
        if name in found:
            yield judge_package(found[name], _installed(name))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]+(\.[0-9]+)*", text)
    return tuple(map(int, release.group().split("."))) if release else ()


def _holds(found: tuple[int, ...], sign: str, bound: tuple[int, ...]) -> bool:
    # 2.0 and 2 are the same version.
    length = max(len(found), len(bound))
    ours, theirs = (numbers + (0,) * (length - len(numbers)) for numbers in (found, bound))
    return {
        ">=": ours >= theirs,
        "<=": ours <= theirs,
        "==": ours == theirs,
        "<": ours < theirs,
        ">": ours > theirs,
    }[sign]
