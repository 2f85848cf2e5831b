"""A step of building a wheel: puts what ships beside the code into the package, where ``quartet.shipped`` finds it.

In a checkout the same files stay where they are, so an editable install has no copy of them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from setuptools.command.build_py import build_py

SOURCES = ("configs", "models/tiny/checkpoint", "models/tiny/pictures")
TARGET = Path("quartet/_data")

# Where there is no git, as in a source distribution: what these kinds of files are called.
SUFFIXES = (".yaml", ".json", ".jinja", ".safetensors", ".jpg")


class BuildWithData(build_py):
    """Also copies what ``shipped_files`` names."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if not self.editable_mode:
            for source, target in self._copies().items():
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(source), str(target))

    def get_source_files(self) -> list[str]:
        """What goes into a source distribution, of which a wheel can be built as well."""
        return [*super().get_source_files(), *map(str, self._copies()), "tools/build_data.py"]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """What an installation consists of."""
        return [*super().get_outputs(include_bytecode), *map(str, self._copies().values())]

    def _copies(self) -> dict[Path, Path]:
        return {file: Path(self.build_lib) / TARGET / file for file in shipped_files(Path())}


def shipped_files(root: Path) -> list[Path]:
    """The files below ``SOURCES`` of the checkout or source distribution in ``root``, relative to it.

    Of a checkout what git tracks: a user's own topologies beside ours, and their secrets, are nobody else's.

    Raises:
        subprocess.CalledProcessError, OSError: it is a checkout, and git does not say what it tracks.
    """
    found = _tracked(root) if (root / ".git").exists() else _of_known_kinds(root)
    return sorted(file for file in found if (root / file).is_file())


def _tracked(root: Path) -> Iterator[Path]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--", *SOURCES]
    return map(
        Path, filter(None, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0"))
    )


def _of_known_kinds(root: Path) -> Iterator[Path]:
    for source in SOURCES:
        for file in (root / source).rglob("*"):
            if file.suffix in SUFFIXES and not any(part.startswith(".") for part in file.relative_to(root).parts):
                yield file.relative_to(root)
