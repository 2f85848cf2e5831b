"""The shape of a block in memory, and what a hand-off says about the blocks behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, TypeAlias, TypeVar

#: Bytes of one element, by the dtype's name as safetensors and PyTorch spell it.
DTYPE_SIZE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "uint8": 1,
}


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """Block-major layout: one block is ``[num_layers, 2, block_size, num_kv_heads, head_dim]``, contiguous.

    Two workers can exchange blocks if and only if their layouts are equal.
    """

    model_fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens

    @property
    def piece_size_bytes(self) -> int:
        """Bytes of one block: one piece of a transfer, also where it is only partly filled."""
        elements = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return elements * DTYPE_SIZE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class EmbeddingLayout:
    """Embeddings of media: one piece is ``[block_size, hidden_size]``, contiguous.

    Two workers can exchange embeddings if and only if their layouts are equal.
    """

    model_fingerprint: str
    dtype: str
    hidden_size: int
    block_size: int  # tokens

    @property
    def piece_size_bytes(self) -> int:
        """Bytes of one piece, also where it is only partly filled."""
        return self.block_size * self.hidden_size * DTYPE_SIZE_BYTES[self.dtype]


#: What the pieces of a transfer may be.
PieceLayout: TypeAlias = KvLayout | EmbeddingLayout


_LayoutT = TypeVar("_LayoutT", KvLayout, EmbeddingLayout)


@dataclass(frozen=True)
class _Pieces(Generic[_LayoutT]):
    """What ``num_tokens`` tokens have in a pool; piece ``i`` holds tokens ``[i * block_size, ...)``.

    Attributes:
        block_ids: which block of the source's pool holds each piece; empty where the source does not say.
    """

    layout: _LayoutT
    num_tokens: int
    block_ids: tuple[int, ...] = field(default=(), repr=False)

    @property
    def num_pieces(self) -> int:
        """Pieces behind the hand-off, the partly filled last one included."""
        return -(-self.num_tokens // self.layout.block_size)


class BlocksPayload(_Pieces[KvLayout]):
    """KV blocks of the first ``num_tokens`` tokens of a sequence."""


class EmbeddingsPayload(_Pieces[EmbeddingLayout]):
    """Embeddings of one media item's ``num_tokens`` tokens."""


@dataclass(frozen=True)
class OpaquePayload:
    """State of an engine that moves its own cache; only that engine reads it."""

    engine: str
    state: bytes = field(repr=False)


#: What lies in pieces of a pool.
PiecesPayload: TypeAlias = BlocksPayload | EmbeddingsPayload
#: What a hand-off may be of.
Payload: TypeAlias = PiecesPayload | OpaquePayload


@dataclass(frozen=True, kw_only=True)
class HandOff:
    """What a source offers to the worker that continues the request: a ticket, and where and until when to use it.

    Attributes:
        hand_off_id: 16 random bytes that name it.
        secret: 16 random bytes; without them the source lets no caller read or end it.
        worker_id: the worker that holds.
        epoch: that worker's; it refuses a hand-off of another epoch.
        address: ``host:port`` of that worker's TransferService.
        time_to_live: time after which it expires unless renewed.
    """

    hand_off_id: bytes
    secret: bytes = field(repr=False)
    worker_id: str
    epoch: int
    address: str
    time_to_live: timedelta
    payload: Payload
