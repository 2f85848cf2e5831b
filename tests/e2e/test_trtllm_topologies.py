"""Every topology for TensorRT-LLM as users start it, on the stand-in of each line (``make test-trtllm``).

The files are those of ``configs/trtllm``, with their engine files, GPUs and policies; only the model is the tiny one.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import save

from quartet.client import (
    ChatMessage,
    ChoicePlacement,
    Completion,
    MediaFile,
    MediaKind,
    QuartetClient,
    Sampling,
)
from tests import tiny
from tests.e2e.fork_server import ForkServer
from tests.e2e.oracle import Oracle, one_oracle
from tests.e2e.up import CONFIGS, Up
from tests.fakes.installation import DIRECTORY
from tests.pictures import make_look

FILES = CONFIGS / "trtllm"
IMAGE, EMBEDDINGS = MediaKind.IMAGE, MediaKind.EMBEDDINGS


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a topology starts, and what becomes of requests in it.

    Attributes:
        workers: ids of its workers.
        num_decode_ranks: which decode in turn, where caches have no say.
        always_hands_off: every prompt goes to a Prefill worker.
        takes_media: pictures, and embeddings of some.
        encodes: kinds of files that go to an Encode worker; others are encoded where the prompt is computed.
        announces: the router hears which blocks workers have.
    """

    workers: Collection[str]
    num_decode_ranks: int = 1
    always_hands_off: bool = False
    takes_media: bool = False
    encodes: Collection[MediaKind] = ()
    announces: bool = False


DECODE = {"decode-0"}
PAIR, TRIPLE = {"prefill-0", *DECODE}, {"encode-0", "prefill-0", *DECODE}
FOUR = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
MEDIA = {IMAGE, EMBEDDINGS}
TOPOLOGIES = {
    "agg": Expected(workers=DECODE),
    "agg_multimodal": Expected(workers=DECODE, takes_media=True, announces=True),
    "agg_router": Expected(workers={"decode-0", "decode-1"}, announces=True),
    "disagg": Expected(workers=PAIR, always_hands_off=True),
    "disagg_multimodal": Expected(workers=PAIR, always_hands_off=True, takes_media=True),
    # Prompts may be computed where they are decoded, if that costs less.
    "disagg_router": Expected(workers=FOUR, announces=True),
    "e_pd": Expected(workers={"encode-0", *DECODE}, takes_media=True, encodes=MEDIA),
    "epd_disagg": Expected(workers=PAIR, always_hands_off=True, takes_media=True),
    "epd_multimodal_image": Expected(workers=TRIPLE, always_hands_off=True, takes_media=True, encodes=MEDIA),
    "epd_multimodal_image_and_embeddings": Expected(
        workers=TRIPLE, always_hands_off=True, takes_media=True, encodes=MEDIA
    ),
    "gpt_oss_disagg": Expected(workers=PAIR, num_decode_ranks=4, always_hands_off=True),
}
NUM_TOKENS, NUM_LOOK_TOKENS = 24, 72
PROMPTS = [tuple(random.Random(seed).choices(tiny.PLAIN_IDS, k=40 + 25 * seed)) for seed in range(4)]
LOOK = make_look(1)
ALL_GONE_WITHIN_S = 8.0
ANNOUNCED_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with one_oracle() as oracle:
        yield oracle


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A working directory that has a checkout's configs and models: topologies name engine files from there."""
    for name in ("configs", "models"):
        (tmp_path / name).symlink_to(CONFIGS.parent / name, target_is_directory=True)
    return tmp_path


def start(directory: Path, name: str, version: str, python: Path) -> Up:
    """``quartet up`` of the file for GPUs; processes other than its workers never look for the package."""
    switches = {"TENSORRT_LLM_STAND_IN": json.dumps({"version": version})}
    # The stand-in has no MPI that could fail when several workers begin at once.
    stand_in = ("--set", f"environment.PYTHONPATH={DIRECTORY}", "--set", "trtllm_start_interval_s=0")
    choices = ("--model", "models/tiny", "--router-port", "0")
    return Up(directory, f"configs/trtllm/{name}.yaml", *choices, *stand_in, variables=switches, python=python)


async def ask(client: QuartetClient, prompt: tuple[int, ...]) -> Completion:
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return await client.complete(token_ids=prompt, sampling=sampling, timeout_s=120)


async def look(client: QuartetClient, kind: MediaKind, oracle: Oracle) -> Completion:
    """The question about the picture, with its file or with what the tower makes of it."""
    [picture] = LOOK.files
    data = picture if kind is IMAGE else save({"rows": oracle.embeddings(picture).contiguous()})
    message = ChatMessage("user", (MediaFile(kind, data), LOOK.question))
    sampling = Sampling(temperature=0.0, max_tokens=NUM_LOOK_TOKENS)
    return await client.complete(messages=[message], sampling=sampling, timeout_s=120)


async def wait_announced(client: QuartetClient, prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
    """Wait until the router knows a worker that has blocks of an answer: of prompts it expects them by itself."""

    async def is_known() -> bool:
        options = (await client.explain(token_ids=prompt + answer)).options
        return any(option.num_matched_tokens > len(prompt) for option in options)

    async with asyncio.timeout(ANNOUNCED_WITHIN_S):
        while not await is_known():  # noqa: ASYNC110 - of the router, which sends no event
            await asyncio.sleep(0.05)


def test_the_table_has_every_topology() -> None:
    assert sorted(TOPOLOGIES) == sorted(file.stem for file in FILES.glob("*.yaml"))


@pytest.mark.trtllm
@pytest.mark.usefixtures("etcd_binary")
@pytest.mark.parametrize("version", ["1.2.1", "1.4.0rc1"])
@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
async def test_greedy_ids_are_those_of_transformers(
    name: str, version: str, directory: Path, oracle: Oracle, fork_server: ForkServer
) -> None:
    expected = TOPOLOGIES[name]
    answers = [oracle.generate(prompt, NUM_TOKENS) for prompt in PROMPTS]
    seen, is_near_tie = oracle.look(LOOK, NUM_LOOK_TOKENS)
    assert not is_near_tie
    async with start(directory, name, version, fork_server.python) as up:
        await up.wait_ready()
        async with QuartetClient(up.router_address) as client:
            workers, [model] = await client.list_workers(), await client.list_models()
            alone = [await ask(client, prompt) for prompt in PROMPTS]
            if expected.announces:
                await wait_announced(client, PROMPTS[-1], answers[-1])
            # Their prefixes are cached by now, and each may go elsewhere.
            together = await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))
            looks = {kind: await look(client, kind, oracle) for kind in (MEDIA if expected.takes_media else ())}
        assert {worker.record.worker_id for worker in workers} == set(expected.workers)
        assert ("seed" in model.sampling_fields) == (version != "1.2.1"), "the default sampler heeds seeds since 1.4"
        assert set(model.media) == {kind.value for kind in looks}
        for completions in (alone, together):
            assert [completion.choices[0].token_ids for completion in completions] == answers
        for kind, completion in looks.items():
            assert completion.choices[0].token_ids == seen, kind
            assert (completion.accepted.encode is not None) == (kind in expected.encodes), kind
        if not expected.announces:
            assert len({placed.decode for placed in placements(*alone, *together)}) == expected.num_decode_ranks
        if expected.always_hands_off:
            assert all(placed.prefill is not None for placed in placements(*alone, *together, *looks.values()))
        assert await up.end(signal.SIGINT) < ALL_GONE_WITHIN_S
    assert "Traceback" not in up.log


def placements(*completions: Completion) -> list[ChoicePlacement]:
    return [placed for completion in completions for placed in completion.accepted.choices]
