"""What can be said of a file before a worker has it: enough to refuse what could never be embedded."""

from __future__ import annotations

import json
import struct

from quartet.errors import InvalidMediaError, MediaTooLargeError
from quartet.media.image_file import read_header
from quartet.media.items import MediaFile, MediaItem, MediaKind
from quartet.media.media_id import media_id
from router.media.config import MediaConfig

# That of a file with one tensor has about a hundred.
_MAX_HEADER_SIZE_BYTES = 64 * 1024


def check_size(size_bytes: int, config: MediaConfig) -> None:
    """Raise ``MediaTooLargeError`` where a file has more bytes than allowed."""
    if size_bytes > config.max_size_bytes:
        raise MediaTooLargeError(f"the file has {size_bytes} bytes, more than the {config.max_size_bytes} allowed")


def make_item(file: MediaFile, fingerprint: bytes, config: MediaConfig) -> MediaItem:
    """``file``, checked, with its name; takes time in proportion to its size.

    Raises:
        InvalidMediaError: no picture that we read, or no safetensors file.
        MediaTooLargeError: more pixels than allowed.
    """
    if file.kind is MediaKind.IMAGE:
        read_header(file.data, max_pixels=config.max_pixels)
    else:
        _check_safetensors(file.data)
    return MediaItem(media_id(file, fingerprint), file)


def _check_safetensors(data: bytes) -> None:
    """The header's length as little-endian u64, then that of JSON, then tensors; which ones, the worker checks."""
    if len(data) < 8:
        raise InvalidMediaError("the embeddings are no safetensors file")
    (size_bytes,) = struct.unpack_from("<Q", data)
    if size_bytes > min(len(data) - 8, _MAX_HEADER_SIZE_BYTES):
        raise InvalidMediaError("the embeddings are no safetensors file, or are cut short")
    try:
        header = json.loads(data[8 : 8 + size_bytes])
    except (ValueError, RecursionError) as error:
        raise InvalidMediaError("the embeddings' safetensors header is no JSON") from error
    if not isinstance(header, dict):
        raise InvalidMediaError("the embeddings' safetensors header is no JSON object")
