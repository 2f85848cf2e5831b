"""Many requests for few items in a pool that has room for few of them; some fail, some are cancelled at any moment.

Every block has what was last written to it, so an item that is written over while a request reads it shows at once.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

from quartet.errors import TransferError
from quartet.kvcache.embedding_pool import EmbeddingPool
from services.workers.embedding_store import EmbeddingStore, Hold, Want
from tests.services.stream_workers import WAIT_S

NUM_BLOCKS = 6
BLOCK_SIZE = 4
NUM_REQUESTS = 150
#: By name, tokens: one to three blocks.
ITEMS = {bytes([number]) * 32: 1 + number * 3 % 12 for number in range(8)}


class Crowd:
    """A pool and all its users; the seed decides every choice."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = EmbeddingPool(NUM_BLOCKS, BLOCK_SIZE)
        # No request waits so long for room, unless two wait for each other.
        self.store = EmbeddingStore(self.pool, field="media", room_timeout_s=WAIT_S)
        self.blocks: dict[int, bytes | None] = dict.fromkeys(range(NUM_BLOCKS))
        self.being_written: set[int] = set()
        self.num_made = 0
        self.num_served = 0
        self.num_kept_waiting = 0  # though all that they wanted was there

    async def request(self) -> None:
        names = [self.rng.choice(list(ITEMS)) for _ in range(self.rng.randint(1, 3))]
        if sum(-(-ITEMS[name] // BLOCK_SIZE) for name in set(names)) > NUM_BLOCKS:
            names = names[:1]
        await self.turns(20)
        holds: dict[int, Hold] = {}
        try:
            wants = [Want(name, ITEMS[name], partial(self.make, name)) for name in names]
            if all(map(self.store.has, names)):
                asyncio.get_running_loop().call_soon(self.check_has_all, holds, len(names))
            await self.store.obtain(wants, holds.__setitem__)
            assert sorted(holds) == list(range(len(names)))
            for _ in range(self.rng.randint(0, 3)):
                for index, name in enumerate(names):
                    assert {self.blocks[block_id] for block_id in holds[index].block_ids} == {name}
                await self.turns(3)
            self.num_served += 1
        except TransferError:
            return
        finally:
            for hold in holds.values():
                hold.release()

    def check_has_all(self, holds: dict[int, Hold], num_wanted: int) -> None:
        self.num_kept_waiting += len(holds) < num_wanted

    async def make(self, name: bytes, block_ids: tuple[int, ...]) -> None:
        assert not self.being_written.intersection(block_ids), "two write to one block"
        assert len(block_ids) == -(-ITEMS[name] // BLOCK_SIZE)
        self.being_written.update(block_ids)
        self.num_made += 1
        try:
            for block_id in block_ids:
                self.blocks[block_id] = None
                await self.turns(3)
                self.blocks[block_id] = name
            if self.rng.random() < 0.2:
                raise TransferError("lost")
        finally:
            self.being_written.difference_update(block_ids)

    async def turns(self, num_turns: int) -> None:
        """Let the others go on."""
        for _ in range(self.rng.randint(0, num_turns)):
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(12))
async def test_every_request_ends_no_held_item_is_overwritten_and_nothing_stays_held(seed: int) -> None:
    crowd = Crowd(seed)
    tasks = [asyncio.create_task(crowd.request()) for _ in range(NUM_REQUESTS)]
    for task in crowd.rng.sample(tasks, NUM_REQUESTS // 5):
        await crowd.turns(3)
        task.cancel()
    async with asyncio.timeout(2 * WAIT_S):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [one for one in ended if isinstance(one, Exception)], "room, too, comes in time"
    assert not crowd.num_kept_waiting
    counts = crowd.pool.counts
    assert (counts.held, counts.in_use, counts.free + counts.cached) == (0, 0, NUM_BLOCKS)
    assert crowd.num_served > NUM_REQUESTS // 3
    assert crowd.num_made < 3 * NUM_REQUESTS
