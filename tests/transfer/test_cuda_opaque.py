"""The bytes by which a source describes its pool on a GPU: what is written is read, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.errors import TransferError
from quartet.transfer.cuda.lent import LentDeviceMemory, from_opaque, to_opaque
from quartet.transfer.runs import Offsets

_NAME = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=100)
_U64 = st.integers(0, 2**64 - 1)
LENT = st.builds(
    LentDeviceMemory,
    handle=st.binary(min_size=64, max_size=64),
    device_uuid=st.binary(min_size=16, max_size=16),
    size_bytes=st.integers(1, 2**64 - 1),
    epoch=_U64,
    socket_path=_NAME.map(lambda name: f"@{name}"),
    token=st.binary(min_size=16, max_size=16),
)
OFFSETS = st.lists(st.integers(0, 2**63 - 1), max_size=5).map(lambda offsets: np.array(offsets, np.int64))


@given(LENT, OFFSETS)
def test_what_is_written_is_read(lent: LentDeviceMemory, offsets: Offsets) -> None:
    read, places = from_opaque(to_opaque(lent, offsets))
    assert (read, places.tolist()) == (lent, offsets.tolist())


@given(LENT, st.integers(2**63, 2**64 - 1))
def test_an_offset_that_no_pool_reaches_becomes_negative(lent: LentDeviceMemory, offset: int) -> None:
    opaque = to_opaque(lent, np.zeros(1, np.int64))[:-8] + offset.to_bytes(8, "big")
    assert from_opaque(opaque)[1] < 0


@given(LENT, OFFSETS, st.data())
def test_changed_bytes_are_refused_or_mean_what_they_say(
    lent: LentDeviceMemory, offsets: Offsets, data: st.DataObject
) -> None:
    opaque = bytearray(to_opaque(lent, offsets))
    for _ in range(data.draw(st.integers(1, 3))):
        opaque[data.draw(st.integers(0, len(opaque) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = from_opaque(bytes(opaque))
    except TransferError:
        return
    assert to_opaque(*read) == bytes(opaque)


@given(st.binary(max_size=400))
def test_any_other_bytes_are_refused_or_mean_what_they_say(opaque: bytes) -> None:
    for candidate in (opaque, b"\1" + opaque):
        try:
            read = from_opaque(candidate)
        except TransferError:
            continue
        assert to_opaque(*read) == candidate


@given(LENT, OFFSETS, st.integers(1, 200))
def test_a_part_is_refused_and_so_is_more(lent: LentDeviceMemory, offsets: Offsets, number: int) -> None:
    opaque = to_opaque(lent, offsets)
    for wrong in (opaque[:-number], opaque + bytes(number), b"\2" + opaque[1:], b""):
        with pytest.raises(TransferError):
            from_opaque(wrong)
