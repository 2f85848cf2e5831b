"""TypeScript: messages and descriptions of services, by the plugin that ``clients/typescript`` pins.

The details of a gRPC status (``google.rpc``) are made, too: no package of npm that is widely used has them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from google.rpc import error_details_pb2

from codegen.language import PACKAGE, ROOT, Language, ToolMissingError, run_protoc

_PLUGIN = ROOT / "clients/typescript/node_modules/.bin/protoc-gen-es"
_DETAILS = Path("google/rpc/error_details.proto")


def generate(out: Path) -> None:
    """Write the packages ``quartet/v1`` and ``google/rpc`` under ``out``.

    Raises:
        GenerationError: protoc failed.
        ToolMissingError: there is no Node, or no plugin.
    """
    if shutil.which("node") is None:
        raise ToolMissingError("no node on the PATH")
    if not _PLUGIN.exists():
        raise ToolMissingError("clients/typescript/node_modules lacks protoc-gen-es: `make node` gets it")
    out.mkdir(parents=True, exist_ok=True)
    run_protoc(
        [
            f"--plugin=protoc-gen-es={_PLUGIN}",
            f"--es_out={out}",
            "--es_opt=target=ts,import_extension=js",
            f"--proto_path={Path(error_details_pb2.__file__).parents[2]}",
            str(_DETAILS),
        ]
    )


LANGUAGE = Language(
    name="TypeScript",
    root=ROOT / "codegen/gen/typescript",
    generate=generate,
    required_by="QUARTET_REQUIRE_NODE",
    packages=(PACKAGE, _DETAILS.parent),
)
