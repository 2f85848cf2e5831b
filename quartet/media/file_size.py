"""How large one media file may be: the rule that routers and workers share.

Both have a setting ``max_file_size_mb`` with this default. A router refuses a larger file before it is fetched or sent
on, and a worker before it is read; so the smaller of the two settings counts.
"""

from __future__ import annotations

from quartet.errors import ConfigError, MediaTooLargeError
from quartet.rpc.channels import MAX_API_MESSAGE_BYTES

#: In MB of 10**6 bytes. One such file also fits into the body of a request by HTTP, as base64.
DEFAULT_MAX_FILE_SIZE_MB = 50.0

_MB = 1_000_000


def in_bytes(max_file_size_mb: float) -> int:
    """The setting in bytes."""
    return round(max_file_size_mb * _MB)


def check_setting(max_file_size_mb: float) -> None:
    """Raise ``ConfigError`` for a size that no file can have: all files of a request go to a worker together."""
    most = MAX_API_MESSAGE_BYTES / _MB
    if not 0 < max_file_size_mb <= most:
        raise ConfigError(
            f"max_file_size_mb: must be above 0 and at most {most:g}, which all files of a request have together, "
            f"not {max_file_size_mb:g}"
        )


def too_large(max_size_bytes: int, size_bytes: int | None = None) -> MediaTooLargeError:
    """The error for a file of more than ``max_size_bytes``; ``None``: how many it has is not known."""
    has = "more bytes" if size_bytes is None else f"{size_bytes} bytes, more"
    return MediaTooLargeError(f"the file has {has} than the {max_size_bytes} that max_file_size_mb allows here")
