"""Tokens straight from the worker: the same answer, and another placement where an attempt breaks."""

from __future__ import annotations

import asyncio

import pytest

from quartet.client import Accepted, AnswerPart, ChoiceFinished, Completion, Delta, FinishReason, QuartetClient
from quartet.client.direct import MAX_ATTEMPTS
from quartet.client.routers import ClientClosedError
from quartet.client.workers import DecodeWorkers
from quartet.errors import (
    DrainingError,
    InvalidRequestError,
    MessageTooLargeError,
    ModelFilesError,
    ModelMismatchError,
    OutOfBlocksError,
    PermissionDeniedError,
    PlaceTooLargeError,
    QueueFullError,
    RequestTimeoutError,
    ServingError,
    SignedStartError,
    SignedStartExpiredError,
    StalledStreamError,
    TransferError,
    WorkerUnavailableError,
)
from tests.client.conftest import StartRouter
from tests.client.fake_router import REQUEST_ID, FakeRouter
from tests.client.fake_worker import Failing, Losing
from tests.services.stream_workers import until

WAIT_S = 30.0
IDS = (100, 101, 102)


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


async def complete(router_address: str, **fields: object) -> Completion:
    async with QuartetClient(router_address) as client, asyncio.timeout(WAIT_S):
        return await client.complete("Hi", path="direct", **fields)  # type: ignore[arg-type]


async def test_usage_and_times_are_those_of_placement_and_worker(router: FakeRouter, start_router: StartRouter) -> None:
    completion = await complete(await start_router(router))
    [choice] = completion.choices
    usage, time = choice.finished.usage, choice.finished.time
    assert (choice.token_ids, choice.finished.reason) == (IDS, FinishReason.LENGTH)
    assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (4, 3)
    assert (usage.num_output_tokens, usage.num_attempts) == (3, 1)
    assert (time.tokenize_s, time.router_queue_s, time.prefill_s, time.prefill_queue_s) == (0.125, 0.5, 0.75, 0.25)
    assert time.decode_queue_s == 0.25
    assert time.first_token_s is not None and time.total_s is not None and time.first_token_s <= time.total_s < WAIT_S


async def test_the_first_token_waits_for_no_worker(router: FakeRouter, start_router: StartRouter) -> None:
    router.hold(1)
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(WAIT_S):
        stream = client.generate("Hi", path="direct")
        accepted, delta = await anext(stream), await anext(stream)
        assert isinstance(accepted, Accepted) and accepted.request_id == REQUEST_ID
        assert delta == Delta(choice=0, token_offset=0, token_ids=(100,), text="one")
        await stream.aclose()


async def test_many_requests_share_one_stream_and_one_fetch(router: FakeRouter, start_router: StartRouter) -> None:
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(WAIT_S):
        completions = await asyncio.gather(*(client.complete("Hi", path="direct", num_choices=2) for _ in range(20)))
    assert {choice.text for completion in completions for choice in completion.choices} == {"one two three"}
    assert (router.worker.num_streams, router.worker.num_fetches) == (1, 1)


@pytest.mark.parametrize("breaks_stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        WorkerUnavailableError("gone"),
        TransferError("the hand-off is lost"),
        SignedStartExpiredError("too late"),
        OutOfBlocksError("full", retry_delay_s=0.001),
    ],
)
async def test_a_broken_attempt_goes_on_at_another_placement(
    router: FakeRouter, start_router: StartRouter, error: ServingError, breaks_stream: bool
) -> None:
    router.worker.failing = [Failing(error, num_tokens=1, breaks_stream=breaks_stream)]
    completion = await complete(await start_router(router), seed=5)
    assert (completion.text, completion.choices[0].token_ids) == ("one two three", IDS)
    assert completion.choices[0].finished.usage.num_attempts == 2
    first, second = router.resumes
    assert first is None and second is not None
    assert (second.request_id, second.attempt, second.seed, second.choice) == (REQUEST_ID, 1, 5, 0)
    assert list(second.generated_token_ids.ids) == [100, 101]


async def test_an_end_that_counts_more_tokens_than_came_is_a_broken_attempt(
    router: FakeRouter, start_router: StartRouter
) -> None:
    router.worker.failing = [Losing(num_tokens=1)]
    completion = await complete(await start_router(router))
    assert (completion.text, completion.choices[0].token_ids) == ("one two three", IDS)
    assert completion.choices[0].finished.usage.num_attempts == 2


async def test_a_placement_that_ends_a_resumed_answer_ends_it(router: FakeRouter, start_router: StartRouter) -> None:
    router.worker.failing = [Failing(WorkerUnavailableError("gone"), num_tokens=0)] * 2
    completion = await complete(await start_router(router))
    # Each placement brought one token with it, and the last one the end.
    assert (completion.text, completion.choices[0].finished.usage.num_attempts) == ("one two three", 3)


@pytest.mark.parametrize("error", [SignedStartError("altered"), InvalidRequestError("no", field="sampling.top_p")])
async def test_an_error_that_no_other_placement_mends_is_raised_at_once(
    router: FakeRouter, start_router: StartRouter, error: ServingError
) -> None:
    router.worker.failing = [Failing(error)]
    with pytest.raises(type(error)) as raised:
        await complete(await start_router(router))
    assert raised.value.field == error.field
    assert len(router.starts) == 1


async def test_attempts_are_bounded_and_the_last_error_is_raised(router: FakeRouter, start_router: StartRouter) -> None:
    router.words = [*router.words, *(f" {number}" for number in range(MAX_ATTEMPTS))]
    router.worker.failing = [Failing(WorkerUnavailableError(f"gone {number}"), 0) for number in range(1, 9)]
    with pytest.raises(WorkerUnavailableError, match=f"gone {MAX_ATTEMPTS}"):
        await complete(await start_router(router))
    assert router.worker.num_starts == len(router.starts) == MAX_ATTEMPTS


async def test_any_number_of_workers_may_drain_during_one_answer(router: FakeRouter, start_router: StartRouter) -> None:
    router.words = [*router.words, *(f" {number}" for number in range(MAX_ATTEMPTS + 2))]
    router.worker.failing = [Failing(DrainingError("leaving"), 0) for _ in range(MAX_ATTEMPTS + 1)]
    completion = await complete(await start_router(router))
    assert completion.choices[0].token_ids == tuple(range(IDS[0], IDS[0] + len(router.words)))
    assert completion.choices[0].finished.usage.num_attempts == MAX_ATTEMPTS + 2


async def test_an_answer_waits_where_the_router_cannot_place_it_again_just_now(
    router: FakeRouter, start_router: StartRouter
) -> None:
    router.worker.failing = [Failing(WorkerUnavailableError("gone"))]
    router.resume_errors = [
        QueueFullError("the queue is full", retry_delay_s=0.001),
        DrainingError("the router restarts", retry_delay_s=0.001),
        WorkerUnavailableError("nobody is left just now", retry_delay_s=0.001),
    ]
    completion = await complete(await start_router(router))
    assert (completion.text, completion.choices[0].token_ids) == ("one two three", IDS)
    assert completion.choices[0].finished.usage.num_attempts == 2
    assert [resume.attempt for resume in router.resumes if resume is not None] == [1, 2, 3, 4]


async def test_an_answer_stays_with_its_model(router: FakeRouter, start_router: StartRouter) -> None:
    router.worker.failing = [Failing(WorkerUnavailableError("gone"))]
    completion = await complete(await start_router(router))
    resume = router.resumes[1]
    assert resume is not None
    assert completion.accepted.model_fingerprint == resume.model_fingerprint == "f00d"
    assert router.worker.fingerprints == ["f00d"]


async def test_a_router_that_stays_full_is_not_asked_for_ever(router: FakeRouter, start_router: StartRouter) -> None:
    router.worker.failing = [Failing(WorkerUnavailableError("gone"))]
    router.resume_errors = [QueueFullError(f"full {number}", retry_delay_s=0.001) for number in range(2, 9)]
    with pytest.raises(QueueFullError, match=f"full {MAX_ATTEMPTS}"):
        await complete(await start_router(router))


async def test_the_routers_refusal_to_place_again_is_raised_at_once(
    router: FakeRouter, start_router: StartRouter
) -> None:
    router.worker.failing = [Failing(WorkerUnavailableError("gone"))]
    router.resume_errors = [PermissionDeniedError("not for strangers")]
    with pytest.raises(PermissionDeniedError):
        await complete(await start_router(router))
    assert len(router.starts) == 2


async def test_a_client_that_is_closed_asks_for_nothing_more(router: FakeRouter, start_router: StartRouter) -> None:
    router.hold(2)
    client = QuartetClient(await start_router(router))
    running = asyncio.create_task(client.complete("Hi", path="direct"))
    async with asyncio.timeout(WAIT_S):
        await router.holding.wait()
        await client.close()
        with pytest.raises(ClientClosedError):
            await running
    assert len(router.starts) == router.worker.num_streams == 1


async def test_a_stop_string_ends_the_answer_and_the_work(router: FakeRouter, start_router: StartRouter) -> None:
    router.hold(2)
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(WAIT_S):
        completion = await client.complete("Hi", path="direct", stop=["two"])
        await router.dropped.wait()
    finished = completion.choices[0].finished
    assert (completion.text, finished.reason, finished.stop_string) == ("one ", FinishReason.STOP_STRING, "two")


async def test_a_stop_string_in_the_first_token_makes_the_worker_release_its_hand_off(
    router: FakeRouter, start_router: StartRouter
) -> None:
    router.hold(1)
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(WAIT_S):
        completion = await client.complete("Hi", path="direct", stop=["one"], include_stop_string=True)
        await router.dropped.wait()
    assert (completion.text, completion.choices[0].finished.reason) == ("one", FinishReason.STOP_STRING)


async def test_a_request_without_text_needs_no_tokenizer(router: FakeRouter, start_router: StartRouter) -> None:
    completion = await complete(await start_router(router), omit_text=True)
    assert (completion.text, completion.choices[0].token_ids) == ("", IDS)
    assert router.worker.num_fetches == 0
    [choice] = (await complete(await start_router(router), omit_token_ids=True)).choices
    assert (choice.text, choice.token_ids) == ("one two three", ())


@pytest.mark.parametrize(
    "refusal",
    [
        None,  # its first token is its last
        MessageTooLargeError("too long to be signed"),
        PlaceTooLargeError("the choices don't fit at once"),
    ],
)
async def test_a_request_that_cannot_go_directly_is_generated_by_the_router(
    router: FakeRouter, start_router: StartRouter, refusal: ServingError | None
) -> None:
    if refusal is None:
        router.words = ["one"]
    router.place_error = refusal
    address = await start_router(router)
    completion = await complete(address)
    assert completion.text == "".join(router.words) and completion.router == address
    assert len(router.starts) == 2


async def test_an_answer_that_the_router_gives_is_cancelled_there(
    router: FakeRouter, start_router: StartRouter
) -> None:
    router.place_error = MessageTooLargeError("too long to be signed")
    router.hold(2)
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(WAIT_S):
        stream = client.generate("Hi", path="direct")
        parts: list[AnswerPart] = []
        async for part in stream:
            parts.append(part)
            if isinstance(part, Delta) and part.text.endswith("two"):
                await stream.cancel()
    finished = parts[-1]
    assert isinstance(finished, ChoiceFinished) and finished.reason is FinishReason.CANCELLED
    # As the router reports it.
    assert (finished.usage.num_prompt_tokens, finished.usage.num_output_tokens) == (4, 2)


async def test_malformed_text_files_are_reported(router: FakeRouter, start_router: StartRouter) -> None:
    router.worker.files = {"tokenizer.json": b"{}"}
    with pytest.raises(ModelFilesError):
        await complete(await start_router(router))


async def test_a_worker_that_gives_no_files_is_one_attempt(router: FakeRouter, start_router: StartRouter) -> None:
    router.num_misdirected = 2
    assert (await complete(await start_router(router))).text == "one two three"
    # Nothing was shown: nothing is resumed.
    assert router.resumes == [None] * 3


async def test_a_placement_whose_text_files_failed_is_released(router: FakeRouter, start_router: StartRouter) -> None:
    router.worker.file_errors = [ModelMismatchError("the worker was replaced")]
    assert (await complete(await start_router(router), num_choices=2)).text == "one two three"
    assert (router.worker.num_fetches, router.worker.num_starts) == (2, 4)


@pytest.mark.parametrize("way", ["cancel", "timeout"])
async def test_a_placement_whose_request_ends_before_its_text_files_come_is_released(
    router: FakeRouter, start_router: StartRouter, way: str
) -> None:
    router.worker.holds_files = True
    router.worker.hold_after = 1
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(WAIT_S):
        if way == "timeout":
            with pytest.raises(RequestTimeoutError):
                await client.complete("Hi", path="direct", timeout_s=0.2)
        else:
            stream = client.generate("Hi", path="direct")
            reading = asyncio.ensure_future(anext(stream))
            await router.holding.wait()
            await stream.cancel()
            await reading
            await stream.aclose()
        await router.dropped.wait()
    assert router.worker.num_starts == 1


async def test_the_timeout_is_kept_by_the_client_too(router: FakeRouter, start_router: StartRouter) -> None:
    router.hold(1)
    with pytest.raises(RequestTimeoutError, match=r"within 0\.2 s"):
        await complete(await start_router(router), timeout_s=0.2)
    async with asyncio.timeout(WAIT_S):
        await router.dropped.wait()


async def test_a_reader_that_leaves_too_much_unread_loses_the_request(
    router: FakeRouter, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet.client.direct.MAX_UNREAD", 10)
    router.words = [*router.words] * 10
    router.hold(20)
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(WAIT_S):
        stream = client.generate("Hi", path="direct", omit_text=True)
        await anext(stream)
        await router.dropped.wait()
        with pytest.raises(StalledStreamError):
            async for _ in stream:
                pass


async def test_a_connection_in_use_stays_while_another_that_is_not_is_closed() -> None:
    workers = DecodeWorkers(None, idle_s=0.01)
    with workers.use("127.0.0.1:1") as used:
        with workers.use("127.0.0.1:2"):
            pass
        await until(lambda: len(workers) < 2)
        with workers.use("127.0.0.1:1") as again:
            assert again is used
    await workers.close()


async def test_unused_connections_are_closed_after_a_while(router: FakeRouter, start_router: StartRouter) -> None:
    await start_router(router)
    workers = DecodeWorkers(None, idle_s=0.02)
    with workers.use(router.worker_address) as first:
        with workers.use(router.worker_address) as second:
            assert first is second
        await asyncio.sleep(0.1)  # longer than it would be kept without a user
        assert "tokenizer.json" in await first.text_files("f00d")
        assert len(workers) == 1
    await until(lambda: not len(workers))
    with workers.use(router.worker_address) as third:
        assert third is not first
    await workers.close()
    with pytest.raises(ClientClosedError), workers.use(router.worker_address):
        pass
    assert not len(workers)
