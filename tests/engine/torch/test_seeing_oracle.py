"""Greedy tokens after prompts with pictures are those of the whole LLaVA's ``generate``, however the work is cut up."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quartet.engine.base import RequestKind
from quartet.engine.sampling import Sampling
from tests.engine.fakes import FakePuller, make_request
from tests.engine.torch.checkpoints import PLACEHOLDER_ID, SEEING_FAMILIES
from tests.engine.torch.driving import BLOCK_SIZE, run_all, torch_engine
from tests.engine.torch.seeing import Album, SeeingOracle, SeeingPrompt

NUM_TOKENS = 8
MAIN_FAMILIES = ("llava_clip_llama", "llava_clip_gemma3", "llava_next_mistral")

Checkpoints = Callable[[str], Path]
Oracles = Callable[[str], SeeingOracle]


def text(num_tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(PLACEHOLDER_ID) for _ in range(num_tokens)]


def ragged_prompts(oracle: SeeingOracle) -> list[SeeingPrompt]:
    """No, one and two pictures, at the begin, in the middle and at the end; some begin like others."""
    cat, dog, cow = oracle.pictures(3)
    shared = text(6, seed=1)
    return [
        oracle.prompt(shared, cat, text(7, seed=2)),
        oracle.prompt(text(13, seed=3)),
        oracle.prompt(shared, dog, text(7, seed=2)),
        oracle.prompt(dog, text(1, seed=4), cat, text(2, seed=5)),
        oracle.prompt(shared, cat),
        oracle.prompt(shared, text(5, seed=6)),
        oracle.prompt(text(3, seed=7), cow, cow, text(3, seed=8)),
        oracle.prompt(shared, cat, dog, text(9, seed=9)),
    ]


async def check_batch(
    oracle: SeeingOracle, model_path: Path, *, num_blocks: int = 512, max_num_batched_tokens: int = 512
) -> int:
    """A ragged batch equals the oracle; how often the engine preempted."""
    prompts = ragged_prompts(oracle)
    async with torch_engine(model_path, num_blocks=num_blocks, max_num_batched_tokens=max_num_batched_tokens) as engine:
        album = Album(oracle, engine)
        outcomes = await run_all(engine, [album.request(prompt, NUM_TOKENS) for prompt in prompts])
        [stats] = engine.stats()
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        oracle.check(prompt, outcome, NUM_TOKENS)
    return stats.num_preemptions


def test_the_oracle_distinguishes_pictures(seeing_oracle: Oracles) -> None:
    for family in SEEING_FAMILIES:
        oracle = seeing_oracle(family)
        with_cat, _, with_dog, *_ = ragged_prompts(oracle)
        one, other = oracle.generate(with_cat, NUM_TOKENS), oracle.generate(with_dog, NUM_TOKENS)
        assert abs(one.logprobs[0] - other.logprobs[0]) > 1e-3


@pytest.mark.parametrize("family", SEEING_FAMILIES)
async def test_a_batch_with_and_without_pictures_equals_generate(
    family: str, checkpoint: Checkpoints, seeing_oracle: Oracles
) -> None:
    await check_batch(seeing_oracle(family), checkpoint(family))


@pytest.mark.parametrize("family", MAIN_FAMILIES)
@pytest.mark.parametrize("max_num_batched_tokens", [7, 30])
async def test_chunks_that_begin_and_end_inside_a_picture_equal_generate(
    family: str, max_num_batched_tokens: int, checkpoint: Checkpoints, seeing_oracle: Oracles
) -> None:
    await check_batch(seeing_oracle(family), checkpoint(family), max_num_batched_tokens=max_num_batched_tokens)


@pytest.mark.parametrize(("family", "num_blocks"), [("llava_clip_llama", 18), ("llava_clip_gemma3", 18)])
async def test_preempted_pictures_are_computed_again(
    family: str, num_blocks: int, checkpoint: Checkpoints, seeing_oracle: Oracles
) -> None:
    assert await check_batch(seeing_oracle(family), checkpoint(family), num_blocks=num_blocks) > 0


@pytest.mark.parametrize("family", MAIN_FAMILIES)
async def test_a_cached_prefix_may_end_inside_a_picture(
    family: str, checkpoint: Checkpoints, seeing_oracle: Oracles
) -> None:
    oracle = seeing_oracle(family)
    [cat] = oracle.pictures(1)
    begin = oracle.prompt(text(6, seed=1), cat)
    whole = oracle.prompt(text(6, seed=1), cat, text(4, seed=2))
    num_shared = (len(begin.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert 6 < num_shared < len(begin.token_ids), "that would be no part of it"
    async with torch_engine(checkpoint(family)) as engine:
        album = Album(oracle, engine)
        await run_all(engine, [album.request(begin, 1)])
        [outcome] = await run_all(engine, [album.request(whole, NUM_TOKENS)])
        [stats] = engine.stats()
    assert stats.num_cached_tokens == num_shared
    oracle.check(whole, outcome, NUM_TOKENS)


@pytest.mark.parametrize("num_same", [0, 3])
async def test_kv_is_shared_up_to_the_first_block_of_another_picture_and_no_further(
    num_same: int, checkpoint: Checkpoints, seeing_oracle: Oracles
) -> None:
    oracle = seeing_oracle("llava_clip_llama")
    cat, dog = oracle.pictures(2)
    # Equal tokens throughout; the picture begins in the second block, or in the sixth after one that is the same.
    same = [cat] if num_same else []
    first = oracle.prompt(text(6, seed=1), *same, cat, text(4, seed=2))
    second = oracle.prompt(text(6, seed=1), *same, dog, text(4, seed=2))
    assert first.token_ids == second.token_ids
    async with torch_engine(checkpoint("llava_clip_llama")) as engine:
        album = Album(oracle, engine)
        await run_all(engine, [album.request(first, NUM_TOKENS)])
        [other] = await run_all(engine, [album.request(second, NUM_TOKENS)])
        num_cached_of_other = engine.stats()[0].num_cached_tokens
        [again] = await run_all(engine, [album.request(first, NUM_TOKENS)])
        num_cached_of_again = engine.stats()[0].num_cached_tokens - num_cached_of_other
    assert num_cached_of_other == second.media[-1].first_position // BLOCK_SIZE * BLOCK_SIZE
    assert num_cached_of_again == (len(first.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    oracle.check(second, other, NUM_TOKENS)
    oracle.check(first, again, NUM_TOKENS)


async def test_a_request_resumed_after_any_number_of_tokens_equals_generate(
    checkpoint: Checkpoints, seeing_oracle: Oracles
) -> None:
    oracle = seeing_oracle("llava_clip_llama")
    prompt = ragged_prompts(oracle)[3]
    expected = oracle.generate(prompt, NUM_TOKENS).token_ids
    async with torch_engine(checkpoint("llava_clip_llama")) as engine:
        album = Album(oracle, engine)
        requests = [album.request(prompt, NUM_TOKENS, generated=expected[:k]) for k in range(NUM_TOKENS)]
        outcomes = await run_all(engine, requests)
    assert [outcome.token_ids for outcome in outcomes] == [expected[k:] for k in range(NUM_TOKENS)]


async def test_prefill_with_pictures_here_and_decode_without_there_equal_generate(
    checkpoint: Checkpoints, seeing_oracle: Oracles
) -> None:
    oracle, path = seeing_oracle("llava_clip_llama"), checkpoint("llava_clip_llama")
    prompts = ragged_prompts(oracle)
    puller = FakePuller()
    async with torch_engine(path) as prefill, torch_engine(path, puller=puller) as decode:
        assert prefill.memory is not None
        assert prefill.capabilities.layout is not None
        album = Album(oracle, prefill)
        requests = [album.request(prompt, NUM_TOKENS, kind=RequestKind.PREFILL) for prompt in prompts]
        decodes = []
        for prompt, outcome in zip(prompts, await run_all(prefill, requests), strict=True):
            assert outcome.prefilled is not None
            hand_off = puller.offer_prefilled(prefill.memory, prefill.capabilities.layout, outcome.prefilled)
            decodes.append(
                make_request(
                    prompt.token_ids,
                    generated=[outcome.prefilled.token_id],
                    sampling=Sampling(temperature=0.0, max_tokens=NUM_TOKENS),
                    hand_off=hand_off,
                    media=prompt.media,
                )
            )
        outcomes = await run_all(decode, decodes)
    for prompt, request, outcome in zip(prompts, decodes, outcomes, strict=True):
        whole = [*request.generation.generated_token_ids, *outcome.token_ids]
        assert whole == oracle.generate(prompt, NUM_TOKENS).token_ids


async def test_a_placeholder_that_was_generated_is_a_token_like_any_other(
    checkpoint: Checkpoints, seeing_oracle: Oracles
) -> None:
    oracle = seeing_oracle("llava_clip_llama")
    [cat] = oracle.pictures(1)
    prompt = oracle.prompt(text(2, seed=1), cat, text(2, seed=2))
    generated = [5, PLACEHOLDER_ID, 6]
    embeddings = oracle.model.get_input_embeddings()(torch.tensor([[*prompt.token_ids, *generated]]))
    [span] = prompt.media
    embeddings[0, span.first_position : span.first_position + span.num_tokens] = oracle.features(cat)
    with torch.no_grad():
        expected = oracle.model(inputs_embeds=embeddings).logits[0, -1].log_softmax(-1)
    async with torch_engine(checkpoint("llava_clip_llama")) as engine:
        [outcome] = await run_all(engine, [Album(oracle, engine).request(prompt, 4, generated=generated)])
    assert outcome.token_ids == [int(expected.argmax())]
    assert outcome.logprobs[0].logprob == pytest.approx(float(expected.max()), abs=1e-6)
