"""Puts the stand-in of TensorRT-LLM in place, for as long as a test wants it.

with installed():
    from tensorrt_llm import LLM

Outside of it ``import tensorrt_llm`` fails, as on every machine without the package. For processes of their own, set
``PYTHONPATH`` to ``DIRECTORY`` and, where a switch differs, ``TENSORRT_LLM_STAND_IN`` to switches as JSON.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

DIRECTORY = Path(__file__).parent
_NAME, _VARIABLE = "tensorrt_llm", "TENSORRT_LLM_STAND_IN"
#: By switches: classes stay the same ones from test to test.
_shelf: dict[str, dict[str, ModuleType]] = {}


class _Distribution(importlib.metadata.Distribution):
    """What an installation says of itself without an import."""

    def read_text(self, filename: str) -> str | None:
        version = sys.modules[_NAME].__version__
        return f"Name: {_NAME}\nVersion: {version}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return DIRECTORY / path


_ANYTHING = importlib.metadata.DistributionFinder.Context()


class _Finder(importlib.metadata.DistributionFinder):
    """Finds the stand-in's distribution."""

    def find_spec(self, *_: Any) -> None:
        """Modules are found on the path."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _ANYTHING
    ) -> Iterable[importlib.metadata.Distribution]:
        return [_Distribution()] if context.name == _NAME else []


_FINDER = _Finder()


@contextmanager
def installed(**switches: Any) -> Iterator[ModuleType]:
    """Make ``tensorrt_llm`` importable with ``switches`` (see `_stand_in/switches.py`); may be nested."""
    key = json.dumps(switches, sort_keys=True)
    before, variable = _take_modules(), os.environ.get(_VARIABLE)
    sys.modules.update(_shelf.get(key, {}))
    sys.path.insert(0, str(DIRECTORY))
    sys.meta_path.insert(0, _FINDER)
    os.environ[_VARIABLE] = key
    importlib.invalidate_caches()
    try:
        yield importlib.import_module(_NAME)
    finally:
        _shelf[key] = _take_modules()
        sys.modules.update(before)
        sys.path.remove(str(DIRECTORY))
        sys.meta_path.remove(_FINDER)
        if variable is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = variable


def _take_modules() -> dict[str, ModuleType]:
    """Remove the package's modules from Python's list, and return them."""
    names = [name for name in sys.modules if name == _NAME or name.startswith(_NAME + ".")]
    return {name: sys.modules.pop(name) for name in names}
