"""Nonsense over the wire is refused by name, and other requests do not notice."""

from __future__ import annotations

import asyncio
import operator
import random
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from quartet.client import FinishReason, QuartetClient
from quartet.v1 import decode_pb2, prefill_pb2, router_pb2, transfer_pb2, types_pb2
from quartet.v1.router_pb2 import ChatMessage, ChatPrompt, GenerateStart, MediaPart, TextOptions, TokenIds
from quartet.v1.types_pb2 import GuidedDecoding, OutputOptions, Sampling
from tests import tiny
from tests.e2e.crowd import Crowd, endless_asks
from tests.e2e.stack import Stack

GENERATE = "/quartet.v1.RouterService/Generate"
PREFILL = "/quartet.v1.PrefillService/Prefill"
DECODE = "/quartet.v1.DecodeService/Decode"
PULL = "/quartet.v1.TransferService/Pull"
PLACES = {GENERATE: "router", PREFILL: "prefill-0", DECODE: "decode-0", PULL: "prefill-0"}

INVALID, NOT_FOUND, DENIED = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND, StatusCode.PERMISSION_DENIED
NUM_MALFORMED = 100
_TIMEOUT_S = 30.0


def user(content: str, role: str = "user") -> ChatPrompt:
    return ChatPrompt(messages=[ChatMessage(role=role, content=content)])


def sampled(**fields: object) -> GenerateStart:
    return GenerateStart(text="x", sampling=Sampling(**fields))  # type: ignore[arg-type]


BAD_STARTS: dict[str, tuple[GenerateStart, StatusCode, str | None]] = {
    "no prompt": (GenerateStart(), INVALID, None),
    "empty text": (GenerateStart(text=""), INVALID, "text"),
    "empty conversation": (GenerateStart(chat=ChatPrompt()), INVALID, "chat.messages"),
    "no token ids": (GenerateStart(token_ids=TokenIds()), INVALID, "token_ids.ids"),
    "role that the template refuses": (GenerateStart(chat=user("hello", "ghost")), INVALID, "chat.messages"),
    "id outside the vocabulary": (
        GenerateStart(token_ids=TokenIds(ids=[tiny.VOCAB_SIZE])),
        INVALID,
        "token_ids.ids",
    ),
    "prompt too long": (GenerateStart(token_ids=TokenIds(ids=[9] * tiny.MAX_MODEL_LEN)), INVALID, "token_ids.ids"),
    "text too long": (GenerateStart(text="river " * 20_000), INVALID, "text"),
    "more tokens than the model has room for": (sampled(max_tokens=tiny.MAX_MODEL_LEN), INVALID, "sampling.max_tokens"),
    "unknown model": (GenerateStart(text="x", model="nobody"), NOT_FOUND, "model"),
    "unknown adapter": (GenerateStart(text="x", adapter="nobody"), INVALID, "adapter"),
    "temperature below 0": (sampled(temperature=-1), INVALID, "sampling.temperature"),
    "temperature not a number": (sampled(temperature=float("nan")), INVALID, "sampling.temperature"),
    "top_p above 1": (sampled(top_p=1.5), INVALID, "sampling.top_p"),
    "no tokens wanted": (sampled(max_tokens=0), INVALID, "sampling.max_tokens"),
    "min above max": (sampled(min_tokens=9, max_tokens=8), INVALID, "sampling.min_tokens"),
    "bias of no token": (sampled(logit_bias={10**6: 1.0}), INVALID, "sampling.logit_bias"),
    "a malformed grammar": (sampled(guided=GuidedDecoding(regex="(a")), INVALID, "sampling.guided"),
    "too many alternatives": (GenerateStart(text="x", output=OutputOptions(logprobs=21)), INVALID, "output.logprobs"),
    "no choices": (GenerateStart(text="x", num_choices=0), INVALID, "num_choices"),
    "too many choices": (GenerateStart(text="x", num_choices=65), INVALID, "num_choices"),
    "no time": (GenerateStart(text="x", timeout=Duration()), INVALID, "timeout"),
    "time gone by": (GenerateStart(text="x", timeout=Duration(seconds=-1)), INVALID, "timeout"),
    "empty stop string": (
        GenerateStart(text="x", text_options=TextOptions(stop_strings=[""])),
        INVALID,
        "text_options.stop_strings",
    ),
    "stop strings in text that is left out": (
        GenerateStart(text="x", text_options=TextOptions(stop_strings=["a"], omit_text=True)),
        INVALID,
        "text_options.omit_text",
    ),
    "name too long": (GenerateStart(text="x", client_request_id="n" * 129), INVALID, "client_request_id"),
    "media": (GenerateStart(text="x", media=[MediaPart(url="data:,a")]), INVALID, "media[0]"),
    "file": (GenerateStart(text="x", media=[MediaPart(url="file:///etc/passwd")]), DENIED, "media[0].url"),
}


@pytest.fixture
async def undisturbed(stack: Stack, client: QuartetClient) -> AsyncIterator[Crowd]:
    """Requests of others, which run all the while, go on after that, and end well."""
    async with Crowd(client, endless_asks("bystanders", 2)) as crowd:
        await crowd.wait_for(lambda: all(answer.token_ids for answer in crowd.answers))
        yield crowd
        nums_before = [len(ids) for ids in crowd.token_ids]
        await crowd.wait_for(lambda: all(map(operator.gt, map(len, crowd.token_ids), nums_before)))
        await crowd.cancel()
        await crowd.finish()
    assert {end.reason for answer in crowd.answers if (end := answer.finished)} == {FinishReason.CANCELLED}
    assert set(crowd.num_attempts) == {1}
    await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=_TIMEOUT_S)


class Raw:
    """Calls with bytes as they are."""

    def __init__(self, channel: grpc.Channel, method: str) -> None:
        self._call: Any = channel.stream_stream(method, request_serializer=None, response_deserializer=None)

    def call(self, bodies: Iterable[bytes]) -> grpc.RpcError | None:
        """Send these messages and half-close; how it failed, if it did."""
        try:
            list(self._call(iter(bodies), timeout=_TIMEOUT_S))
        except grpc.RpcError as error:
            return error
        return None


def details_of(error: grpc.RpcError) -> dict[str, Any]:
    """The details of google.rpc that came with a status, by the name of their type."""
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]  # pairs, to the stubs not
    status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
    details: dict[str, Any] = {}
    for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest):
        for packed in status.details:
            if packed.Is(kind.DESCRIPTOR):
                details[kind.__name__] = kind.FromString(packed.value)
    return details


def field_of(error: grpc.RpcError) -> str | None:
    details = details_of(error)
    return details["BadRequest"].field_violations[0].field if "BadRequest" in details else None


def reason_of(error: grpc.RpcError) -> str | None:
    details = details_of(error)
    return details["ErrorInfo"].reason if "ErrorInfo" in details else None


async def test_each_impossible_request_is_refused_by_code_and_field(stack: Stack, undisturbed: Crowd) -> None:
    def refuse_all() -> None:
        with stack.channel("router") as channel:
            raw = Raw(channel, GENERATE)
            for name, (start, code, field) in BAD_STARTS.items():
                error = raw.call([router_pb2.GenerateRequest(start=start).SerializeToString()])
                assert error is not None, name
                assert error.code() is code, f"{name}: {error}"
                assert reason_of(error), name
                assert field is None or field_of(error) == field, f"{name}: {field_of(error)}"
                proper = GenerateStart(text="x", sampling=Sampling(max_tokens=1))
                assert raw.call([router_pb2.GenerateRequest(start=proper).SerializeToString()]) is None, name

    await asyncio.to_thread(refuse_all)


def generate_request() -> Message:
    return router_pb2.GenerateRequest(start=GenerateStart(text="the river", sampling=Sampling(top_p=0.5, max_tokens=2)))


def generation() -> types_pb2.Generation:
    ids = array("I", [17, 18, 19]).tobytes()
    return types_pb2.Generation(prompt_token_ids=ids, sampling=Sampling(max_tokens=2), seed=3)


def prefill_request() -> Message:
    return prefill_pb2.PrefillRequest(start=prefill_pb2.PrefillStart(slot=1, generation=generation()))


def decode_request() -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(slot=1, generation=generation()))


def pull_request() -> Message:
    ticket = transfer_pb2.HandOffTicket(hand_off_id=bytes(16), secret=bytes(16), worker_epoch=1)
    return transfer_pb2.PullRequest(begin=transfer_pb2.PullBegin(ticket=ticket, pieces=[0, 1]))


def malformed(message: Message) -> list[bytes]:
    """``message`` cut short, scrambled, or nothing like it: none of them can be parsed."""
    rng, whole, found = random.Random(message.DESCRIPTOR.full_name), message.SerializeToString(), set[bytes]()
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: whole[: rng.randrange(1, len(whole))],
        lambda: whole + rng.randbytes(rng.randrange(1, 4)),
        lambda: rng.randbytes(rng.randrange(1, 200)),
        lambda: bytes(byte ^ (rng.random() < 0.1) * rng.randrange(256) for byte in whole),
    )
    while len(found) < NUM_MALFORMED:
        body = rng.choice(makers)()
        try:
            type(message).FromString(body)
        except DecodeError:
            found.add(body)
    return sorted(found)


@pytest.mark.parametrize(
    ("method", "message"),
    [(GENERATE, generate_request()), (PREFILL, prefill_request()), (DECODE, decode_request()), (PULL, pull_request())],
    ids=["generate", "prefill", "decode", "pull"],
)
async def test_malformed_messages_end_their_own_call_only(
    stack: Stack, undisturbed: Crowd, method: str, message: Message
) -> None:
    def send_all() -> None:
        with stack.channel(PLACES[method]) as channel:
            raw = Raw(channel, method)
            for body in malformed(message):
                error = raw.call([body])
                assert error is not None and error.code() is INVALID, f"{body!r}: {error}"
                assert reason_of(error) == "PROTOCOL_VIOLATION"

    await asyncio.to_thread(send_all)


async def test_messages_out_of_order_end_their_own_call_only(stack: Stack, undisturbed: Crowd) -> None:
    # An answer of two tokens may end before a second start has come.
    endless = Sampling(max_tokens=2000, ignore_eos=True)
    long = router_pb2.GenerateRequest(start=GenerateStart(text="the river", sampling=endless))
    start, cancel = long.SerializeToString(), b"\x12\x00"
    chunk = decode_pb2.DecodeRequest(chunk=types_pb2.StartChunk(slot=9, data=b"1234")).SerializeToString()
    done = decode_pb2.DecodeRequest(start_done=types_pb2.StartDone(slot=9)).SerializeToString()
    cancel_unknown = decode_pb2.DecodeRequest(cancel=types_pb2.Cancel(slot=9)).SerializeToString()
    decode_start = decode_request()
    ends = decode_start.SerializeToString()
    decode_start.start.generation.sampling.CopyFrom(endless)
    goes_on = decode_start.SerializeToString()

    def send_all() -> None:
        with stack.channel("router") as router, stack.channel("decode-0") as decode:
            assert router_pb2.GenerateRequest.FromString(cancel).HasField("cancel")
            for bodies in ([cancel], [b""], [start, start], []):
                error = Raw(router, GENERATE).call(bodies)
                assert error is not None and error.code() is INVALID, f"{bodies}: {error}"
            for bodies in ([b""], [goes_on, goes_on]):
                error = Raw(decode, DECODE).call(bodies)
                assert error is not None and error.code() is INVALID, f"{bodies}: {error}"
            # Of a request that has just ended such a message may be on its way: it means nothing.
            for stray in (cancel_unknown, chunk, done):
                assert Raw(decode, DECODE).call([stray, ends, stray]) is None

    await asyncio.to_thread(send_all)


async def test_a_message_over_the_limit_ends_its_own_call_only(stack: Stack, undisturbed: Crowd) -> None:
    huge = router_pb2.GenerateRequest(start=GenerateStart(text="x" * (65 << 20))).SerializeToString()

    def send() -> None:
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(stack.router_address, options) as channel:
            error = Raw(channel, GENERATE).call([huge])
            assert error is not None and error.code() is StatusCode.RESOURCE_EXHAUSTED, f"{error}"
            assert Raw(channel, GENERATE).call([generate_request().SerializeToString()]) is None

    await asyncio.to_thread(send)


def chunk_of(size_bytes: int) -> bytes:
    """A message of exactly that size, for a slot where nothing starts."""
    frame = decode_pb2.DecodeRequest(chunk=types_pb2.StartChunk(slot=9, data=bytes(size_bytes))).ByteSize() - size_bytes
    chunk = types_pb2.StartChunk(slot=9, data=bytes(size_bytes - frame))
    message = decode_pb2.DecodeRequest(chunk=chunk).SerializeToString()
    assert len(message) == size_bytes
    return message


async def test_a_message_over_a_workers_limit_ends_its_own_call_only(stack: Stack, undisturbed: Crowd) -> None:
    start, limit_bytes = decode_request().SerializeToString(), 1 << 20

    def send() -> None:
        with stack.channel("decode-0") as channel:
            raw = Raw(channel, DECODE)
            assert raw.call([chunk_of(limit_bytes), start]) is None
            error = raw.call([start, chunk_of(limit_bytes + 1)])
            assert error is not None and error.code() is StatusCode.RESOURCE_EXHAUSTED, f"{error}"
            assert raw.call([start]) is None

    await asyncio.to_thread(send)
