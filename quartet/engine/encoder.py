"""The encoder seam: what a worker asks of whatever turns media into embeddings.

Apart from ``Engine``, as nothing of its life is alike: an item has no steps, no blocks that grow and no tokens that
come one by one. Whoever calls keeps the pool's book (``quartet.kvcache.embedding_pool``) and says which blocks to write
to, so that embeddings computed here and embeddings pulled from elsewhere lie in the same pool. An encoder whose library
keeps embeddings itself, and lets only itself have them elsewhere, has a ``StateEncoder`` for those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quartet.media.items import MediaFile, MediaGrid, MediaKind
from quartet.transfer.base import EmbeddingMemory


@dataclass(frozen=True, kw_only=True)
class EncoderCapabilities:
    """What an encoder can do; it is asked for nothing else.

    Attributes:
        preprocessing_fingerprint: as ``quartet.media.media_id`` makes it.
        max_item_tokens: tokens that one item fills at most.
    """

    kinds: frozenset[MediaKind]
    model_fingerprint: str
    preprocessing_fingerprint: bytes
    max_item_tokens: int


@dataclass(frozen=True)
class ItemSize:
    """How much of a prompt an item fills: tokens, and the grid of patches where there is one.

    Attributes:
        num_tokens: at least one; 0, of a ``MediaSizer`` that is no encoder: the engine says it in the end.
        num_pixels: that its file is decoded to; 0: it is no picture.
    """

    num_tokens: int
    grid: MediaGrid | None
    num_pixels: int = 0


@dataclass(frozen=True)
class EncodeTimes:
    """Seconds from the call until the vision tower began with the item, and in it, for the whole batch."""

    queue_s: float
    compute_s: float


@dataclass(frozen=True, kw_only=True)
class EncoderStats:
    """A snapshot. ``num_steps`` is the progress counter: it grows with every batch."""

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_items: int = 0  # encoded, ever
    num_failed: int = 0


@dataclass(frozen=True)
class EncodedState:
    """An item that its encoder keeps: what the engine that is to have it needs to know, and how long it took."""

    state: bytes = field(repr=False)
    times: EncodeTimes


class MediaSizer(Protocol):
    """Tells how much media files fill. All methods are called on the event loop; none blocks it."""

    @property
    def capabilities(self) -> EncoderCapabilities:
        """What it can do; of an encoder, valid after ``start``."""
        ...

    async def size(self, file: MediaFile) -> ItemSize:
        """What ``file`` will fill, from its header alone.

        Raises:
            InvalidMediaError, MediaTooLargeError: it is no such file, or not one that the model takes; ``field`` is
                ``file``.
        """
        ...


class StateEncoder(Protocol):
    """Encodes items and keeps them itself, each for one taker of the same engine on the same host."""

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """Of the items that are encoded so; all others go into the pool. Valid after ``start``."""
        ...

    async def encode(self, holder: int, file: MediaFile) -> EncodedState:
        """Encode ``file``, and keep it for ``holder``, a number never used before, until ``release``.

        Where this raises, by being cancelled too, nothing is kept.

        Raises:
            InvalidMediaError: what the header promised is not there; ``field`` is ``file``.
            EngineError: it became something else than was told of its size, or the encoder died.
        """
        ...

    def release(self, holder: int, *, was_taken: bool) -> None:
        """Let go of what ``holder`` has, which may have been taken. Unknown ones are ignored."""
        ...


class MediaEncoder(MediaSizer, Protocol):
    """Turns media into embeddings. All methods are called on the event loop; none blocks it."""

    @property
    def states(self) -> StateEncoder | None:
        """Encodes what does not go into the pool; ``None``: all of it does. Valid after ``start``."""
        ...

    @property
    def embeddings(self) -> EmbeddingMemory:
        """The pool that it writes to; valid after ``start``."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it has died; nothing is encoded any more."""
        ...

    async def start(self) -> None:
        """Load and warm up. Raises ``ServingError`` naming what is wrong."""
        ...

    async def encode(self, file: MediaFile, block_ids: Sequence[int]) -> EncodeTimes:
        """Write the embeddings of ``file`` into those blocks, which hold ``size(file).num_tokens`` tokens.

        Calls that overlap are batched. Whatever way it ends, by being cancelled too, nothing writes there any more.

        Raises:
            InvalidMediaError: what the header promised is not there; ``field`` is ``file``.
            MediaTooLargeError: the device has no room for it even alone; ``field`` is ``file``.
            EngineError: it died.
        """
        ...

    def stats(self) -> EncoderStats:
        """How it is. May be called on any thread, also after ``close``."""
        ...

    async def close(self) -> None:
        """Free everything; calls still waiting fail with ``WorkerUnavailableError``. May be called twice."""
        ...
