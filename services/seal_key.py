"""A key for the sealed starts of one running topology."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_SECRET_BYTES = 32


def draw_seal_key(directory: Path) -> Path:
    """Write a new key to a file in ``directory`` that only its owner can read, and return the path.

    Raises:
        OSError: there is such a file already, or it can't be written.
    """
    path = directory / "seal_keys"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_hex(4)} {secrets.token_hex(_SECRET_BYTES)}\n")
    return path
