"""States of pictures as bytes: exactly what was written comes back, and nothing else is read."""

from __future__ import annotations

import json

import pytest

from quartet.engine.trtllm.media_state import PictureState, num_handle_tokens, read_state, write_state
from quartet.errors import EngineError, InvalidRequestError

STATE = PictureState(
    width=640,
    height=480,
    handle={
        "dtype": "torch.float16",
        "storage_handle": bytes(range(256)),
        "event_handle": b"",
        "event_sync_required": True,
        "ref_counter_offset": 2**40,
        "tensor_size": [576, 4096],
        "nothing": None,
        "base64": "not bytes",
    },
    hashes=(-(2**31), 2**31 - 1, 0, 1, 2, 3, 4, 5),
    host="boot ipc:[1]",
)


def test_every_key_and_byte_comes_back() -> None:
    assert read_state(write_state(STATE)) == STATE
    assert STATE.num_tokens == 576


def test_a_handle_without_a_size_has_no_tokens() -> None:
    assert [num_handle_tokens({"tensor_size": size}) for size in ((3, 4), [], None, ["x"], "12")] == [3, 0, 0, 0, 0]


def test_a_state_that_cannot_be_sent_is_an_error_of_the_encoder() -> None:
    with pytest.raises(EngineError, match="a object"):
        write_state(PictureState(width=1, height=1, handle={"x": object()}, hashes=(0,) * 8, host=""))


def changed(**changes: object) -> bytes:
    return json.dumps({**json.loads(write_state(STATE)), **changes}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04\x95",  # a pickle's beginning
        b"[]",
        b"[" * 100_000,
        changed(surprise=1),
        changed(width=0),
        changed(width=2**40),
        changed(height=True),
        changed(handle=[1]),
        changed(handle={"base64": "AAAA"}),
        changed(handle={"key": {"base64": "?"}}),
        changed(hashes=[1, 2]),
        changed(hashes=None),
        changed(hashes=["1"] * 8),
        changed(host=1),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="no state of a picture"):
        read_state(data)
