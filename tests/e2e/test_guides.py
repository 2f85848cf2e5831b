"""The commands of the pages on tuning, troubleshooting and observability, on the fleet that they are for."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e import documentation
from tests.e2e.fork_server import ForkServer
from tests.e2e.up import Up

COMMAND_TIMEOUT_S = 60.0
NUM_AT_ONCE = 3
_HTTP = re.compile(r"http://([\w.:]+)/")


class Shell:
    """Runs commands as the pages have them, against one fleet."""

    def __init__(self, up: Up, quartet: Path, grpcurl: Path) -> None:
        [http_address] = {address for line in up.lines for address in _HTTP.findall(line)}
        self._addresses = {"localhost:8000": http_address, "127.0.0.1:50050": up.router_address}
        path = os.pathsep.join([str(quartet.parent), str(grpcurl.parent), os.environ["PATH"]])
        without_etcd = {name: value for name, value in os.environ.items() if name != "ETCD_ENDPOINTS"}
        self._environment = {**without_etcd, "PATH": path, "QUARTET_ROUTER": up.router_address}
        self._turn = asyncio.Semaphore(NUM_AT_ONCE)

    async def run(self, command: str) -> str:
        """What it and the functions of the page print, on both streams."""
        script = f"{documentation.guide_functions()}\n{command}"
        for shown, real in self._addresses.items():
            script = script.replace(shown, real)
        async with self._turn, asyncio.timeout(COMMAND_TIMEOUT_S):
            process = await asyncio.create_subprocess_exec(
                *("bash", "-c", script), stdout=PIPE, stderr=STDOUT, cwd=documentation.ROOT, env=self._environment
            )
            out, _ = await process.communicate()
        return out.decode()


@pytest.mark.usefixtures("etcd_binary")
async def test_every_command_of_the_guides_gives_what_they_show(
    tmp_path: Path, fork_server: ForkServer, grpcurl: Path
) -> None:
    file, *options = documentation.guide_fleet()
    settings = ("router.port=0", "engine.mock.speed_up=20", f"model.path={tiny.CHECKPOINT}")
    options += [option for setting in settings for option in ("--set", setting)]
    async with Up(tmp_path, str(documentation.ROOT / file), *options, python=fork_server.python) as up:
        await up.wait_ready()
        shell = Shell(up, fork_server.quartet, grpcurl)
        # First a load, whose figures others show.
        lines = documentation.guide_lines()
        [load] = [command for command in lines if command.startswith("quartet bench")]
        outputs = {load: await shell.run(load)}
        rest = [command for command in lines if command != load]
        outputs |= dict(zip(rest, await asyncio.gather(*map(shell.run, rest)), strict=True))
        for command, wanted in lines.items():
            assert not [text for text in wanted if text not in outputs[command]], (command, wanted, outputs[command])
        await up.end(signal.SIGINT)
