"""The prompt of commands that send one: a text, a file, standard input, or token ids."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from cli.media import read_images
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
    prompt: str | None, file: Path | None, token_ids: str | None, images: Sequence[str] | None, *, is_chat: bool
) -> tuple[str | None, GenerateFields]:
    """The text to continue, or ``None``, and the fields that hold what else is. Raises ``typer.BadParameter``.

    In a user's message the pictures come before the text; any other prompt says itself where they go.
    """
    if sum(given is not None for given in (prompt, file, token_ids)) != 1:
        raise typer.BadParameter("give one of PROMPT, --file and --token-ids")
    if token_ids is not None:
        if is_chat:
            raise typer.BadParameter("--chat takes text, not --token-ids")
        return None, {"token_ids": _parse_ids(token_ids), "media": read_images(images)}
    text = _read(file) if file is not None else sys.stdin.read() if prompt == "-" else prompt
    assert text is not None, "one of them is given"
    media = read_images(images)
    if not is_chat:
        return text, {"media": media}
    return None, {"messages": [ChatMessage("user", (*media, text) if media else text)]}


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
