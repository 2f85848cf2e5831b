"""The encoder seam: what a worker asks of a vision tower, or of anything else that turns media into embeddings.

It is separate from ``Engine``, because an item has no steps, no growing blocks and no tokens one by one. The caller
manages the pool (``quartet.kvcache.embedding_pool``) and says which blocks to write to, so that embeddings computed
here and embeddings pulled from other workers are in one pool. TensorRT-LLM keeps embeddings itself, and only its own
engine can read them elsewhere: such an encoder has a ``StateEncoder``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from quartet.media.items import MediaFile, MediaGrid, MediaKind
from quartet.transfer.base import EmbeddingMemory


@dataclass(frozen=True, kw_only=True)
class EncoderCapabilities:
    """What an encoder can do; callers ask for nothing else.

    Attributes:
        preprocessing_fingerprint: as ``quartet.media.media_id`` makes it.
        max_item_tokens: most tokens of one item.
    """

    kinds: frozenset[MediaKind]
    model_fingerprint: str
    preprocessing_fingerprint: bytes
    max_item_tokens: int


@dataclass(frozen=True)
class ItemSize:
    """How much of a prompt an item fills: tokens, and the grid of patches if there is one.

    Attributes:
        num_tokens: at least one; 0, from a ``MediaSizer`` that is no encoder: only the engine finds it out, later.
        num_pixels: of the decoded file; 0: it is no picture.
    """

    num_tokens: int
    grid: MediaGrid | None
    num_pixels: int = 0


@dataclass(frozen=True)
class EncodeTimes:
    """Seconds from the call until the vision tower began with the item's batch, and seconds of that batch."""

    queue_s: float
    compute_s: float


@dataclass(frozen=True, kw_only=True)
class EncoderStats:
    """A snapshot of the load. ``num_steps`` is the progress counter: it grows with every batch.

    ``slowest_item_s`` is the time of the slowest batch, by its number of items; 0: unknown.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    slowest_item_s: float = 0.0
    num_items: int = 0  # encoded, ever
    num_failed: int = 0

    def plus(self, **counts: int) -> EncoderStats:
        """These statistics with ``counts`` added, by name."""
        return replace(self, **{name: getattr(self, name) + count for name, count in counts.items()})


@dataclass(frozen=True)
class EncodedState:
    """An item that its encoder keeps: the state by which an engine can take it, and how long encoding took."""

    state: bytes = field(repr=False)
    times: EncodeTimes


class MediaSizer(Protocol):
    """Sizes media files. All methods are called on the event loop; none blocks it."""

    @property
    def capabilities(self) -> EncoderCapabilities:
        """What it can do; an encoder's are valid after ``start``."""
        ...

    async def size(self, file: MediaFile) -> ItemSize:
        """The tokens that ``file`` fills, from its header only.

        Raises:
            InvalidMediaError, MediaTooLargeError: it is damaged, of another format, or the model does not take it;
                ``field`` is ``file``.
        """
        ...


class StateEncoder(Protocol):
    """Encodes items and keeps them itself, each for one taker of the same engine on the same host."""

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """The kinds of items that are encoded so; all others go into the pool. Valid after ``start``."""
        ...

    async def encode(self, holder: int, file: MediaFile) -> EncodedState:
        """Encode ``file``, and keep it for ``holder``, a number never used before, until ``release``.

        If this raises or is cancelled, nothing is kept.

        Raises:
            InvalidMediaError: the file does not hold what its header says; ``field`` is ``file``.
            EngineError: its embeddings differ from the announced size, or the encoder died.
        """
        ...

    def release(self, holder: int, *, was_taken: bool) -> None:
        """Free what ``holder`` has, taken or not. Unknown holders are ignored."""
        ...


class MediaEncoder(MediaSizer, Protocol):
    """Turns media into embeddings. All methods are called on the event loop; none blocks it."""

    @property
    def states(self) -> StateEncoder | None:
        """Encodes the items that do not go into the pool; ``None``: all do. Valid after ``start``."""
        ...

    @property
    def embeddings(self) -> EmbeddingMemory:
        """The pool that it writes to; valid after ``start``."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it has died; it encodes nothing more."""
        ...

    async def start(self) -> None:
        """Load and warm up. Raises ``ServingError`` naming what is wrong."""
        ...

    async def encode(self, file: MediaFile, block_ids: Sequence[int]) -> EncodeTimes:
        """Write the embeddings of ``file`` into those blocks, which hold ``size(file).num_tokens`` tokens.

        Concurrent calls are batched. However it ends, cancelled too, nothing writes to the blocks after that.

        Raises:
            InvalidMediaError: the file does not hold what its header says; ``field`` is ``file``.
            MediaTooLargeError: the device has no room for it even alone; ``field`` is ``file``.
            EngineError: it died.
        """
        ...

    def stats(self) -> EncoderStats:
        """The load now. May be called on any thread, also after ``close``."""
        ...

    async def close(self) -> None:
        """Free everything; waiting calls fail with ``WorkerUnavailableError``. May be called twice."""
        ...
