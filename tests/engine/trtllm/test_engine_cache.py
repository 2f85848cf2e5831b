"""What an engine reports of its cache: the names that a router computes for the same tokens, no private blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quartet.engine.base import StepOutput
from quartet.events.kv import Stored
from quartet.kvcache.block_hash import sequence_hashes
from tests.engine.trtllm.engines import WAIT_S, Running, asked, running
from tests.fakes.driving import STORY, token_ids_of

BLOCK_SIZE = 4


class Listener:
    """Follows what becomes of the cache."""

    def __init__(self, running: Running) -> None:
        self.outputs: list[StepOutput] = []
        self._changed = asyncio.Event()
        consumer, take = running.consumer, running.consumer._take

        def listen(output: StepOutput) -> None:
            take(output)
            self.outputs.append(output)
            self._changed.set()

        consumer._take = listen  # type: ignore[method-assign]

    @property
    def stored(self) -> set[int]:
        """Names that were reported."""
        return {
            name
            for output in self.outputs
            for rank in output.kv_events
            for event in rank.events
            if isinstance(event, Stored)
            for name in event.sequence_hashes
        }

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


async def test_full_blocks_are_reported_by_our_names_and_a_snapshot_has_them(package: Any) -> None:
    async with running(block_size=BLOCK_SIZE) as decode:
        listener = Listener(decode)
        request = asked(STORY, 12)
        await decode.end_of(request)
        names = set(sequence_hashes(token_ids_of(STORY), BLOCK_SIZE))
        assert len(names) > 1
        await listener.until(lambda: names <= listener.stored)
        decode.engine.request_kv_snapshot()
        decode.engine.request_kv_snapshot()
        await listener.until(lambda: listener.outputs[-1].kv_snapshot is not None)
        [snapshot] = [output.kv_snapshot for output in listener.outputs if output.kv_snapshot is not None]
        assert {name for blocks in snapshot for name in blocks.parent_hashes} == listener.stored
        again = asked(STORY, 2)
        await decode.end_of(again)
        assert decode.consumer.started[again.id].num_cached_tokens >= BLOCK_SIZE


async def test_blocks_of_a_salt_are_never_reported(package: Any) -> None:
    async with running(block_size=BLOCK_SIZE) as decode:
        listener = Listener(decode)
        request = asked(STORY, 12)
        salted = replace(request, generation=replace(request.generation, cache_salt="pepper"))
        await decode.end_of(salted)
        plain = asked("What else is there to be told of a rabbit and its friends?", 12)
        await decode.end_of(plain)
        names = set(sequence_hashes(plain.generation.prompt_token_ids, BLOCK_SIZE))
        await listener.until(lambda: names <= listener.stored)
        assert not listener.stored & set(sequence_hashes(token_ids_of(STORY), BLOCK_SIZE))
