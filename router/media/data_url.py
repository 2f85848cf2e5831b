"""``data:`` URLs (RFC 2397): files that clients write into their requests as text.

A thread decodes long ones while the event loop runs on, so it does only a little of the work between two moments at
which the loop can go on. Work that can't be cut so, such as undoing escapes, is done on short URLs only.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import unquote_to_bytes

from quartet.errors import InvalidMediaError, MediaTooLargeError, RequestCancelledError
from quartet.media import file_size

# More characters must be base64 without escapes: a picture of this size is no longer one that somebody writes by hand.
_MAX_ESCAPED_LENGTH = 32 * 1024

# Undoing an escape takes as long as decoding so many characters of base64.
_ESCAPE_COST = 100

# A media type and its parameters.
_MAX_HEADER_LENGTH = 1024

# Of base64, decoded in half a millisecond.
_SLICE_LENGTH = 256 * 1024

_BLANKS = b" \t\n\r\v\f"


def check_data_url(url: str, max_size_bytes: int) -> None:
    """Refuse at once what can't be a file of at most ``max_size_bytes``; takes no time, however long ``url`` is.

    Raises:
        InvalidMediaError: it isn't ASCII.
        MediaTooLargeError: more characters than base64 with some blanks has for such a file.
    """
    max_length = _MAX_HEADER_LENGTH + max_size_bytes * 3 // 2
    if len(url) > max_length:
        message = (
            f"the data: URL has {len(url)} characters, more than the {max_length} that max_file_size_mb allows here"
        )
        raise MediaTooLargeError(message)
    if not url.isascii():
        raise InvalidMediaError("the data: URL has characters in it that are not ASCII")


def decoding_cost(url: str) -> int:
    """The work of decoding ``url``, in characters of base64. Takes no time, however long ``url`` is."""
    return len(url) + (_ESCAPE_COST * url.count("%") if len(url) <= _MAX_ESCAPED_LENGTH else 0)


def read_data_url(url: str, max_size_bytes: int, is_wanted: Callable[[], bool] = lambda: True) -> bytes:
    """The bytes in a ``data:`` URL. Its media type is ignored, since files show their own.

    Base64 may contain white space and lack its padding.

    Args:
        url: the URL.
        max_size_bytes: of the file.
        is_wanted: whether a request still waits for the file; asked now and then.

    Raises:
        InvalidMediaError: malformed, or long and not base64 without escapes.
        MediaTooLargeError: more bytes than ``max_size_bytes``; no more than that are ever decoded.
        RequestCancelledError: it is not wanted any more.
    """
    check_data_url(url, max_size_bytes)
    comma = url.find(",", 0, _MAX_HEADER_LENGTH)
    if comma < 0:
        raise InvalidMediaError(f"the data: URL has no comma in its first {_MAX_HEADER_LENGTH} characters")
    is_base64 = url[:comma].lower().endswith(";base64")
    if len(url) > _MAX_ESCAPED_LENGTH:
        if not is_base64:
            raise _not_plain_base64()
        return _decode_base64(_slices(url, comma + 1, is_wanted), max_size_bytes)
    payload = url[comma + 1 :]
    if is_base64:
        return _decode_base64([_unescaped(payload)], max_size_bytes)
    # Three characters of an escape are one byte.
    if len(payload) - 2 * payload.count("%") > max_size_bytes:
        raise file_size.too_large(max_size_bytes)
    return _unescaped(payload)


def _unescaped(payload: str) -> bytes:
    return unquote_to_bytes(payload) if "%" in payload else payload.encode("ascii")


def _slices(url: str, begin: int, is_wanted: Callable[[], bool]) -> Iterator[bytes]:
    for start in range(begin, len(url), _SLICE_LENGTH):
        if not is_wanted():
            raise RequestCancelledError("no request waits for the file any more")
        piece = url[start : start + _SLICE_LENGTH]
        if "%" in piece:
            raise _not_plain_base64()
        yield piece.encode("ascii")


def _decode_base64(pieces: Iterable[bytes], max_size_bytes: int) -> bytes:
    decoded: list[bytes] = []
    num_bytes, has_ended = 0, False
    try:
        for whole in _in_fours(pieces):
            if has_ended:
                raise binascii.Error("something follows the padding")
            # Padding is two characters at most.
            if num_bytes + len(whole) // 4 * 3 - 2 > max_size_bytes:
                raise file_size.too_large(max_size_bytes)
            decoded.append(base64.b64decode(whole, validate=True))
            num_bytes += len(decoded[-1])
            has_ended = whole.endswith(b"=")
    except binascii.Error as error:
        raise InvalidMediaError("the data: URL's base64 is malformed") from error
    return b"".join(decoded)


def _in_fours(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The characters of ``pieces`` without blanks, four or a multiple at a time; the last ones are padded."""
    rest = b""
    for piece in pieces:
        text = rest + piece.translate(None, _BLANKS)
        num_whole = len(text) - len(text) % 4
        rest = text[num_whole:]
        if num_whole:
            yield text[:num_whole]
    if rest:
        yield rest + b"=" * (4 - len(rest))


def _not_plain_base64() -> InvalidMediaError:
    message = f"a data: URL of more than {_MAX_ESCAPED_LENGTH} characters must be base64 without escapes such as %2B"
    return InvalidMediaError(message)
