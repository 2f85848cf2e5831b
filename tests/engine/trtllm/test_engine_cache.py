"""What an engine reports of its cache: the names that a router computes for the same tokens, no private blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quartet.discovery.base import SALTED_BLOCKS
from quartet.engine.base import Finished, StepOutput
from quartet.engine.settings import Modality
from quartet.events.kv import Stored
from quartet.kvcache.block_hash import NO_EXTRA_KEY, ExtraKey, sequence_hashes
from quartet.kvcache.media_spans import expand_placeholders
from quartet.media.items import MediaSize
from tests.engine.fakes import make_request
from tests.engine.trtllm.engines import WAIT_S, Running, asked, greedily, running, stand_in
from tests.engine.trtllm.media import NUM_TOKENS, PLACEHOLDER_ID, image_file, running_encoder
from tests.fakes.driving import LOOK, STORY, picture, token_ids_of

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


async def test_blocks_of_a_salt_are_never_reported_as_plain_ones(package: Any) -> None:
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


LATER = {"version": "1.4.0rc1"}


async def test_a_later_line_s_salted_blocks_are_reported_by_the_names_that_routers_look_for() -> None:
    with stand_in(**LATER):
        async with running(block_size=BLOCK_SIZE) as decode:
            assert decode.engine.capabilities.unannounced_blocks == ("adapter",)
            listener = Listener(decode)
            request = asked(STORY, 12)
            salted = replace(request, generation=replace(request.generation, cache_salt="pepper"))
            await decode.end_of(salted)
            names = set(sequence_hashes(token_ids_of(STORY), BLOCK_SIZE, ExtraKey(cache_salt="pepper")))
            await listener.until(lambda: names <= listener.stored)
            assert not listener.stored & set(sequence_hashes(token_ids_of(STORY), BLOCK_SIZE))
            hits = {"pepper": len(names) * BLOCK_SIZE, "salt": 0, "": 0}
            for salt, num_cached in hits.items():
                again = replace(asked(STORY, 2), generation=replace(request.generation, cache_salt=salt))
                await decode.end_of(again)
                assert decode.consumer.started[again.id].num_cached_tokens == num_cached, salt


async def test_a_later_line_s_second_manager_names_no_salts_so_they_are_not_reported() -> None:
    with stand_in(**LATER):
        override = {"kv_cache_config": {"use_kv_cache_manager_v2": True}}
        async with running(block_size=BLOCK_SIZE, override_engine_args=override) as decode:
            assert SALTED_BLOCKS in decode.engine.capabilities.unannounced_blocks
            listener = Listener(decode)
            request = asked(STORY, 12)
            await decode.end_of(replace(request, generation=replace(request.generation, cache_salt="pepper")))
            plain = asked("What else is there to be told of a rabbit and its friends?", 12)
            await decode.end_of(plain)
            names = set(sequence_hashes(plain.generation.prompt_token_ids, BLOCK_SIZE))
            await listener.until(lambda: names <= listener.stored)
            for key in (NO_EXTRA_KEY, ExtraKey(cache_salt="pepper")):
                assert not listener.stored & set(sequence_hashes(token_ids_of(STORY), BLOCK_SIZE, key))


@pytest.mark.parametrize("salt", ["", "pepper"])
@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_later_line_s_picture_is_reported_by_its_media_id(salt: str, is_kept: bool) -> None:
    with stand_in(**LATER):
        async with (
            running_encoder() as encoder,
            running(block_size=BLOCK_SIZE, modality=Modality.MULTIMODAL) as decode,
        ):
            assert decode.engine.capabilities.unannounced_blocks == ("adapter",)
            listener = Listener(decode)
            shown = [image_file(picture()), image_file(picture().rotate(90))]
            for number, file in enumerate(shown):
                given = (await encoder.states.encode(number, file)).state if is_kept else file
                size = MediaSize(media_id=bytes([number]) * 32, num_tokens=NUM_TOKENS)
                token_ids, spans = expand_placeholders(token_ids_of(LOOK), PLACEHOLDER_ID, [size])
                request = make_request(token_ids, media=spans, sampling=greedily(8))
                request = replace(
                    request, generation=replace(request.generation, cache_salt=salt), media_inputs=(given,)
                )
                assert isinstance(await decode.end_of(request), Finished)
                names = set(sequence_hashes(token_ids, BLOCK_SIZE, ExtraKey(cache_salt=salt), spans))
                await listener.until(lambda names=names: names <= listener.stored)
                assert len(names) > NUM_TOKENS // BLOCK_SIZE
