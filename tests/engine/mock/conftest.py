"""Tokenizer files without weights, and mock engines that are closed when a test ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.random_llama import write_text_files


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model without weights, of 640 tokens; its end-of-sequence id is 1."""
    directory = tmp_path_factory.mktemp("mock-model")
    write_text_files(directory)
    return directory
