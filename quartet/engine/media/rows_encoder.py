"""A ``MediaEncoder`` for embeddings that clients computed themselves: it needs no vision tower and no GPU.

The threads that read files import torch, which takes seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quartet.engine.encoder import EncoderCapabilities, EncoderStats, EncodeTimes, ItemSize
from quartet.errors import EngineError, InvalidMediaError, ServingError, WorkerUnavailableError
from quartet.media.items import MediaFile, MediaKind
from quartet.transfer.base import EmbeddingMemory

if TYPE_CHECKING:
    import torch

    from quartet.engine.media.rows_file import RowsHeader


@dataclass(frozen=True)
class RowsReader:
    """Reads files of embeddings. May be called on any thread.

    Attributes:
        max_item_tokens: most tokens of one item.
    """

    hidden_size: int
    max_item_tokens: int

    def size(self, file: MediaFile) -> ItemSize:
        """The tokens that ``file`` fills. Raises ``InvalidMediaError`` or ``MediaTooLargeError``, field ``file``."""
        return ItemSize(self._header(file).num_tokens, None)

    def write(self, file: MediaFile, embeddings: EmbeddingMemory, block_ids: Sequence[int]) -> None:
        """Write ``file`` to those blocks.

        Raises:
            InvalidMediaError: field ``file``; it is malformed, or fills another number of blocks.
            MediaTooLargeError: field ``file``.
        """
        from quartet.engine.media.embeddings import EmbeddingPoolView

        rows = self.read(file, embeddings.layout.dtype)
        check_blocks(len(rows), embeddings.layout.block_size, len(block_ids))
        EmbeddingPoolView(embeddings).write(block_ids, rows)

    def read(self, file: MediaFile, dtype: str) -> torch.Tensor:
        """The tensor ``[num_tokens, hidden_size]`` of ``file``. Raises as ``size`` does."""
        from quartet.engine.media.rows_file import read_rows

        return read_rows(file.data, self._header(file), dtype)

    def _header(self, file: MediaFile) -> RowsHeader:
        from quartet.engine.media.rows_file import read_rows_header

        return read_rows_header(file.data, hidden_size=self.hidden_size, max_item_tokens=self.max_item_tokens)


def check_blocks(num_tokens: int, block_size: int, num_blocks: int) -> None:
    """Raise ``InvalidMediaError``, field ``file``, unless an item of ``num_tokens`` fills exactly ``num_blocks``."""
    if -(-num_tokens // block_size) != num_blocks:
        message = f"the file fills {num_tokens} tokens, and {num_blocks} blocks were set aside for it"
        raise InvalidMediaError(message, field="file")


@dataclass(frozen=True)
class RowsParts:
    """The pool that embeddings are written to, and the encoder's capabilities."""

    capabilities: EncoderCapabilities
    embeddings: EmbeddingMemory


class RowsEncoder:
    """See ``MediaEncoder``."""

    def __init__(self, make: Callable[[], RowsParts]) -> None:
        """Does nothing yet; ``start`` calls ``make`` on a thread, and ``close`` closes the pool that it makes."""
        self._make = make
        self._parts: RowsParts | None = None
        self._stats = EncoderStats()
        self._is_closed = False

    @property
    def capabilities(self) -> EncoderCapabilities:
        """See ``MediaEncoder``."""
        return self._started().capabilities

    @property
    def embeddings(self) -> EmbeddingMemory:
        """See ``MediaEncoder``."""
        return self._started().embeddings

    @property
    def states(self) -> None:
        """None: all goes into the pool."""

    @property
    def is_alive(self) -> bool:
        """Always true: it has no thread that could die."""
        return True

    async def start(self) -> None:
        """Make the pool, and import torch, so that the first item does not wait for it. Raises what ``make`` does."""
        self._parts = await asyncio.to_thread(self._make)
        await asyncio.to_thread(_import_torch)

    async def size(self, file: MediaFile) -> ItemSize:
        """See ``MediaEncoder``."""
        return await asyncio.to_thread(self._reader().size, file)

    async def encode(self, file: MediaFile, block_ids: Sequence[int]) -> EncodeTimes:
        """See ``MediaEncoder``."""
        if self._is_closed:
            raise WorkerUnavailableError("the encoder is closed")
        assert file.kind is MediaKind.EMBEDDINGS, "its capabilities say so"
        began = time.monotonic()
        self._stats = self._stats.plus(num_running=1)
        is_written = False
        try:
            await _to_its_end(partial(self._reader().write, file, self.embeddings, tuple(block_ids)))
            is_written = True
        except ServingError:
            raise
        except Exception as error:  # reading a client's bytes may raise anything; other files are not affected
            raise EngineError(f"the file could not be read: {type(error).__name__}") from error
        finally:
            self._stats = self._stats.plus(
                num_running=-1, num_steps=is_written, num_items=is_written, num_failed=not is_written
            )
        return EncodeTimes(0.0, time.monotonic() - began)

    def stats(self) -> EncoderStats:
        """See ``MediaEncoder``."""
        return self._stats

    async def close(self) -> None:
        """See ``MediaEncoder``."""
        self._is_closed = True
        if self._parts is not None:
            self._parts.embeddings.memory.close()

    def _started(self) -> RowsParts:
        if self._parts is None:
            raise WorkerUnavailableError("the encoder is not running")
        return self._parts

    def _reader(self) -> RowsReader:
        parts = self._started()
        return RowsReader(parts.embeddings.layout.hidden_size, parts.capabilities.max_item_tokens)


async def _to_its_end(call: partial[None]) -> None:
    """Run ``call`` on a thread; a cancelled caller also waits until it writes nothing more."""
    writing = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        while not writing.done():
            try:
                await asyncio.wait([writing])
            except asyncio.CancelledError:
                continue  # a second cancel waits too: afterwards another item gets the blocks
        if not writing.cancelled():
            writing.exception()  # retrieved, else asyncio logs that nothing did
        raise


def _import_torch() -> None:
    from quartet.engine.media import embeddings, rows_file

    del embeddings, rows_file
