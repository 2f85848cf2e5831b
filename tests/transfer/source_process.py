"""A source in a process of its own: prints a hand-off as hexadecimal pickle, then serves until it is killed.

The second argument makes it stop in the middle of a pull: ``stall`` sends the first piece and no other.
"""

from __future__ import annotations

import asyncio
import pickle
import sys

from quartet.transfer.grpc import servicer
from tests.transfer.workers import LARGE_LAYOUT, source_worker


async def _main(num_blocks: int, behaviour: str) -> None:
    async with source_worker(layout=LARGE_LAYOUT) as source:
        if behaviour == "stall":
            servicer.split_piece = _split_and_stall  # type: ignore[assignment]
        print(pickle.dumps(source.offer(1, tuple(range(num_blocks)))).hex(), flush=True)
        async for _ in _never():
            pass


def _split_and_stall(piece: memoryview):
    yield 0, piece[:1000]
    print("stalled", flush=True)
    sys.stdin.read()  # as a process that hangs: nothing of it runs any more


async def _never():
    await asyncio.Event().wait()
    yield


asyncio.run(_main(int(sys.argv[1]), sys.argv[2]))
