"""The Python client's part of ``benchmarks.clients``: reads answers on one session and says how many tokens it had.

It gets its job as JSON, answers once all requests are accepted, and then each order with its count.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from benchmarks.children import answer, argument, orders
from benchmarks.relay_load import ENDLESS
from quartet.client import Accepted, Delta, QuartetClient, RequestPath, Sampling

#: Runs this.
COMMAND = (sys.executable, "-m", "benchmarks.clients_python")


class Reader:
    """Reads endless answers.

    Attributes:
        num_tokens: of all of them so far.
        all_accepted: set once all have begun, or one has failed.
        error: why a request ended; empty: none has.
    """

    def __init__(self, num_streams: int) -> None:
        self.num_tokens = 0
        self.all_accepted = asyncio.Event()
        self.error = ""
        self._num_waiting = num_streams

    async def read(self, client: QuartetClient, seed: int) -> None:
        """Read one of them."""
        sampling = Sampling(max_tokens=ENDLESS, ignore_eos=True)
        try:
            async for part in client.generate(
                "Once upon a time", path=RequestPath.SESSION, seed=seed, sampling=sampling
            ):
                if isinstance(part, Delta):
                    self.num_tokens += len(part.token_ids)
                elif isinstance(part, Accepted):
                    self._num_waiting -= 1
                    if not self._num_waiting:
                        self.all_accepted.set()
            self.error = "an answer ended"
        except Exception as error:  # noqa: BLE001  # the parent fails with it
            self.error = f"{type(error).__name__}: {error}"
        self.all_accepted.set()


async def main() -> None:
    """Read until standard input ends."""
    job = argument()
    reader = Reader(job["num_streams"])
    async with QuartetClient(job["address"]) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader.read(client, seed)) for seed in range(job["num_streams"])]
        await reader.all_accepted.wait()
        answer({"error": reader.error})
        async for _ in orders():
            answer({"num_tokens": reader.num_tokens, "error": reader.error})
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    uvloop.run(main())
