"""``data:`` URLs (RFC 2397): the bytes are in the URL."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from quartet.errors import InvalidMediaError, MediaTooLargeError


def read_data_url(url: str, max_size_bytes: int) -> bytes:
    """The bytes in ``url``; its media type is not looked at, as files tell their own.

    Base64 may have white space in it and lack its padding.

    Raises:
        InvalidMediaError: malformed.
        MediaTooLargeError: more bytes than ``max_size_bytes``; found before any is decoded.
    """
    header, comma, payload = url.partition(",")
    if not comma:
        raise InvalidMediaError("the data: URL has no comma")
    if not payload.isascii():
        raise InvalidMediaError("the data: URL has characters in it that are not ASCII")
    is_base64 = header.lower().endswith(";base64")
    if is_base64:
        payload = "".join(payload.split())
    # Of three characters of an escape one byte remains; of four characters of base64, three, less the padding.
    size_bytes = len(payload) - 2 * payload.count("%")
    if is_base64:
        size_bytes = size_bytes * 3 // 4 - 2
    if size_bytes > max_size_bytes:
        raise MediaTooLargeError(f"the file has more than the {max_size_bytes} bytes allowed")
    data = unquote_to_bytes(payload)
    return _decode_base64(data) if is_base64 else data


def _decode_base64(text: bytes) -> bytes:
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise InvalidMediaError("the data: URL's base64 is malformed") from error
