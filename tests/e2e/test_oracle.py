"""Greedy tokens through router, workers and hand-off are those that ``transformers`` gives for the same checkpoint.

Prompts are without pictures: those have a test of their own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import transformers

from quartet.client import Completion, QuartetClient, Rank, Sampling
from tests import tiny
from tests.e2e.oracle import Oracle, one_oracle
from tests.e2e.stack import Stack

# Around the block size of 32, and a prompt of many blocks.
LENGTHS = (1, 2, 31, 32, 33, 64, 100, 300)
NUM_TOKENS = 8
PROMPT = "Once upon a time"
ROUTERS = ("router", "router-local")


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with one_oracle() as oracle:
        yield oracle


@pytest.fixture(params=ROUTERS)
def router(request: pytest.FixtureRequest) -> str:
    """The router that prefills remotely, and the one that prefills where it decodes."""
    name: str = request.param
    return name


@pytest.fixture
async def routed(router: str, stack: Stack) -> AsyncIterator[QuartetClient]:
    """A client of ``router``."""
    async with QuartetClient(stack.processes[router].grpc_address) as client:
        yield client


def prompts_of(router: str) -> list[tuple[int, ...]]:
    """Each router's own, so that neither finds blocks that the other had computed."""
    return [_make_prompt(random.Random(f"{router} {length}"), length) for length in LENGTHS]


def _make_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(tiny.PLAIN_IDS, k=length))


async def complete(client: QuartetClient, prompt: tuple[int, ...]) -> Completion:
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return await client.complete(token_ids=prompt, sampling=sampling, timeout_s=120)


async def test_greedy_tokens_are_those_of_transformers(routed: QuartetClient, router: str, oracle: Oracle) -> None:
    for prompt in prompts_of(router):
        completion = await complete(routed, prompt)
        assert completion.choices[0].token_ids == oracle.generate(prompt, NUM_TOKENS), f"prompt of {len(prompt)} tokens"
        [placement] = completion.accepted.choices
        assert placement.prefill == (Rank("prefill-0") if router == "router" else None)


async def test_greedy_tokens_stay_the_same_in_a_crowd(routed: QuartetClient, router: str, oracle: Oracle) -> None:
    prompts = prompts_of(router) * (32 // len(LENGTHS))
    completions = await asyncio.gather(*(complete(routed, prompt) for prompt in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.choices[0].token_ids == oracle.generate(prompt, NUM_TOKENS), f"prompt of {len(prompt)} tokens"


async def test_text_is_what_the_tokens_say(client: QuartetClient) -> None:
    completion = await client.complete(PROMPT, sampling=Sampling(temperature=0.0, max_tokens=NUM_TOKENS))
    auto: Any = transformers.AutoTokenizer
    tokenizer = auto.from_pretrained(tiny.CHECKPOINT)
    assert completion.accepted.num_prompt_tokens == len(tokenizer(PROMPT)["input_ids"])
    # Half a character at the end is held back for good.
    assert completion.text == tokenizer.decode(completion.choices[0].token_ids).rstrip("\ufffd")
