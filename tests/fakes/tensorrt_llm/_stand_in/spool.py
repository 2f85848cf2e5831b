"""What one engine keeps for another, taken at most once, in this process or another one of this host.

A thing lies in a file; to take it is to rename it, which one taker only can do. The name says which process keeps it.
"""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any

import torch


class GoneError(Exception):
    """It was taken before, its time is over, or its keeper is gone."""


class Spool:
    """One engine's shelf of things for others."""

    def __init__(self) -> None:
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._number = 0

    def put(self, thing: Any) -> bytes:
        """Keep ``thing`` (tensors in lists and dicts) and return its address: opaque, with zeros and high bytes."""
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix=f"tensorrt_llm-stand-in-{os.getpid()}-")
        self._number += 1
        path = Path(self._directory.name) / f"{self._number}.pt"
        buffer = io.BytesIO()
        torch.save(thing, buffer)
        path.with_suffix(".part").write_bytes(buffer.getvalue())
        path.with_suffix(".part").rename(path)
        return b"\x00\xff\x00\x80" + str(path).encode()

    def has(self, address: bytes) -> bool:
        """Whether what ``address`` names is still there to take."""
        return _path(address).exists()

    def drop(self, address: bytes) -> None:
        """Keep it no longer."""
        _path(address).unlink(missing_ok=True)

    def close(self) -> None:
        """Drop everything."""
        if self._directory is not None:
            self._directory.cleanup()


def take(address: bytes, *, once: bool = True) -> Any:
    """Return what ``address`` names, and (``once``) remove it from its keeper's shelf.

    Raises:
        GoneError: it isn't there (any more).
        ValueError: that is no address.
    """
    path = _path(address)
    _check_keeper(path)
    taken = path.with_suffix(f".taken-{os.getpid()}")
    try:
        if not once:
            return torch.load(path, weights_only=True)
        path.rename(taken)
    except FileNotFoundError:
        raise GoneError("it was released or taken") from None
    try:
        return torch.load(taken, weights_only=True)
    finally:
        taken.unlink(missing_ok=True)


def _path(address: bytes) -> Path:
    if address[:4] != b"\x00\xff\x00\x80":
        raise ValueError("not an address")
    return Path(address[4:].decode())


def _check_keeper(path: Path) -> None:
    """Raise if the process that keeps ``path`` died without cleaning up."""
    pid = int(path.parent.name.removeprefix("tensorrt_llm-stand-in-").partition("-")[0])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        raise GoneError("its process died") from None
