"""Greedy tokens are those of ``model.generate``, however the work is cut up and wherever it is done."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from quartet.engine.base import EngineRequest, RequestKind
from quartet.engine.sampling import Sampling
from tests.engine.fakes import FakePuller, make_request
from tests.engine.torch.checkpoints import FAMILIES, SLIDING_WINDOW, VOCAB_SIZE
from tests.engine.torch.driving import BLOCK_SIZE, run_all, torch_engine
from tests.engine.torch.oracle import Oracle

MAIN_FAMILIES = ("llama", "qwen3", "gemma3", "qwen3_moe")
NUM_TOKENS = 10

Checkpoints = Callable[[str], Path]
Oracles = Callable[[str], Oracle]


def ragged_prompts(num_prompts: int = 12) -> list[list[int]]:
    """Prompts of 1 to 42 tokens; every other one begins like some other, for a while."""
    source = random.Random(3)
    shared = [source.randrange(VOCAB_SIZE) for _ in range(30)]
    prompts = []
    for i in range(num_prompts):
        own = [source.randrange(VOCAB_SIZE) for _ in range(1 + i)]
        prompts.append(shared[: 6 * (i // 2 % 6)] + own if i % 2 else own)
    assert any(len(prompt) > 3 * SLIDING_WINDOW for prompt in prompts)
    return prompts


def greedy(
    prompt: Sequence[int], generated: Sequence[int] = (), kind: RequestKind = RequestKind.DECODE
) -> EngineRequest:
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
    return make_request(prompt, generated=generated, kind=kind, sampling=sampling)


async def check_batch(
    oracle: Oracle, model_path: Path, *, num_blocks: int = 512, max_num_batched_tokens: int = 512
) -> int:
    """A ragged batch equals the oracle; how often the engine preempted."""
    prompts = ragged_prompts()
    async with torch_engine(model_path, num_blocks=num_blocks, max_num_batched_tokens=max_num_batched_tokens) as engine:
        outcomes = await run_all(engine, [greedy(prompt) for prompt in prompts])
        [stats] = engine.stats()
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        oracle.check(prompt, outcome.token_ids, NUM_TOKENS)
    print(f"{oracle.num_ties} of {len(prompts)} comparisons ended in a tie")
    return stats.num_preemptions


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_ragged_batch_equals_generate(family: str, checkpoint: Checkpoints, oracle: Oracles) -> None:
    await check_batch(oracle(family), checkpoint(family))


@pytest.mark.parametrize(
    ("family", "max_num_batched_tokens"),
    [("llama", 40), ("gemma3", 40), *((family, 7) for family in (*MAIN_FAMILIES, "gemma2", "gpt_oss"))],
)
async def test_prompts_in_chunks_beside_decoding_equal_generate(
    family: str, max_num_batched_tokens: int, checkpoint: Checkpoints, oracle: Oracles
) -> None:
    await check_batch(oracle(family), checkpoint(family), max_num_batched_tokens=max_num_batched_tokens)


@pytest.mark.parametrize("family", MAIN_FAMILIES)
async def test_preempted_requests_equal_generate(family: str, checkpoint: Checkpoints, oracle: Oracles) -> None:
    num_preemptions = await check_batch(oracle(family), checkpoint(family), num_blocks=24)
    assert num_preemptions > 0


@pytest.mark.parametrize("family", MAIN_FAMILIES)
async def test_a_request_resumed_after_any_number_of_tokens_equals_generate(
    family: str, checkpoint: Checkpoints, oracle: Oracles
) -> None:
    prompt = ragged_prompts()[11]
    expected = list(oracle(family).generate(prompt, NUM_TOKENS).token_ids)
    async with torch_engine(checkpoint(family)) as engine:
        requests = [greedy(prompt, expected[:k]) for k in range(NUM_TOKENS)]
        outcomes = await run_all(engine, requests)
    for k, outcome in enumerate(outcomes):
        oracle(family).check(prompt, expected[:k] + outcome.token_ids, NUM_TOKENS)


@pytest.mark.parametrize("family", MAIN_FAMILIES)
async def test_prefill_here_and_decode_there_equal_generate(
    family: str, checkpoint: Checkpoints, oracle: Oracles
) -> None:
    prompts = ragged_prompts()
    puller = FakePuller()
    async with torch_engine(checkpoint(family)) as prefill, torch_engine(checkpoint(family), puller=puller) as decode:
        prefilled = await run_all(prefill, [greedy(prompt, kind=RequestKind.PREFILL) for prompt in prompts])
        requests = []
        for prompt, outcome in zip(prompts, prefilled, strict=True):
            assert outcome.prefilled is not None
            assert prefill.memory is not None
            assert prefill.capabilities.layout is not None
            hand_off = puller.offer_prefilled(prefill.memory, prefill.capabilities.layout, outcome.prefilled)
            request = greedy(prompt, [outcome.prefilled.token_id])
            requests.append(
                make_request(
                    prompt,
                    generated=[outcome.prefilled.token_id],
                    sampling=request.generation.sampling,
                    hand_off=hand_off,
                )
            )
        decoded = await run_all(decode, requests)
        [stats] = decode.stats()
    assert stats.num_prompt_tokens < len(prompts) * 3, "decode computed prompts again"
    for prompt, first, rest in zip(prompts, prefilled, decoded, strict=True):
        assert first.prefilled is not None
        oracle(family).check(prompt, [first.prefilled.token_id, *rest.token_ids], NUM_TOKENS)


async def test_a_cached_prefix_is_not_computed_again(checkpoint: Checkpoints, oracle: Oracles) -> None:
    prompt = ragged_prompts()[11]
    async with torch_engine(checkpoint("llama")) as engine:
        [first] = await run_all(engine, [greedy(prompt)])
        [second] = await run_all(engine, [greedy(prompt)])
        [stats] = engine.stats()
    assert second.token_ids == first.token_ids
    assert stats.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    oracle("llama").check(prompt, second.token_ids, NUM_TOKENS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_low_precision_stays_close_to_the_exact_logits(
    family: str, dtype: str, checkpoint: Checkpoints, oracle: Oracles
) -> None:
    """Each token of a low-precision run is nearly the best one by exact logits given the same context."""
    tolerance = {"float32": 1e-3, "bfloat16": 0.5}[dtype]
    prompts = ragged_prompts()[::3]
    async with torch_engine(checkpoint(family), dtype=dtype, max_num_batched_tokens=20) as engine:
        outcomes = await run_all(engine, [greedy(prompt) for prompt in prompts])
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert len(outcome.token_ids) == NUM_TOKENS
        assert max(oracle(family).losses(prompt, outcome.token_ids)) < tolerance
