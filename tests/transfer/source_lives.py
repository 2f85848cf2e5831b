"""Sources that live one after the other at one address: each is a process forked from this one, which has imported all.

    python -m tests.transfer.source_lives ADDRESS

For each number that it reads it forks a source of that epoch, and prints the process's id and its hand-offs of all
blocks, pickled, in hexadecimal. Sources run until they are killed, which comes before the next number, or this process
ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import signal
import sys

from quartet.kvcache.layout import KvLayout
from tests.transfer.workers import NUM_BLOCKS, source_worker

NUM_HAND_OFFS = 6
#: 128 KiB a piece, so that a pull has several messages and takes a while.
LAYOUT = KvLayout(model_fingerprint="f" * 64, dtype="float32", num_layers=4, num_kv_heads=8, head_dim=32, block_size=16)
_PR_SET_PDEATHSIG = 1


async def _serve(epoch: int, address: str) -> None:
    async with source_worker(layout=LAYOUT, epoch=epoch, address=address) as source:
        hand_offs = [source.offer(holder, range(NUM_BLOCKS)) for holder in range(NUM_HAND_OFFS)]
        print(os.getpid(), pickle.dumps(hand_offs).hex(), flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Fork a source for each line of standard input."""
    print("ready", flush=True)
    pid = 0
    while line := sys.stdin.readline():
        if pid:
            os.waitpid(pid, 0)  # only then is its address free
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            asyncio.run(_serve(int(line), sys.argv[1]))


if __name__ == "__main__":
    main()
