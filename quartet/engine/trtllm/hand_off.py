"""A prefill's ``DisaggregatedParams`` as bytes, and back: what decode needs to pull the KV blocks of a prompt.

The bytes are a version byte, the length of a JSON header, the header, and the binary fields that it points to,
unchanged. TensorRT-LLM's fields differ from release to release, so the header carries each by its name.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quartet.engine.trtllm.package import Package
from quartet.errors import EngineError, InvalidRequestError, LayoutMismatchError

_VERSION = 1
_PREFIX = struct.Struct("<BI")
# Fields that each side sets for itself, or that decode does not need: pictures are in the KV by then, and no request
# asks for logits.
_NOT_CARRIED = frozenset({"request_type", "multimodal_embedding_handles", "multimodal_hashes", "first_gen_logits"})
_LOGPROBS = "first_gen_log_probs"
# Of ``cache_transceiver_config``; the values that leave the choice to variables or to the release.
_MOVING, _LEFT_OPEN = ("backend", "transceiver_runtime"), ("DEFAULT", "AUTO")
#: The field, where a release has it, of an id that prefill and decode both give a request.
HAND_OFF_ID = "disagg_request_id"
# Ids below are those that engines count up themselves; the field has 63 bits.
_MIN_HAND_OFF_ID, _MAX_HAND_OFF_ID = 1 << 42, (1 << 63) - 1
_BYTES, _TUPLE, _DTYPE, _TOP = "$bytes", "$tuple", "$dtype", "top"


@dataclass(frozen=True, kw_only=True)
class CacheIdentity:
    """What must be the same on both sides.

    Attributes:
        transceiver: fields of ``cache_transceiver_config`` that say how blocks move; one that is left to TensorRT-LLM,
            or to the environment, is missing, and nothing is known of it.
    """

    model_fingerprint: str
    block_size: int
    transceiver: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_arguments(
        cls, model_fingerprint: str, block_size: int, transceiver: Mapping[str, object] | None
    ) -> CacheIdentity:
        """``transceiver`` is ``cache_transceiver_config``."""
        given = {name: (transceiver or {}).get(name) for name in _MOVING}
        named = {name: value.upper() for name, value in given.items() if isinstance(value, str)}
        known = {name: value for name, value in named.items() if value not in _LEFT_OPEN}
        return cls(model_fingerprint=model_fingerprint, block_size=block_size, transceiver=known)

    def refusal_of(self, other: CacheIdentity) -> str | None:
        """Why an engine with this cache can't take the hand-off of ``other``; ``None``: it can, as far as is known."""
        if (self.model_fingerprint, self.block_size) != (other.model_fingerprint, other.block_size):
            return "the hand-off is of another model, dtype or block size"
        for name, ours in self.transceiver.items():
            if (theirs := other.transceiver.get(name, ours)) != ours:
                return f"the hand-off goes by cache_transceiver_config.{name} {theirs}, here it is {ours}"
        return None


@dataclass(frozen=True, kw_only=True)
class PromptState:
    """A prompt that another engine computed.

    Attributes:
        cache: the cache identity of that engine.
        num_tokens: tokens whose KV it holds.
        fields: of its ``DisaggregatedParams``, by name; those that are ``None`` are left out.
    """

    cache: CacheIdentity
    num_tokens: int
    fields: Mapping[str, Any] = field(repr=False)

    @property
    def first_token_id(self) -> int | None:
        """The token that prefill sampled; decode's output begins with it."""
        tokens = self.fields.get("first_gen_tokens")
        return tokens[0] if tokens else None

    @classmethod
    def of(cls, params: Any, cache: CacheIdentity, num_tokens: int, given: Any = None) -> PromptState:
        """Make a state from ``params`` of a completed prefill, whose call was ``given`` others."""
        # The class has slots, and ``asdict`` would copy the values.
        came = {item.name: getattr(params, item.name) for item in dataclasses.fields(params)}
        if came.get(HAND_OFF_ID) is None:  # not every release repeats it in the result
            came[HAND_OFF_ID] = getattr(given, HAND_OFF_ID, None)
        kept = {name: value for name, value in came.items() if value is not None and name not in _NOT_CARRIED}
        if _LOGPROBS in kept:
            kept[_LOGPROBS] = _plain_logprobs(kept[_LOGPROBS])
        return cls(cache=cache, num_tokens=num_tokens, fields=kept)

    def params(self, package: Package) -> Any:
        """The ``DisaggregatedParams`` with which decode goes on, without fields that this release doesn't have."""
        known = {name: value for name, value in self.fields.items() if package.has_disaggregated_field(name)}
        if _LOGPROBS in known:
            known[_LOGPROBS] = _made_logprobs(known[_LOGPROBS], package.Logprob)
        return package.DisaggregatedParams(request_type="generation_only", **known)

    def to_bytes(self) -> bytes:
        """The state as bytes, to be sent. Raises ``EngineError`` for a field that is not plain data."""
        blobs = bytearray()
        header = {
            "model": self.cache.model_fingerprint,
            "block_size": self.cache.block_size,
            "transceiver": dict(self.cache.transceiver),
            "num_tokens": self.num_tokens,
            "fields": {name: _plain(value, blobs) for name, value in self.fields.items()},
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        return _PREFIX.pack(_VERSION, len(text)) + text + bytes(blobs)

    @classmethod
    def from_bytes(cls, data: bytes) -> PromptState:
        """Read what ``to_bytes`` made.

        Raises:
            LayoutMismatchError: another version made it.
            InvalidRequestError: field ``hand_off``; the bytes are malformed.
        """
        if data[:1] and data[0] != _VERSION:
            raise LayoutMismatchError("the hand-off is of another version of this engine", field="hand_off")
        try:
            _, size = _PREFIX.unpack_from(data)
            header = json.loads(data[_PREFIX.size : _PREFIX.size + size])
            blobs = memoryview(data)[_PREFIX.size + size :]
            return cls(
                cache=CacheIdentity.of_arguments(
                    str(header["model"]), int(header["block_size"]), header.get("transceiver")
                ),
                num_tokens=int(header["num_tokens"]),
                fields={str(name): _restored(value, blobs) for name, value in header["fields"].items()},
            )
        except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise InvalidRequestError("the hand-off's state is malformed", field="hand_off") from None


def new_hand_off_id() -> int:
    """An id for one hand-off, which no engine gives a request by itself."""
    # Drawn, where upstream puts a node and a process into it: those would have to be told apart across a deployment.
    return _MIN_HAND_OFF_ID + secrets.randbelow(_MAX_HAND_OFF_ID - _MIN_HAND_OFF_ID)


def _plain_logprobs(value: Any) -> Any:
    """Log probabilities as lists: ``[token_id, logprob, rank]`` for each of a position's ``Logprob``s, by token id."""
    if isinstance(value, Mapping):
        return {_TOP: [[int(token_id), top.logprob, top.rank] for token_id, top in value.items()]}
    return [_plain_logprobs(item) for item in value] if isinstance(value, list) else value


def _made_logprobs(value: Any, kind: Any) -> Any:
    """The inverse of ``_plain_logprobs``; ``kind`` is TensorRT-LLM's ``Logprob``."""
    if isinstance(value, Mapping):
        return {token_id: kind(logprob, rank) for token_id, logprob, rank in value[_TOP]}
    return [_made_logprobs(item, kind) for item in value] if isinstance(value, list) else value


def _plain(value: Any, blobs: bytearray) -> Any:
    """``value`` in JSON's types; its bytes go to the end of ``blobs``."""
    if isinstance(value, bytes | bytearray | memoryview):
        start = len(blobs)
        blobs += value
        return {_BYTES: [start, len(blobs) - start]}
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(item, blobs) for item in value]}
    if isinstance(value, list):
        return [_plain(item, blobs) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, blobs) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return {_DTYPE: str(value).removeprefix("torch.")}
    raise EngineError(f"the engine's hand-off has a {type(value).__name__} in it, which can't be sent")


def _restored(value: Any, blobs: memoryview) -> Any:
    if isinstance(value, list):
        return [_restored(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    if _BYTES in value:
        start, size = value[_BYTES]
        if not 0 <= start <= start + size <= len(blobs):
            raise ValueError("bytes that are not there")
        return bytes(blobs[start : start + size])
    if _TUPLE in value:
        return tuple(_restored(item, blobs) for item in value[_TUPLE])
    if _DTYPE in value:
        return _dtype(value[_DTYPE])
    return {key: _restored(item, blobs) for key, item in value.items()}


def _dtype(name: object) -> Any:
    import torch

    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError("not a dtype")
    return dtype
