"""Log probabilities of prompts are those of transformers' logits, however they are cut up and whatever is cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quartet.engine.base import EngineRequest, RequestKind
from quartet.engine.sampling import OutputOptions, PromptLogprobs, Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.torch import TorchEngineConfig, create_runner
from quartet.engine.torch.inputs import Tokens, lay_out
from tests.engine.fakes import make_request
from tests.engine.launching import Driver
from tests.engine.torch.driving import BLOCK_SIZE, run_all, torch_engine
from tests.engine.torch.oracle import Oracle
from tests.engine.torch.test_oracle import ragged_prompts

Checkpoints = Callable[[str], Path]
Oracles = Callable[[str], Oracle]

GREEDY = Sampling(temperature=0.0, max_tokens=3)


def reported(prompt: list[int], num_top: int, kind: RequestKind = RequestKind.DECODE) -> EngineRequest:
    return make_request(prompt, kind=kind, sampling=GREEDY, output=OutputOptions(num_prompt_logprobs=num_top))


def check(
    oracle: Oracle, prompt: list[int], num_top: int, report: PromptLogprobs | None, tolerance: float = 1e-6
) -> None:
    assert report is not None
    expected = oracle.prompt_logprobs(prompt)
    first, *entries = replace(report, token_ids=prompt).tokens()
    assert first is None
    assert len(entries) == len(prompt) - 1
    for token_id, entry, row in zip(prompt[1:], entries, expected, strict=True):
        assert entry is not None
        assert entry.token_id == token_id
        assert len(set(entry.top_token_ids)) == num_top
        ours = torch.tensor([entry.logprob, *entry.top_logprobs]).double()
        named = [row[token_id], *(row[top_id] for top_id in entry.top_token_ids)]
        torch.testing.assert_close(ours, torch.stack(named), rtol=0, atol=tolerance)
        best = [row[token_id], *row.topk(num_top).values]  # where two tie, either may be named
        torch.testing.assert_close(ours, torch.stack(best), rtol=0, atol=tolerance)


# Qwen3's layers are run by hand or by kernels, Gemma's by transformers' modules.
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("max_num_batched_tokens", [5, 512])
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", "float64", 1e-6),
        pytest.param(
            "cuda:0",
            "float32",
            1e-4,
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
async def test_they_are_the_oracles(
    family: str,
    max_num_batched_tokens: int,
    device: str,
    dtype: str,
    tolerance: float,
    checkpoint: Checkpoints,
    oracle: Oracles,
) -> None:
    prompts = ragged_prompts()
    kinds = [RequestKind.PREFILL if i % 3 == 0 else RequestKind.DECODE for i in range(len(prompts))]
    async with torch_engine(
        checkpoint(family), device=device, dtype=dtype, max_num_batched_tokens=max_num_batched_tokens
    ) as engine:
        for _cache in ("cold", "warm"):
            requests = [reported(prompt, i % 4, kinds[i]) for i, prompt in enumerate(prompts)]
            plain = [make_request(prompt, sampling=GREEDY) for prompt in prompts]
            outcomes = await run_all(engine, [*requests, *plain])
            for i, outcome in enumerate(outcomes[: len(prompts)]):
                report = outcome.prompt_logprobs if outcome.prefilled is None else outcome.prefilled.prompt_logprobs
                check(oracle(family), prompts[i], i % 4, report, tolerance)
                assert outcome.prefilled is None or outcome.prefilled.num_cached_tokens == 0
                if outcome.prefilled is None:
                    assert outcome.token_ids == outcomes[len(prompts) + i].token_ids
                else:
                    engine.release(requests[i].id)
        [stats] = engine.stats()
        assert stats.num_cached_tokens >= sum(len(prompt) // (2 * BLOCK_SIZE) * BLOCK_SIZE for prompt in prompts)


@pytest.mark.parametrize("launches", [False, True])
def test_they_are_gathered_again_after_a_preemption(launches: bool, checkpoint: Checkpoints, oracle: Oracles) -> None:
    prompts = ragged_prompts()[-1:-5:-2]
    config = TorchEngineConfig(
        model_path=str(checkpoint("qwen3")), dtype="float64", num_blocks=14, block_size=4, num_threads=1
    )
    runner = create_runner(config)
    if launches:
        runner.launcher = runner
    try:
        driver = Driver(runner, SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=5))
        # They decode meanwhile, and take the blocks of those behind them.
        driver.submit(*[make_request([token_id], sampling=replace(GREEDY, max_tokens=22)) for token_id in (3, 4)])
        requests = [reported(prompt, 2) for prompt in prompts]
        driver.submit(*requests)
        driver.run()
    finally:
        runner.close()
    for prompt, request in zip(prompts, requests, strict=True):
        assert len(driver.tokens[request.id]) == GREEDY.max_tokens
        check(oracle("qwen3"), prompt, 2, driver.prompt_logprobs[request.id])
    assert driver.steps.snapshot.stats.num_preemptions


def test_kernels_get_reported_rows_after_those_that_sample() -> None:
    block = torch.arange(4, dtype=torch.int32).numpy()
    sequences = [
        Tokens([7, 8, 9], 0, block, samples=True, num_reported=2),
        Tokens([5], 3, block, samples=True),
        Tokens([6], 1, block, samples=False, num_reported=1),
    ]
    inputs = lay_out(sequences, 4)
    assert inputs.num_reported == 3
    assert inputs.token_ids[inputs.last_rows].tolist() == [9, 5, 7, 8, 6]
