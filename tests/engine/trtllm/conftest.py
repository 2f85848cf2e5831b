"""The stand-in in place, as each of the two lines that the adapter knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.trtllm.engines import LINES, stand_in


@pytest.fixture(params=LINES, ids=str)
def package(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The package of one line, and of the other."""
    with stand_in(**request.param) as module:
        yield module
