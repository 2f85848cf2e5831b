"""The page's files, who may see what, and the stream of states: one for all who look, and none when nobody does."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quartet.telemetry.metrics import ReusePart
from router.http.config import HttpConfig
from router.page import feed as page_feed
from router.page.feed import StateFeed
from router.page.page import Page
from router.workers import WorkerTable
from tests.router.fakes import TIMEOUT_S
from tests.router.http.face import Face, open_face, until

ACME, OPS = "acme-key-0123456789", "ops-key-0123456789abc"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a prompt that is long enough"}], "max_tokens": 3}
STATIC = Path(page_feed.__file__).parent / "static"


def feed_of(face: Face) -> StateFeed:
    page: Page = face.server._page
    return page._feed


def with_keys(directory: Path) -> HttpConfig:
    keys = directory / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"acme {ACME}\nops {OPS}\n")
    return HttpConfig(keys_file=keys, operators=("ops",))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def get(face: Face, path: str, **headers: str) -> tuple[int, aiohttp.ClientResponse, bytes]:
    async with face.session.get(path, headers=headers) as response:
        return response.status, response, await response.read()


@asynccontextmanager
async def looking(face: Face, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """A page that looks."""
    async with face.session.get("/page/state", headers=headers) as response:
        yield response


async def next_state(response: aiohttp.ClientResponse) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        line = await response.content.readline()
        assert line.startswith(b"data: "), line
        assert await response.content.readline() == b"\n"
    return json.loads(line.removeprefix(b"data: "))


# Files.


async def test_every_file_comes_with_a_strict_policy_and_is_kept_by_its_tag() -> None:
    async with open_face() as face:
        for file in sorted(STATIC.iterdir()):
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            status, response, body = await get(face, path)
            assert (status, body) == (200, file.read_bytes()), path
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["X-Frame-Options"] == "DENY"
            assert "Set-Cookie" not in response.headers
            tag = response.headers["ETag"]
            status, _, body = await get(face, path, **{"If-None-Match": tag})
            assert (status, body) == (304, b""), path
        assert (await get(face, "/page/"))[0] == (await get(face, "/page/../page.py"))[0] == 404
        assert (await face.post("/", {}))[0] == 405


def test_the_shell_has_nothing_that_the_policy_would_block_and_asks_nobody_else() -> None:
    shell = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", shell)
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file.name


# Who may see it.


async def test_without_keys_the_page_is_for_loopback_by_a_loopback_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_face() as face:
        for path in ("/", "/page/main.js", "/page/state"):
            for host in ("attacker.example", "attacker.example:80", "127.0.0.1.attacker.example", ""):
                status, _, body = await get(face, path, Host=host)
                assert status == 403 and b"localhost" in body, (path, host)
            status, _, body = await get(face, path, **{"X-Forwarded-For": "203.0.113.9"})
            assert status == 403 and b"http.keys_file" in body
        for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
            assert (await get(face, "/", Host=host))[0] == 200, host
        for path in ("/page/state", "/page/explain"):
            method = face.session.get if path == "/page/state" else face.session.post
            async with method(path, headers={"Sec-Fetch-Site": "cross-site"}) as response:
                assert response.status == 403, path
        # A link from elsewhere may lead here.
        assert (await get(face, "/", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}))[0] == 200
        monkeypatch.setattr("router.page.page._is_loopback", lambda _request: False)
        for path in ("/", "/page/style.css", "/page/state"):
            status, _, body = await get(face, path)
            assert status == 403 and b"set http.keys_file" in body, path
        assert (await face.post("/page/explain", CHAT))[0] == 403
        assert (await face.post("/v1/chat/completions", CHAT))[0] == 200


async def test_with_keys_the_shell_is_open_and_the_fleet_is_for_operators(tmp_path: Path) -> None:
    async with open_face(config=with_keys(tmp_path)) as face:
        status, _, body = await get(face, "/", Host="quartet.example")
        assert status == 200 and b"decode-0" not in body
        for path, asked in (("/page/state", None), ("/page/explain", CHAT)):
            status, answer = await (face.get(path) if asked is None else face.post(path, asked))
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        status, answer = await face.get("/page/state", **bearer(ACME))
        assert status == 403 and "http.operators" in answer["error"]["message"]
        status, answer = await face.post("/page/explain", CHAT, **bearer(ACME))
        assert status == 200 and answer["options"][0]["is_chosen"]
        async with looking(face, **bearer(OPS)) as response:
            state = await next_state(response)
        assert [worker["id"] for worker in state["workers"]] == ["decode-0"]


async def test_a_revoked_key_ends_the_stream(tmp_path: Path) -> None:
    config = with_keys(tmp_path)
    assert config.keys_file is not None
    async with open_face(config=config) as face:
        feed_of(face)._interval_s = 0.02
        async with looking(face, **bearer(OPS)) as response:
            await next_state(response)
            config.keys_file.write_text(f"acme {ACME}\n")
            async with asyncio.timeout(TIMEOUT_S):
                await response.content.read()
        assert not feed_of(face).is_running


# The stream of states.


async def test_nothing_is_read_or_counted_when_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[float]()
    statuses = WorkerTable.statuses
    monkeypatch.setattr(WorkerTable, "statuses", lambda table, now: reads.append(now) or statuses(table, now))
    async with open_face("prefill-0", "decode-0") as face:
        feed, hand_offs = feed_of(face), face.fleet.pipeline.context.hand_offs
        await face.post("/v1/chat/completions", CHAT)
        assert not reads and not feed.is_running and not hand_offs.counts
        async with looking(face) as response:
            await next_state(response)
            assert reads and feed.is_running
            await face.post("/v1/chat/completions", CHAT)
            assert hand_offs.counts == {("prefill-0", "decode-0"): 1}
        await until(lambda: not feed.is_running)
        num_reads = len(reads)
        await face.post("/v1/chat/completions", CHAT)
        assert not hand_offs.counts and len(reads) == num_reads and feed._timer is None


async def test_a_state_shows_workers_counts_and_hand_offs() -> None:
    async with open_face("prefill-0", "decode-0") as face, looking(face) as response:
        first = await next_state(response)
        await face.post("/v1/chat/completions", CHAT)
        await face.post("/v1/chat/completions", {**CHAT, "model": "nobody's"})
        state = await next_state(response)
        while state["totals"]["requests"] < 2:
            state = await next_state(response)
        assert state["at_s"] > first["at_s"] and state["router"]["namespace"] == "here"
        assert state["router"]["is_ready"] and len(state["router"]["models"]) == 1
        assert [(one["id"], one["role"], one["state"]) for one in state["workers"]] == [
            ("decode-0", "decode", "ready"),
            ("prefill-0", "prefill", "ready"),
        ]
        totals = state["totals"]
        assert (totals["requests"], totals["failed_requests"], totals["output_tokens"]) == (2, 1, 3)
        assert sum(totals["ttft_counts"]) == 1 and len(totals["ttft_counts"]) == len(totals["ttft_bounds_s"]) + 1
        assert totals["reuse"] == dict.fromkeys(ReusePart, 0) | {"unannounced": 2, "cached": 2}
        assert state["hand_offs"] == [["prefill-0", "decode-0", 1]]


async def test_a_state_names_the_models_and_adapters_that_v1_models_lists() -> None:
    async with open_face(adapters=("poet",)) as face:
        async with looking(face) as response:
            state = await next_state(response)
        _, answer = await face.get("/v1/models")
        assert state["router"]["models"] == [model["id"] for model in answer["data"]]
        assert "poet" in state["router"]["models"]


async def test_tokens_of_an_answer_count_while_it_runs() -> None:
    async with open_face() as face, looking(face) as response:
        async with face.session.post(
            "/v1/chat/completions", json={**CHAT, "max_tokens": 400, "stream": True}
        ) as answer:
            await answer.content.readline()
            state = await next_state(response)
            while not state["totals"]["output_tokens"]:
                state = await next_state(response)
            await answer.read()
        while state["totals"]["requests"] < 1:
            state = await next_state(response)
        assert state["totals"]["output_tokens"] == 400


async def test_all_who_look_share_one_state_at_most_four_times_a_second() -> None:
    assert page_feed.INTERVAL_S >= 0.25
    async with open_face() as face:
        feed, num_reads, loop = feed_of(face), 0, asyncio.get_running_loop()

        def read() -> dict[str, Any]:
            nonlocal num_reads
            num_reads += 1
            return {"number": num_reads}

        feed._read, feed._interval_s = read, 0.05
        began = loop.time()
        async with looking(face) as one, looking(face) as other, looking(face) as third:
            numbers = {(await next_state(response))["number"] for response in (one, other, third)}
            while max(numbers) < 4:
                numbers |= {(await next_state(response))["number"] for response in (one, other, third)}
            assert num_reads <= (loop.time() - began) / 0.05 + 1
            assert feed.num_viewers == 3


async def test_viewers_have_a_bound() -> None:
    async with open_face() as face:
        feed_of(face)._max_viewers = 2
        async with looking(face) as one, looking(face) as other:
            await next_state(one), await next_state(other)
            status, answer = await face.get("/page/state")
            assert status == 429 and "close one" in answer["error"]["message"]
        await until(lambda: not feed_of(face).num_viewers)
        async with looking(face) as response:
            await next_state(response)


# More than both ends of a connection keep for a reader that waits, and less than the stream gives up at.
LONG = "x" * (7 << 20)


async def test_a_slow_viewer_misses_states_and_keeps_none_waiting() -> None:
    async with open_face() as face:
        feed = feed_of(face)
        feed._read, feed._interval_s = lambda: {"long": LONG}, 0.02
        async with looking(face) as slow:
            await until(lambda: bool(feed._viewers) and next(iter(feed._viewers))._stream.num_written > 0)
            [viewer] = feed._viewers
            transport = viewer._stream.transport
            assert transport is not None
            assert transport.get_write_buffer_size() > 0
            feed._read = lambda: {"short": 1}
            await until(lambda: "short" in feed._event)
            async with looking(face) as quick:
                for _ in range(5):
                    await next_state(quick)
            num_written = viewer._stream.num_written
            assert num_written < 2 * len(LONG) and transport.get_write_buffer_size() > 0
            slow.content._high_water = 64 << 20  # it reads again
            while "long" in await asyncio.wait_for(_long_state(slow), TIMEOUT_S):
                pass


async def _long_state(response: aiohttp.ClientResponse) -> Any:
    text = b""
    while not text.endswith(b"\n\n"):
        text += await response.content.readany()
    return json.loads(text.rsplit(b"data: ", 1)[1])


async def test_a_drain_ends_the_streams_at_once() -> None:
    async with open_face() as face, looking(face) as response:
        await next_state(response)
        async with asyncio.timeout(TIMEOUT_S):
            await face.server.drain(10 * TIMEOUT_S)
            await response.content.read()


async def test_a_state_that_cannot_be_read_ends_the_streams_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async with open_face() as face:
        feed_of(face)._read = lambda: {"bad": object()}
        async with looking(face) as response, asyncio.timeout(TIMEOUT_S):
            assert await response.content.read() == b""
        assert "can't be read" in caplog.text
        assert (await face.post("/v1/chat/completions", CHAT))[0] == 200


async def test_a_head_request_of_the_stream_is_refused() -> None:
    async with open_face() as face, face.session.head("/page/state") as response:
        assert response.status == 405 and not feed_of(face).num_viewers


# Explain, and where an answer ran.


async def test_explain_says_where_a_chat_would_go_and_names_a_wrong_field() -> None:
    async with open_face("prefill-0", "decode-0") as face:
        status, answer = await face.post("/page/explain", CHAT)
        assert status == 200
        chosen = {option["rank"]: option["role"] for option in answer["options"] if option["is_chosen"]}
        assert chosen == {"prefill-0/0": "prefill", "decode-0/0": "decode"}
        assert answer["num_prompt_tokens"] > 0 and answer["policy"]
        status, answer = await face.post("/page/explain", {**CHAT, "temperature": -1})
        assert (status, answer["error"]["param"]) == (400, "temperature")
        await face.until_nothing_left()


async def test_an_answer_says_where_it_ran_and_where_its_time_went() -> None:
    async with open_face("prefill-0", "decode-0") as face:
        body = {**CHAT, "return_placement": True}
        _, answer = await face.post("/v1/chat/completions", body)
        [choice] = answer["quartet"]["choices"]
        assert choice["placement"]["prefill"] == "prefill-0/0" and choice["placement"]["decode"] == "decode-0/0"
        assert choice["placement"]["encode"] is None and choice["num_attempts"] == 1
        assert choice["time"]["total_s"] >= choice["time"]["prefill_s"] > 0
        events = await face.events("/v1/chat/completions", {**body, "n": 2})
        shown = [event["quartet"]["choices"] for event in events if "quartet" in event]
        assert events[0]["quartet"] and not events[0]["choices"]
        assert "time" not in shown[0][0] and [one["index"] for one in shown[-1]] == [0, 1]
        assert all(one["time"]["total_s"] > 0 and one["placement"]["decode"] == "decode-0/0" for one in shown[-1])
        _, plain = await face.post(
            "/v1/completions", {"prompt": ["one", "two"], "max_tokens": 1, "return_placement": True}
        )
        assert [one["index"] for one in plain["quartet"]["choices"]] == [0, 1]
        _, answer = await face.post("/v1/chat/completions", CHAT)
        assert "quartet" not in answer
        assert not any("quartet" in event for event in await face.events("/v1/chat/completions", CHAT))
