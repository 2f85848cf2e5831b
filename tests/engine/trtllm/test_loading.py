"""Guesses about an LLM that reports little, and what is refused before its weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from quartet.engine.base import RequestKind
from quartet.engine.settings import Modality
from quartet.engine.trtllm.engine import TrtllmEngine
from quartet.engine.trtllm.loading import guess_num_blocks, pool_blocks_of
from quartet.errors import ConfigError
from tests.engine.trtllm.engines import TIMES, OpaquePuller, running, stand_in
from tests.engine.trtllm.specs import arguments, spec_of

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("override", "max_model_len", "num_tokens"),
    [
        ({"max_batch_size": 8}, 4096, 8 * 4096),
        ({"max_batch_size": 8}, 131_072, 131_072),
        ({"max_batch_size": 64}, 131_072, 64 * 8192),
        ({"max_batch_size": 64, "max_num_tokens": 2048}, 131_072, 131_072),
        ({"max_batch_size": 64, "max_num_tokens": 65_536}, 131_072, 64 * 8192),
        ({"max_batch_size": 64, "max_num_tokens": None}, 131_072, 64 * 8192),
        ({"max_batch_size": 64}, 10_000_000, 10_000_000),
        ({"max_batch_size": 64, "kv_cache_config": {"max_tokens": 100_000}}, 131_072, 100_000),
        ({"max_batch_size": 1, "kv_cache_config": {"max_tokens": 100_000}}, 4096, 4096),
    ],
)
def test_a_pool_of_unreported_size_has_room_for_what_is_computed_at_a_time(
    override: dict[str, object], max_model_len: int, num_tokens: int
) -> None:
    assert guess_num_blocks(arguments(override=override), max_model_len) == -(-num_tokens // 32)


def test_the_guess_of_the_first_commands_on_a_gpu_host_is_as_the_page_has_it() -> None:
    file = ROOT / "configs" / "engines" / "qwen3" / "agg.yaml"
    guess = guess_num_blocks(arguments(extra_engine_args=file), 40_960)  # Qwen3-0.6B's max_position_embeddings
    assert f"In 1.2 they are {guess}, the adapter's guess" in (ROOT / "docs" / "trtllm.md").read_text(encoding="utf-8")


async def test_a_reported_pool_size_is_not_guessed() -> None:
    with stand_in():
        async with (
            running(publish_events_and_metrics=True) as reporting,
            running(publish_events_and_metrics=False) as silent,
        ):
            assert reporting.engine.capabilities.num_blocks == 512
            loaded = silent.engine._session.loaded  # type: ignore[union-attr]
            guess = guess_num_blocks(loaded.arguments, loaded.facts.max_model_len)
            assert silent.engine.capabilities.num_blocks == guess != 512


async def test_a_release_that_says_how_large_its_pool_is_is_believed_without_statistics() -> None:
    with stand_in(kv_cache_capacity=True, num_kv_blocks=77):
        async with running(publish_events_and_metrics=False, block_size=16) as silent:
            assert silent.engine.capabilities.num_blocks == 77
            assert silent.engine.stats()[0].num_total_blocks == 77


@pytest.mark.parametrize(
    ("capacity", "num_blocks"),
    [
        ({"maxNumBlocks": 123, "tokensPerBlock": 64, "maxNumTokens": 7872}, 246),
        ({"maxNumBlocks": 0, "tokensPerBlock": 64, "maxNumTokens": 0}, None),
        ({}, None),
        (NotImplementedError("not on this executor"), None),
    ],
)
def test_a_capacity_that_makes_no_sense_is_left_alone(capacity: Any, num_blocks: int | None) -> None:
    assert pool_blocks_of(mock.Mock(**{"get_kv_cache_capacity.side_effect": [capacity]}), 32) == num_blocks


@pytest.mark.parametrize("modality", [Modality.TEXT, Modality.MULTIMODAL])
async def test_a_model_that_takes_pictures_needs_its_tokenizer(modality: Modality) -> None:
    with stand_in():
        from tensorrt_llm._stand_in.control import control

        spec = spec_of(modality=modality, override_engine_args={"skip_tokenizer_init": True})
        engine = TrtllmEngine(spec, RequestKind.DECODE, OpaquePuller(), TIMES)
        try:
            if modality is Modality.TEXT:
                await engine.start()
            else:
                with pytest.raises(ConfigError, match="skip_tokenizer_init"):
                    await engine.start()
                assert not control.engines
        finally:
            await engine.close()
