"""The page's cost is measured on a real fleet, with the page in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import page


@pytest.mark.bench
async def test_the_router_works_a_little_for_an_open_page(chromedriver: Path) -> None:
    found = await page.measure(1.0, 1)
    assert found.num_workers == 6 and found.browser.startswith("chrome")
    for windows in (found.idle, found.busy, found.busy_in_browser):
        assert len(windows.closed) == len(windows.opened) == 2
        assert min(*windows.closed, *windows.opened) > 0
    assert min(found.busy.closed) > max(found.idle.closed)
