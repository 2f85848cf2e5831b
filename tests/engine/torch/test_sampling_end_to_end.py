"""Sampling through whole engines: seeds, ends of sequence, log probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quartet.engine.base import EngineRequest, FinishReason, RequestKind
from quartet.engine.sampling import OutputOptions, Sampling
from tests.engine.fakes import FakePuller, make_request
from tests.engine.torch.driving import run_all, torch_engine
from tests.engine.torch.oracle import Oracle
from tests.engine.torch.test_loader import edit_json
from tests.engine.torch.test_oracle import ragged_prompts

NUM_TOKENS = 12
PROMPT = ragged_prompts()[7]
SAMPLINGS = (
    Sampling(max_tokens=NUM_TOKENS),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, max_tokens=NUM_TOKENS),
    Sampling(
        temperature=1.2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, max_tokens=NUM_TOKENS
    ),
)

Checkpoints = Callable[[str], Path]


def seeded(sampling: Sampling, seed: int = 5, choice: int = 0, **changes: object) -> EngineRequest:
    request = make_request(PROMPT, sampling=sampling, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(request, generation=dataclasses.replace(request.generation, seed=seed, choice=choice))


@pytest.fixture
async def expected(checkpoint: Checkpoints) -> list[list[int]]:
    """The tokens of each sampling, drawn alone."""
    async with torch_engine(checkpoint("llama")) as engine:
        outcomes = [await run_all(engine, [seeded(sampling)]) for sampling in SAMPLINGS]
    tokens = [outcome.token_ids for [outcome] in outcomes]
    assert all(len(set(row)) > 4 for row in tokens)
    return tokens


@pytest.mark.parametrize(("num_blocks", "max_num_batched_tokens"), [(512, 512), (512, 9), (30, 64)])
async def test_a_seed_gives_the_same_tokens_in_any_batch(
    num_blocks: int, max_num_batched_tokens: int, expected: list[list[int]], checkpoint: Checkpoints
) -> None:
    others = [
        make_request(prompt, sampling=Sampling(temperature=float(i % 3), top_k=i, max_tokens=8))
        for i, prompt in enumerate(ragged_prompts())
    ]
    async with torch_engine(
        checkpoint("llama"), num_blocks=num_blocks, max_num_batched_tokens=max_num_batched_tokens
    ) as engine:
        outcomes = await run_all(engine, [*others, *map(seeded, SAMPLINGS)])
        [stats] = engine.stats()
    assert [outcome.token_ids for outcome in outcomes[-3:]] == expected
    assert (stats.num_preemptions > 0) == (num_blocks == 30)


async def test_a_seed_gives_the_same_tokens_on_any_attempt(expected: list[list[int]], checkpoint: Checkpoints) -> None:
    async with torch_engine(checkpoint("llama")) as engine:
        for sampling, tokens in zip(SAMPLINGS, expected, strict=True):
            requests = [seeded(sampling, generated=tokens[:k]) for k in range(1, NUM_TOKENS)]
            for k, outcome in enumerate(await run_all(engine, requests), 1):
                assert outcome.token_ids == tokens[k:]


async def test_a_seed_gives_the_same_tokens_when_prefilled_elsewhere(
    expected: list[list[int]], checkpoint: Checkpoints
) -> None:
    puller = FakePuller()
    async with torch_engine(checkpoint("llama")) as prefill, torch_engine(checkpoint("llama"), puller=puller) as decode:
        for sampling, tokens in zip(SAMPLINGS, expected, strict=True):
            [first] = await run_all(prefill, [seeded(sampling, kind=RequestKind.PREFILL)])
            assert first.prefilled is not None
            assert prefill.memory is not None
            assert prefill.capabilities.layout is not None
            hand_off = puller.offer_prefilled(prefill.memory, prefill.capabilities.layout, first.prefilled)
            request = seeded(sampling, generated=[first.prefilled.token_id], hand_off=hand_off)
            [rest] = await run_all(decode, [request])
            assert [first.prefilled.token_id, *rest.token_ids] == tokens


async def test_seeds_and_choices_differ(checkpoint: Checkpoints) -> None:
    requests = [seeded(SAMPLINGS[0], seed, choice) for seed in (0, 1, 2**64 - 1) for choice in (0, 1)]
    async with torch_engine(checkpoint("llama")) as engine:
        outcomes = await run_all(engine, requests)
    assert len({tuple(outcome.token_ids) for outcome in outcomes}) == len(requests)


async def test_end_of_sequence_ends_unless_ignored_or_too_early(
    checkpoint: Checkpoints, oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    greedy = oracle("llama").generate(PROMPT, NUM_TOKENS).token_ids
    eos = greedy[3]
    assert eos not in greedy[:3]
    path = edit_json(checkpoint("llama"), tmp_path / "model", "generation_config.json", eos_token_id=[eos])
    base = Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
    samplings = [
        base,
        dataclasses.replace(base, ignore_eos=True),
        dataclasses.replace(base, min_tokens=6),
        dataclasses.replace(base, ignore_eos=True, stop_token_ids=(greedy[1],)),
    ]
    async with torch_engine(path) as engine:
        outcomes = await run_all(engine, [make_request(PROMPT, sampling=sampling) for sampling in samplings])
    ends = [outcome.finished.reason for outcome in outcomes if outcome.finished is not None]
    assert [outcome.token_ids for outcome in outcomes[:2]] == [list(greedy[:4]), list(greedy)]
    assert ends[:2] == [FinishReason.STOP_ID, FinishReason.LENGTH]
    assert len(outcomes[2].token_ids) > 6 or ends[2] is FinishReason.LENGTH
    assert eos not in outcomes[2].token_ids[:6]
    assert outcomes[3].token_ids == list(greedy[: greedy.index(greedy[1]) + 1])


async def test_logprobs_are_the_oracles(checkpoint: Checkpoints, oracle: Callable[[str], Oracle]) -> None:
    request = make_request(PROMPT, sampling=Sampling(temperature=0.0, max_tokens=NUM_TOKENS))
    request = dataclasses.replace(
        request, generation=dataclasses.replace(request.generation, output=OutputOptions(logprobs=3))
    )
    async with torch_engine(checkpoint("llama"), max_num_batched_tokens=5) as engine:
        [outcome] = await run_all(engine, [request])
    expected = oracle("llama").generate(PROMPT, NUM_TOKENS).logits.double().log_softmax(-1)
    assert len(outcome.logprobs) == NUM_TOKENS
    for report, row in zip(outcome.logprobs, expected, strict=True):
        top = row.topk(3)
        assert report.token_id == int(row.argmax())
        assert report.top_token_ids == tuple(top.indices.tolist())
        torch.testing.assert_close(torch.tensor(report.top_logprobs).double(), top.values, rtol=0, atol=1e-6)
        assert report.logprob == report.top_logprobs[0]
