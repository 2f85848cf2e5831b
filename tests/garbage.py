"""What only the garbage collector would free."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def garbage(*packages: str) -> Iterator[list[str]]:
    """The types of objects of ``packages`` that the block leaves in cycles, once it has ended."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.extend(sorted(type(one).__qualname__ for one in _of(packages, gc.garbage)))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.collect()


def _of(packages: tuple[str, ...], objects: Iterable[object]) -> list[object]:
    return [one for one in objects if f"{type(one).__module__}.{type(one).__qualname__}".startswith(packages)]
