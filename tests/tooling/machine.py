"""A machine that lacks what a test says: copies of the set-up scripts, and a PATH of fakes and plain Unix tools."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
#: The folder of the TypeScript client in the repository.
TYPESCRIPT = Path("clients/typescript")
# Nothing of this machine's Go, Node, etcd or Python may be found.
_UNIX = (
    "awk bash cat chmod cp cut df dirname find flock grep head mkdir mktemp mv printf pwd rm sed sha256sum sort tee"
    " timeout touch true uname"
).split()


class Machine:
    """The repository's set-up scripts under ``directory``, on a PATH where fakes stand in for what downloads."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "repository"
        self._bin = directory / "bin"
        self._bin.mkdir()
        for name in ("tools", ".ci"):
            shutil.copytree(_ROOT / name, self.root / name)
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(_ROOT / name, self.root / name)
        (self.root / TYPESCRIPT).mkdir(parents=True)
        for name in ("package.json", "package-lock.json", ".npmrc"):
            shutil.copy(_ROOT / TYPESCRIPT / name, self.root / TYPESCRIPT / name)
        for name in _UNIX:
            if program := shutil.which(name):
                (self._bin / name).symlink_to(program)

    def install(self, name: str, script: str) -> None:
        """Put a program on the PATH, or replace it; every start of it appends its arguments to its calls."""
        self.write_program(self._bin / name, f'echo "$@" >>"{self._calls_of(name)}"\n{script}')

    def write_program(self, path: Path, script: str) -> None:
        """Write a shell script that can be started."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        """Arguments of each start of an installed program."""
        file = self._calls_of(name)
        return file.read_text().splitlines() if file.exists() else []

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one of the repository's scripts."""
        return subprocess.run(
            [self.root / script, *arguments],
            env={"PATH": str(self._bin), "HOME": os.environ.get("HOME", "/"), **variables},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def _calls_of(self, name: str) -> Path:
        return self._bin.parent / f"{name}.calls"
