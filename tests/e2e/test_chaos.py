"""Requests don't notice what breaks (workers, routers, etcd), and clients that vanish leave nothing behind."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest

from quartet.client import QuartetClient
from quartet.v1 import router_pb2
from tests.e2e.conftest import StartStack
from tests.e2e.crowd import Answer, Ask, Crowd, endless_asks, mixed_asks
from tests.e2e.process import wait_until
from tests.e2e.stack import REMOTE_PREFILL, Settings, Stack, StackConfig

HAND_OFF_TTL_S = 3.0
LEASE_TTL_S = 2
HEARTBEAT_TIMEOUT_S = 4.0
# For what comes sooner unless the machine is very busy: blocks, for example, within a hand-off's time to live.
WAIT_S = 90.0
NUM_STREAMS = 8
READY = router_pb2.WORKER_STATE_READY
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")


@pytest.fixture(scope="module")
def chaos_stack(start_stack: StartStack) -> Stack:
    """Two prefills, two decodes, and limits short enough to see them pass."""
    etcd: Settings = {"discovery.etcd.lease_ttl_s": LEASE_TTL_S}
    router: Settings = {
        **REMOTE_PREFILL,
        # A rank must have room for all that a request may generate: four endless ones fill two ranks.
        "attempts.reserve_tokens": 4096,
        "attempts.prefill_timeout_s": 20.0,
        "attempts.decode_stall_timeout_s": 4.0,
        "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        "drain_timeout_s": 5.0,
    }
    config = StackConfig(
        num_prefill=2,
        num_decode=2,
        worker={"transfer.hand_off_ttl_s": HAND_OFF_TTL_S, **etcd},
        routers={"router": {**router, **etcd}},
    )
    return start_stack(config)


@pytest.fixture
def chaos(chaos_stack: Stack) -> Iterator[Stack]:
    """The stack as the test before has left it: a router and at least one worker of each role."""
    yield chaos_stack
    for name in chaos_stack.config.worker_names:
        if chaos_stack.processes[name].is_running:
            chaos_stack.processes[name].signal(signal.SIGCONT)


@pytest.fixture
def whole(chaos: Stack) -> Stack:
    """The stack, with whatever was broken made whole again."""
    chaos.restart_dead()
    return chaos


@pytest.fixture
async def client(chaos: Stack) -> AsyncIterator[QuartetClient]:
    async with QuartetClient(chaos.router_address) as client:
        yield client


def decoding_asks(name: str) -> list[Ask]:
    # Answers longer than prompts: several requests must decode at once when something is broken, on a busy machine too.
    # A step takes twice the CPU where sequences have some four hundred tokens.
    return mixed_asks(name, NUM_STREAMS, num_prompt_tokens=range(20, 120), num_tokens=range(128, 161))


def prefilling_asks(name: str) -> list[Ask]:
    return mixed_asks(name, NUM_STREAMS, num_prompt_tokens=range(200, 500), num_tokens=range(8, 17))


async def busy_one(
    crowd: Crowd, names: Sequence[str], num_requests: int, is_there: Callable[[Answer], bool] = lambda _answer: True
) -> str:
    """A worker at which so many requests are: wherever the router puts them, half are at one of two."""

    def find() -> str:
        return next((name for name in names if sum(map(is_there, crowd.at(name))) >= num_requests), "")

    await crowd.wait_for(lambda: find() != "")
    return find()


def is_decoding(answer: Answer) -> bool:
    return len(answer.token_ids) > 1


async def returned(stack: Stack, *names: str) -> None:
    await asyncio.to_thread(stack.wait_blocks_returned, *names, timeout_s=WAIT_S)


async def undisturbed(client: QuartetClient, asks: Sequence[Ask]) -> list[list[int]]:
    async with Crowd(client, asks) as crowd:
        await crowd.finish()
    assert [len(ids) for ids in crowd.token_ids] == [ask.sampling.max_tokens for ask in asks]
    return crowd.token_ids


async def test_no_request_notices_that_a_decode_and_then_a_prefill_are_killed(
    whole: Stack, client: QuartetClient
) -> None:
    without_decode, without_prefill = decoding_asks("a decode dies"), prefilling_asks("a prefill dies")
    async with Crowd(client, without_decode) as first:
        decode = await busy_one(first, DECODES, 3, is_decoding)
        whole.kill(decode)
        await first.finish()
    assert max(first.num_attempts) > 1, "no request was on the decode that was killed"
    left = {*PREFILLS, *DECODES} - {decode}
    await returned(whole, *left)

    async with Crowd(client, without_prefill) as second:
        prefill = await busy_one(second, PREFILLS, 3)
        # Frozen first, so that work is surely in it when it is killed.
        whole.processes[prefill].signal(signal.SIGSTOP)
        await second.wait_for(lambda: any(answer.token_ids for answer in second.answers))
        whole.kill(prefill)
        await second.finish()
    assert max(second.num_attempts) > 1, "no request was on the prefill that was killed"
    left -= {prefill}
    await returned(whole, *left)

    expected = await undisturbed(client, [*without_decode, *without_prefill])
    assert [*first.token_ids, *second.token_ids] == expected
    await returned(whole, *left)


async def test_a_client_that_vanishes_in_the_routers_queue_leaves_it(whole: Stack, client: QuartetClient) -> None:
    def num_queued() -> float:
        return whole.metrics("router").value("quartet_router_queued_requests")

    async with Crowd(client, endless_asks("fill", 4)) as filling:
        await filling.wait_for(lambda: all(answer.token_ids for answer in filling.answers))
        async with Crowd(client, endless_asks("queued", 3)) as queued:
            await asyncio.to_thread(wait_until, lambda: num_queued() == 3, WAIT_S, lambda: f"{num_queued()} queued")
        # One of them may have found room in the very moment of leaving; not all of them.
        assert not all(answer.placement for answer in queued.answers)
        await asyncio.to_thread(wait_until, lambda: num_queued() == 0, WAIT_S, lambda: f"{num_queued()} queued")
        assert all(answer.finished is None for answer in filling.answers)
    await returned(whole)


async def test_a_client_that_vanishes_during_prefill_frees_its_blocks(whole: Stack, client: QuartetClient) -> None:
    # Some seconds of work: more of it lies in each prefill's queue than one step takes.
    asks = mixed_asks("prefill", 8, num_prompt_tokens=range(3000, 3500), num_tokens=range(16, 17))

    def num_in_prefill() -> int:
        loads = [whole.load(name) for name in ("prefill-0", "prefill-1")]
        return min(load.num_in_use_blocks for load in loads) and sum(load.num_queued_prefill_tokens for load in loads)

    async with Crowd(client, asks) as crowd:
        await asyncio.to_thread(wait_until, lambda: num_in_prefill() > 0, WAIT_S, lambda: "a prefill at work")
    assert not all(answer.token_ids for answer in crowd.answers)
    await returned(whole)


async def test_a_client_that_vanishes_before_the_hand_off_is_pulled_frees_its_blocks(
    whole: Stack, client: QuartetClient
) -> None:
    decodes = [whole.processes[name] for name in ("decode-0", "decode-1")]
    for process in decodes:
        process.signal(signal.SIGSTOP)
    async with Crowd(client, endless_asks("hand-off", 4)) as crowd:
        # The first token comes from prefill and waits for no transfer.
        await crowd.wait_for(lambda: all(answer.token_ids for answer in crowd.answers))
        assert sum(whole.load(name).num_held_blocks for name in ("prefill-0", "prefill-1")) >= 4 * 3
    for process in decodes:
        process.signal(signal.SIGCONT)
    await returned(whole)
    # They have worked off what had reached them meanwhile.
    await undisturbed(client, prefilling_asks("after a freeze")[:4])
    await returned(whole)


async def test_a_client_that_vanishes_during_decode_frees_its_blocks(whole: Stack, client: QuartetClient) -> None:
    async with Crowd(client, endless_asks("decode", 4)) as crowd:
        await crowd.wait_for(lambda: all(len(answer.token_ids) > 4 for answer in crowd.answers))
        assert whole.load("decode-0").num_in_use_blocks > 0 and whole.load("decode-1").num_in_use_blocks > 0
    await returned(whole)


async def test_requests_move_away_from_a_frozen_decode_which_gets_none_until_it_reports_again(
    whole: Stack, client: QuartetClient
) -> None:
    asks = decoding_asks("a decode freezes")
    async with Crowd(client, asks) as crowd:
        decode = await busy_one(crowd, DECODES, 3, is_decoding)
        whole.processes[decode].signal(signal.SIGSTOP)
        await asyncio.wait_for(crowd.finish(), WAIT_S)
    assert max(crowd.num_attempts) > 1

    # Suspect while its record stands, and gone with its lease.
    def is_given_up() -> bool:
        return whole.worker_states().get(decode) != READY

    await asyncio.to_thread(wait_until, is_given_up, WAIT_S, lambda: f"{whole.worker_states()}")
    whole.processes[decode].signal(signal.SIGCONT)
    await asyncio.to_thread(whole.wait_ready, WAIT_S)
    await returned(whole)
    assert crowd.token_ids == await undisturbed(client, asks)


async def test_a_drained_decode_hands_on_what_it_does_not_end_and_leaves(whole: Stack, client: QuartetClient) -> None:
    asks = mixed_asks("drain", 4, num_prompt_tokens=range(20, 60), num_tokens=range(200, 201))
    async with Crowd(client, asks) as crowd:
        await crowd.wait_for(lambda: all(len(answer.token_ids) > 2 for answer in crowd.answers))
        decode = await busy_one(crowd, DECODES, 2)
        whole.terminate(decode)
        await crowd.finish()
    # Those that had not ended after two seconds went on at the other one.
    assert set(crowd.num_attempts) <= {1, 2}
    assert await asyncio.to_thread(whole.processes[decode].wait, WAIT_S) == 0
    await asyncio.to_thread(whole.wait_ready, WAIT_S)
    assert decode not in whole.worker_states()
    await undisturbed(client, prefilling_asks("after a drain")[:2])
    await returned(whole)


async def test_a_router_that_is_killed_leaves_nothing_on_workers_and_serves_when_it_is_back(
    chaos: Stack, client: QuartetClient
) -> None:
    async with Crowd(client, endless_asks("router", 2)) as crowd:
        await crowd.wait_for(lambda: all(answer.token_ids for answer in crowd.answers))
        chaos.kill("router")
        await crowd.drop()
    chaos.spawn("router")
    await returned(chaos)
    await asyncio.to_thread(chaos.wait_ready)
    await undisturbed(client, prefilling_asks("router is back")[:2])


async def test_requests_are_served_without_etcd_and_all_is_well_when_it_is_back(
    chaos: Stack, client: QuartetClient
) -> None:
    chaos.etcd.kill()
    try:
        silent_until = time.monotonic() + LEASE_TTL_S + HEARTBEAT_TIMEOUT_S + 1
        asks = mixed_asks("without etcd", 2, num_prompt_tokens=range(20, 60), num_tokens=range(8, 9))
        while time.monotonic() < silent_until:
            await undisturbed(client, asks)
            await asyncio.sleep(0.5)
        assert set(chaos.worker_states().values()) == {READY}
    finally:
        await asyncio.to_thread(chaos.etcd.start)
    # A new router knows only what etcd holds: every worker must have announced itself again.
    chaos.kill("router")
    chaos.spawn("router")
    await asyncio.to_thread(chaos.wait_ready)
    await undisturbed(client, asks)
