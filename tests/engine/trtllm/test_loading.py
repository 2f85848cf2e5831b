"""Guesses about an LLM that reports little, and what is refused before its weights are read."""

from __future__ import annotations

import pytest

from quartet.engine.base import RequestKind
from quartet.engine.settings import Modality
from quartet.engine.trtllm.engine import TrtllmEngine
from quartet.engine.trtllm.loading import guess_num_blocks
from quartet.errors import ConfigError
from tests.engine.trtllm.engines import TIMES, OpaquePuller, running, stand_in
from tests.engine.trtllm.specs import arguments, spec_of


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
