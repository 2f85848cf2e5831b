"""Topologies with the engine trtllm, on the stand-in of TensorRT-LLM: real processes, real tokens of the tiny model.

`make test` leaves out what `make test-trtllm` runs: agg on 1.2, as disagg decodes short prompts where they are
computed, and all topologies on the stand-in of each line, which are in test_trtllm_topologies.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.client import ChatMessage, Completion, MediaFile, MediaKind, QuartetClient, Sampling
from tests import tiny
from tests.e2e.fork_server import ForkServer
from tests.e2e.oracle import Oracle, one_oracle
from tests.e2e.up import CONFIGS, Up
from tests.fakes.installation import DIRECTORY
from tests.pictures import make_look

pytestmark = pytest.mark.usefixtures("etcd_binary")

NUM_TOKENS = 12
NUM_LOOK_TOKENS = 72
PROMPTS = [tuple(random.Random(seed).choices(tiny.PLAIN_IDS, k=40 + 25 * seed)) for seed in range(3)]
LOOKS = [make_look(number) for number in (1, 2, 4)]
#: Several of a role, and hand-offs of 1.2, are in test_trtllm_chaos.
WORKERS = {
    "agg": {"decode-0"},
    "disagg": {"prefill-0", "decode-0"},
}
#: Of the stand-in.
VERSIONS = {"agg": "1.2.1", "disagg": "1.4.0rc1", "epd_multimodal_image": "1.4.0rc1"}
ALL_GONE_WITHIN_S = 8.0
#: The shortest prompt is no longer.
LOCAL_MAX_TOKENS = 50


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with one_oracle() as oracle:
        yield oracle


def start(directory: Path, name: str, python: Path) -> Up:
    """``quartet up`` of a topology for laptops; processes other than its workers never look for the package."""
    choices = ("--engine", "trtllm", "--model", str(tiny.CHECKPOINT), "--router-port", "0")
    # The stand-in has no MPI that could fail when several workers begin at once.
    stand_in = ("--set", f"environment.PYTHONPATH={DIRECTORY}", "--set", "trtllm_start_interval_s=0")
    version = {"TENSORRT_LLM_STAND_IN": json.dumps({"version": VERSIONS[name]})}
    # The default sampler of 1.2 pays no heed to seeds; that of 1.4 does, and there is no other.
    old_sampler = ("--set", "engine.override_engine_args={sampler_type: TRTLLMSampler}")
    sampler = old_sampler if VERSIONS[name] == "1.2.1" else ()
    # A rule by length alone, whatever the load is.
    overrides = f"router.overrides.policy={{name: least_loaded, local_prefill_max_tokens: {LOCAL_MAX_TOKENS}}}"
    policy = ("--set", overrides) if name == "disagg" else ()
    options = (*choices, *stand_in, *sampler, *policy)
    return Up(directory, str(CONFIGS / f"{name}.yaml"), *options, variables=version, python=python)


async def ask_twice_for_two(client: QuartetClient, prompt: tuple[int, ...]) -> list[Completion]:
    sampling = Sampling(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [
        await client.complete(token_ids=prompt, sampling=sampling, seed=7, num_choices=2, timeout_s=120)
        for _ in range(2)
    ]


async def ask(client: QuartetClient, prompt: tuple[int, ...]) -> Completion:
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return await client.complete(token_ids=prompt, sampling=sampling, timeout_s=120)


@pytest.mark.parametrize("name", [pytest.param("agg", marks=pytest.mark.trtllm), "disagg"])
async def test_greedy_ids_of_text_are_those_of_transformers(
    name: str, tmp_path: Path, oracle: Oracle, fork_server: ForkServer
) -> None:
    expected = [oracle.generate(prompt, NUM_TOKENS) for prompt in PROMPTS]
    async with start(tmp_path, name, fork_server.python) as up:
        await up.wait_ready()
        async with QuartetClient(up.router_address) as client:
            assert {worker.record.worker_id for worker in await client.list_workers()} == WORKERS[name]
            one_by_one = [await ask(client, prompt) for prompt in PROMPTS]
            # Their prefixes are cached by now, and each may go elsewhere.
            together = await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))
            pairs = [await ask_twice_for_two(client, prompt) for prompt in PROMPTS[:2]]
        for completions in (one_by_one, together):
            assert [completion.choices[0].token_ids for completion in completions] == expected
        for prompt, completion in zip(PROMPTS, one_by_one, strict=True):
            [placement] = completion.accepted.choices
            assert (placement.prefill is not None) == (name == "disagg" and len(prompt) > LOCAL_MAX_TOKENS)
        for first, second in pairs:
            assert len(first.accepted.choices) == 2, "each choice is a request of its own to the engine"
            one, other = [choice.token_ids for choice in first.choices]
            assert len(one) == len(other) == NUM_TOKENS and one != other
            assert [choice.token_ids for choice in second.choices] == [one, other]
        assert await up.end(signal.SIGINT) < ALL_GONE_WITHIN_S
    assert "Traceback" not in up.log


async def test_greedy_ids_of_pictures_are_those_of_transformers(
    tmp_path: Path, oracle: Oracle, fork_server: ForkServer
) -> None:
    expected = [oracle.look(look, NUM_LOOK_TOKENS) for look in LOOKS]
    assert not any(is_near_tie for _ids, is_near_tie in expected)
    async with start(tmp_path, "epd_multimodal_image", fork_server.python) as up:
        await up.wait_ready()
        async with QuartetClient(up.router_address) as client:
            [model] = await client.list_models()
            assert "seed" in model.sampling_fields, "the stand-in is not of 1.4"
            for look, (ids, _is_near_tie) in zip(LOOKS, expected, strict=True):
                pictures = [MediaFile(MediaKind.IMAGE, file) for file in look.files]
                completion = await client.complete(
                    messages=[ChatMessage("user", (*pictures, look.question))],
                    sampling=Sampling(temperature=0.0, max_tokens=NUM_LOOK_TOKENS),
                    timeout_s=120,
                )
                assert completion.choices[0].token_ids == ids, look
                assert completion.accepted.encode is not None
        assert await up.end(signal.SIGINT) < ALL_GONE_WITHIN_S
    assert "Traceback" not in up.log
