"""Generates the stubs of ``protos/quartet/v1`` in every language: ``codegen/python.py`` and those beside it.

python -m codegen.generate            write the stubs
python -m codegen.generate --check    write nothing; fail if the stubs do not match the contracts

A language whose tools this machine lacks is left alone, with a line that says so. The gate requires them all, by
``QUARTET_REQUIRE_GO=1`` and the like.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import sys
import tempfile
from pathlib import Path

from codegen import go, python, typescript
from codegen.language import ROOT, GenerationError, Language, ToolMissingError

#: All of them; each has a file of its own.
LANGUAGES = (python.LANGUAGE, go.LANGUAGE, typescript.LANGUAGE)


def differing_files(expected: Path, actual: Path) -> list[str]:
    """Return the names of files that only one of two directories has, or that differ in content."""
    names = {path.name for directory in (expected, actual) for path in directory.glob("*") if path.is_file()}
    _, differing, missing = filecmp.cmpfiles(expected, actual, names, shallow=False)
    return sorted(differing + missing)


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description="Generate stubs from protos/quartet/v1.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the stubs are out of date")
    arguments = parser.parse_args()
    are_good = [run(language, is_check=arguments.check) for language in LANGUAGES]
    return 0 if all(are_good) else 1


def run(language: Language, *, is_check: bool) -> bool:
    """Write the language's stubs, or check them; returns whether they are what the contracts give, as far as known."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            language.generate(Path(scratch))
        except GenerationError as error:
            print(f"{language.name}: {error}", file=sys.stderr)
            return False
        except ToolMissingError as error:
            print(f"{language.name}: stubs not {'checked' if is_check else 'written'}: {error}", file=sys.stderr)
            return os.environ.get(language.required_by) != "1" if language.required_by else False
        are_same = [
            _settle(Path(scratch) / package, language.root / package, is_check) for package in language.packages
        ]
        return all(are_same)


def _settle(fresh: Path, target: Path, is_check: bool) -> bool:
    differing = differing_files(fresh, target)
    if is_check:
        return _report(target, differing)
    _update(fresh, target, differing)
    return True


def _report(target: Path, differing: list[str]) -> bool:
    for name in differing:
        path = (target / name).relative_to(ROOT)
        print(f"{path} is not what the contracts give: run `make generate`", file=sys.stderr)
    return not differing


def _update(fresh: Path, target: Path, differing: list[str]) -> None:
    """Copy files that differ, delete files of no contract, and leave other files and their times unchanged."""
    target.mkdir(parents=True, exist_ok=True)
    for name in differing:
        if (fresh / name).exists():
            shutil.copyfile(fresh / name, target / name)
        else:
            (target / name).unlink()


if __name__ == "__main__":
    sys.exit(main())
