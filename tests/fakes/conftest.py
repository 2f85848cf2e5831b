"""The stand-in is in place for each test here, and gone after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.installation import installed


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with installed():
        from tensorrt_llm._stand_in.control import control

        try:
            yield
        finally:
            control.reset()
