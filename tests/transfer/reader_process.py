"""A reader in a process of its own that never ends what it begins, and runs until it is killed.

It prints ``ready`` and reads three hand-offs, pickled, in hexadecimal. Of the first it fetches a piece by shared
memory, of the second a part of one by gRPC; the third it only claims. It prints a line once it is in the middle of all.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from quartet.kvcache.layout import HandOff
from quartet.transfer.base import PieceCopy, TransferWay
from quartet.transfer.grpc import puller
from quartet.transfer.grpc.messages import PullMessage
from quartet.transfer.life_line import PoolOwner
from quartet.transfer.runs import Runs
from quartet.transfer.shm import ShmReader
from tests.transfer.workers import CONFIG, LARGE_LAYOUT, puller_worker

COPIES = [PieceCopy(0, 1), PieceCopy(1, 5)]
BY_GRPC = replace(CONFIG, ways=(TransferWay.GRPC,))


async def _main(lines: Sequence[str]) -> None:
    mapped, sent, claimed = (pickle.loads(bytes.fromhex(line)) for line in lines)
    async with AsyncExitStack() as stack:
        by_shm = await stack.enter_async_context(puller_worker(layout=LARGE_LAYOUT))
        by_grpc = await stack.enter_async_context(puller_worker(layout=LARGE_LAYOUT, config=BY_GRPC))
        by_shm.puller.claim(claimed)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_fetch(by_shm.puller, mapped))
            tasks.create_task(_fetch(by_grpc.puller, sent))
            await _copied.wait()
            await _received.wait()
            print("in the middle", flush=True)


async def _fetch(here: puller.TransferPuller, hand_off: HandOff) -> None:
    await here.claim(hand_off).fetch(COPIES)
    sys.exit("a fetch has ended")


_copied, _received = asyncio.Event(), asyncio.Event()
_copy, _accept = ShmReader.copy, puller._PieceReceiver.accept


async def _copy_one(reader: ShmReader, owner: PoolOwner, runs: Runs) -> None:
    await _copy(reader, owner, runs[:1])
    _copied.set()
    await asyncio.Event().wait()


async def _accept_one(receiver: puller._PieceReceiver, part: PullMessage) -> None:
    await _accept(receiver, part)
    _received.set()
    await asyncio.Event().wait()


ShmReader.copy = _copy_one  # type: ignore[method-assign]
puller._PieceReceiver.accept = _accept_one  # type: ignore[method-assign]
print("ready", flush=True)
asyncio.run(_main([sys.stdin.readline() for _ in range(3)]))
