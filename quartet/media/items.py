"""What messages carry of media: where an item is, its file, its name and its size in tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


class MediaKind(StrEnum):
    """What a media file holds."""

    IMAGE = "image"  # PNG, JPEG, WebP or GIF; the first frame counts
    EMBEDDINGS = "embeddings"  # a safetensors file with one tensor [num_tokens, hidden_size]


#: Embeddings that an encode worker holds: beside the kinds of files, what a worker may take of media.
TAKES_HAND_OFF = "hand_off"


@dataclass(frozen=True)
class MediaFile:
    """The bytes of one item, as they came."""

    kind: MediaKind
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class MediaUrl:
    """Where an item can be fetched: ``data:``, ``file:``, ``http:`` or ``https:``. Only routers follow it."""

    url: str = field(repr=False)


#: One item of a request, as a client names it.
MediaPart: TypeAlias = MediaFile | MediaUrl


@dataclass(frozen=True)
class MediaItem:
    """A file with its name.

    Attributes:
        media_id: as ``quartet.media.media_id`` makes it, 32 bytes.
    """

    media_id: bytes
    file: MediaFile


@dataclass(frozen=True)
class MediaGrid:
    """Rows and columns of patches that a picture is cut into, before a model joins or leaves out any."""

    num_rows: int
    num_columns: int


@dataclass(frozen=True, kw_only=True)
class MediaSize:
    """How much of a prompt an item fills.

    Attributes:
        num_tokens: at least one.
        grid: ``None`` for what is laid out in none.
        is_cached: its embeddings are there already.
    """

    media_id: bytes
    num_tokens: int
    grid: MediaGrid | None = None
    is_cached: bool = False
