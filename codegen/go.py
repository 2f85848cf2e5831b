"""Go: messages and gRPC stubs, by the plugins that ``tools/go.mod`` pins."""

from __future__ import annotations

import subprocess
from pathlib import Path

from codegen.language import PACKAGE, PROTOS, ROOT, Language, ToolMissingError, contracts, run_protoc

_STUBS = Path("codegen/gen/go")
_TOOLS = ROOT / "tools"
_PLUGINS = {
    "protoc-gen-go": "google.golang.org/protobuf/cmd/protoc-gen-go",
    "protoc-gen-go-grpc": "google.golang.org/grpc/cmd/protoc-gen-go-grpc",
}
# Where our own module (go.mod) has them. It is said here and not by `option go_package` in the contracts: where stubs
# lie is each program's own affair, and a change of that option would count as one that breaks the contracts.
_IMPORT_PATH = f"quartet/{_STUBS / PACKAGE};quartetv1"
_BUILD_TIMEOUT_S = 600.0


def generate(out: Path) -> None:
    """Write the package ``quartet/v1`` under ``out``. Raises ``GenerationError`` and ``ToolMissingError``."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [f"M{contract.relative_to(PROTOS)}={_IMPORT_PATH}" for contract in contracts()]
    run_protoc(
        [
            *(f"--plugin={name}={_build(package)}" for name, package in _PLUGINS.items()),
            f"--go_out={out}",
            f"--go-grpc_out={out}",
            # Named for the contracts, not for the import path.
            *(
                f"--{plugin}_opt={option}"
                for plugin in ("go", "go-grpc")
                for option in ("paths=source_relative", *paths)
            ),
        ]
    )


def _build(package: str) -> str:
    """The program of a tool, which Go keeps in its cache. Raises ``ToolMissingError``."""
    command = [str(_TOOLS / "go.sh"), "tool", "-n", package]
    built = subprocess.run(command, cwd=_TOOLS, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    if built.returncode != 0:
        raise ToolMissingError(built.stderr.strip())
    return built.stdout.strip()


LANGUAGE = Language(name="Go", root=ROOT / _STUBS, generate=generate, required_by="QUARTET_REQUIRE_GO")
