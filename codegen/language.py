"""What ``codegen.generate`` needs to know of a language, and what all languages generate with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
#: The package of all contracts: below ``PROTOS``, and below the root of each language's stubs.
PACKAGE = Path("quartet/v1")


class GenerationError(Exception):
    """The contracts were refused; stderr says why."""


class ToolMissingError(Exception):
    """This machine can't generate the language; the message says what it lacks."""


@dataclass(frozen=True, kw_only=True)
class Language:
    """Stubs in one language.

    Attributes:
        name: for people.
        root: the directory in the repository whose ``packages`` hold the stubs, and nothing else.
        generate: writes ``packages`` under a directory; the same contracts always give the same bytes. Raises
            ``GenerationError`` and ``ToolMissingError``.
        required_by: the environment variable that, set to 1, makes a missing tool a failure; empty: it always is one.
        packages: directories below ``root``.
    """

    name: str
    root: Path
    generate: Callable[[Path], None]
    required_by: str = ""
    packages: Sequence[Path] = (PACKAGE,)


def contracts() -> list[Path]:
    """All contracts, sorted."""
    return sorted((PROTOS / PACKAGE).glob("*.proto"))


def run_protoc(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Have protoc read all contracts, with ``arguments`` that say what it makes of them; in ``environment``, if given.

    Raises:
        GenerationError: protoc failed.
    """
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc"),
        f"--proto_path={PROTOS}",
        f"--proto_path={files('grpc_tools') / '_proto'}",  # google.protobuf's well-known types
        *arguments,
        *map(str, contracts()),
    ]
    if subprocess.run(command, env=environment, check=False).returncode != 0:
        raise GenerationError("protoc failed")
