"""What a router knows of workers' caches is the truth, whatever is killed, and decides where requests go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence

import pytest

from quartet.client import QuartetClient, Sampling
from quartet.discovery.base import Rank
from quartet.kvcache.block_hash import sequence_hashes
from quartet.v1 import worker_pb2, worker_pb2_grpc
from tests import tiny
from tests.e2e.conftest import StartStack
from tests.e2e.stack import Stack, StackConfig

WORKERS = ("decode-0", "decode-1")
CALL_TIMEOUT_S, EXACT_S, POLL_S = 60.0, 90.0, 0.05
BLOCK_SIZE, NUM_BLOCKS = 16, 64
NUM_PREFIXES, PREFIX_TOKENS, OWN_TOKENS = 6, 80, 24
SAMPLING = Sampling(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def kv_stack(start_stack: StartStack) -> Stack:
    """Two decode workers that prefill themselves, with room for half of the prefixes each, and one router."""
    worker = {"engine.num_blocks": NUM_BLOCKS, "engine.block_size": BLOCK_SIZE}
    return start_stack(StackConfig(num_prefill=0, num_decode=2, worker=worker))


@pytest.fixture
async def client(kv_stack: Stack) -> AsyncIterator[QuartetClient]:
    async with QuartetClient(kv_stack.router_address) as client:
        yield client


def prompts(seed: int, count: int) -> list[list[int]]:
    """Each begins with one of a few prefixes, the same whatever the seed."""
    common, rng = random.Random("prefixes"), random.Random(seed)
    prefixes = [token_ids(common, PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    return [rng.choice(prefixes) + token_ids(rng, OWN_TOKENS) for _ in range(count)]


def token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.choice(tiny.PLAIN_IDS) for _ in range(count)]


async def send(client: QuartetClient, sent: Sequence[list[int]]) -> int:
    """Have all answered, some at a time; how many of their tokens were cached."""
    gate = asyncio.Semaphore(4)

    async def complete(prompt: list[int]) -> int:
        async with gate:
            completion = await client.complete(token_ids=prompt, sampling=SAMPLING, timeout_s=CALL_TIMEOUT_S)
        [choice] = completion.choices
        return choice.finished.usage.num_cached_tokens

    return sum(await asyncio.gather(*map(complete, sent)))


def held(stack: Stack, name: str) -> set[int]:
    """Names of all blocks that a worker says it could share."""
    with stack.channel(name) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        parts = stub.StreamKvSnapshot(worker_pb2.StreamKvSnapshotRequest(), timeout=CALL_TIMEOUT_S)
        return {named for part in parts for named in part.sequence_hashes}


def cached_tokens(prompt: list[int], blocks: set[int]) -> int:
    """Leading tokens of ``prompt`` that are in ``blocks``."""
    hashes = sequence_hashes(prompt, BLOCK_SIZE)
    return BLOCK_SIZE * next((number for number, named in enumerate(hashes) if named not in blocks), len(hashes))


async def known(client: QuartetClient, asked: Sequence[list[int]]) -> list[Mapping[Rank, int]]:
    """What the router takes to be cached of each prompt, by rank."""
    explained = [await client.explain(token_ids=prompt) for prompt in asked]
    return [{option.rank: option.num_matched_tokens for option in answer.options} for answer in explained]


async def check_exact(stack: Stack, client: QuartetClient, *names: str) -> set[int]:
    """Wait until the router knows of many prompts what the workers have of them; return how many tokens those are."""
    asked = prompts(0, 12) + prompts(1, 12) + prompts(99, 12)

    async def is_exact() -> bool:
        blocks = {Rank(name): await asyncio.to_thread(held, stack, name) for name in names}
        truth = [{place: cached_tokens(prompt, have) for place, have in blocks.items()} for prompt in asked]
        return truth == await known(client, asked)

    async with asyncio.timeout(EXACT_S):
        while not await is_exact():  # noqa: ASYNC110 - of other processes, which send no event
            await asyncio.sleep(POLL_S)
    return {tokens for matches in await known(client, asked) for tokens in matches.values()}


async def test_requests_go_where_their_prefix_is(kv_stack: Stack, client: QuartetClient) -> None:
    await send(client, prompts(0, 12))
    matched = await check_exact(kv_stack, client, *WORKERS)
    assert {0, PREFIX_TOKENS} < matched, "some have nothing of a prompt, some its prefix, and some of it all"
    sent = prompts(2, 24)
    num_cached_tokens = 0
    for prompt in sent:
        completion = await client.complete(token_ids=prompt, sampling=SAMPLING, timeout_s=CALL_TIMEOUT_S)
        num_cached_tokens += completion.choices[0].finished.usage.num_cached_tokens
    # All prefixes are somewhere, and nowhere are all.
    assert num_cached_tokens > 0.6 * len(sent) * PREFIX_TOKENS
    assert kv_stack.metrics("router").value("quartet_router_matched_tokens_total") >= num_cached_tokens / 2


async def test_after_a_worker_was_killed_and_came_back_its_cache_is_known_to_be_empty(
    kv_stack: Stack, client: QuartetClient
) -> None:
    await send(client, prompts(0, 12))
    await check_exact(kv_stack, client, *WORKERS)
    kv_stack.kill("decode-0")
    kv_stack.restart_dead()  # here: a process dies with the thread that started it
    assert not held(kv_stack, "decode-0")
    assert 0 in await check_exact(kv_stack, client, *WORKERS)
    assert await send(client, prompts(1, 24)) > 0
    await check_exact(kv_stack, client, *WORKERS)


async def test_a_router_that_starts_anew_learns_what_all_workers_have(kv_stack: Stack, client: QuartetClient) -> None:
    await send(client, prompts(1, 24))
    before = await check_exact(kv_stack, client, *WORKERS)
    kv_stack.kill("router")
    kv_stack.restart_dead()  # here: a process dies with the thread that started it
    assert await check_exact(kv_stack, client, *WORKERS) == before
    assert kv_stack.metrics("router").value("quartet_router_kv_live_workers") == len(WORKERS)
