"""The encode hop: what is started on an encode worker, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.errors import InvalidRequestError, ProtocolError
from quartet.kvcache.layout import EmbeddingsPayload, OpaquePayload
from quartet.media.items import MediaItem, MediaSize
from quartet.media.media_id import MEDIA_ID_SIZE_BYTES
from quartet.rpc.convert.hand_off import from_hand_off, to_hand_off
from quartet.rpc.convert.media import from_media_file, from_media_size, to_media_file, to_media_size
from quartet.rpc.convert.starts import from_request_context, to_request_context
from quartet.rpc.durations import put_duration, to_seconds
from quartet.rpc.encode import EncodedItem, EncodeStart
from quartet.v1 import encode_pb2


def to_encode_start(start: EncodeStart) -> encode_pb2.EncodeStart:
    """The message, whole."""
    return encode_pb2.EncodeStart(
        context=to_request_context(start.context),
        items=[encode_pb2.EncodeItem(media_id=item.media_id, file=to_media_file(item.file)) for item in start.items],
    )


def from_encode_start(message: encode_pb2.EncodeStart) -> EncodeStart:
    """A complete start. Raises ``InvalidRequestError`` with ``field`` such as ``items[1].file.kind``."""
    if not message.items:
        raise InvalidRequestError("there is nothing to encode", field="items")
    items = tuple(_from_encode_item(item, f"items[{index}]") for index, item in enumerate(message.items))
    return EncodeStart(context=from_request_context(message.context), items=items)


def to_encode_sized(sizes: Sequence[MediaSize]) -> encode_pb2.EncodeSized:
    """The message."""
    return encode_pb2.EncodeSized(items=map(to_media_size, sizes))


def from_encode_sized(message: encode_pb2.EncodeSized) -> tuple[MediaSize, ...]:
    """The sizes, item by item. Raises ``ProtocolError`` where one makes no sense."""
    return tuple(map(from_media_size, message.items))


def to_encoded_item(encoded: EncodedItem) -> encode_pb2.EncodedItem:
    """The message."""
    message = encode_pb2.EncodedItem(item=encoded.item, hand_off=to_hand_off(encoded.hand_off))
    if encoded.queue_s:
        put_duration(message.queue, encoded.queue_s)
    if encoded.compute_s:
        put_duration(message.compute, encoded.compute_s)
    return message


def from_encoded_item(message: encode_pb2.EncodedItem) -> EncodedItem:
    """One item's hand-off. Raises ``ProtocolError`` or ``InvalidRequestError`` where it makes no sense."""
    hand_off = from_hand_off(message.hand_off)
    if not isinstance(hand_off.payload, EmbeddingsPayload | OpaquePayload):
        raise ProtocolError("an encode worker handed something else off than embeddings")
    return EncodedItem(
        item=message.item,
        hand_off=hand_off,
        queue_s=to_seconds(message.queue),
        compute_s=to_seconds(message.compute),
    )


def _from_encode_item(message: encode_pb2.EncodeItem, field: str) -> MediaItem:
    if len(message.media_id) not in (0, MEDIA_ID_SIZE_BYTES):
        raise InvalidRequestError(f"a media id has {MEDIA_ID_SIZE_BYTES} bytes", field=f"{field}.media_id")
    return MediaItem(message.media_id, from_media_file(message.file, f"{field}.file"))
