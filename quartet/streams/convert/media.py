"""Media as clients name it, and as workers get it."""

from __future__ import annotations

from quartet.errors import InvalidRequestError, ProtocolError
from quartet.kvcache.layout import EmbeddingsPayload, OpaquePayload
from quartet.media.items import MediaFile, MediaGrid, MediaKind, MediaPart, MediaSize, MediaUrl
from quartet.media.media_id import MEDIA_ID_SIZE_BYTES
from quartet.streams.convert.hand_off import from_hand_off, to_hand_off
from quartet.streams.messages import MediaInput
from quartet.v1 import encode_pb2, router_pb2, types_pb2

_KINDS = {
    MediaKind.IMAGE: types_pb2.MEDIA_KIND_IMAGE,
    MediaKind.EMBEDDINGS: types_pb2.MEDIA_KIND_EMBEDDINGS,
}
_KINDS_BACK = {number: kind for kind, number in _KINDS.items()}


def put_media_part(into: router_pb2.MediaPart, part: MediaPart) -> None:
    """Fill the message, which is empty."""
    if isinstance(part, MediaUrl):
        into.url = part.url
    elif part.kind is MediaKind.IMAGE:
        into.data = part.data
    else:
        into.embeddings = part.data


def from_media_part(message: router_pb2.MediaPart, field: str) -> MediaPart:
    """The part, its content unchecked. Raises ``InvalidRequestError`` naming ``field``: it is empty."""
    source = message.WhichOneof("source")
    # Once: each reading of a field copies it, and files are long.
    value = None if source is None else getattr(message, source)
    if not value:
        raise InvalidRequestError("a media item holds a url, data or embeddings", field=field)
    if source == "url":
        return MediaUrl(value)
    return MediaFile(MediaKind.IMAGE if source == "data" else MediaKind.EMBEDDINGS, value)


def to_media_file(file: MediaFile) -> types_pb2.MediaFile:
    """The message, whole."""
    return types_pb2.MediaFile(kind=_KINDS[file.kind], data=file.data)


def from_media_file(message: types_pb2.MediaFile, field: str) -> MediaFile:
    """The file. Raises ``InvalidRequestError`` with ``field`` below the one given: an unknown kind, or no bytes."""
    kind = _KINDS_BACK.get(message.kind)
    if kind is None:
        raise InvalidRequestError("a media file has a kind", field=f"{field}.kind")
    data = message.data
    if not data:
        raise InvalidRequestError("the media file is empty", field=f"{field}.data")
    return MediaFile(kind, data)


def to_media_input(media: MediaInput) -> types_pb2.MediaInput:
    """The message, whole."""
    if isinstance(media.source, MediaFile):
        return types_pb2.MediaInput(media_id=media.media_id, file=to_media_file(media.source))
    return types_pb2.MediaInput(media_id=media.media_id, hand_off=to_hand_off(media.source))


def from_media_input(message: types_pb2.MediaInput, field: str) -> MediaInput:
    """The input. Raises ``InvalidRequestError`` with ``field`` below the one given."""
    if len(message.media_id) != MEDIA_ID_SIZE_BYTES:
        raise InvalidRequestError(f"a media id has {MEDIA_ID_SIZE_BYTES} bytes", field=f"{field}.media_id")
    match message.WhichOneof("source"):
        case "hand_off":
            hand_off = from_hand_off(message.hand_off, f"{field}.hand_off")
            if not isinstance(hand_off.payload, EmbeddingsPayload | OpaquePayload):
                raise InvalidRequestError("the hand-off holds no embeddings", field=f"{field}.hand_off.payload")
            return MediaInput(message.media_id, hand_off)
        case "file":
            return MediaInput(message.media_id, from_media_file(message.file, f"{field}.file"))
        case _:
            raise InvalidRequestError("a media item has a hand_off or a file", field=f"{field}.source")


def to_media_size(size: MediaSize) -> encode_pb2.MediaSize:
    """The message."""
    grid = size.grid
    return encode_pb2.MediaSize(
        media_id=size.media_id,
        num_tokens=size.num_tokens,
        grid=None if grid is None else encode_pb2.MediaGrid(num_rows=grid.num_rows, num_columns=grid.num_columns),
        is_cached=size.is_cached,
    )


def from_media_size(message: encode_pb2.MediaSize) -> MediaSize:
    """The size. Raises ``ProtocolError`` where it is impossible."""
    if len(message.media_id) != MEDIA_ID_SIZE_BYTES or message.num_tokens < 1:
        raise ProtocolError("an encode worker reported an impossible size")
    grid = MediaGrid(message.grid.num_rows, message.grid.num_columns) if message.HasField("grid") else None
    return MediaSize(media_id=message.media_id, num_tokens=message.num_tokens, grid=grid, is_cached=message.is_cached)
