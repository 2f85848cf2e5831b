"""A step of building a wheel: puts what ships beside the code into the package, where ``quartet.shipped`` finds it.

In a checkout the same files stay where they are, so an editable install has no copy of them.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py

SOURCES = ("configs", "models/tiny/checkpoint", "models/tiny/pictures")
TARGET = Path("quartet/_data")


class BuildWithData(build_py):
    """Also copies all files below ``SOURCES``."""

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
        files = [file for source in SOURCES for file in sorted(Path(source).rglob("*")) if file.is_file()]
        return {file: Path(self.build_lib) / TARGET / file for file in files}
