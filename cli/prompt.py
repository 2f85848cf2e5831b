"""The prompt of commands that send one: a text, a file, standard input, or token ids."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from quartet.client import ChatMessage, GenerateFields

PromptArgument: TypeAlias = Annotated[
    str | None, typer.Argument(help="What to continue; - reads it from standard input.")
]
FileOption: TypeAlias = Annotated[
    Path | None, typer.Option("--file", metavar="FILE", help="What to continue, in a file.")
]
TokenIdsOption: TypeAlias = Annotated[
    str | None, typer.Option("--token-ids", metavar="N,N,...", help="What to continue, tokenized already.")
]
ChatOption: TypeAlias = Annotated[
    bool, typer.Option("--chat", help="The prompt is a user's message, laid out by the model's chat template.")
]
SessionKeyOption: TypeAlias = Annotated[
    str,
    typer.Option("--session-key", help="Requests of one session have it in common; routers may keep them together."),
]


def read_prompt(
    prompt: str | None, file: Path | None, token_ids: str | None, *, is_chat: bool
) -> tuple[str | None, GenerateFields]:
    """The text to continue, or ``None`` and the field that holds what is. Raises ``typer.BadParameter``."""
    if sum(given is not None for given in (prompt, file, token_ids)) != 1:
        raise typer.BadParameter("give one of PROMPT, --file and --token-ids")
    if token_ids is not None:
        if is_chat:
            raise typer.BadParameter("--chat takes text, not --token-ids")
        return None, {"token_ids": _parse_ids(token_ids)}
    text = _read(file) if file is not None else sys.stdin.read() if prompt == "-" else prompt
    assert text is not None, "one of them is given"
    return (None, {"messages": [ChatMessage("user", text)]}) if is_chat else (text, {})


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(token_id) for token_id in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter("--token-ids takes whole numbers, parted by commas") from error


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--file {file}: {error}") from error
