"""Putting pieces that come in parts where they belong, believing nothing that the sender says."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.errors import TransferError
from quartet.transfer.base import PieceCopy, PoolMemory
from quartet.transfer.piece_frame import PiecePart


class PieceReceiver:
    """Takes the parts of the pieces asked for, each piece's in order and once, into their blocks."""

    def __init__(self, memory: PoolMemory, copies: Sequence[PieceCopy]) -> None:
        """Expect every piece of ``copies``, which differ."""
        self._memory = memory
        self._block_by_piece = {copy.piece: copy.block_id for copy in copies}
        self._num_received = dict.fromkeys(self._block_by_piece, 0)  # bytes
        self._num_missing_bytes = len(copies) * memory.piece_size_bytes

    @property
    def is_complete(self) -> bool:
        """Whether every byte has come."""
        return self._num_missing_bytes == 0

    def accept(self, part: PiecePart) -> None:
        """Write a part into its block.

        Raises:
            TransferError: nobody asked for it, or it is not the next one of its piece; nothing was written.
        """
        size = len(part.data)
        end = part.offset_bytes + size
        if part.offset_bytes != self._num_received.get(part.index) or size == 0:
            raise TransferError("the source sent a piece that was not asked for, or its parts out of order")
        if end > self._memory.piece_size_bytes:
            raise TransferError("the source sent more of a piece than a piece is long")
        self._memory.piece(self._block_by_piece[part.index])[part.offset_bytes : end] = part.data
        self._num_received[part.index] = end
        self._num_missing_bytes -= size
