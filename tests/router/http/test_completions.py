"""Completions and chats over HTTP: what comes, as whole answers and as streams, and what is left when a client goes."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest

from quartet.errors import WorkersLostError
from router.http.config import HttpConfig
from tests.router.fakes import TIMEOUT_S, Plan, expected_tokens, text_of
from tests.router.http.face import open_face, until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": 5}
NUM_CHAT_TOKENS = 11


def chat_text(num_tokens: int, choice: int = 0) -> str:
    return text_of(expected_tokens(5, choice, NUM_CHAT_TOKENS, num_tokens))


async def test_a_chat_gives_one_message_a_choice_and_its_usage() -> None:
    async with open_face("prefill-0", "decode-0") as face:
        status, answer = await face.post("/v1/chat/completions", {**CHAT, "max_tokens": 5, "n": 2, "model": "tiny"})
        assert (status, answer["object"], answer["model"]) == (200, "chat.completion", "tiny")
        assert [(one["index"], one["message"], one["finish_reason"]) for one in answer["choices"]] == [
            (index, {"role": "assistant", "content": chat_text(5, index)}, "length") for index in range(2)
        ]
        assert answer["usage"] == {
            "prompt_tokens": NUM_CHAT_TOKENS,
            "completion_tokens": 10,
            "total_tokens": NUM_CHAT_TOKENS + 10,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        face.fleet.assert_nothing_left()


async def test_a_streamed_chat_gives_an_event_a_token_then_the_end_and_the_usage() -> None:
    async with open_face() as face:
        body = {**CHAT, "max_completion_tokens": 3, "stream_options": {"include_usage": True}}
        first, *tokens, end, usage = await face.events("/v1/chat/completions", body)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [event["choices"][0]["delta"] for event in tokens] == [{"content": one} for one in chat_text(3)]
        assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "length")
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3
        assert all(event["usage"] is None for event in (first, *tokens, end))
        assert len({event["id"] for event in (first, *tokens, end, usage)}) == 1


async def test_each_event_has_the_usage_so_far_if_asked_for() -> None:
    async with open_face() as face:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await face.events("/v1/completions", {"prompt": "hi", "max_tokens": 3, "stream_options": options})
        assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3, 3]


async def test_every_event_of_a_chat_says_how_long_its_prompt_is() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with open_face() as face:
        events = await face.events("/v1/chat/completions", {**CHAT, "max_tokens": 2, "stream_options": options})
        assert {event["usage"]["prompt_tokens"] for event in events} == {NUM_CHAT_TOKENS}
        assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 2, 2]


async def test_prompts_of_a_list_are_answered_in_order_as_texts_or_as_token_ids() -> None:
    async with open_face() as face:
        prompts: list[Any] = [[72, 101, 108], [5, 6]]
        body = {"prompt": prompts, "seed": 5, "max_tokens": 4, "n": 2, "return_token_ids": True}
        _, answer = await face.post("/v1/completions", body)
        wanted = [expected_tokens(5, choice, len(prompt), 4) for prompt in prompts for choice in range(2)]
        assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
        assert [one["token_ids"] for one in answer["choices"]] == wanted
        assert [one["text"] for one in answer["choices"]] == list(map(text_of, wanted))
        events = await face.events("/v1/completions", body)
        streamed = dict.fromkeys(range(4), "")
        for event in events:
            streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert list(streamed.values()) == list(map(text_of, wanted))
        status, answer = await face.post("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 1})
        assert status == 200 and len(answer["choices"]) == 2


async def test_log_probabilities_have_the_form_of_each_endpoint() -> None:
    async with open_face() as face:
        _, chat = await face.post("/v1/chat/completions", {**CHAT, "max_tokens": 2, "logprobs": True})
        text = chat_text(2)
        assert chat["choices"][0]["logprobs"]["content"] == [
            {"token": one, "logprob": -1.0, "bytes": [ord(one)], "top_logprobs": []} for one in text
        ]
        _, plain = await face.post("/v1/completions", {"prompt": "hi", "max_tokens": 3, "logprobs": 0})
        logprobs = plain["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == plain["choices"][0]["text"] and logprobs["text_offset"] == [0, 1, 2]
        events = await face.events("/v1/completions", {"prompt": "hi", "max_tokens": 3, "logprobs": 0})
        assert [event["choices"][0]["logprobs"]["text_offset"] for event in events[:3]] == [[0], [1], [2]]


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_an_echo_begins_with_the_prompt_and_its_log_probabilities(max_tokens: int) -> None:
    async with open_face("prefill-0", "decode-0") as face:
        body = {"prompt": ["say hi", [43, 76]], "n": 2, "seed": 5, "echo": True, "max_tokens": max_tokens}
        _, answer = await face.post("/v1/completions", {**body, "logprobs": 1})
        # Text gets a token before it.
        for one, prompt in zip(answer["choices"], [["<s>", *"say hi"]] * 2 + [["H", "i"]] * 2, strict=True):
            output = text_of(expected_tokens(5, one["index"] % 2, len(prompt), max_tokens))
            text = "".join(prompt).removeprefix("<s>") + output
            logprobs, num_before = one["logprobs"], len(prompt) + max_tokens - len(text)
            assert (one["text"], logprobs["tokens"]) == (text, [*prompt, *output])
            assert logprobs["text_offset"] == [0] * num_before + list(range(len(text)))
            own = [-1.0 - i for i in range(len(prompt) - 1)]
            assert logprobs["token_logprobs"] == [None, *own, *[-1.0] * max_tokens]
            tops = [{token: -0.5 - 0.5 * i} for i, token in enumerate(prompt[1:])]
            assert logprobs["top_logprobs"] == [None, *tops, *[None] * max_tokens]
            assert one["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 4 * max_tokens
        _, plain = await face.post("/v1/completions", body)
        assert [one["text"] for one in plain["choices"]] == [one["text"] for one in answer["choices"]]
        assert plain["choices"][0]["logprobs"] is None
        face.fleet.assert_nothing_left()


async def test_a_stop_string_ends_the_answer_and_is_named() -> None:
    async with open_face() as face:
        text = chat_text(12)
        stop = text[4:6]
        _, answer = await face.post("/v1/chat/completions", {**CHAT, "max_tokens": 12, "stop": stop})
        [one] = answer["choices"]
        assert one["message"]["content"] == text[: text.index(stop)]
        assert (one["finish_reason"], one["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_ends_its_request(streams: bool) -> None:
    async with open_face() as face:
        face.fleet.hops.plan("decode", Plan(hang_after=2))
        body = {**CHAT, "max_tokens": 50, "stream": streams}
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{face.port}/v1/chat/completions"
            asking = asyncio.create_task(session.post(url, json=body))
            async with asyncio.timeout(TIMEOUT_S):
                await face.fleet.hops.hung.wait()
            if streams:
                async with await asking as response:
                    assert (await response.content.readline()).startswith(b"data: ")
                    response.close()
            else:
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
        await face.until_nothing_left()


async def test_a_failure_in_the_middle_is_the_last_event_and_before_the_start_a_status() -> None:
    async with open_face() as face:
        face.fleet.hops.plan("decode", Plan(error=WorkersLostError("gone"), fail_after=2))
        events = await face.events("/v1/chat/completions", {**CHAT, "max_tokens": 9})
        assert [event["choices"][0]["delta"].get("content") for event in events[1:3]] == list(chat_text(2))
        assert events[-1]["error"]["code"] == "workers_lost" and len(events) == 4
        status, answer = await face.post("/v1/chat/completions", {**CHAT, "model": "huge", "stream": True})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
        face.fleet.assert_nothing_left()


async def test_a_reader_that_is_too_slow_loses_its_stream_and_holds_nothing() -> None:
    async with open_face(config=HttpConfig(max_unread_bytes=4_096), max_model_len=40_000, num_blocks=4_000) as face:
        face.fleet.hops.max_sequence_tokens = 40_000
        face.fleet.hops.tokens_per_step = 1
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        reader.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(reader, ("127.0.0.1", face.port))
            body = json.dumps({"prompt": "hi", "max_tokens": 30_000, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(reader, head.encode() + body)
            await until(lambda: bool(face.fleet.hops.calls))
            await face.until_nothing_left()
        finally:
            reader.close()


async def test_silent_streams_get_comments_and_a_client_of_http_1_0_a_plain_body() -> None:
    config = HttpConfig(keepalive_s=0.05)
    async with open_face(config=config, stall_timeout_s=0.2) as face:
        face.fleet.hops.plan("decode", Plan(hang_after=1))
        tending = asyncio.create_task(face.server.tend())
        reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
        body = json.dumps({"prompt": "hi", "max_tokens": 9, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 OK\r\n" in head and b"chunked" not in head
            assert (await reader.readline()).startswith(b'data: {"id":"cmpl-')
            assert await reader.readuntil(b"keep-alive\n\n") == b"\n: keep-alive\n\n"
        writer.close()
        await face.until_nothing_left()
        tending.cancel()


async def test_headers_name_the_request_its_trace_and_its_conversation() -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with open_face() as face:
        for streams in (False, True):
            headers = {"X-Request-Id": "mine", "traceparent": trace, "X-Session-Id": "s"}
            body = {**CHAT, "max_tokens": 1, "stream": streams}
            async with face.session.post("/v1/chat/completions", json=body, headers=headers) as response:
                assert response.headers["X-Request-Id"] == "mine" and response.headers["traceparent"] == trace
        assert {call.start.context.traceparent for call in face.fleet.hops.calls} == {trace}
        async with face.session.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1}) as response:
            answer = await response.json()
            assert answer["id"] == "chatcmpl-" + response.headers["X-Request-Id"]
        status, answer = await face.get("/v1/models", **{"X-Request-Id": "x" * 129})
        assert (status, answer["error"]["param"]) == (400, "X-Request-Id")
