"""The engine on the tiny model that ships with the repository: it sees, and says what the whole model says."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from tokenizers import Tokenizer

from models.tiny.evaluate import CHECKPOINT, Sample, samples
from models.tiny.render import render
from models.tiny.tokenizer import ASSISTANT, BOS, EOS, USER
from quartet.engine.sampling import Sampling
from tests.engine.fakes import make_request
from tests.engine.torch.driving import run_all, torch_engine
from tests.engine.torch.seeing import Album, Picture, SeeingOracle, SeeingPrompt

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def oracle() -> SeeingOracle:
    return SeeingOracle(CHECKPOINT, torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def to_prompt(oracle: SeeingOracle, tokenizer: Tokenizer, sample: Sample, *, num_copies: int = 1) -> SeeingPrompt:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    pictures = []
    if sample.scene is not None:
        pixels = torch.from_numpy(render(sample.scene)).permute(2, 0, 1) / 127.5 - 1
        pictures = [Picture(pixels)] * num_copies
    return oracle.prompt(encode(f"{BOS}{USER}"), *pictures, encode(f"{sample.turn.question}{EOS}{ASSISTANT}"))


@pytest.mark.parametrize("max_num_batched_tokens", [512, 40])
async def test_questions_about_pictures_are_answered_as_by_generate(
    max_num_batched_tokens: int, oracle: SeeingOracle, tokenizer: Tokenizer
) -> None:
    asked = [sample for measure in ("shape", "colour", "count", "text_qa") for sample in islice(samples(measure, 9), 2)]
    prompts = [to_prompt(oracle, tokenizer, sample) for sample in asked]
    prompts.append(to_prompt(oracle, tokenizer, asked[0], num_copies=2))
    async with torch_engine(CHECKPOINT, dtype="float32", max_num_batched_tokens=max_num_batched_tokens) as engine:
        assert engine.capabilities.placeholder_id == oracle.placeholder_id == 7
        album = Album(oracle, engine)
        outcomes = await run_all(engine, [album.request(prompt, NUM_TOKENS) for prompt in prompts])
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        oracle.check(prompt, outcome, NUM_TOKENS)
    said = [tokenizer.decode(outcome.token_ids) for outcome in outcomes[: len(asked)]]
    num_right = sum(text == sample.turn.answer for text, sample in zip(said, asked, strict=True))
    assert num_right >= len(asked) - 1, said


async def test_text_alone_is_generated_as_by_the_whole_model(oracle: SeeingOracle, tokenizer: Tokenizer) -> None:
    prompt = oracle.prompt(tokenizer.encode("Once upon a time", add_special_tokens=False).ids)
    async with torch_engine(CHECKPOINT, dtype="float32") as engine:
        sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS)
        [outcome] = await run_all(engine, [make_request(prompt.token_ids, sampling=sampling)])
    assert outcome.token_ids == oracle.generate(prompt, NUM_TOKENS).token_ids
