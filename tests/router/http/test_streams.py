"""When the response to a request begins, what it waits for, and how one that has begun ends badly."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from quartet.errors import WorkersLostError
from router.config import AdmissionConfig
from router.http.config import HttpConfig
from services.topology.launch import free_port
from tests.router.fakes import TIMEOUT_S, Fleet, Plan
from tests.router.http.face import Face, open_face, until
from tests.router.records import make_load
from tests.router.system import running_system

KEEPALIVE = HttpConfig(keepalive_s=0.05)
WAITING = {"prompt": "hi", "max_tokens": 3, "stream": True}


def set_used(fleet: Fleet, num_blocks: int | None = None) -> None:
    """Let all workers report so many blocks in use; ``None``: all of them."""
    for status in fleet.table.statuses(0.0):
        used = status.record.num_blocks if num_blocks is None else num_blocks
        fleet.table.report(make_load(status.record, num_in_use_blocks=used), 0.0)
    fleet.admission.wake()


@asynccontextmanager
async def tended(face: Face) -> AsyncIterator[None]:
    """The face looks after its streams."""
    tending = asyncio.create_task(face.server.tend())
    try:
        yield
    finally:
        tending.cancel()


async def read_event(response: aiohttp.ClientResponse) -> Any:
    """The next event or comment of a stream: JSON, or else its text."""
    async with asyncio.timeout(TIMEOUT_S):
        line = (await response.content.readline()).decode().rstrip("\n")
        assert await response.content.readline() == b"\n"
    data = line.removeprefix("data: ")
    return json.loads(data) if data.startswith("{") else line


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("later", [[5] * 1_000, "too long " * 100, [10**6]])
async def test_a_wrong_later_prompt_is_refused_before_the_others_are_answered(streams: bool, later: Any) -> None:
    async with open_face(max_model_len=64) as face:
        face.fleet.hops.plan("decode", Plan(hang_after=2), Plan(hang_after=2))
        body = {"prompt": ["hi", later, "ho"], "max_tokens": 5, "stream": streams}
        status, answer = await face.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "prompt[1]")
        assert answer["error"]["message"].startswith("prompt[1]: ")
        await face.until_nothing_left()


async def test_a_queue_that_is_full_for_a_later_prompt_has_a_status() -> None:
    async with open_face(admission=AdmissionConfig(max_queue_length=2)) as face:
        set_used(face.fleet)
        status, answer = await face.post("/v1/completions", {**WAITING, "prompt": ["a", "b", "c"]})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        await face.until_nothing_left()


async def test_a_later_prompt_that_fails_ends_the_stream_while_others_still_run() -> None:
    async with open_face() as face:
        failing = Plan(error=WorkersLostError("gone"), fail_after=2)
        face.fleet.hops.plan("decode", Plan(hang_after=2), failing)
        events = await face.events("/v1/completions", {"prompt": ["hi", "ho"], "max_tokens": 9})
        assert [event["choices"][0]["index"] for event in events[:-1]].count(1) == 2
        assert events[-1]["error"]["code"] == "workers_lost"
        await face.until_nothing_left()


async def test_a_stream_begins_while_its_first_prompt_still_waits_for_a_worker() -> None:
    async with open_face() as face:
        admission, gate, num_asked = face.fleet.admission, asyncio.Event(), 0
        admit = admission.admit

        async def admit_the_first_late(queued: Any) -> Any:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                await gate.wait()
            return await admit(queued)

        admission.admit = admit_the_first_late  # type: ignore[method-assign]
        body = {"prompt": ["hi", "ho"], "max_tokens": 3, "stream": True}
        async with face.session.post("/v1/completions", json=body) as response:
            early = [await read_event(response) for _ in range(4)]
            assert {event["choices"][0]["index"] for event in early} == {1}
            assert early[-1]["choices"][0]["finish_reason"] == "length"
            gate.set()
            late = [await read_event(response) for _ in range(4)]
            assert {event["choices"][0]["index"] for event in late} == {0}


async def test_what_waits_for_the_check_of_another_prompt_is_bounded() -> None:
    bound, num_tokens = 20_000, 900
    async with open_face(config=HttpConfig(max_unread_bytes=bound)) as face:
        intake, is_checked = face.fleet.pipeline.context.intake, asyncio.Event()
        enter, num_entered = intake.enter, 0

        async def enter_the_second_late(tenant: str, work: int) -> None:
            nonlocal num_entered
            num_entered += 1
            if num_entered == 2:  # the body was the first, and the first prompt needs no turn of its own
                await is_checked.wait()
            await enter(tenant, work)

        face.server._bodies._enter = intake.enter = enter_the_second_late  # type: ignore[method-assign]
        body = {"prompt": ["hi", "ho"], "max_tokens": num_tokens, "stream": True}
        async with face.session.post("/v1/completions", json=body) as response:
            events = [await read_event(response) for _ in range(num_tokens + 1)]
            assert {event["choices"][0]["index"] for event in events} == {0}
            assert len(json.dumps(events)) > 5 * bound
            is_checked.set()
            assert (await read_event(response))["choices"][0]["index"] == 1


async def test_an_open_stream_keeps_nothing_of_its_body() -> None:
    mark = "nobody keeps this"
    body = b'{"prompt": "hi", "max_tokens": 5, "stream": true, "metadata": {"a": ["%s"]}}' % mark.encode()
    async with open_face() as face:
        face.fleet.hops.plan("decode", Plan(hang_after=2))
        async with face.session.post("/v1/completions", data=body) as response:
            await read_event(response)
            kept = [one for one in gc.get_objects() if type(one) is list and len(one) == 1 and one[0] == mark]
            assert not kept
            response.close()
        await face.until_nothing_left()


async def test_a_stream_that_waits_for_a_worker_gets_comments_and_then_its_answer() -> None:
    async with open_face(config=KEEPALIVE, stall_timeout_s=0.2) as face, tended(face):
        set_used(face.fleet)
        async with face.session.post("/v1/completions", json=WAITING) as response:
            assert response.status == 200
            assert [await read_event(response) for _ in range(2)] == [": keep-alive"] * 2
            set_used(face.fleet, 0)
            rest = (await response.read()).decode().split("\n\n")
        events = [event for event in rest if event and not event.startswith(":")]
        assert len(events) == 5 and events[-1] == "data: [DONE]"
        await face.until_nothing_left()


async def test_a_refusal_is_an_event_after_the_first_comment_and_a_status_before_it() -> None:
    admission = AdmissionConfig(queue_timeout_s=0.4)
    async with open_face(config=KEEPALIVE, stall_timeout_s=0.2, admission=admission) as face:
        set_used(face.fleet)
        status, answer = await face.post("/v1/completions", WAITING)  # nothing looks after streams yet
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        async with tended(face), face.session.post("/v1/completions", json=WAITING) as response:
            assert (response.status, await read_event(response)) == (200, ": keep-alive")
            *_, error, done, end = (await response.read()).decode().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "queue_full"
        assert (done, end) == ("data: [DONE]", "")
        await face.until_nothing_left()


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (
            "/v1/responses",
            {"input": "hi"},
            {"type": "error", "sequence_number": 0, "code": "queue_full", "param": None},
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
            {"type": "error", "error": {"type": "rate_limit_error"}},
        ),
    ],
)
async def test_other_apis_have_an_event_of_their_own_for_a_refusal_after_a_comment(
    path: str, body: dict[str, Any], wanted: dict[str, Any]
) -> None:
    admission = AdmissionConfig(queue_timeout_s=0.4)
    async with open_face(config=KEEPALIVE, stall_timeout_s=0.2, admission=admission) as face:
        set_used(face.fleet)
        async with tended(face), face.session.post(path, json={**body, "stream": True}) as response:
            assert (response.status, await read_event(response)) == (200, ": keep-alive")
            *_, error, end = (await response.read()).decode().split("\n\n")
        assert (error.startswith("event: error\ndata: "), end) == (True, "")
        shown = json.loads(error.partition("\ndata: ")[2])
        assert (shown.get("error") or shown).pop("message")
        assert shown == wanted
        await face.until_nothing_left()


async def test_the_blocks_of_a_client_that_leaves_are_free_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    async with running_system(tmp_path, monkeypatch, "decode-0", gated=("decode-0",), http=HttpConfig(port=port)) as (
        system,
        _,
    ):
        runner, gate = system.runners["decode-0"], system.gates["decode-0"]
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
            session.post("/v1/completions", json={**WAITING, "max_tokens": 100, "ignore_eos": True}) as response,
        ):
            gate.release(3)
            await until(lambda: runner.num_steps == 4)  # it waits for its permit
            response.close()
        await system.wait_workers(lambda known: all(status.num_requests == 0 for status in known.values()))
        gate.release(1)
        await system.wait_idle()
        assert runner.num_steps == 4


async def test_events_of_one_turn_of_the_loop_are_written_together() -> None:
    async with open_face() as face:
        body = {"prompt": "hi", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
        chunks = [b""]
        async with face.session.post("/v1/completions", json=body) as response:
            async for data, is_whole in response.content.iter_chunks():
                chunks[-1] += data
                if is_whole:
                    chunks.append(b"")
        *_, usage, done, rest = chunks[-2].split(b"\n\n")
        assert b'"usage":{' in usage and (done, rest) == (b"data: [DONE]", b"")
        assert b"".join(chunks).count(b'"text":') == 4, "three tokens and the end"


def test_a_reader_that_leaves_holds_up_no_other_on_the_loop_that_routers_use() -> None:
    num_tokens = 300

    async def read(face: Face, num_most: int) -> int:
        count = 0
        async with face.session.post("/v1/completions", json={"prompt": "hi", "max_tokens": 50, "stream": True}) as got:
            async for data in got.content.iter_any():
                count += data.count(b'"text":"more"')
                if count >= num_most:
                    got.close()
                    break
        return count

    async def run() -> list[int]:
        async with open_face() as face:
            face.fleet.hops.plan("decode", *[Plan(hang_after=1) for _ in range(4)])
            readers = [asyncio.create_task(read(face, 20 if not number else num_tokens)) for number in range(4)]
            streams = face.server._connections._streams
            await until(lambda: len(streams) == 4 and all(stream.transport is not None for stream in streams))
            # As a worker's message: a token for each stream in one turn, the one of the reader that leaves among them.
            for _ in range(num_tokens):
                for stream in list(streams):
                    stream.send('data: {"text":"more"}\n\n')
                await asyncio.sleep(0)
            async with asyncio.timeout(TIMEOUT_S):
                counts = await asyncio.gather(*readers)
            await face.until_nothing_left()
            return counts

    counts = uvloop.run(run())
    assert counts[0] >= 20 and counts[1:] == [num_tokens] * 3
