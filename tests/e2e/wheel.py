"""A wheel of Quartet, built as for a release, and an environment that has it and nothing of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]

TIMEOUT_S = 300.0

#: What a wheel is built from.
_PARTS = (
    *("quartet", "router", "services", "cli", "models", "configs", "tools"),
    *("README.md", "LICENSE", "pyproject.toml"),
)
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "results")

#: What the extra ``torch`` brings for us to import, and Quartet itself, which the checkout's environment links to.
_NOT_SHARED = ("torch", "transformers", "safetensors", "quartet", "__editable__")


def build(kind: str, directory: Path) -> Path:
    """Build ``kind``, a ``wheel`` or an ``sdist``, from a copy of the checkout, in ``directory``; returns the file."""
    copy, built = directory / "copy", directory / "built"
    for name in _PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=_LEFT_OUT)
        else:
            shutil.copy2(source, copy / name)
    built.mkdir()
    run([sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_{kind}({str(built)!r})"], copy)
    [file] = built.iterdir()
    return file


def install(wheel: Path, directory: Path) -> Path:
    """Install ``wheel`` beside this environment's packages, but those of the extra ``torch``; returns its Python."""
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(_NOT_SHARED) and package.suffix != ".pth":
            (site_packages / package.name).symlink_to(package)
    options = ("--no-deps", "--no-index", "--no-compile", "--quiet")
    run([sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)], directory)
    return python


def run(command: list[str], directory: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Standard output of ``command``, run in ``directory`` without what leads to the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
