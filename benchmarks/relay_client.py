"""One process of load: it reads a job and then commands, line by line, and answers each with a line.

python -m benchmarks.relay_client     (``benchmarks.relay_clients`` starts it)
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

import uvloop

from benchmarks.paced_clock import PacedClock
from benchmarks.relay_load import Command, Job, Load, Opened, StreamLoad, Tally, decode_job, find_absence
from benchmarks.relay_requests import RequestLoad


def main() -> None:
    """Run until told to quit, or until the standard input ends: then the process that started this one is gone."""
    uvloop.run(_run())


async def _run() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    job = decode_job(await reader.readline())
    tally = Tally(PacedClock(Path(job.clock_path)))
    if (absent := await find_absence(job)) is not None:
        _answer(json.dumps(asdict(Opened(absent=absent))))
        return
    load = _create_load(job, tally)
    try:
        _answer(json.dumps(asdict(await load.open())))
        while (line := await reader.readline()) and (command := Command(line.decode().strip())) is not Command.QUIT:
            if command is Command.BEGIN:
                tally.begin()
            elif command is not Command.END and isinstance(load, RequestLoad):
                load.set_paused(command is Command.PAUSE)
            _answer(tally.read().encode())
    finally:
        await load.close()


def _create_load(job: Job, tally: Tally) -> StreamLoad | RequestLoad:
    return StreamLoad(job, tally) if job.load is Load.STREAMS else RequestLoad(job, tally)


def _answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
