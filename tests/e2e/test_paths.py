"""One suite over the three paths from a client to its tokens: users can't see which one it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from quartet.api.request import TIMES
from quartet.client import (
    Accepted,
    ChatMessage,
    ChoiceFinished,
    CompletedChoice,
    Completion,
    Delta,
    FinishReason,
    GenerateFields,
    GenerateStream,
    QuartetClient,
    RequestPath,
    Sampling,
    TimeBreakdown,
    TransferWay,
)
from quartet.client.sync import SyncClient
from quartet.errors import QueueFullError, RequestTimeoutError, ServingError, UnsupportedFieldError
from tests import tiny
from tests.e2e.conftest import StartStack
from tests.e2e.crowd import Ask, Crowd, decode_of_all, endless_asks, mixed_asks
from tests.e2e.stack import LOCAL_PREFILL, REMOTE_PREFILL, Settings, Stack, StackConfig

RETURN_S = 40.0
RETRY_DELAY_S = 2.5
PROMPT = "Once upon a time, there was a quiet rabbit named Olive who lived near a castle. She loved to"
QUESTION = "Tell me a short story about a rabbit named Olive."
GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
SAMPLED = Sampling(temperature=1.0, top_p=0.95, max_tokens=16, ignore_eos=True)

#: Requests whose answers must not depend on the path.
ASKS: dict[str, GenerateFields] = {
    "greedy": {"sampling": GREEDY},
    "sampled": {"sampling": SAMPLED, "seed": 2**64 - 1},
    "choices": {"sampling": SAMPLED, "seed": 7, "num_choices": 2},
    "ended by its nature": {"sampling": Sampling(temperature=1.5, max_tokens=100), "seed": 4},
    "one token": {"sampling": Sampling(temperature=0.0, max_tokens=1)},
    "log probabilities": {"sampling": GREEDY, "logprobs": 2},
    "ids only": {"sampling": GREEDY, "omit_text": True},
    "text only": {"sampling": GREEDY, "omit_token_ids": True},
    "special tokens": {
        "sampling": Sampling(temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias={1: 100.0}),
        "show_special_tokens": True,
    },
    "special tokens hidden": {
        "sampling": Sampling(temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias={1: 100.0})
    },
}


#: Of them by router: what differs where a prompt is prefilled is how its tokens come, not how they are shown.
ROUTED_ASKS = {"router": tuple(ASKS), "router-local": ("sampled", "choices", "one token", "log probabilities")}


@pytest.fixture(scope="module")
def paths_stack(start_stack: StartStack) -> Stack:
    """One prefill, two decodes, and three routers.

    ``router-local`` prefills where it decodes; ``router-full`` soon has no room and does not let wait for it.
    """
    # A rank must have room for all that a request may generate: four endless ones fill two ranks.
    full: Settings = {
        "policy.name": "least_loaded",  # which queues no request that there is room for
        "attempts.reserve_tokens": 4096,
        "admission.queue_timeout_s": 0.5,
        "admission.retry_delay_s": RETRY_DELAY_S,
    }
    config = StackConfig(
        num_decode=2,
        worker={"transfer.hand_off_ttl_s": 5.0},
        routers={"router": REMOTE_PREFILL, "router-local": LOCAL_PREFILL, "router-full": full},
    )
    return start_stack(config)


@pytest.fixture(params=list(RequestPath))
def path(request: pytest.FixtureRequest) -> RequestPath:
    return RequestPath(request.param)


@pytest.fixture
async def client(paths_stack: Stack) -> AsyncIterator[QuartetClient]:
    async with QuartetClient(paths_stack.router_address) as client:
        yield client


async def returned(stack: Stack) -> None:
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=RETURN_S)


def shown(choice: CompletedChoice) -> tuple[object, ...]:
    """What of an answer must be equal wherever it comes from."""
    finished = choice.finished
    top = tuple(entry.top_token_ids for entry in choice.logprobs)
    usage = (finished.usage.num_prompt_tokens, finished.usage.num_output_tokens, finished.usage.num_attempts)
    return (choice.text, choice.token_ids, top, finished.choice, finished.reason, finished.stop_string, usage)


def measured(time: TimeBreakdown) -> set[str]:
    """Names of the parts of the time that are known."""
    return {name for name in TIMES if getattr(time, name) is not None}


def check_same(one: Completion, other: Completion) -> None:
    assert list(map(shown, one.choices)) == list(map(shown, other.choices))
    assert one.accepted.num_prompt_tokens == other.accepted.num_prompt_tokens
    for ours, theirs in zip(one.choices, other.choices, strict=True):
        assert [entry.logprob for entry in ours.logprobs] == pytest.approx(
            [entry.logprob for entry in theirs.logprobs], abs=1e-3
        )
        assert measured(ours.finished.time) == measured(theirs.finished.time)


@pytest.mark.parametrize("router", ROUTED_ASKS)
async def test_answers_are_the_same_on_every_path(paths_stack: Stack, router: str) -> None:
    async with QuartetClient(paths_stack.processes[router].grpc_address) as client:
        for name in ROUTED_ASKS[router]:
            asked = (client.complete(PROMPT, path=path, **ASKS[name]) for path in RequestPath)
            by_path = dict(zip(RequestPath, await asyncio.gather(*asked), strict=True))
            generated = by_path[RequestPath.GENERATE]
            for path, completion in by_path.items():
                try:
                    check_same(completion, generated)
                except AssertionError as error:
                    raise AssertionError(f"{name} by {path}") from error
        assert generated.choices[0].token_ids, "the last ones answered something"


async def test_answers_on_every_path_and_workers_tell_how_blocks_were_moved(
    client: QuartetClient, path: RequestPath
) -> None:
    first = tiny.PLAIN_IDS[100 * (list(RequestPath).index(path) + 1)]  # what nothing has cached
    answer = await client.complete(token_ids=range(first, first + 100), sampling=GREEDY, path=path)
    time = answer.choices[0].finished.time
    assert time.transfer_way is TransferWay.SHM
    assert time.transfer_bytes > 0
    assert time.transfer_gb_per_s is not None
    # Of this and earlier requests.
    await until_pulled(client, answer.accepted.choices[0].decode.worker_id, TransferWay.SHM, time.transfer_bytes)


async def until_pulled(client: QuartetClient, worker_id: str, way: TransferWay, size_bytes: int) -> None:
    """Wait until that worker reports that it has pulled so much, the last of it by ``way``."""
    async with asyncio.timeout(RETURN_S):
        async for workers in client.watch_workers():
            for worker in workers:
                if worker.record.worker_id == worker_id and worker.load is not None:
                    totals = worker.load.transfers
                    if totals and totals[-1].way == way and totals[-1].size_bytes >= size_bytes:
                        return
    raise AssertionError("the router went away")


async def test_conversations_and_stop_strings_are_the_same_on_every_path(client: QuartetClient) -> None:
    chat: GenerateFields = {
        "messages": [ChatMessage("user", "Tell me a short story about a rabbit named Olive.")],
        "sampling": GREEDY,
    }
    text = (await client.complete(**chat)).text
    # From the first token's text, from the middle, one that begins within the other, and none.
    for stop in ([text[0]], [text[9:13]], [text[9:12] + "\0", text[10:12]], ["\0"]):
        for include in (False, True):
            ask: GenerateFields = {**chat, "stop": stop, "include_stop_string": include}
            answers = await asyncio.gather(*(client.complete(path=path, **ask) for path in RequestPath))
            for answer in answers:
                check_same(answer, answers[0])
            has_stopped = stop != ["\0"]
            assert (answers[0].choices[0].finished.reason is FinishReason.STOP_STRING) == has_stopped
            assert has_stopped == (len(answers[0].text) < len(text))


@pytest.mark.parametrize("placement", [REMOTE_PREFILL, LOCAL_PREFILL])
async def test_log_probabilities_of_a_prompt_come_from_where_it_is_computed(
    paths_stack: Stack, placement: Settings
) -> None:
    router = "router-local" if placement is LOCAL_PREFILL else "router"
    async with QuartetClient(paths_stack.processes[router].grpc_address) as client:
        ask: GenerateFields = {"sampling": GREEDY, "prompt_logprobs": 2, "num_choices": 2}
        plain = await client.complete(PROMPT, sampling=GREEDY)
        for path in (RequestPath.GENERATE, RequestPath.SESSION):
            answer = await client.complete(PROMPT, path=path, **ask)
            assert (answer.accepted.choices[0].prefill is None) == (placement is LOCAL_PREFILL)
            assert [choice.token_ids for choice in answer.choices] == [plain.choices[0].token_ids] * 2
            assert answer.prompt_logprobs is not None
            first, *entries = answer.prompt_logprobs.tokens()
            assert first is None and len(entries) == plain.choices[0].finished.usage.num_prompt_tokens - 1
            # What the model says of its own greedy output is known.
            token_ids = [*answer.prompt_logprobs.token_ids, *answer.choices[0].token_ids]
            whole = await client.complete(token_ids=token_ids, path=path, **ask)
            told = await client.complete(PROMPT, sampling=GREEDY, logprobs=2)
            assert whole.prompt_logprobs is not None
            for ours, theirs in zip(
                whole.prompt_logprobs.tokens()[len(entries) + 1 :], told.choices[0].logprobs, strict=True
            ):
                assert ours is not None
                assert (ours.token_id, ours.top_token_ids) == (theirs.token_id, theirs.top_token_ids)
                assert [ours.logprob, *ours.top_logprobs] == pytest.approx(
                    [theirs.logprob, *theirs.top_logprobs], abs=1e-4
                )
        with pytest.raises(UnsupportedFieldError) as refused:
            await client.complete(PROMPT, path=RequestPath.DIRECT, **ask)
        assert refused.value.field == "output.num_prompt_logprobs"


async def test_parts_come_in_order(client: QuartetClient, path: RequestPath) -> None:
    parts = [part async for part in client.generate(PROMPT, path=path, sampling=GREEDY, seed=3)]
    accepted, finished = parts[0], parts[-1]
    assert isinstance(accepted, Accepted) and accepted.seed == 3 and len(accepted.request_id) == 32
    assert accepted.choices[0].prefill is not None
    assert isinstance(finished, ChoiceFinished) and finished.usage.num_attempts == 1
    deltas = [part for part in parts[1:-1] if isinstance(part, Delta)]
    assert len(deltas) == len(parts) - 2
    offsets = [delta.token_offset for delta in deltas]
    assert offsets == [sum(len(delta.token_ids) for delta in deltas[:number]) for number in range(len(deltas))]
    assert len(deltas[0].token_ids) == 1, "the first token waited for others"


BAD: dict[str, Callable[[QuartetClient, RequestPath], GenerateStream]] = {
    "unknown model": lambda client, path: client.generate(PROMPT, path=path, model="nobody"),
    "id outside the vocabulary": lambda client, path: client.generate(token_ids=[9, tiny.VOCAB_SIZE], path=path),
    "prompt too long": lambda client, path: client.generate(token_ids=[9] * tiny.MAX_MODEL_LEN, path=path),
    "too many tokens": lambda client, path: client.generate(PROMPT, path=path, sampling=Sampling(max_tokens=5000)),
    "bias of no token": lambda client, path: client.generate(
        PROMPT, path=path, sampling=Sampling(logit_bias={10**6: 1.0})
    ),
    "unknown role": lambda client, path: client.generate(messages=[ChatMessage("ghost", "boo")], path=path),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused_alike(client: QuartetClient, name: str) -> None:
    refusals: set[tuple[type[ServingError], str | None, str]] = set()
    for path in RequestPath:
        with pytest.raises(ServingError) as raised:
            await anext(BAD[name](client, path))
        refusals.add((type(raised.value), raised.value.field, raised.value.message))
    [(_kind, field, _message)] = refusals
    assert field


async def test_a_full_system_refuses_alike_and_says_when_to_come_back(paths_stack: Stack) -> None:
    [late] = endless_asks("too late", 1)
    async with (
        QuartetClient(paths_stack.processes["router-full"].grpc_address) as client,
        Crowd(client, endless_asks("fill", 4)) as filling,
    ):
        await filling.wait_for(lambda: all(answer.token_ids for answer in filling.answers))
        refusals: set[tuple[str, float | None]] = set()
        asked = (client.complete(token_ids=late.token_ids, sampling=late.sampling, path=path) for path in RequestPath)
        for refused in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(refused, QueueFullError)
            refusals.add((refused.message, refused.retry_delay_s))
        assert all(answer.finished is None for answer in filling.answers)
    [(_message, delay_s)] = refusals
    assert delay_s == RETRY_DELAY_S
    await returned(paths_stack)


@pytest.mark.parametrize("way", ["cancel", "drop"])
async def test_an_answer_that_is_ended_early_leaves_nothing(
    paths_stack: Stack, client: QuartetClient, path: RequestPath, way: str
) -> None:
    [ask] = endless_asks(f"{path} {way}", 1)
    stream = client.generate(token_ids=ask.token_ids, sampling=ask.sampling, path=path)
    num_tokens, end = 0, None
    async for part in stream:
        if isinstance(part, Delta):
            num_tokens += len(part.token_ids)
            if num_tokens > 4 and way == "drop":
                await stream.aclose()
                break
            if num_tokens > 4:
                await stream.cancel()
        if isinstance(part, ChoiceFinished):
            end = part
    if way == "cancel":
        assert end is not None and end.reason is FinishReason.CANCELLED
        assert end.usage.num_output_tokens == num_tokens < 4000
    await returned(paths_stack)


async def test_a_timeout_is_reported_alike_and_leaves_nothing(
    paths_stack: Stack, client: QuartetClient, path: RequestPath
) -> None:
    [ask] = endless_asks(f"{path} timeout", 1)
    with pytest.raises(RequestTimeoutError):
        await client.complete(token_ids=ask.token_ids, sampling=ask.sampling, path=path, timeout_s=0.4)
    await returned(paths_stack)


async def test_a_client_that_closes_leaves_nothing(paths_stack: Stack, path: RequestPath) -> None:
    client = QuartetClient(paths_stack.router_address)
    async with Crowd(client, endless_asks(f"{path} closes", 3), path=path) as crowd:
        await crowd.wait_for(lambda: all(len(answer.token_ids) > 2 for answer in crowd.answers))
        await client.close()
    await returned(paths_stack)


async def test_a_router_that_is_not_there_is_passed_over(
    paths_stack: Stack, path: RequestPath, free_port: Callable[[], int]
) -> None:
    addresses = [f"127.0.0.1:{free_port()}", paths_stack.router_address]
    async with QuartetClient(addresses) as client:
        assert (await client.complete(PROMPT, path=path, sampling=GREEDY)).router == paths_stack.router_address


def test_clients_without_a_loop_have_every_path(paths_stack: Stack) -> None:
    with SyncClient(paths_stack.router_address) as client:
        texts = {client.complete(PROMPT, path=path, sampling=GREEDY).text for path in RequestPath}
        streamed = client.generate(PROMPT, path="direct", sampling=GREEDY)
        texts.add("".join(part.text for part in streamed if isinstance(part, Delta)))
    assert len(texts) == 1


async def test_many_at_once_are_answered_alike(paths_stack: Stack, client: QuartetClient) -> None:
    asks = mixed_asks("many", 8, num_prompt_tokens=range(20, 100), num_tokens=range(4, 13))
    answers: list[list[list[int]]] = []
    for path in RequestPath:
        async with Crowd(client, asks, path=path) as crowd:
            await crowd.finish()
        assert set(crowd.num_attempts) == {1}
        answers.append(crowd.token_ids)
    assert answers[0] == answers[1] == answers[2]
    await returned(paths_stack)


async def with_stop_strings(client: QuartetClient, asks: Sequence[Ask]) -> list[Ask]:
    """These, but that each ends late in its answer."""
    async with Crowd(client, asks) as crowd:
        await crowd.finish()
    texts = [answer.choices[0].text for answer in crowd.answers]
    return [replace(ask, stop=(text[len(text) * 3 // 4 :][:6],)) for ask, text in zip(asks, texts, strict=True)]


async def test_no_client_notices_that_a_decode_worker_is_killed(paths_stack: Stack, client: QuartetClient) -> None:
    mixed = mixed_asks("killed", 5, num_prompt_tokens=range(20, 60), num_tokens=range(160, 200))
    asks = [*await with_stop_strings(client, mixed[:2]), mixed[2], replace(mixed[3], num_choices=2), mixed[4]]
    decodes = ("decode-0", "decode-1")
    # They begin to decode side by side: none is near its end when one of each path is at work.
    paths_stack.freeze(*decodes)
    async with AsyncExitStack() as exits:
        crowds = {path: await exits.enter_async_context(Crowd(client, asks, path=path)) for path in RequestPath}
        routed = crowds[RequestPath.GENERATE]
        await routed.wait_for(lambda: all(routed.token_ids))  # the first ones, of the prefill worker
        paths_stack.thaw(*decodes)
        paths_stack.kill(await decode_of_all(crowds.values(), decodes))
        for crowd in crowds.values():
            await crowd.finish()
    for path, crowd in crowds.items():
        assert max(crowd.num_attempts) > 1, f"no request was there by {path}"
    await returned(paths_stack)
    async with Crowd(client, asks) as undisturbed:
        await undisturbed.finish()
    for path, crowd in crowds.items():
        assert crowd.shown == undisturbed.shown, path
    ends = [answer.choices[0].finished for answer in undisturbed.answers]
    assert [end.reason for end in ends if end is not None][:3] == [FinishReason.STOP_STRING] * 2 + [FinishReason.LENGTH]


async def test_answers_that_come_directly_outlive_their_router(paths_stack: Stack) -> None:
    asks = mixed_asks("router dies", 2, num_prompt_tokens=range(20, 60), num_tokens=range(200, 220))
    router = paths_stack.processes["router-local"].grpc_address
    async with QuartetClient(router) as client, Crowd(client, asks, path=RequestPath.DIRECT) as crowd:
        await crowd.wait_for(lambda: all(len(answer.token_ids) > 2 for answer in crowd.answers))
        paths_stack.kill("router-local")
        await crowd.finish()
    assert [len(ids) for ids in crowd.token_ids] == [ask.sampling.max_tokens for ask in asks]
    await returned(paths_stack)
