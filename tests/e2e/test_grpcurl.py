"""What a person with grpcurl can do: look around, generate, cancel, and read errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.e2e.grpcurl import Answer, Grpcurl
from tests.e2e.stack import Stack

pytestmark = pytest.mark.grpcurl

GENERATE = "quartet.v1.RouterService/Generate"
HEALTH = "grpc.health.v1.Health/Check"
WORKER_SERVICES = {"quartet.v1.WorkerService", "quartet.v1.TransferService"}
SERVICES = {
    "router": {"quartet.v1.RouterService"},
    "prefill-0": {"quartet.v1.PrefillService"} | WORKER_SERVICES,
    "decode-0": {"quartet.v1.DecodeService"} | WORKER_SERVICES,
}
METHODS = {
    "quartet.v1.RouterService": ["Generate", "Place", "Session", "ListWorkers", "WatchWorkers", "Explain", "GetModel"],
    "quartet.v1.PrefillService": ["Prefill"],
    "quartet.v1.DecodeService": ["Decode"],
    "quartet.v1.WorkerService": ["GetInfo", "GetModelFiles", "Drain"],
    "quartet.v1.TransferService": ["Pull"],
}
PROMPT = "Once upon a time"
PROMPT_IDS = [0, 898, 1333, 266, 723]  # the same, behind the token that begins a text
GREEDY = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
# So hot that no two draws are alike: at 1 the model is sure of most of a story's words.
HOT = GREEDY | {"temperature": 2}
ENDLESS = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True}
# So much of an answer shows that it runs.
A_FEW = 4

At = Callable[[str], Grpcurl]


@pytest.fixture
def at(stack: Stack, grpcurl: Path) -> At:
    """grpcurl, pointed at a process."""
    return lambda name: Grpcurl(grpcurl, stack.processes[name].grpc_address)


@pytest.fixture
def router(at: At) -> Grpcurl:
    return at("router")


def started(text: str = PROMPT, **fields: object) -> dict[str, object]:
    return {"start": {"text": text, "sampling": GREEDY} | fields}


async def generate(router: Grpcurl, request: Mapping[str, object]) -> Answer:
    answer = await router.call(GENERATE, request)
    assert answer.code == 0, answer.err
    return answer


def deltas(answer: Answer, choice: int = 0) -> list[dict[str, Any]]:
    found = [message["delta"] for message in answer.messages if "delta" in message]
    return [delta for delta in found if delta.get("choice", 0) == choice]


def token_ids(answer: Answer, choice: int = 0) -> list[int]:
    ids: list[int] = []
    for delta in deltas(answer, choice):
        if delta.get("token_ids"):
            assert delta.get("token_offset", 0) == len(ids)
        ids += delta.get("token_ids", [])
    return ids


def text_of(answer: Answer) -> str:
    return "".join(delta.get("text", "") for delta in deltas(answer))


def finished(answer: Answer) -> list[dict[str, Any]]:
    return [message["finished"] for message in answer.messages if "finished" in message]


@pytest.mark.parametrize("name", SERVICES)
async def test_every_service_is_listed_and_described_by_reflection(at: At, name: str) -> None:
    listed = {service for service in await at(name).list() if service.startswith("quartet.")}
    assert listed == SERVICES[name]
    for service in listed:
        described = await at(name).describe(service)
        for method in METHODS[service]:
            assert f"rpc {method} (" in described


@pytest.mark.parametrize("name", SERVICES)
async def test_health_is_reported_for_each_service_and_overall(at: At, name: str) -> None:
    for service in ["", *SERVICES[name]]:
        answer = await at(name).call(HEALTH, {"service": service})
        assert answer.messages == [{"status": "SERVING"}], service
    unknown = await at(name).call(HEALTH, {"service": "quartet.v1.Nothing"})
    assert unknown.status["code"] == 5


async def test_tokens_come_one_message_at_a_time_while_the_answer_is_made(router: Grpcurl, stack: Stack) -> None:
    call = await router.open(GENERATE)
    await call.send(started(sampling=ENDLESS))
    first, second, third = [await call.receive() for _ in range(3)]
    assert first is not None and second is not None and third is not None
    assert len(first["accepted"]["request_id"]) == 32
    assert len(second["delta"]["token_ids"]) == 1
    # It runs on: what came was not kept until the end.
    assert sum(worker.num_requests for worker in stack.list_workers()) >= 1
    assert third["delta"]["token_offset"] == 1
    await call.kill()
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=25)


async def test_an_answer_is_accepted_streamed_and_finished(router: Grpcurl) -> None:
    answer = await generate(router, started(client_request_id="mine"))
    first, *middle, last = answer.messages
    assert first["accepted"]["num_prompt_tokens"] > 0
    [placement] = first["accepted"]["choices"]
    assert placement["prefill"] == {"worker_id": "prefill-0"} and placement["decode"] == {"worker_id": "decode-0"}
    assert all("delta" in message for message in middle) and len(middle) >= A_FEW
    assert len(token_ids(answer)) == GREEDY["max_tokens"]
    assert last["finished"]["reason"] == "FINISH_REASON_LENGTH"
    usage = last["finished"]["usage"]
    assert usage["num_output_tokens"] == GREEDY["max_tokens"] and usage["num_attempts"] == 1
    assert usage["num_prompt_tokens"] == first["accepted"]["num_prompt_tokens"]
    time = last["finished"]["time"]
    assert {"tokenize", "router_queue", "prefill", "first_token", "total"} <= set(time)


async def test_text_chat_and_token_ids_are_prompts(router: Grpcurl) -> None:
    chat = {"messages": [{"role": "user", "content": "What is 17 plus 25?"}]}
    texts = []
    for prompt in ({"text": PROMPT}, {"token_ids": {"ids": PROMPT_IDS}}, {"chat": chat}):
        answer = await generate(router, {"start": {**prompt, "sampling": GREEDY}})
        assert len(token_ids(answer)) == GREEDY["max_tokens"]
        texts.append(text_of(answer))
    assert texts[0] == texts[1] and texts[0].startswith(", there was a")
    assert texts[2].startswith("42")


async def test_choices_are_answers_of_their_own(router: Grpcurl) -> None:
    both = await generate(router, started(sampling=HOT, seed=7, num_choices=2))
    alone = await generate(router, started(sampling=HOT, seed=7))
    assert {entry.get("choice", 0) for entry in finished(both)} == {0, 1}
    assert token_ids(both, 0) != token_ids(both, 1)
    assert token_ids(both, 0) == token_ids(alone)
    # Those placed with the first, then those placed later.
    placed = [*both.messages[0]["accepted"]["choices"], *(one["placed"] for one in both.messages if "placed" in one)]
    assert sorted(entry.get("choice", 0) for entry in placed) == [0, 1]


async def test_the_seed_decides_the_tokens(router: Grpcurl) -> None:
    drawn = await generate(router, started(sampling=HOT))
    seed = drawn.messages[0]["accepted"]["seed"]
    again = await generate(router, started(sampling=HOT, seed=seed))
    other = await generate(router, started(sampling=HOT, seed=str(int(seed) ^ 1)))
    assert token_ids(drawn) == token_ids(again) != token_ids(other)


async def test_a_stop_string_ends_the_answer_before_it(router: Grpcurl) -> None:
    text = text_of(await generate(router, started()))
    stop = text[len(text) // 2 :][:3]
    answer = await generate(router, started(text_options={"stop_strings": ["never said", stop]}))
    assert text_of(answer) == text[: text.index(stop)]
    [end] = finished(answer)
    assert end["reason"] == "FINISH_REASON_STOP_STRING" and end["stop_string"] == stop
    assert end["usage"]["num_output_tokens"] <= GREEDY["max_tokens"]


async def test_log_probabilities_come_with_each_token(router: Grpcurl) -> None:
    answer = await generate(router, started(output={"logprobs": 3}))
    entries = [entry for delta in deltas(answer) for entry in delta.get("logprobs", [])]
    assert [entry.get("token_id", 0) for entry in entries] == token_ids(answer)
    for entry in entries:
        assert len(entry["top_token_ids"]) == 3
        assert entry["top_token_ids"][0] == entry["token_id"]
        assert entry["top_logprobs"] == sorted(entry["top_logprobs"], reverse=True)
        # Of what is certain it is 0, which JSON leaves out.
        assert entry.get("logprob", 0.0) == pytest.approx(entry["top_logprobs"][0])


async def test_cancel_ends_the_answer_in_order_and_frees_its_blocks(router: Grpcurl, stack: Stack) -> None:
    call = await router.open(GENERATE)
    await call.send(started(sampling=ENDLESS, num_choices=2))
    for _ in range(A_FEW):
        assert await call.receive() is not None
    await call.send({"cancel": {}})
    answer = await call.finish()
    assert answer.code == 0, answer.err
    assert [entry["reason"] for entry in finished(answer)] == ["FINISH_REASON_CANCELLED"] * 2
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=25)


async def test_a_client_that_is_killed_leaves_nothing_behind(router: Grpcurl, stack: Stack) -> None:
    call = await router.open(GENERATE)
    await call.send(started(sampling=ENDLESS))
    for _ in range(A_FEW):
        assert await call.receive() is not None
    assert stack.load("decode-0").num_in_use_blocks > 0
    await call.kill()
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=25)


async def test_workers_and_models_are_listed(router: Grpcurl) -> None:
    answer = await router.call("quartet.v1.RouterService/ListWorkers", {})
    [listed] = answer.messages
    assert [worker["record"]["worker_id"] for worker in listed["workers"]] == ["decode-0", "prefill-0"]
    assert {worker["state"] for worker in listed["workers"]} == {"WORKER_STATE_READY"}
    assert all(worker["load"]["is_healthy"] for worker in listed["workers"])
    answer = await router.call("quartet.v1.RouterService/GetModel", {"name": tiny.NAME})
    [model] = answer.messages[0]["models"]
    assert model["name"] == tiny.NAME and len(model["fingerprint"]) == 64
    assert model["num_prefill_workers"] == model["num_decode_workers"] == 1
    assert model["has_chat_template"] and "top_p" in model["sampling_fields"]


async def test_explain_names_the_ranks_for_a_request(router: Grpcurl) -> None:
    answer = await router.call("quartet.v1.RouterService/Explain", {"start": {"text": PROMPT}})
    [explained] = answer.messages
    assert explained["policy"] and explained["model"] == tiny.NAME
    assert explained["num_prompt_tokens"] > 1
    places = {option["rank"]["worker_id"]: option for option in explained["options"]}
    assert places.keys() == {"prefill-0", "decode-0"}
    assert places["decode-0"]["is_chosen"]
    refused = await router.call("quartet.v1.RouterService/Explain", {"start": {"text": ""}})
    assert refused.status["code"] == 3


async def test_a_watch_begins_with_all_workers(router: Grpcurl) -> None:
    call = await router.open("quartet.v1.RouterService/WatchWorkers")
    await call.send({})
    call.half_close()
    first = await call.receive()
    await call.kill()
    assert first is not None
    assert {worker["record"]["worker_id"] for worker in first["updated"]} == {"prefill-0", "decode-0"}


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        ({"start": {}}, 3, None),
        ({"cancel": {}}, 3, None),
        ({"start": {"text": "x", "model": "nobody"}}, 5, "model"),
        ({"start": {"text": "x", "sampling": {"top_p": 2}}}, 3, "sampling.top_p"),
        ({"start": {"token_ids": {"ids": [999_999]}}}, 3, "token_ids.ids"),
        ({"start": {"text": "x", "num_choices": 65}}, 3, "num_choices"),
    ],
    ids=lambda value: None if not isinstance(value, dict) else str(value),
)
async def test_an_impossible_request_shows_code_and_field(
    router: Grpcurl, request_: dict[str, object], code: int, field: str | None
) -> None:
    answer = await router.call(GENERATE, request_)
    assert answer.code != 0 and not answer.out.strip()
    assert answer.status["code"] == code
    assert answer.reason is not None
    if field is not None:
        assert answer.field == field


async def test_a_session_answers_as_generate_does(router: Grpcurl) -> None:
    wanted = await generate(router, started())
    answer = await router.call("quartet.v1.RouterService/Session", {"start": {"slot": 3, **started()}})
    assert answer.code == 0, answer.err
    assert [token_id for message in answer.messages for token_id in message.get("token_ids", [])] == token_ids(wanted)
    assert "".join(text for message in answer.messages for text in message.get("texts", [])) == text_of(wanted)
    finished = [entry for message in answer.messages for entry in message.get("finished", [])]
    assert [entry["slot"] for entry in finished] == [3]


async def test_a_start_that_place_signed_is_streamed_from_its_decode_worker(router: Grpcurl, grpcurl: Path) -> None:
    wanted = await generate(router, started())
    answer = await router.call("quartet.v1.RouterService/Place", started())
    assert answer.code == 0, answer.err
    [choice] = answer.messages[0]["choices"]
    address = choice["stream"].pop("address")
    signed = {"signed_start": choice["stream"]}
    decode = Grpcurl(grpcurl, address)
    rest = await decode.call("quartet.v1.DecodeService/Decode", signed)
    ids = [token_id for message in rest.messages for token_id in message.get("token_ids", [])]
    assert choice["token_ids"] + ids == token_ids(wanted)
    again = await decode.call("quartet.v1.DecodeService/Decode", signed)
    [failure] = [entry["failure"] for message in again.messages for entry in message.get("failures", [])]
    assert failure["reason"] == "SIGNED_START_USED"
