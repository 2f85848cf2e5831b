"""What commands send: a prompt (text, file, standard input or token ids) and its pictures."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from quartet.client import ChatMessage, GenerateFields, MediaPart, MediaUrl, read_media
from quartet.errors import MediaTooLargeError
from quartet.shipped import find_shipped

ImageOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--image",
        metavar="FILE|URL",
        help="A picture, or embeddings in a .safetensors file. May be given several times. The router follows URLs.",
    ),
]

# The letter of a Windows drive is not a scheme.
_URL = re.compile(r"data:|[A-Za-z][A-Za-z0-9+.-]+://")


class MediaError(Exception):
    """A file can't be sent; the message names it."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What to continue.

    With ``is_chat`` the pictures come before the text; any other prompt holds a placeholder for each of them.
    """

    prompt: Annotated[str | None, typer.Argument(help="What to continue; - reads it from standard input.")] = None
    is_chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message, laid out by the model's chat template.")
    ] = False
    image: ImageOption = None
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="What to continue, in a file.")] = None
    token_ids: Annotated[
        str | None, typer.Option("--token-ids", metavar="N,N,...", help="What to continue, tokenized already.")
    ] = None
    session_key: Annotated[
        str,
        typer.Option(
            "--session-key", help="Requests of one session have it in common; routers may keep them together."
        ),
    ] = ""

    def read(self) -> tuple[str | None, GenerateFields]:
        """The text to continue, or ``None``, and the other fields of the request. Raises ``typer.BadParameter``."""
        if sum(given is not None for given in (self.prompt, self.file, self.token_ids)) != 1:
            raise typer.BadParameter("give one of PROMPT, --file and --token-ids")
        given: GenerateFields = {"session_key": self.session_key}
        if self.token_ids is not None:
            if self.is_chat:
                raise typer.BadParameter("--chat takes text, not --token-ids")
            return None, {**given, "token_ids": _parse_ids(self.token_ids), "media": read_images(self.image)}
        text = _read(self.file) if self.file is not None else sys.stdin.read() if self.prompt == "-" else self.prompt
        assert text is not None, "one of the three is given"
        media = read_images(self.image)
        if not self.is_chat:
            return text, {**given, "media": media}
        return None, {**given, "messages": [ChatMessage("user", (*media, text) if media else text)]}


def to_media(file_or_url: str) -> MediaPart:
    """The picture at ``file_or_url``: a file of this machine, or a URL, which the router follows.

    Raises ``MediaError``.
    """
    if _URL.match(file_or_url):
        return MediaUrl(file_or_url)
    try:
        # A shell has replaced `~` already; `quartet chat` has not.
        return read_media(find_shipped(os.path.expanduser(file_or_url)))
    except OSError as error:
        raise MediaError(f"{file_or_url}: {error.strerror}") from error
    except MediaTooLargeError as error:
        raise MediaError(f"{file_or_url}: {error.message}") from error


def read_images(images: Sequence[str] | None) -> list[MediaPart]:
    """The pictures that ``--image`` names. Raises ``typer.BadParameter``."""
    try:
        return [to_media(image) for image in images or ()]
    except MediaError as error:
        raise typer.BadParameter(f"--image {error}") from error


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
