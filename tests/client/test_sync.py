"""The client without an event loop: blocking calls, iterators that can be dropped, an end that comes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from quartet.client import ChoiceFinished, Delta, FinishReason
from quartet.client.sync import SyncClient
from quartet.errors import ConfigError, InvalidRequestError, RouterUnavailableError
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter, worker_status

ResultT = TypeVar("ResultT")


async def in_thread(address: str, use: Callable[[SyncClient], ResultT]) -> ResultT:
    """The result of ``use`` on a client in a thread of its own: the fake router runs on this loop."""

    def work() -> ResultT:
        with SyncClient(address) as client:
            return use(client)

    async with asyncio.timeout(30):
        return await asyncio.to_thread(work)


async def test_answers_workers_and_models_come_without_a_loop(start_router: StartRouter) -> None:
    router = FakeRouter()
    router.workers = [worker_status("decode-0")]
    router.explanation.policy = "round_robin"

    def use(client: SyncClient) -> None:
        assert "".join(e.text for e in client.generate("Hi") if isinstance(e, Delta)) == "one two three"
        assert client.complete("Hi").text == "one two three"
        assert [worker.record.worker_id for worker in client.list_workers()] == ["decode-0"]
        assert client.list_models() == [client.get_model("tiny")]
        assert client.explain("Hi", session_key="s").policy == "round_robin"

    await in_thread(await start_router(router), use)
    assert router.starts[-1].session_key == "s"


async def test_leaving_the_iteration_cancels_the_request(start_router: StartRouter) -> None:
    router = FakeRouter()
    router.hold_after = 1

    def use(client: SyncClient) -> None:
        for event in client.generate("Hi"):
            if isinstance(event, Delta):
                break

    await in_thread(await start_router(router), use)
    async with asyncio.timeout(30):
        await router.dropped.wait()


async def test_cancel_from_another_thread_ends_the_answer_in_order(start_router: StartRouter) -> None:
    router = FakeRouter()
    router.hold_after = 1

    def use(client: SyncClient) -> FinishReason:
        stream = client.generate("Hi")
        for event in stream:
            if isinstance(event, Delta):
                canceller = threading.Thread(target=stream.cancel)
                canceller.start()
                canceller.join(5)
            if isinstance(event, ChoiceFinished):
                return event.reason
        raise AssertionError("the answer did not finish")

    assert await in_thread(await start_router(router), use) is FinishReason.CANCELLED


async def test_closing_the_client_drops_what_runs(start_router: StartRouter) -> None:
    router = FakeRouter()
    router.hold_after = 1
    held = []

    def use(client: SyncClient) -> None:
        events = iter(client.generate("Hi"))
        next(events)
        held.append(events)

    await in_thread(await start_router(router), use)
    async with asyncio.timeout(30):
        await router.dropped.wait()


async def test_errors_are_the_same_types(start_router: StartRouter, free_port: Callable[[], int]) -> None:
    router = FakeRouter()
    router.error = InvalidRequestError("no", field="sampling.top_k")
    with pytest.raises(InvalidRequestError):
        await in_thread(await start_router(router), lambda client: client.complete("Hi"))
    with pytest.raises(RouterUnavailableError):
        await in_thread(f"127.0.0.1:{free_port()}", lambda client: client.complete("Hi"))
    with pytest.raises(ConfigError):
        await in_thread("nowhere", lambda client: client.complete("Hi"))


async def test_closing_twice_is_harmless_and_leaves_no_thread(start_router: StartRouter) -> None:
    def work(address: str) -> None:
        client = SyncClient(address)
        client.complete("Hi")
        client.close()
        client.close()

    await asyncio.to_thread(work, await start_router(FakeRouter()))
    assert "quartet-client" not in [thread.name for thread in threading.enumerate()]
