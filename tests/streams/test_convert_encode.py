"""The encode hop in messages."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from quartet.errors import InvalidRequestError, ProtocolError
from quartet.kvcache.layout import (
    BlocksPayload,
    EmbeddingLayout,
    EmbeddingsPayload,
    HandOff,
    KvLayout,
    OpaquePayload,
)
from quartet.media.items import MediaFile, MediaGrid, MediaItem, MediaKind, MediaSize
from quartet.streams.convert.hand_off import to_hand_off
from quartet.streams.convert.messages import (
    from_encode_sized,
    from_encode_start,
    from_encoded_item,
    to_encode_sized,
    to_encode_start,
    to_encoded_item,
)
from quartet.streams.messages import EncodedItem, EncodeStart, RequestContext
from quartet.v1 import encode_pb2

LAYOUT = EmbeddingLayout(model_fingerprint="ab", dtype="float32", hidden_size=8, block_size=16)
HAND_OFF = HandOff(
    hand_off_id=b"i" * 16,
    secret=b"s" * 16,
    worker_id="encode-0",
    epoch=1,
    address="h:1",
    time_to_live=timedelta(seconds=30),
    payload=EmbeddingsPayload(LAYOUT, 64, (1, 2, 3, 4)),
)
START = EncodeStart(
    context=RequestContext(tenant="acme", timeout_s=3.0),
    items=(
        MediaItem(b"m" * 32, MediaFile(MediaKind.IMAGE, b"png")),
        MediaItem(b"", MediaFile(MediaKind.EMBEDDINGS, b"tensors")),
    ),
)


def test_starts_sizes_and_items_come_back_as_they_were() -> None:
    assert from_encode_start(to_encode_start(START)) == START
    sizes = (
        MediaSize(media_id=b"m" * 32, num_tokens=64, grid=MediaGrid(8, 8), is_cached=True),
        MediaSize(media_id=b"n" * 32, num_tokens=3),
    )
    assert from_encode_sized(to_encode_sized(sizes)) == sizes
    for item in (
        EncodedItem(item=1, hand_off=HAND_OFF),
        EncodedItem(item=0, hand_off=HAND_OFF, queue_s=1, compute_s=2),
    ):
        assert from_encoded_item(to_encoded_item(item)) == item
    assert not to_encoded_item(EncodedItem(item=1, hand_off=HAND_OFF)).HasField("compute")


def test_an_impossible_field_of_a_start_is_named() -> None:
    for change, field in (
        (lambda message: message.ClearField("items"), "items"),
        (lambda message: message.items[1].file.ClearField("kind"), "items[1].file.kind"),
        (lambda message: message.items[1].file.ClearField("data"), "items[1].file.data"),
        (lambda message: message.items[0].ClearField("file"), "items[0].file.kind"),
        (lambda message: setattr(message.items[0], "media_id", b"m" * 31), "items[0].media_id"),
    ):
        message = to_encode_start(START)
        change(message)
        with pytest.raises(InvalidRequestError) as raised:
            from_encode_start(message)
        assert raised.value.field == field


def test_an_opaque_state_of_an_encoder_is_forwarded_unchanged() -> None:
    kept = replace(HAND_OFF, payload=OpaquePayload("trtllm", bytes(range(256))))
    assert from_encoded_item(to_encoded_item(EncodedItem(item=3, hand_off=kept))) == EncodedItem(item=3, hand_off=kept)


def test_nonsense_of_a_worker_is_refused() -> None:
    layout = KvLayout(model_fingerprint="f", dtype="float16", num_layers=1, num_kv_heads=1, head_dim=1, block_size=1)
    blocks = to_hand_off(replace(HAND_OFF, payload=BlocksPayload(layout, 1)))
    with pytest.raises(ProtocolError):
        from_encoded_item(encode_pb2.EncodedItem(hand_off=blocks))
    with pytest.raises(InvalidRequestError):
        from_encoded_item(encode_pb2.EncodedItem())
    with pytest.raises(ProtocolError):
        from_encode_sized(encode_pb2.EncodeSized(items=[encode_pb2.MediaSize(media_id=b"m" * 32)]))
