"""Workers called directly, as routers do it, with grpcurl: Prefill, Decode, the hand-off between them, and GetInfo."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.e2e.grpcurl import Answer, Grpcurl
from tests.e2e.stack import Stack

pytestmark = pytest.mark.grpcurl

PREFILL = "quartet.v1.PrefillService/Prefill"
DECODE = "quartet.v1.DecodeService/Decode"
PULL = "quartet.v1.TransferService/Pull"
PROMPT = [0, *range(40, 110)]
NUM_TOKENS = 12
SAMPLING = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture
def prefill(stack: Stack, grpcurl: Path) -> Grpcurl:
    return Grpcurl(grpcurl, stack.processes["prefill-0"].grpc_address)


@pytest.fixture
def decode(stack: Stack, grpcurl: Path) -> Grpcurl:
    return Grpcurl(grpcurl, stack.processes["decode-0"].grpc_address)


def packed(token_ids: Sequence[int]) -> str:
    return base64.b64encode(array("I", token_ids).tobytes()).decode()


def start(slot: int = 0, generated: Sequence[int] = (), salt: str = "", **fields: object) -> dict[str, Any]:
    generation = {
        "prompt_token_ids": packed(PROMPT),
        "generated_token_ids": packed(generated),
        "sampling": SAMPLING,
        # Each test's own: what one has cached must not decide what the next one transfers.
        "cache_salt": salt,
    }
    return {"start": {"slot": slot, "generation": generation} | fields}


def columns(answer: Answer, slot: int = 0) -> list[int]:
    """The tokens of one slot, out of the columns of all messages."""
    ids: list[int] = []
    for message in answer.messages:
        rest = list(message.get("token_ids", []))
        for entry, count in zip(message.get("slots", []), message.get("num_tokens", []), strict=True):
            own, rest = rest[:count], rest[count:]
            ids += own if entry == slot else []
    return ids


async def test_a_prompt_is_decoded_where_it_arrives(decode: Grpcurl, stack: Stack) -> None:
    answer = await decode.call(DECODE, start())
    assert answer.code == 0, answer.err
    assert len(columns(answer)) == NUM_TOKENS
    ends = [end for message in answer.messages for end in message.get("finished", [])]
    assert ends == [{"reason": "FINISH_REASON_LENGTH", "num_output_tokens": NUM_TOKENS}]
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=25)


async def test_requests_of_one_stream_are_distinguished_by_slot(decode: Grpcurl) -> None:
    alone = columns(await decode.call(DECODE, start()))
    both = await decode.call(DECODE, start(slot=3), start(slot=5))
    assert columns(both, 3) == columns(both, 5) == alone


async def test_a_prefill_is_handed_off_and_decoded_elsewhere(prefill: Grpcurl, decode: Grpcurl, stack: Stack) -> None:
    answer = await prefill.call(PREFILL, start(salt="hand-off"))
    [output] = answer.messages[0]["outputs"]
    first, hand_off = output["result"]["token_id"], output["result"]["hand_off"]
    assert hand_off["worker_id"] == "prefill-0" and hand_off["blocks"]["num_tokens"] == len(PROMPT)
    assert stack.load("prefill-0").num_held_blocks == 3
    answer = await decode.call(DECODE, start(generated=[first], salt="hand-off", hand_off=hand_off))
    whole = columns(await decode.call(DECODE, start()))
    assert [first, *columns(answer)] == whole
    [joined] = [entry for message in answer.messages for entry in message.get("started", [])]
    num_bytes = int(joined["transfer_bytes"])
    assert num_bytes > 0 and "transfer" in joined and joined["transfer_way"] == "TRANSFER_WAY_SHM"
    # On one host the pool is mapped, nothing is sent.
    assert stack.metrics("decode-0").value("quartet_worker_transfer_bytes_total", way="shm") >= num_bytes
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=25)


async def test_a_hand_off_can_be_used_by_one_decode(prefill: Grpcurl, decode: Grpcurl) -> None:
    [output] = (await prefill.call(PREFILL, start(salt="once"))).messages[0]["outputs"]
    first, hand_off = output["result"]["token_id"], output["result"]["hand_off"]
    request = start(generated=[first], salt="once", hand_off=hand_off)
    assert len(columns(await decode.call(DECODE, request))) == NUM_TOKENS - 1
    # Another salt: what the first decode has cached must not answer for the transfer.
    again = await decode.call(DECODE, start(generated=[first], salt="again", hand_off=hand_off))
    [failure] = [entry["failure"] for message in again.messages for entry in message.get("failures", [])]
    assert failure["reason"] == "HAND_OFF_NOT_FOUND"


async def test_a_caller_without_the_secret_gets_nothing(prefill: Grpcurl, stack: Stack) -> None:
    [output] = (await prefill.call(PREFILL, start(salt="secret"))).messages[0]["outputs"]
    hand_off = output["result"]["hand_off"]
    ticket = {key: hand_off[key] for key in ("hand_off_id", "secret")} | {"worker_epoch": hand_off["epoch"]}
    guessed = ticket | {"secret": base64.b64encode(bytes(16)).decode()}
    refused = await prefill.call(PULL, {"begin": {"ticket": guessed, "pieces": [0]}})
    assert refused.status["code"] == 5
    assert stack.load("prefill-0").num_held_blocks == 3
    aborted = await prefill.call(PULL, {"abort": {"ticket": ticket}})
    assert aborted.messages == [{"aborted": {}}]
    await asyncio.to_thread(stack.wait_blocks_returned, "prefill-0", timeout_s=25)


async def test_a_repeated_slot_ends_its_stream_and_no_other(decode: Grpcurl, stack: Stack) -> None:
    other = await decode.open(DECODE)
    await other.send(start())
    broken = await decode.call(DECODE, start(slot=1), start(slot=1))
    assert broken.status["code"] == 3
    assert len(columns(await other.finish())) == NUM_TOKENS
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=25)


async def test_a_failed_start_leaves_the_stream_to_others(decode: Grpcurl) -> None:
    bad = start(slot=1)
    bad["start"]["generation"] = {"prompt_token_ids": packed([10**6])}
    answer = await decode.call(DECODE, bad, start(slot=2))
    [failure] = [entry for message in answer.messages for entry in message.get("failures", [])]
    assert failure["slot"] == 1 and failure["failure"]["code"] == 3
    assert len(columns(answer, 2)) == NUM_TOKENS


async def test_info_and_files_are_given_out(prefill: Grpcurl, decode: Grpcurl) -> None:
    for worker, role in ((prefill, "WORKER_ROLE_PREFILL"), (decode, "WORKER_ROLE_DECODE")):
        [info] = (await worker.call("quartet.v1.WorkerService/GetInfo", {})).messages
        assert info["record"]["role"] == role and info["record"]["model_name"] == tiny.NAME
        files = await worker.call("quartet.v1.WorkerService/GetModelFiles", {})
        names = {message["file"]["name"] for message in files.messages if "file" in message}
        assert {"tokenizer.json", "config.json"} <= names
        assert not any(name.endswith((".safetensors", ".py")) for name in names)
    refused = await decode.call("quartet.v1.WorkerService/GetModelFiles", {"names": ["../../etc/passwd"]})
    assert refused.status["code"] == 3 and refused.field == "names"
