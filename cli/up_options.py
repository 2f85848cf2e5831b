"""Options of ``quartet up`` that go over its file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from quartet.engine.settings import EngineKind

EngineOption: TypeAlias = Annotated[
    EngineKind | None,
    typer.Option("--engine", help="Of every worker. What the file says that this engine does not have is left out."),
]
ModelOption: TypeAlias = Annotated[
    Path | None, typer.Option("--model", help="Folder of a checkpoint, or a Hugging Face repository.")
]
ServedModelNameOption: TypeAlias = Annotated[
    str | None, typer.Option("--served-model-name", help="What requests call the model by.")
]
MediaPathsOption: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--allowed-local-media-path",
        metavar="DIR",
        help="file: URLs of requests may name what is below it. May be given several times.",
    ),
]
AssignmentsOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME.NAME=VALUE", help="Change one setting. May be given several times."),
]
