"""Draws ``quartet top`` over a fleet under load: docs/images/top.svg.

python tools/draw_top.py

Starts the fleet of configs/mock_fleet.yaml with smaller pools, has clients send prompts for two minutes, drains a
worker, and draws the screen as it is then. Look at the picture before you commit it.
"""

from __future__ import annotations

import asyncio
import io
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import yaml
from rich.console import Console

from cli.top.fleet import KEPT_S, Fleet
from cli.top.render import draw
from cli.top.view import View
from quartet.client import QuartetClient, Sampling, WorkerState
from services.topology.launch import free_port

PICTURE = Path("docs/images/top.svg")
TOPOLOGY = Path("configs/mock_fleet.yaml")
WIDTH, HEIGHT = 112, 19

_TIMEOUT_S = 60.0
_LOAD_S = KEPT_S + 5
_DRAINED = "decode-3"
# Clients come and go, so that lines rise and fall.
_MAX_CLIENTS, _WAVE_S = 60, 40.0
_PREFIX_TOKENS, _NUM_PREFIXES = 3000, 4
# Rich's picture asks another site for its font, which no page that shows the picture would load.
_FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


def main() -> None:
    """Draw the picture."""
    with tempfile.TemporaryDirectory() as directory, _fleet(Path(directory)) as address:
        fleet = asyncio.run(_watch(address))
    console = Console(record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True)
    for line in draw(fleet, View(selected=_DRAINED), now_s=time.monotonic(), width=WIDTH, height=HEIGHT):
        console.print(line, no_wrap=True)
    PICTURE.write_text(_FONT.sub("", console.export_svg(title="quartet top", unique_id="top")))


@contextmanager
def _fleet(directory: Path) -> Iterator[str]:
    """The address of a running fleet's router."""
    topology = yaml.safe_load(TOPOLOGY.read_text())
    port = free_port()
    topology["namespace"] = "top"
    topology["engine"] |= {"num_blocks": 2048, "max_model_len": 8192, "scheduler": {"max_num_seqs": 32}}
    topology["model"]["path"] = str(Path(topology["model"]["path"]).resolve())
    topology["router"] = {"port": port}
    file = directory / "top.yaml"
    file.write_text(yaml.safe_dump(topology))
    command = [str(Path(sys.executable).with_name("quartet")), "up", str(file)]
    with (directory / "log").open("w") as log:
        up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert up.stdout is not None
            if not any(line.strip() == "ready" for line in up.stdout):
                raise SystemExit((directory / "log").read_text())
            yield f"127.0.0.1:{port}"
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(_TIMEOUT_S)


async def _watch(address: str) -> Fleet:
    """What ``quartet top`` knows after the load, with one worker that drains."""
    fleet, began_s = Fleet(), time.monotonic()
    async with QuartetClient(address) as client, aclosing(client.watch_fleet()) as states:
        clients = [asyncio.create_task(_ask(client, random.Random(number), number)) for number in range(_MAX_CLIENTS)]
        draining: asyncio.Task[object] | None = None
        async for state in states:
            fleet.take(state, now_s := time.monotonic())
            [worker] = [worker for worker in state.workers if worker.record.worker_id == _DRAINED]
            if now_s - began_s > _LOAD_S and draining is None:
                draining = asyncio.create_task(client.drain_worker(worker.record.grpc_address))
            if worker.state is WorkerState.DRAINING:
                break
        for task in clients:
            task.cancel()
        await asyncio.wait(clients)
    return fleet


async def _ask(client: QuartetClient, draw_number: random.Random, number: int) -> None:
    """Send prompts that begin like others', one after the other, in a part of each wave."""
    while True:
        phase = time.monotonic() % _WAVE_S / _WAVE_S
        if abs(phase - 0.5) * 2 > number / _MAX_CLIENTS:
            await asyncio.sleep(0.5)
            continue
        first_id = 10 + draw_number.randrange(_NUM_PREFIXES)
        prompt = [first_id] * _PREFIX_TOKENS + [draw_number.randrange(10, 200) for _ in range(500)]
        sampling = Sampling(max_tokens=draw_number.randrange(50, 200), ignore_eos=True)
        await client.complete(token_ids=prompt, sampling=sampling)


if __name__ == "__main__":
    main()
