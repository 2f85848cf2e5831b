"""Pictures that commands are given: files of this machine, or URLs that the router follows."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import typer

from quartet.client import MediaPart, MediaUrl, read_media
from quartet.errors import MediaTooLargeError

ImageOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--image",
        metavar="FILE|URL",
        help="A picture, or embeddings in a .safetensors file. May be given several times. The router follows URLs.",
    ),
]

# A drive's letter is no scheme.
_URL = re.compile(r"data:|[A-Za-z][A-Za-z0-9+.-]+://")


class MediaError(Exception):
    """A file that can't be sent; the message names it."""


def to_media(file_or_url: str) -> MediaPart:
    """What ``file_or_url`` names. Raises ``MediaError``."""
    if _URL.match(file_or_url):
        return MediaUrl(file_or_url)
    try:
        # In a shell `~` was replaced already; in a conversation nobody has.
        return read_media(os.path.expanduser(file_or_url))
    except OSError as error:
        raise MediaError(f"{file_or_url}: {error.strerror}") from error
    except MediaTooLargeError as error:
        raise MediaError(f"{file_or_url}: {error.message}") from error


def read_images(images: Sequence[str] | None) -> list[MediaPart]:
    """What ``--image`` names. Raises ``typer.BadParameter``."""
    try:
        return [to_media(image) for image in images or ()]
    except MediaError as error:
        raise typer.BadParameter(f"--image {error}") from error
