"""Tokenizer files without weights, and mock engines that are closed when a test ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def text_dir() -> Path:
    """Directory of a model; the engine reads all of it but the weights."""
    return tiny.CHECKPOINT
