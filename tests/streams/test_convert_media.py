"""Media items of worker starts: where their embeddings come from, and what no worker is given."""

from __future__ import annotations

import pytest

from quartet.errors import InvalidRequestError
from quartet.kvcache.layout import HandOff, OpaquePayload
from quartet.streams.convert.messages import from_start
from quartet.v1 import decode_pb2, prefill_pb2, types_pb2

ID = bytes(range(32))
FILE = types_pb2.MediaInput(media_id=ID, file=types_pb2.MediaFile(kind=types_pb2.MEDIA_KIND_IMAGE, data=b"\x89PNG"))
LAYOUT = types_pb2.EmbeddingLayout(model_fingerprint="f", dtype="float32", hidden_size=8, block_size=4)
KV_LAYOUT = types_pb2.KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8, block_size=4)
HAND_OFF = types_pb2.HandOff(
    hand_off_id=b"i" * 16,
    secret=b"s" * 16,
    worker_id="encode-0",
    address="a:1",
    embeddings=types_pb2.EmbeddingsPayload(layout=LAYOUT, num_tokens=9),
)
HANDED_OFF = types_pb2.MediaInput(media_id=ID, hand_off=HAND_OFF)
SPAN = types_pb2.MediaSpan(media_id=ID, first_position=0, num_tokens=9)


def changed(media: types_pb2.MediaInput, change: types_pb2.MediaInput) -> types_pb2.MediaInput:
    message = types_pb2.MediaInput()
    message.CopyFrom(media)
    message.MergeFrom(change)
    return message


def refused_field(media: list[types_pb2.MediaInput], spans: list[types_pb2.MediaSpan]) -> str | None:
    """Of a start for prefill and of one for decode, which is the same."""
    generation = types_pb2.Generation(prompt_token_ids=bytes(4 * 9), media=spans)
    with pytest.raises(InvalidRequestError) as of_prefill:
        from_start(prefill_pb2.PrefillStart(generation=generation, media=media))
    with pytest.raises(InvalidRequestError) as of_decode:
        from_start(decode_pb2.DecodeStart(generation=generation, media=media))
    assert of_prefill.value.field == of_decode.value.field
    return of_prefill.value.field


def test_files_and_hand_offs_are_taken_as_they_should_come() -> None:
    generation = types_pb2.Generation(prompt_token_ids=bytes(4 * 9))
    files = from_start(prefill_pb2.PrefillStart(generation=generation, media=[FILE, FILE]))
    assert [item.media_id for item in files.media] == [ID, ID]
    generation.media.append(SPAN)
    handed_off = from_start(prefill_pb2.PrefillStart(generation=generation, media=[HANDED_OFF]))
    assert len(handed_off.media) == len(handed_off.generation.media) == 1


def test_an_opaque_state_of_an_encoder_is_taken_unchanged() -> None:
    kept = types_pb2.MediaInput()
    kept.CopyFrom(HANDED_OFF)
    kept.hand_off.opaque.CopyFrom(types_pb2.OpaquePayload(engine="trtllm", state=bytes(range(256))))
    generation = types_pb2.Generation(prompt_token_ids=bytes(4 * 9), media=[SPAN])
    start = from_start(prefill_pb2.PrefillStart(generation=generation, media=[kept]))
    [item] = start.media
    assert isinstance(item.source, HandOff)
    assert item.source.payload == OpaquePayload("trtllm", bytes(range(256)))


@pytest.mark.parametrize(
    ("media", "field"),
    [
        (types_pb2.MediaInput(media_id=ID[:31], file=FILE.file), "media[1].media_id"),
        (types_pb2.MediaInput(media_id=ID), "media[1].source"),
        (types_pb2.MediaInput(media_id=ID, file=types_pb2.MediaFile(data=b"x")), "media[1].file.kind"),
        (
            types_pb2.MediaInput(media_id=ID, file=types_pb2.MediaFile(kind=types_pb2.MEDIA_KIND_EMBEDDINGS)),
            "media[1].file.data",
        ),
        (
            changed(HANDED_OFF, types_pb2.MediaInput(hand_off=types_pb2.HandOff(secret=b"s"))),
            "media[1].hand_off.secret",
        ),
        (
            changed(
                HANDED_OFF,
                types_pb2.MediaInput(
                    hand_off=types_pb2.HandOff(
                        embeddings=types_pb2.EmbeddingsPayload(layout=types_pb2.EmbeddingLayout(dtype="int3"))
                    )
                ),
            ),
            "media[1].hand_off.embeddings.layout.dtype",
        ),
        (
            changed(
                HANDED_OFF,
                types_pb2.MediaInput(
                    hand_off=types_pb2.HandOff(blocks=types_pb2.BlocksPayload(num_tokens=1, layout=KV_LAYOUT))
                ),
            ),
            "media[1].hand_off.payload",
        ),
    ],
)
def test_an_impossible_item_is_refused_by_its_field(media: types_pb2.MediaInput, field: str) -> None:
    assert refused_field([FILE, media], []) == field


@pytest.mark.parametrize("name", ["num_tokens", "layout.hidden_size", "layout.block_size"])
def test_embeddings_with_a_zero_size_are_refused(name: str) -> None:
    media = changed(HANDED_OFF, types_pb2.MediaInput())
    embeddings = media.hand_off.embeddings
    inner, _, last = name.rpartition(".")
    setattr(embeddings.layout if inner else embeddings, last, 0)
    assert refused_field([media], [SPAN]) == f"media[0].hand_off.embeddings.{name}"


@pytest.mark.parametrize(
    ("media", "spans", "field"),
    [
        ([FILE, HANDED_OFF], [SPAN], "media"),
        ([FILE], [SPAN], "generation.media"),
        ([HANDED_OFF], [], "generation.media"),
        ([HANDED_OFF], [SPAN, SPAN], "generation.media"),
    ],
)
def test_items_that_do_not_go_with_the_spans_are_refused(
    media: list[types_pb2.MediaInput], spans: list[types_pb2.MediaSpan], field: str
) -> None:
    assert refused_field(media, spans) == field
