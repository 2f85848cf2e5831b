"""A message is measured before it is parsed: every field counts, text and numbers by their bytes, files not at all."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from quartet.errors import MessageTooLargeError, ProtocolError
from quartet.rpc.channels import create_channel
from quartet.rpc.message_limits import (
    MAX_STANDARD_BYTES,
    UNCHECKED_BYTES,
    MaxBytes,
    MessageLimits,
    limited_parser,
)
from quartet.v1 import prefill_pb2, types_pb2
from quartet.v1 import router_pb2 as pb
from router.servicer import NUMBER_FIELDS
from tests.rpc.conftest import StartServer

START = pb.GenerateRequest.DESCRIPTOR
FILES = frozenset({"quartet.v1.MediaPart.url"})


def request(**fields: Any) -> bytes:
    return pb.GenerateRequest(start=pb.GenerateStart(**fields)).SerializeToString()


def limits(max_fields: int = 10_000, max_text_bytes: int = 10_000) -> MessageLimits:
    return MessageLimits(max_fields, lambda: MaxBytes(text=max_text_bytes), file_fields=FILES)


def num_fields(message: Message) -> int:
    """As they stand on the wire, those of messages within included."""
    return sum(_num_fields(descriptor, value) for descriptor, value in message.ListFields())


def _num_fields(field: FieldDescriptor, value: Any) -> int:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        # A key and a value in each entry: protobuf writes both, also where they are 0.
        return 3 * len(value)
    values = value if field.is_repeated else [value]
    if field.message_type is not None:
        return sum(1 + num_fields(item) for item in values)
    is_packed = field.is_repeated and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return 1 if is_packed else len(values)


texts = st.text(max_size=300)
parts = st.builds(pb.MediaPart, url=texts) | st.builds(pb.MediaPart, data=st.binary(max_size=300))
pieces = st.builds(pb.ContentPart, text=texts) | st.builds(pb.ContentPart, media=parts)
messages = st.builds(pb.ChatMessage, role=texts, content=texts, parts=st.lists(pieces, max_size=4))
numbers = st.integers(0, 2**32 - 1)
samplings = st.builds(
    types_pb2.Sampling,
    temperature=st.floats(0, 1, width=32),
    logit_bias=st.dictionaries(numbers, st.floats(0, 1, width=32), max_size=5),
    stop_token_ids=st.lists(numbers, max_size=200),
)
starts = st.builds(
    pb.GenerateStart,
    chat=st.builds(pb.ChatPrompt, messages=st.lists(messages, max_size=5)),
    sampling=samplings,
    seed=st.integers(0, 2**64 - 1),
    media=st.lists(parts, max_size=3),
    session_key=texts,
)


@given(start=starts)
def test_all_fields_of_a_message_are_counted_and_none_twice(start: pb.GenerateStart) -> None:
    message = pb.GenerateRequest(start=start)
    count = num_fields(message)
    raw = message.SerializeToString()
    limits(max_fields=count).check(START, raw)
    with pytest.raises(MessageTooLargeError, match=f"more than {count - 1} fields"):
        limits(max_fields=count - 1).check(START, raw)


@given(noise=st.binary(max_size=200), at=st.integers(0, 10_000))
def test_noise_is_refused_or_measured_and_never_read_past(noise: bytes, at: int) -> None:
    raw = bytearray(request(text="word " * 40, media=[pb.MediaPart(data=b"x" * 40)]))
    raw[at % len(raw) : at % len(raw) + len(noise)] = noise
    with suppress(ProtocolError):
        limits().check(START, bytes(raw))


def test_what_the_wire_format_allows_is_measured_alike() -> None:
    group, fixed = b"\xfb\x3f\x08\x01\xfc\x3f", b"\xf9\x3f12345678\xfd\x3f1234"  # unknown: a group, and fixed numbers
    limits(max_fields=5).check(START, group + fixed)
    with pytest.raises(MessageTooLargeError):
        limits(max_fields=4).check(START, group + fixed)


def test_the_text_of_a_message_is_bounded_and_its_files_are_not() -> None:
    limits().check(START, request(text="", media=[pb.MediaPart(data=bytes(20_000)), pb.MediaPart(url="u" * 20_000)]))
    with pytest.raises(MessageTooLargeError, match="20001 bytes of text, more than the 10000 allowed"):
        limits().check(START, request(text="a" * 20_000, model="m"))
    with pytest.raises(MessageTooLargeError, match="bytes of text"):
        limits().check(START, b"\xfa\x3f\xa0\x9c\x01" + bytes(20_000))  # a field that nobody knows


def test_numbers_are_bounded_by_the_ids_of_the_longest_prompt() -> None:
    prompt = request(token_ids=pb.TokenIds(ids=[2**32 - 1] * (1 << 20)))
    limits().check(START, prompt)
    with pytest.raises(MessageTooLargeError, match="bytes of numbers"):
        limits().check(START, prompt + prompt)
    shorter = MessageLimits(max_bytes=lambda: MaxBytes(numbers=100))
    shorter.check(START, request(token_ids=pb.TokenIds(ids=[1] * 100)))
    with pytest.raises(
        MessageTooLargeError, match="101 bytes of numbers, such as token ids, more than the 100 allowed"
    ):
        shorter.check(START, request(token_ids=pb.TokenIds(ids=[1] * 101)))


def test_bytes_that_hold_token_ids_are_numbers_and_not_files() -> None:
    prompt = types_pb2.Generation(prompt_token_ids=bytes(4 * 100))
    raw = pb.PrefillForRequest(start=prefill_pb2.PrefillStart(generation=prompt)).SerializeToString()
    asked = pb.PrefillForRequest.DESCRIPTOR
    MessageLimits(max_bytes=lambda: MaxBytes(numbers=400), number_fields=NUMBER_FIELDS).check(asked, raw)
    with pytest.raises(MessageTooLargeError, match="400 bytes of numbers"):
        MessageLimits(max_bytes=lambda: MaxBytes(numbers=399), number_fields=NUMBER_FIELDS).check(asked, raw)


def test_where_no_model_takes_files_a_message_is_refused_by_its_length_alone() -> None:
    bounds = MessageLimits(10, lambda: MaxBytes(text=100, numbers=100, has_files=False), file_fields=FILES)
    bounds.check(START, request(media=[pb.MediaPart(data=bytes(300))]))
    with pytest.raises(MessageTooLargeError, match="more than the 360 allowed where no model takes files") as caught:
        bounds.check(START, b"\xff" * 361)
    assert caught.value.head == b"\xff" * 32


@pytest.mark.parametrize(
    "raw", [b"\x0a\x05", b"\x0f", b"\x08" + b"\x80" * 11 + b"\x01", b"\x0a\x80", b"\x0a\x02\x12\x05"]
)
def test_a_malformed_message_says_so(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        limits().check(START, raw)


def test_only_long_messages_are_measured() -> None:
    parse = limited_parser(pb.GenerateRequest.FromString, limits(max_fields=1))
    assert parse is not None
    assert parse(request(text="hello", model="m")).start.text == "hello"
    with pytest.raises(MessageTooLargeError):
        parse(request(text="x" * UNCHECKED_BYTES, model="m"))


def test_what_has_no_message_type_is_parsed_as_ever() -> None:
    assert limited_parser(None, limits()) is None
    assert limited_parser(bytes.upper, limits()) is bytes.upper


async def test_a_standard_service_takes_no_long_message(start_server: StartServer) -> None:
    _, address = await start_server([])
    async with create_channel(address, None) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="s" * MAX_STANDARD_BYTES))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "longer than" in str(caught.value.details())
