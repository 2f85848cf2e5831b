"""Pieces framed by hand against the generated class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.transfer.grpc.messages import (
    PiecePart,
    frame_piece,
    parse_piece,
    parse_response,
    split_piece,
)
from quartet.v1 import transfer_pb2 as pb

_indices = st.integers(0, 2**32 - 1)
_offsets = st.integers(0, 2**64 - 1)


@given(_indices, _offsets, st.binary(min_size=1, max_size=300))
def test_a_framed_piece_is_byte_for_byte_what_the_generated_class_writes(index: int, offset: int, data: bytes) -> None:
    piece = pb.Piece(index=index, offset_bytes=offset, data=data)
    framed = frame_piece(index, offset, memoryview(data))
    assert framed == pb.PullResponse(piece=piece).SerializeToString(deterministic=True)
    assert parse_piece(framed) == PiecePart(index, offset, memoryview(data))


@given(st.binary(max_size=64) | st.binary(max_size=40).map(lambda tail: bytes([0x12, len(tail)]) + tail))
def test_every_message_is_read_as_by_the_generated_class_or_left_to_it(message: bytes) -> None:
    part = parse_piece(message)
    if part is not None:
        piece = pb.PullResponse.FromString(message).piece
        # A 32-bit field keeps the low half of a longer varint; a receiver refuses such an index as not asked for.
        assert (piece.index, piece.data) == (part.index % 2**32, part.data)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_truncated_piece_is_left_to_the_generated_class(cut: int) -> None:
    framed = frame_piece(300, 70_000, memoryview(b"data"))
    assert parse_piece(framed[: len(framed) - cut]) is None


def test_a_piece_with_its_fields_in_another_order_is_read_all_the_same() -> None:
    body = b"\x1a\x03abc" + b"\x08\x05" + b"\x10\x09"
    message = bytes([0x12, len(body)]) + body
    assert parse_response(message) == PiecePart(5, 9, memoryview(b"abc"))


def test_other_messages_are_parsed_as_generated() -> None:
    response = pb.PullResponse(granted=pb.PullGranted(way=pb.TRANSFER_WAY_GRPC, piece_size_bytes=1))
    assert parse_response(response.SerializeToString()) == response


@pytest.mark.parametrize("size", [1, 1000, MAX_STREAM_MESSAGE_BYTES, MAX_STREAM_MESSAGE_BYTES * 5 // 2])
def test_a_piece_is_split_into_messages_of_one_mebibyte_at_most(size: int) -> None:
    piece = bytes(range(256)) * (size // 256) + bytes(size % 256)
    parts = list(split_piece(memoryview(piece)))
    assert b"".join(data for _offset, data in parts) == piece
    assert [offset for offset, _data in parts] == [sum(len(d) for _o, d in parts[:i]) for i in range(len(parts))]
    # The largest index and offset take the most room.
    assert max(len(frame_piece(2**32 - 1, 2**64 - 1, data)) for _o, data in parts) <= MAX_STREAM_MESSAGE_BYTES
