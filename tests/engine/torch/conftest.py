"""Checkpoints and oracles, made once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.engine.torch.checkpoints import SEEING_FAMILIES, make_checkpoint, make_config, make_seeing_config
from tests.engine.torch.oracle import Oracle
from tests.engine.torch.seeing import SeeingOracle


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's tiny model."""

    def make(family: str) -> Path:
        config = make_seeing_config(family) if family in SEEING_FAMILIES else make_config(family)
        return make_checkpoint(tmp_path_factory.mktemp(family), config)

    return cache(make)


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """``generate`` on a family's tiny model."""
    return cache(lambda family: Oracle(checkpoint(family)))


@pytest.fixture(scope="session")
def seeing_oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], SeeingOracle]:
    """``generate`` on a tiny model that sees."""
    return cache(lambda family: SeeingOracle(checkpoint(family)))
