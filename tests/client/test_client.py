"""What the client shows of an answer, how it ends one, and what it does when a router can't be reached."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import aclosing

import pytest

from quartet.api.convert.fleet import to_fleet_totals
from quartet.client import (
    Accepted,
    AnswerPart,
    ChatMessage,
    ChoiceFinished,
    Delta,
    FinishReason,
    FleetTotals,
    GenerateStream,
    Placed,
    QuartetClient,
    RequestPath,
    Sampling,
    Tool,
    ToolChoice,
    TransferWay,
    WorkerState,
)
from quartet.client import generate as client_generate
from quartet.discovery.base import Rank, Role
from quartet.errors import (
    ConfigError,
    DrainingError,
    InvalidRequestError,
    ModelNotFoundError,
    ProtocolError,
    QueueFullError,
    RouterUnavailableError,
    ServingError,
    WorkerUnavailableError,
)
from quartet.v1 import router_pb2, worker_pb2
from tests.client.conftest import StartRouter
from tests.client.fake_router import REQUEST_ID, FakeRouter, worker_status
from tests.stopwatch import Stopwatch

HELLO = [ChatMessage("user", "Hi")]

# Paths on which the router itself streams the answer.
_BY_ROUTER = (RequestPath.GENERATE, RequestPath.SESSION)


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture(params=list(RequestPath))
def path(request: pytest.FixtureRequest) -> RequestPath:
    """Tests that take it run over every path."""
    return RequestPath(request.param)


@pytest.fixture
def silent_address() -> Iterator[str]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def _read(stream: GenerateStream) -> None:
    async for _ in stream:
        pass


async def is_answered(client: QuartetClient) -> bool:
    try:
        return bool(await client.list_models())
    except RouterUnavailableError:
        return False


async def test_an_answer_is_accepted_then_streamed_then_finished(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    address = await start_router(router)
    async with QuartetClient(address) as client:
        stream = client.generate("Hi", path=path, seed=5)
        router_before = stream.router
        events = [event async for event in stream]

    accepted, *deltas, finished = events
    assert isinstance(accepted, Accepted)
    assert (accepted.request_id, accepted.seed) == (REQUEST_ID, 5)
    assert (router_before, stream.router) == (None, address)
    assert accepted.choices[0].prefill == Rank("prefill-0")
    assert [delta.text for delta in deltas if isinstance(delta, Delta)] == router.words
    assert isinstance(finished, ChoiceFinished)
    assert finished.reason is FinishReason.LENGTH
    assert finished.stop_string is None
    assert finished.usage.num_output_tokens == 3
    if path is not RequestPath.DIRECT:
        time = finished.time
        assert (time.first_token_s, time.total_s, time.prefill_s) == (0.25, 0.5, None)
        assert (time.transfer_s, time.transfer_way, time.transfer_bytes) == (0.125, TransferWay.SHM, 250_000_000)


async def test_a_request_has_the_values_that_the_caller_gave(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    async with QuartetClient(await start_router(router)) as client:
        messages = [ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")]
        sampling = Sampling(temperature=0.0, max_tokens=3)
        await client.complete(
            path=path,
            messages=messages,
            model="tiny",
            sampling=sampling,
            stop=["."],
            num_choices=2,
            logprobs=1,
            timeout_s=2.5,
        )
        await client.complete(path=path, token_ids=[1, 2, 3])

    chat, ids = router.starts
    assert [(entry.role, entry.content) for entry in chat.chat.messages] == [("system", "Be brief."), ("user", "Hi")]
    assert (chat.model, chat.num_choices, chat.output.logprobs) == ("tiny", 2, 1)
    assert chat.sampling.HasField("temperature") and chat.sampling.temperature == 0.0
    assert chat.sampling.max_tokens == 3
    assert list(chat.text_options.stop_strings) == ["."]
    # By Place, the timeout is what is left of it.
    assert 2.0 < chat.timeout.ToTimedelta().total_seconds() <= 2.5
    assert list(ids.token_ids.ids) == [1, 2, 3]
    assert not ids.HasField("timeout") and not ids.HasField("seed")


async def test_a_completion_holds_every_choice_whole(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    async with QuartetClient(await start_router(router)) as client:
        completion = await client.complete("Hi", path=path, num_choices=3)
    assert [choice.text for choice in completion.choices] == ["one two three"] * 3
    assert completion.choices[2].token_ids == (100, 101, 102)
    assert completion.choices[1].finished.usage.num_output_tokens == 3
    assert completion.text == "one two three"
    assert [placed.decode.worker_id for placed in completion.accepted.choices] == ["decode-0", "decode-1", "decode-2"]


@pytest.mark.parametrize("path", _BY_ROUTER)
async def test_choices_that_are_placed_later_are_reported_then(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    async with QuartetClient(await start_router(router)) as client:
        accepted, placed, *_rest = [event async for event in client.generate("Hi", path=path, num_choices=2)]
    assert isinstance(accepted, Accepted) and [choice.choice for choice in accepted.choices] == [0]
    assert isinstance(placed, Placed) and (placed.placement.choice, placed.placement.decode) == (1, Rank("decode-1"))


@pytest.mark.parametrize("drop", ["break", "aclose", "cancel the task"])
async def test_dropping_an_answer_cancels_the_request(
    router: FakeRouter, start_router: StartRouter, drop: str, path: RequestPath
) -> None:
    router.hold(1)
    async with QuartetClient(await start_router(router)) as client:
        if drop == "break":
            async for event in client.generate("Hi", path=path):
                if isinstance(event, Delta):
                    break
            gc.collect()
        elif drop == "aclose":
            stream = client.generate("Hi", path=path)
            await anext(stream)
            await stream.aclose()
        else:
            task = asyncio.create_task(client.complete("Hi", path=path))
            await router.holding.wait()
            task.cancel()
        async with asyncio.timeout(30):
            await router.dropped.wait()


async def test_cancel_ends_every_choice_in_order(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    router.hold(1)
    async with QuartetClient(await start_router(router)) as client:
        stream = client.generate("Hi", path=path, num_choices=2)
        events: list[AnswerPart] = []
        async for event in stream:
            events.append(event)
            if isinstance(event, Delta):
                await stream.cancel()
    finished = [event for event in events if isinstance(event, ChoiceFinished)]
    assert [(event.choice, event.reason) for event in finished] == [
        (0, FinishReason.CANCELLED),
        (1, FinishReason.CANCELLED),
    ]
    # On the other paths both are said in the same way.
    assert path is not RequestPath.GENERATE or not router.dropped.is_set()


async def test_cancel_before_the_first_event_counts_too(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    router.hold(0)
    async with QuartetClient(await start_router(router)) as client:
        stream = client.generate("Hi", path=path)
        await stream.cancel()
        events = [event async for event in stream]
        await stream.cancel()
    assert isinstance(events[-1], ChoiceFinished)
    assert events[-1].reason is FinishReason.CANCELLED


async def test_a_cancel_is_sent_once_and_never_beside_the_start(
    router: FakeRouter, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.hold(0)
    is_sending, may_send = asyncio.Event(), asyncio.Event()
    write, written = client_generate._write, []

    async def write_late(call: object, message: router_pb2.GenerateRequest) -> None:
        if message.HasField("start"):
            is_sending.set()
            await may_send.wait()
        written.append(message.WhichOneof("message"))
        await write(call, message)  # type: ignore[arg-type]

    monkeypatch.setattr(client_generate, "_write", write_late)
    async with QuartetClient(await start_router(router)) as client, asyncio.timeout(30):
        stream = client.generate("Hi")
        first = asyncio.ensure_future(anext(stream))
        await is_sending.wait()
        await stream.cancel()
        may_send.set()
        await asyncio.gather(stream.cancel(), stream.cancel())
        events = [await first, *[event async for event in stream]]
        await stream.cancel()
    assert written == ["start", "cancel"]
    assert isinstance(events[-1], ChoiceFinished)
    assert events[-1].reason is FinishReason.CANCELLED


async def test_the_routers_error_comes_as_its_own_type(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    router.error = InvalidRequestError("top_p must be in (0, 1]", field="sampling.top_p")
    async with QuartetClient(await start_router(router)) as client:
        with pytest.raises(InvalidRequestError, match="top_p must be") as raised:
            await client.complete("Hi", path=path)
        router.error = QueueFullError("the queue is full", retry_delay_s=1.5)
        with pytest.raises(QueueFullError) as full:
            await client.complete("Hi", path=path)
    assert raised.value.field == "sampling.top_p"
    assert full.value.retry_delay_s == 1.5


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda client: client.generate(), "prompt"),
        (lambda client: client.generate("Hi", token_ids=[1]), "prompt"),
        (lambda client: client.generate(""), "text"),
        (lambda client: client.generate(token_ids=[-1]), "token_ids.ids"),
        (lambda client: client.generate(messages=HELLO, tools=[Tool("")]), "chat.tools[0].name"),
        (lambda client: client.generate(messages=HELLO, tool_choice=ToolChoice.REQUIRED), "chat.tool_choice"),
        (lambda client: client.generate(messages=HELLO, template_arguments={"a": {1}}), "chat.template_arguments"),
        (lambda client: client.generate("Hi", tools=[Tool("f")]), "chat"),
        (lambda client: client.generate("Hi", seed=2**64), "seed"),
        (lambda client: client.generate("Hi", num_choices=65), "num_choices"),
        (lambda client: client.generate("Hi", timeout_s=0), "timeout"),
        (lambda client: client.generate("Hi", timeout_s=float("inf")), "timeout"),
        (lambda client: client.generate("Hi", logprobs=21), "output.logprobs"),
        (lambda client: client.generate("Hi", stop="no list"), "text_options.stop_strings"),
        (lambda client: client.generate("Hi", stop=["."] * 17), "text_options.stop_strings"),
        (lambda client: client.generate("\ud800"), None),
        (lambda client: client.generate("Hi", sampling=Sampling(stop_token_ids=(-1,))), None),
        (lambda client: client.generate("Hi", stop=["\ud800"]), None),
    ],
)
async def test_a_request_that_no_router_could_take_is_refused_at_once(
    ask: Callable[[QuartetClient], object], field: str | None
) -> None:
    async with QuartetClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequestError) as raised:
            ask(client)
    assert raised.value.field == field


@pytest.mark.parametrize("addresses", [[], ["nowhere"], ["host:0"], ["host:x"], [":1"]])
async def test_addresses_that_are_none_are_refused(addresses: list[str]) -> None:
    with pytest.raises(ConfigError):
        QuartetClient(addresses)


async def test_the_next_router_takes_over_when_one_cannot_be_reached(
    router: FakeRouter, start_router: StartRouter, free_port: Callable[[], int], path: RequestPath
) -> None:
    address = await start_router(router)
    async with QuartetClient([f"127.0.0.1:{free_port()}", address]) as client:
        assert (await client.complete("Hi", path=path)).router == address
        assert [model.name for model in await client.list_models()] == ["tiny"]


async def test_the_next_router_takes_over_from_one_that_drains(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    draining = FakeRouter()
    draining.error = DrainingError("the router drains")
    async with QuartetClient([await start_router(draining), await start_router(router)]) as client:
        await client.complete("Hi", path=path)
        await client.complete("Hi", path=path)
    assert (len(draining.starts), len(router.starts)) == (1, 2)


async def test_a_router_without_workers_is_not_asked_again_elsewhere(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    bare = FakeRouter()
    bare.error = WorkerUnavailableError("no worker")
    async with QuartetClient([await start_router(bare), await start_router(router)]) as client:
        with pytest.raises(WorkerUnavailableError, match="no worker"):
            await client.complete("Hi", path=path)
    assert router.starts == []


@pytest.mark.parametrize("call", ["complete", "list_workers"])
async def test_a_missing_router_is_reported_soon_and_by_address(
    free_port: Callable[[], int], call: str, path: RequestPath
) -> None:
    addresses = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]
    stopwatch = Stopwatch()
    async with QuartetClient(addresses) as client:
        with pytest.raises(RouterUnavailableError) as raised:
            await (client.complete("Hi", path=path) if call == "complete" else client.list_workers())
    assert all(address in raised.value.message for address in addresses)
    assert "refused" in raised.value.message
    assert stopwatch.seconds < 5


async def test_a_silent_server_is_reported_soon(silent_address: str, path: RequestPath) -> None:
    stopwatch = Stopwatch()
    async with QuartetClient(silent_address) as client:
        with pytest.raises(RouterUnavailableError, match=silent_address):
            await client.complete("Hi", path=path)
    assert stopwatch.seconds < 5


async def test_a_router_that_comes_back_is_found_again(
    router: FakeRouter, start_router: StartRouter, free_port: Callable[[], int]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with QuartetClient(address) as client:
        with pytest.raises(RouterUnavailableError):
            await client.list_models()
        await start_router(router, address)
        async with asyncio.timeout(30):
            while not await is_answered(client):
                pass


async def test_an_answer_that_ends_without_its_finished_is_an_error(
    router: FakeRouter, start_router: StartRouter
) -> None:
    router.lose_last_finished = True
    async with QuartetClient(await start_router(router)) as client:
        with pytest.raises(ProtocolError, match="1 of 2 choices"):
            await client.complete("Hi", num_choices=2)


async def test_closing_the_client_ends_what_runs_and_says_so(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    router.hold(1)
    client = QuartetClient(await start_router(router))
    stream = client.generate("Hi", path=path)
    await anext(stream)
    await router.holding.wait()
    reading = asyncio.create_task(_read(stream))
    await asyncio.sleep(0)
    await client.close()
    async with asyncio.timeout(30):
        with pytest.raises(ServingError):
            await reading
        await router.dropped.wait()


async def test_a_client_that_was_closed_says_so(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    client = QuartetClient(await start_router(router))
    await client.complete("Hi", path=path)
    await client.close()
    with pytest.raises(RouterUnavailableError, match="closed"):
        await client.complete("Hi", path=path)


async def test_workers_are_listed_with_their_load(router: FakeRouter, start_router: StartRouter) -> None:
    router.workers = [worker_status("decode-0", num_running=3, num_held_blocks=2, num_total_blocks=64)]
    async with QuartetClient(await start_router(router)) as client:
        [worker] = await client.list_workers()
    assert (worker.record.worker_id, worker.record.role, worker.state) == ("decode-0", Role.DECODE, WorkerState.READY)
    assert worker.load is not None
    assert (worker.load.ranks[0].num_running, worker.load.ranks[0].num_held_blocks) == (3, 2)
    assert worker.load_age_s == 0.4


async def test_a_watch_shows_all_workers_after_each_change(router: FakeRouter, start_router: StartRouter) -> None:
    router.workers = [worker_status("decode-0")]
    await router.changes.put(
        router_pb2.WatchWorkersResponse(updated=[worker_status("prefill-0", worker_pb2.WORKER_ROLE_PREFILL)])
    )
    await router.changes.put(router_pb2.WatchWorkersResponse(removed_worker_ids=["decode-0"]))
    seen: list[set[str]] = []
    async with QuartetClient(await start_router(router)) as client:
        async for workers in client.watch_workers():
            seen.append({worker.record.worker_id for worker in workers})
            if len(seen) == 3:
                break
    assert seen == [{"decode-0"}, {"decode-0", "prefill-0"}, {"prefill-0"}]


async def test_a_watch_of_the_fleet_has_what_the_router_has_counted(
    router: FakeRouter, start_router: StartRouter
) -> None:
    router.workers = [worker_status("decode-0")]
    totals = FleetTotals(
        router_id="router-1",
        policy="kv_aware",
        outcomes={"stop_id": 3, "timeout": 1},
        num_failed=1,
        num_prompt_tokens=100,
        num_cached_tokens=40,
        num_output_tokens=60,
        ttft_bounds_s=(0.5, 1.0),
        ttft_counts=(2, 1, 1),
        num_without_room=5,
        num_kv_gaps=6,
        num_queued=7,
        num_running=8,
    )
    router.totals = to_fleet_totals(totals)
    await router.changes.put(router_pb2.WatchWorkersResponse())
    async with QuartetClient(await start_router(router)) as client, aclosing(client.watch_fleet()) as watch:
        first, second = [await anext(watch) for _ in range(2)]
    assert (first.totals, second.totals) == (totals, None)
    assert [[worker.record.worker_id for worker in state.workers] for state in (first, second)] == [["decode-0"]] * 2


async def test_a_watched_worker_that_is_removed_and_back_in_one_change_is_there(
    router: FakeRouter, start_router: StartRouter
) -> None:
    router.workers = [worker_status("w-0")]
    back = worker_status("w-0", worker_pb2.WORKER_ROLE_PREFILL)
    await router.changes.put(router_pb2.WatchWorkersResponse(updated=[back], removed_worker_ids=["w-0"]))
    async with QuartetClient(await start_router(router)) as client:
        watch = client.watch_workers()
        seen = [{worker.record.key for worker in await anext(watch)} for _ in range(2)]
        await watch.aclose()
    assert seen == [{(Role.DECODE, "w-0")}, {(Role.PREFILL, "w-0")}]


async def test_a_model_is_found_by_name_or_not(router: FakeRouter, start_router: StartRouter) -> None:
    async with QuartetClient(await start_router(router)) as client:
        assert (await client.get_model("tiny")).max_model_len == 64
        with pytest.raises(ModelNotFoundError):
            await client.get_model("huge")


async def test_an_explain_request_is_checked_before_it_is_sent(router: FakeRouter, start_router: StartRouter) -> None:
    router.error = ModelNotFoundError("no worker serves any model yet", field="model")
    async with QuartetClient(await start_router(router)) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.explain("Hi", session_key="x" * 257)
        assert (caught.value.field, router.starts) == ("session_key", [])
        with pytest.raises(ModelNotFoundError):
            await client.explain(token_ids=[1, 2])
    [start] = router.starts
    assert list(start.token_ids.ids) == [1, 2]


async def test_every_failure_is_a_serving_error(
    router: FakeRouter, start_router: StartRouter, path: RequestPath
) -> None:
    router.words = ["\ud800"]  # makes the fake break
    async with QuartetClient(await start_router(router)) as client:
        with pytest.raises(ServingError, match="internal error"):
            await client.complete("Hi", path=path)


@pytest.mark.parametrize("traceparent", ["00-ä", "00-a\n"])
async def test_a_trace_context_that_metadata_cannot_hold_is_refused_at_once(traceparent: str) -> None:
    async with QuartetClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequestError) as caught:
            client.generate("Hi", traceparent=traceparent)
    assert caught.value.field == "traceparent"
