"""Threads in which grammars are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Several times the stack that a router's check has for the same grammar.
_STACK_SIZE = 16 << 20


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that begin meanwhile have stacks on which any grammar can be read that routers let pass."""
    usual = threading.stack_size(_STACK_SIZE)
    try:
        yield
    finally:
        threading.stack_size(usual)
