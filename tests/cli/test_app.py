"""``quartet`` itself: the list of its subcommands, and what it imports before it does anything."""

from __future__ import annotations

import asyncio
import inspect
import sys

import pytest
import typer.main

from cli.app import app
from cli.options import DEFAULT_ROUTER
from services.topology.topology import DEFAULT_ROUTER_PORT
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# Runs the command line, and prints the modules that it imported as the last line of standard error.
PROGRAM = """
import sys
from cli.app import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
#: What only engines, routers, topologies, tables, pictures or the direct path need.
HEAVY = (
    *("torch", "transformers", "safetensors", "tokenizers", "jinja2", "numpy", "PIL", "matplotlib"),
    *("aetcd", "aiohttp", "grpc_channelz", "grpc_status", "prometheus_client", "uvloop", "yaml", "zmq"),
    *("router", "services", "quartet.client.direct", "quartet.telemetry", "quartet.text.tokenizer"),
)


async def imported_by(*arguments: str) -> tuple[str, set[str]]:
    """Standard output of ``quartet ARGUMENT...``, and the modules that it imported."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode(), set(errors.decode().splitlines()[-1].split())


async def test_the_list_of_commands_imports_none_of_them() -> None:
    output, modules = await imported_by("--help")
    assert all(name in output for name in COMMANDS)
    assert {name for name in modules if name.split(".")[0] == "cli"} == {"cli", "cli.app"}
    assert sorted(modules & {*HEAVY, "quartet", "grpc", "google.protobuf", "asyncio", "importlib.metadata"}) == []


async def test_generate_imports_only_what_it_needs(start_router: StartRouter) -> None:
    output, modules = await imported_by("generate", "Hi", "--router", await start_router(FakeRouter()))
    assert output == "one two three\n"
    assert {name for name in modules if name.split(".")[0] == "cli"} == {
        *("cli", "cli.answer", "cli.app", "cli.generate", "cli.options", "cli.output", "cli.prompt")
    }
    assert "quartet.client.client" in modules, "the look itself is wrong"
    assert sorted(modules & {*HEAVY, "readline", "rich"}) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_the_first_of_its_own_help(name: str) -> None:
    own_help = COMMANDS[name].load().help
    assert inspect.cleandoc(own_help).split("\n\n")[0] == COMMANDS[name].help


def test_commands_go_by_default_where_a_topology_starts_its_router() -> None:
    assert f"127.0.0.1:{DEFAULT_ROUTER_PORT}" == DEFAULT_ROUTER
