"""Checks of Python, the platform, and the versions of the packages that matter."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from cli.doctor.finding import Finding, ok, warning, wrong

_MIN_PYTHON = (3, 11)
#: Their versions decide whether processes understand each other and whether models run.
_WATCHED = ("grpcio", "protobuf", "aetcd", "pyzmq", "tokenizers", "numpy", "uvloop", "torch", "transformers")


async def check_packages() -> Sequence[Finding]:
    """Python and the packages."""
    return [_python(), *_packages(requires("quartet") or [])]


def judge_package(requirement: Requirement, found: str | None) -> Finding:
    """What the installed version ``found`` means; ``None``: the package is not installed."""
    name, bounds = requirement.name.lower(), requirement.specifier
    if found is None and is_optional(requirement):
        return ok(name, "not installed: the engine `torch` needs it, `mock` and the router don't")
    install = f"pip install '{name}{bounds}'"
    if found is None:
        return wrong(name, f"not installed; Quartet needs {bounds}", install)
    # Suffixes such as +cu128 do not count, nor does the a0 of the builds in NVIDIA's containers.
    if bounds.contains(Version(found).base_version):
        return ok(name, found)
    if is_optional(requirement):
        others = "those with TensorRT-LLM have the versions that it needs"
        return warning(name, f"{found}; the engine `torch` needs {bounds}, {others}", f"for `torch`: {install}")
    return wrong(name, f"{found}, but Quartet needs {bounds}", install)


def is_optional(requirement: Requirement) -> bool:
    """Whether only an extra needs it."""
    return "extra ==" in str(requirement.marker)


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
    for requirement in map(Requirement, lines):
        # Several extras may name a package; the first range counts.
        found.setdefault(requirement.name.lower(), requirement)
    for name in _WATCHED:
        if name in found:
            yield judge_package(found[name], _installed(name))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
