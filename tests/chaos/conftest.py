"""Tests of what takes minutes, run by ``make test-chaos``: short forms of the benchmarks that attack a fleet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.command import TIMEOUT_S


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    directory = Path(__file__).parent
    here = {path for path in {item.path for item in items} if directory in path.parents}
    for item in items:
        if item.path in here:
            item.add_marker("chaos")
            item.add_marker(pytest.mark.timeout(TIMEOUT_S + 100))
