"""Fixtures of the command line's tests: commands run in a thread, the fake router on the test's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from typer.testing import CliRunner, Result

from cli.app import app
from tests.client.conftest import start_router

__all__ = ["start_router"]

RunCli = Callable[..., Awaitable[Result]]


@pytest.fixture
def run_cli() -> RunCli:
    """Runs ``quartet ARGUMENT...``, with ``input`` as its standard input; bounded."""

    async def run(*arguments: str, input: str = "") -> Result:
        runner = CliRunner()
        async with asyncio.timeout(90):
            return await asyncio.to_thread(runner.invoke, app, list(arguments), input)

    return run
