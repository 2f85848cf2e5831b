"""Requests don't notice what breaks under TensorRT-LLM, and leave nothing held in any engine, however they end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest

from quartet.client import Completion, FinishReason, QuartetClient, RequestPath, Sampling
from quartet.v1 import router_pb2
from tests import tiny
from tests.e2e.conftest import StartStack
from tests.e2e.crowd import Ask, Crowd, endless_asks
from tests.e2e.oracle import Oracle, one_oracle
from tests.e2e.picture_asks import single_asks
from tests.e2e.process import wait_until
from tests.e2e.stack import REMOTE_PREFILL, Settings, Stack, StackConfig
from tests.e2e.stand_in_worker import StandIn
from tests.fakes.installation import DIRECTORY

ENCODE, PREFILLS, DECODES = "encode-0", ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
# TensorRT-LLM holds a prompt that no worker pulls for as long, whatever became of its request.
TRANSFER_TIMEOUT_S = 2.5
WAIT_S = 90.0
READY = router_pb2.WORKER_STATE_READY
NUM_TOKENS = 12
PROMPTS = [tuple(random.Random(seed).choices(tiny.PLAIN_IDS, k=40 + 20 * seed)) for seed in range(6)]


@pytest.fixture(scope="module")
def trtllm_stack(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """One encode, two prefills, two decodes, and limits short enough to see them pass."""
    etcd: Settings = {"discovery.etcd.lease_ttl_s": 2}
    router: Settings = {
        **REMOTE_PREFILL,
        "attempts.encode_timeout_s": WAIT_S,
        "attempts.prefill_timeout_s": WAIT_S,
        # Longer than hand-offs are held: else a new attempt would begin before the first one has failed.
        "attempts.decode_start_timeout_s": 2 * TRANSFER_TIMEOUT_S,
        "attempts.decode_stall_timeout_s": 2 * TRANSFER_TIMEOUT_S,
        "heartbeat_timeout_s": 3.0,
    }
    transceiver = {"cache_transceiver_config": {"kv_transfer_timeout_ms": int(TRANSFER_TIMEOUT_S * 1000)}}
    # Requests with pictures have penalties, which the default sampler ignores.
    role: Settings = {"engine.override_engine_args": {**transceiver, "sampler_type": "TRTLLMSampler"}}
    config = StackConfig(
        num_encode=1,
        num_prefill=2,
        num_decode=2,
        worker={
            "engine.kind": "trtllm",
            "engine.num_threads": None,
            "transfer.hand_off_ttl_s": TRANSFER_TIMEOUT_S,
            **etcd,
        },
        roles={"prefill": role, "decode": role},
        routers={"router": {**router, **etcd}},
        launcher=("tests.e2e.stand_in_worker",),
        # What a process that is killed leaves behind lies with the test's files.
        environment={"PYTHONPATH": str(DIRECTORY), "TMPDIR": str(tmp_path_factory.mktemp("stand-in"))},
    )
    return start_stack(config)


@pytest.fixture
def chaos(trtllm_stack: Stack) -> Iterator[Stack]:
    """The stack as the test before has left it; what a test holds goes on after it."""
    yield trtllm_stack
    for name in running(trtllm_stack):
        for gate in ("steps", "transfers"):
            engine(trtllm_stack, name).go_on(gate)
    for process in trtllm_stack.processes.values():
        assert "never retrieved" not in process.log.read_text(), process.name


@pytest.fixture
def whole(chaos: Stack) -> Stack:
    """The stack, with whatever was broken made whole again."""
    chaos.restart_dead()
    return chaos


@pytest.fixture
async def client(chaos: Stack) -> AsyncIterator[QuartetClient]:
    async with QuartetClient(chaos.router_address) as client:
        yield client


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with one_oracle() as oracle:
        yield oracle


@pytest.fixture(scope="module")
def answers(oracle: Oracle) -> list[list[int]]:
    """Of each of ``PROMPTS``, by transformers."""
    return [list(oracle.generate(prompt, NUM_TOKENS)) for prompt in PROMPTS]


ASKS = [
    Ask(token_ids=prompt, sampling=Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True), seed=1)
    for prompt in PROMPTS
]


def engine(stack: Stack, name: str) -> StandIn:
    return StandIn(stack.processes[name].config)


def running(stack: Stack) -> list[str]:
    return [name for name in stack.config.worker_names if stack.processes[name].is_running]


async def until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    await asyncio.to_thread(wait_until, condition, timeout_s, lambda: what)


async def returned(stack: Stack) -> None:
    """Nothing is held: by what the workers say, by what their engines have, and in the router's book."""
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=WAIT_S)
    for name in running(stack):
        await until(lambda name=name: engine(stack, name).is_idle, f"{name} idle")  # type: ignore[misc]
    metrics = stack.metrics("router")
    assert metrics.value("quartet_router_queued_requests") == metrics.value("quartet_router_running_requests") == 0


def counts(stack: Stack, names: Sequence[str], what: str) -> int:
    return sum(engine(stack, name).counts[what] for name in names)


def num_attempts(stack: Stack) -> float:
    return sum(stack.metrics("router").samples("quartet_router_attempts_total").values())


def stop_half_way(stack: Stack, name: str) -> None:
    """Let a decode worker's engine compute half of an answer, then stand still: no request there ends meanwhile."""
    engine(stack, name).let_through("steps", NUM_TOKENS // 2)


def is_half_way(crowd: Crowd, name: str) -> bool:
    there = crowd.at(name)
    return len(there) >= 2 and any(len(answer.token_ids) > 2 for answer in there)


def hold(stack: Stack, gate: str, *names: str) -> None:
    for name in names:
        engine(stack, name).hold(gate)


def go_on(stack: Stack, gate: str, *names: str) -> None:
    for name in names:
        engine(stack, name).go_on(gate)


async def test_a_crowd_of_all_kinds_is_answered_as_each_alone(
    chaos: Stack, client: QuartetClient, answers: list[list[int]], oracle: Oracle
) -> None:
    long = tuple(random.Random("long").choices(tiny.PLAIN_IDS, k=600))
    end_of_long = oracle.generate(long, 8)

    async def complete(prompt: Sequence[int], path: RequestPath, num_tokens: int, **fields: object) -> Completion:
        stop = fields.pop("stop_token_ids", ())
        sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, stop_token_ids=stop)  # type: ignore[arg-type]
        return await client.complete(path=path, token_ids=prompt, sampling=sampling, timeout_s=120, **fields)  # type: ignore[arg-type]

    async def whole_answer(number: int, path: RequestPath) -> None:
        completion = await complete(PROMPTS[number], path, NUM_TOKENS, logprobs=2 if number % 2 else None)
        assert list(completion.choices[0].token_ids) == answers[number]
        assert len(completion.choices[0].logprobs) == (NUM_TOKENS if number % 2 else 0)

    async def one_token(number: int, path: RequestPath) -> None:
        completion = await complete(PROMPTS[number], path, 1)
        assert list(completion.choices[0].token_ids) == answers[number][:1]

    async def ends_at_prefill(number: int, path: RequestPath) -> None:
        completion = await complete(PROMPTS[number], path, NUM_TOKENS, stop_token_ids=(answers[number][0],))
        assert completion.choices[0].finished.reason is FinishReason.STOP_ID
        assert completion.choices[0].finished.usage.num_output_tokens == 1

    async def long_prompt(_: int, path: RequestPath) -> None:
        assert (await complete(long, path, 8)).choices[0].token_ids == end_of_long

    async def cancelled_or_dropped(number: int, path: RequestPath) -> None:
        ask = Ask(
            token_ids=PROMPTS[number], sampling=Sampling(temperature=0.0, max_tokens=2000, ignore_eos=True), seed=1
        )
        async with Crowd(client, [ask], path=path) as crowd:
            await crowd.wait_for(lambda: len(crowd.token_ids[0]) > 6)
            if number % 2:
                await crowd.cancel()
                await crowd.finish()
        num_tokens = min(len(crowd.token_ids[0]), NUM_TOKENS)
        assert crowd.token_ids[0][:num_tokens] == answers[number][:num_tokens]

    kinds = (whole_answer, one_token, ends_at_prefill, long_prompt, cancelled_or_dropped)
    async with asyncio.TaskGroup() as group:
        for number in range(3):  # each kind by each path
            for turn, kind in enumerate(kinds):
                group.create_task(kind(number, list(RequestPath)[(number + turn) % 3]))
            group.create_task(whole_answer(number, RequestPath.GENERATE))
    await returned(chaos)


@pytest.mark.trtllm
async def test_clients_that_vanish_at_any_stage_leave_nothing(chaos: Stack, client: QuartetClient) -> None:
    texts = endless_asks("vanish", 4)
    for asks, gate, names in (
        (texts, "steps", PREFILLS),
        (texts, "transfers", DECODES),
        (single_asks(300, 4), "steps", (ENCODE,)),
        (single_asks(310, 4), "steps", PREFILLS),
    ):
        hold(chaos, gate, *names)
        async with Crowd(client, asks):
            for name in names:
                await asyncio.to_thread(engine(chaos, name).wait_reached, gate)
        go_on(chaos, gate, *names)
        await returned(chaos)
    async with Crowd(client, texts) as crowd:
        await crowd.wait_for(lambda: all(len(answer.token_ids) > 4 for answer in crowd.answers))
    await returned(chaos)


async def test_a_request_cancelled_during_a_transfer_gets_its_end(chaos: Stack, client: QuartetClient) -> None:
    hold(chaos, "transfers", *DECODES)
    async with Crowd(client, endless_asks("cancel", 4)) as crowd:
        await until(lambda: counts(chaos, DECODES, "running") >= 4, "four transfers")
        await crowd.cancel()
        await asyncio.wait_for(crowd.finish(), WAIT_S)
    assert {answer.finished.reason for answer in crowd.answers if answer.finished} == {FinishReason.CANCELLED}
    go_on(chaos, "transfers", *DECODES)
    await returned(chaos)


@pytest.mark.trtllm
async def test_a_transfer_that_fails_or_comes_too_late_is_prefilled_again(
    chaos: Stack, client: QuartetClient, answers: list[list[int]]
) -> None:
    hold(chaos, "transfers", *DECODES)
    num_before = num_attempts(chaos)
    async with Crowd(client, ASKS) as crowd:
        await until(lambda: num_attempts(chaos) - num_before >= 2 * len(ASKS), "prompts that are prefilled again")
        go_on(chaos, "transfers", *DECODES)
        await crowd.finish()
    assert max(crowd.num_attempts) > 1
    assert crowd.token_ids == answers
    for name in (*PREFILLS, *DECODES):
        engine(chaos, name).fail_next_request("KV cache transfer failed")
    async with Crowd(client, ASKS) as crowd:
        await crowd.finish()
    assert max(crowd.num_attempts) > 1
    assert crowd.token_ids == answers
    await returned(chaos)


@pytest.mark.trtllm
async def test_requests_leave_an_engine_that_hangs_which_gets_some_when_it_moves_again(
    chaos: Stack, client: QuartetClient, answers: list[list[int]]
) -> None:
    stop_half_way(chaos, "decode-0")
    async with Crowd(client, ASKS) as crowd:
        await crowd.wait_for(lambda: is_half_way(crowd, "decode-0"))
        hold(chaos, "steps", "decode-0")
        await until(lambda: chaos.worker_states()["decode-0"] != READY, "the one that hangs is found")
        assert not chaos.processes["decode-0"].is_ready()
        await crowd.finish()
    assert max(crowd.num_attempts) > 1
    assert crowd.token_ids == answers
    go_on(chaos, "steps", "decode-0")
    await until(lambda: chaos.worker_states()["decode-0"] == READY, "it moves again")
    await returned(chaos)


async def matched(client: QuartetClient, prompt: Sequence[int]) -> dict[str, int]:
    explained = await client.explain(token_ids=prompt)
    return {option.rank.worker_id: option.num_matched_tokens for option in explained.options}


@pytest.mark.trtllm
async def test_a_prompt_goes_where_its_prefix_is_also_after_events_were_lost(
    chaos: Stack, client: QuartetClient
) -> None:
    rng = random.Random("prefix")
    prefix = rng.choices(tiny.PLAIN_IDS, k=256)
    homes = set()

    async def goes_home(*, is_known: bool) -> None:
        """One more prompt with the prefix: all that is known is true, and it goes there."""
        prompt = [*prefix, *rng.choices(tiny.PLAIN_IDS, k=40)]
        known = await matched(client, prompt)
        completion = await client.complete(token_ids=prompt, sampling=Sampling(max_tokens=2, ignore_eos=True))
        home = completion.accepted.choices[0].prefill
        assert home is not None
        homes.add(home.worker_id)
        assert known[home.worker_id] == (len(prefix) if is_known else 0)
        num_cached = completion.choices[0].finished.usage.num_cached_tokens
        assert num_cached >= known[home.worker_id]
        await knows(prompt, home.worker_id)

    async def knows(prompt: Sequence[int], home: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await matched(client, prompt))[home] < len(prompt) // 32 * 32:  # noqa: ASYNC110 - of other processes
                await asyncio.sleep(0.05)

    await goes_home(is_known=False)
    for _ in range(3):
        await goes_home(is_known=True)
    assert len(homes) == 1
    # Blocks reported before a gap count as gone, until a block stored after one of them proves that it is there.
    engine(chaos, *homes).lose_events(2)
    other = rng.choices(tiny.PLAIN_IDS, k=100)
    for _ in range(8):
        other = [*other[:64], *rng.choices(tiny.PLAIN_IDS, k=36)]
        prompt = [*prefix, *other]
        last = await client.complete(token_ids=prompt, sampling=Sampling(max_tokens=2, ignore_eos=True))
    # While the prefix counted as gone, some may have gone elsewhere, and brought it there.
    placed = last.accepted.choices[0].prefill
    assert placed is not None
    await until_known(client, prefix, placed.worker_id)
    await goes_home(is_known=True)
    await returned(chaos)


async def until_known(client: QuartetClient, prompt: Sequence[int], home: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await matched(client, [*prompt, 99]))[home] < len(prompt):  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.05)


async def test_no_request_notices_that_workers_of_all_roles_are_killed(
    chaos: Stack, client: QuartetClient, answers: list[list[int]]
) -> None:
    pictures = single_asks(330, 4)
    hold(chaos, "steps", *PREFILLS)
    async with Crowd(client, pictures) as seeing:
        for name in PREFILLS:
            await asyncio.to_thread(engine(chaos, name).wait_reached, "steps")
        chaos.kill(ENCODE)
        go_on(chaos, "steps", *PREFILLS)
        chaos.spawn(ENCODE)
        await seeing.finish()
    stop_half_way(chaos, "decode-0")
    async with Crowd(client, ASKS) as first:
        await first.wait_for(lambda: is_half_way(first, "decode-0"))
        chaos.kill("decode-0")
        await first.finish()
    hold(chaos, "transfers", "decode-1")
    # decode-0 is still gone: it would fetch hand-offs of prefill-0 before that is killed.
    async with Crowd(client, ASKS) as second:
        await until(lambda: engine(chaos, "prefill-0").counts["held"] >= 2, "hand-offs of prefill-0 that wait")
        chaos.kill("prefill-0")
        go_on(chaos, "transfers", "decode-1")
        await second.finish()
    for name in ("decode-0", "prefill-0"):
        chaos.spawn(name)
    for crowd in (first, second):
        assert max(crowd.num_attempts) > 1
        assert crowd.token_ids == answers
    await asyncio.to_thread(chaos.wait_ready)
    async with Crowd(client, pictures) as again:
        await again.finish()
    assert seeing.token_ids == again.token_ids
    await returned(chaos)


async def test_a_worker_whose_engine_dies_ends_with_1_and_its_requests_go_on_elsewhere(
    whole: Stack, client: QuartetClient, answers: list[list[int]]
) -> None:
    stop_half_way(whole, "decode-0")
    async with Crowd(client, ASKS) as crowd:
        await crowd.wait_for(lambda: is_half_way(crowd, "decode-0"))
        engine(whole, "decode-0").die()
        go_on(whole, "steps", "decode-0")
        await crowd.finish()
    assert max(crowd.num_attempts) > 1
    assert crowd.token_ids == answers
    # No request goes to these.
    for name in (ENCODE, "prefill-1"):
        engine(whole, name).die()
    for name in ("decode-0", ENCODE, "prefill-1"):
        assert await asyncio.to_thread(whole.processes[name].wait, WAIT_S) == 1
    await asyncio.to_thread(whole.wait_states, {"prefill-0": READY, "decode-1": READY}, WAIT_S)
    await returned(whole)


async def test_workers_that_get_SIGTERM_lose_no_request(
    chaos: Stack, client: QuartetClient, answers: list[list[int]]
) -> None:
    names = running(chaos)
    async with Crowd(client, ASKS) as crowd:
        await crowd.wait_for(lambda: all(len(answer.token_ids) > 2 for answer in crowd.answers))
        for name in names:
            chaos.terminate(name)
        await crowd.finish()
    assert set(crowd.num_attempts) == {1}
    assert crowd.token_ids == answers
    for name in names:
        assert await asyncio.to_thread(chaos.processes[name].wait, WAIT_S) == 0
        assert "Traceback" not in chaos.processes[name].log.read_text()
