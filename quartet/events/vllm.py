"""KV events in vLLM's form: MessagePack, as its engines publish them by ZMQ, and others after them.

A message has three frames: topic, number (u64 big-endian, from 0 on without a gap), and a batch. The batch is an array
of time, events and data-parallel rank. An event is a map with its kind under ``type``; up to vLLM 0.23 it was an array,
the kind first and then the fields in their order. Some publishers use a map for the batch, too. All of these are read;
``EventForm`` says which one is written.

A lost batch can be asked for at a second socket, a ROUTER: a request is an empty frame and the first number that is
wanted. Each kept batch from there on comes as empty frame, number and batch, and then ``END_NUMBER`` without a batch.

The form: vllm-project/vllm, ``vllm/distributed/kv_events.py``, and what ai-dynamo/dynamo reads and writes
(``lib/kv-router/src/zmq_wire``).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from quartet.events.kv import Tier
from quartet.events.wire import MalformedFrameError

#: Names of the tiers; ``to_medium`` knows others of the same meaning.
MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU_TIER1", Tier.DISK: "CPU_TIER2"}
#: Readers refuse a longer message.
MAX_BATCH_BYTES = 16 << 20
#: Stands for a number at the end of a replay.
END_NUMBER = (1 << 64) - 1

_NUMBER_BYTES = 8
_U64 = 1 << 64

#: An engine's own name of a block: 64 bits, or a digest.
ExternalHash: TypeAlias = int | bytes
#: What, besides tokens, decides one block's contents: names, pairs of (media id, offset), digests.
ExtraKeys: TypeAlias = Sequence[object]

# What readers keep of a block is bounded: bytes of a digest, and characters of a medium's name.
_MAX_HASH_BYTES, _MAX_MEDIUM_LENGTH = 64, 64

# Fields in the order in which events that are arrays have them.
_STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "kv_cache_spec_kind")
_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
_MM_INFOS_POSITION = 8

# Kinds of caches that hold a prompt's whole prefix. Those of windows, states and encoders say nothing of it.
_MAIN_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

_OTHER_MEDIA = {
    **dict.fromkeys(("CPU", "CPU_PINNED"), MEDIA[Tier.HOST]),
    **dict.fromkeys(("DISK", "STORAGE"), MEDIA[Tier.DISK]),
}


class EventForm(StrEnum):
    """How events are written."""

    MAP = "map"  # vLLM from 0.24 on
    ARRAY = "array"  # before


@dataclass(frozen=True, kw_only=True)
class BlockStored:
    """Blocks can be reused from now on; each follows the one before it.

    Attributes:
        block_hashes: at least one.
        parent_hash: of the block before the first; ``None``: there is none.
        token_ids: ``block_size`` for each block; empty: they are not told.
        medium: where the blocks lie; ``None``: it is not told.
        extra_keys: one entry a block; ``None``: no block has any.
    """

    block_hashes: Sequence[ExternalHash]
    parent_hash: ExternalHash | None
    token_ids: Sequence[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Sequence[ExtraKeys | None] | None = None
    group_idx: int | None = None


@dataclass(frozen=True, kw_only=True)
class BlockRemoved:
    """Blocks are gone from ``medium``; ``None``: it is not told from which."""

    block_hashes: Sequence[ExternalHash]
    medium: str | None = None
    group_idx: int | None = None


@dataclass(frozen=True)
class AllBlocksCleared:
    """No block is there any more."""


VllmEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, kw_only=True)
class VllmBatch:
    """What changed, in order.

    Attributes:
        time_s: when it was sent, in seconds since 1970.
        data_parallel_rank: ``None``: the publisher has one rank, or does not tell it.
        num_ignored: events that were read and left out: of another cache than that of prompts (``group_idx``,
            ``kv_cache_spec_kind``), of storage elsewhere (``locality``), with media in Dynamo's own form
            (``block_mm_infos``) or pairs of tokens, or of a kind that is unknown.
    """

    time_s: float
    events: Sequence[VllmEvent]
    data_parallel_rank: int | None = None
    num_ignored: int = 0


def to_medium(medium: str | None) -> str:
    """The common name of ``medium``; what is not known stays as it is, and ``None`` is the GPU."""
    return MEDIA[Tier.DEVICE] if medium is None else _OTHER_MEDIA.get(medium, medium)


def encode_number(number: int) -> bytes:
    """The frame of a number."""
    return number.to_bytes(_NUMBER_BYTES, "big")


def decode_number(frame: bytes) -> int:
    """Read the frame of a number. Raises ``MalformedFrameError``."""
    if len(frame) != _NUMBER_BYTES:
        raise MalformedFrameError(f"a number of {len(frame)} bytes, not {_NUMBER_BYTES}")
    return int.from_bytes(frame, "big")


def encode_batch(batch: VllmBatch, form: EventForm = EventForm.MAP) -> bytes:
    """``batch`` as MessagePack."""
    to_event = _to_map if form is EventForm.MAP else _to_array
    return msgspec.msgpack.encode([batch.time_s, list(map(to_event, batch.events)), batch.data_parallel_rank])


def decode_batch(payload: bytes) -> VllmBatch:
    """Read a batch in any of the forms. Raises ``MalformedFrameError``."""
    try:
        message = _fields(msgspec.msgpack.decode(payload), _BATCH_FIELDS)
        rank = message.get("data_parallel_rank", message.get("dp_rank"))
        events = [_from_event(event) for event in message["events"]]
        return VllmBatch(
            time_s=float(message["ts"]),
            events=[event for event in events if event is not None],
            data_parallel_rank=None if rank is None else _count(rank),
            num_ignored=events.count(None),
        )
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedFrameError("a batch is no MessagePack") from error
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise MalformedFrameError(f"a batch has another form: {type(error).__name__}: {error}") from error


def _to_map(event: VllmEvent) -> dict[str, object]:
    match event:
        case BlockStored():
            return {"type": "BlockStored"} | dict(zip(_STORED_FIELDS, _stored_values(event), strict=False))
        case BlockRemoved():
            return {"type": "BlockRemoved"} | dict(zip(_REMOVED_FIELDS, _removed_values(event), strict=False))
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _to_array(event: VllmEvent) -> list[object]:
    match event:
        case BlockStored():
            return ["BlockStored", *_stored_values(event)]
        case BlockRemoved():
            return ["BlockRemoved", *_removed_values(event)]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


def _stored_values(event: BlockStored) -> tuple[object, ...]:
    """The values of the first ``_STORED_FIELDS``."""
    lora_id = None  # vLLM keeps the field, but only the name counts
    return (
        *(event.block_hashes, event.parent_hash, event.token_ids, event.block_size, lora_id),
        *(event.medium, event.lora_name, event.extra_keys, event.group_idx),
    )


def _removed_values(event: BlockRemoved) -> tuple[object, ...]:
    return event.block_hashes, event.medium, event.group_idx


def _fields(message: Any, names: Sequence[str]) -> Mapping[str, Any]:
    """The fields of what came as a map, or as an array of values in the order of ``names``."""
    if isinstance(message, dict):
        return message
    if not isinstance(message, list):
        raise TypeError("neither a map nor an array")
    return dict(zip(names, message, strict=False))


def _from_event(message: Any) -> VllmEvent | None:
    """The event; ``None`` for one to be ignored."""
    kind = message["type"] if isinstance(message, dict) else message[0]
    if kind == "BlockStored":
        return _from_stored(_stored_fields(message))
    if kind == "BlockRemoved":
        return _from_removed(_fields(message if isinstance(message, dict) else message[1:], _REMOVED_FIELDS))
    return AllBlocksCleared() if kind == "AllBlocksCleared" else None


def _stored_fields(message: Any) -> Mapping[str, Any]:
    if isinstance(message, dict):
        return message
    values = message[1:]
    # Dynamo's publishers had media there, before the fields that vLLM added since.
    mm_infos = values.pop(_MM_INFOS_POSITION) if _has_mm_infos(values) else None
    return {**_fields(values, _STORED_FIELDS), "block_mm_infos": mm_infos}


def _has_mm_infos(values: Sequence[Any]) -> bool:
    return len(values) > _MM_INFOS_POSITION and isinstance(values[_MM_INFOS_POSITION], list)


def _from_stored(fields: Mapping[str, Any]) -> BlockStored | None:
    token_ids, extra_keys = fields["token_ids"], fields.get("extra_keys")
    has_mm_infos = any(info is not None for info in fields.get("block_mm_infos") or ())
    has_pairs = bool(token_ids) and isinstance(token_ids[0], list)
    if not _is_of_prompts(fields) or has_mm_infos or has_pairs:
        return None
    block_hashes, parent = _hashes(fields), fields.get("parent_block_hash")
    if extra_keys is not None and len(extra_keys) != len(block_hashes):
        raise ValueError("extra_keys of another number of blocks")
    block_size = _count(fields["block_size"])
    if token_ids and len(token_ids) != block_size * len(block_hashes):
        raise ValueError(f"{len(token_ids)} tokens in {len(block_hashes)} blocks of {block_size}")
    return BlockStored(
        block_hashes=block_hashes,
        parent_hash=None if parent is None else _hash(parent),
        token_ids=_token_ids(token_ids),
        block_size=block_size,
        medium=_medium(fields),
        lora_name=_text(fields.get("lora_name")),
        extra_keys=None if extra_keys is None else [_extra_keys(keys) for keys in extra_keys],
        group_idx=_group(fields),
    )


def _from_removed(fields: Mapping[str, Any]) -> BlockRemoved | None:
    if not _is_of_prompts(fields):
        return None
    block_hashes = _hashes(fields)
    # A block may lie there several times. It is gone with its last copy.
    copies = fields.get("remaining_copy_counts")
    if copies is not None:
        block_hashes = [name for name, num_left in zip(block_hashes, copies, strict=True) if not num_left]
    return BlockRemoved(block_hashes=block_hashes, medium=_medium(fields), group_idx=_group(fields))


def _is_of_prompts(fields: Mapping[str, Any]) -> bool:
    """Whether the blocks are of the cache of whole prompts, and on the publisher's own host."""
    if fields.get("locality") not in (None, "LOCAL"):
        return False
    kind = fields.get("kv_cache_spec_kind")
    return fields.get("group_idx") in (None, 0) if kind is None else kind in _MAIN_KINDS


def _hashes(fields: Mapping[str, Any]) -> list[ExternalHash]:
    if not fields["block_hashes"]:
        raise ValueError("an event of no block")
    return [_hash(block_hash) for block_hash in fields["block_hashes"]]


def _hash(block_hash: Any) -> ExternalHash:
    if isinstance(block_hash, bytes):
        if len(block_hash) > _MAX_HASH_BYTES:
            raise ValueError(f"a hash of {len(block_hash)} bytes, more than {_MAX_HASH_BYTES}")
        return block_hash
    # Some publishers write the 64 bits as a signed number.
    if type(block_hash) is not int or not -_U64 // 2 <= block_hash < _U64:
        raise TypeError("a hash is neither 64 bits nor bytes")
    return block_hash % _U64


def _token_ids(token_ids: Any) -> list[int]:
    if not isinstance(token_ids, list):
        raise TypeError("token ids are no array")
    array("I", token_ids)  # raises for one that is not 32 bits
    return token_ids


def _extra_keys(keys: Any) -> ExtraKeys | None:
    if keys is not None and not isinstance(keys, list):
        raise TypeError("extra_keys has an entry that is no array")
    return keys


def _count(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise TypeError("not a count")
    return number


def _group(fields: Mapping[str, Any]) -> int | None:
    number = fields.get("group_idx")
    return None if number is None else _count(number)


def _medium(fields: Mapping[str, Any]) -> str | None:
    medium = _text(fields.get("medium"))
    if medium is not None and len(medium) > _MAX_MEDIUM_LENGTH:
        raise ValueError(f"a medium of {len(medium)} characters, more than {_MAX_MEDIUM_LENGTH}")
    return medium


def _text(text: Any) -> str | None:
    if text is not None and not isinstance(text, str):
        raise TypeError("not a text")
    return text
