"""The pool of media embeddings as tensors: encoders and pullers write it, steps read it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quartet.transfer.base import EmbeddingMemory


class EmbeddingPoolView:
    """``[num_blocks, block_size, hidden_size]`` over an ``EmbeddingMemory``, in host memory.

    One memory may have several views. The owner of the pool makes sure that no block is written while it is read.
    """

    def __init__(self, memory: EmbeddingMemory) -> None:
        """View ``memory`` without a copy."""
        self.layout = memory.layout
        dtype: torch.dtype = getattr(torch, memory.layout.dtype)
        rows = torch.frombuffer(memory.memory.view, dtype=dtype)
        self._rows = rows.view(memory.memory.num_blocks * memory.layout.block_size, memory.layout.hidden_size)

    def read(self, block_ids: Sequence[int], first: int, num_tokens: int) -> torch.Tensor:
        """Tokens ``[first, first + num_tokens)`` of the item in ``block_ids``: ``[num_tokens, hidden_size]``, a copy.

        Raises:
            IndexError: the item's blocks hold fewer tokens.
        """
        return self._rows[self._slots(block_ids, first, num_tokens)]

    def write(self, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        """Put an item's ``rows``, ``[num_tokens, hidden_size]`` of any dtype and device, into its blocks.

        Raises:
            IndexError: the blocks hold fewer tokens; nothing was written.
        """
        self._rows[self._slots(block_ids, 0, rows.shape[0])] = rows.detach().to(self._rows.device, self._rows.dtype)

    def _slots(self, block_ids: Sequence[int], first: int, num_tokens: int) -> torch.Tensor:
        tokens = np.arange(first, first + num_tokens)
        blocks = np.asarray(block_ids, dtype=np.int64)[tokens // self.layout.block_size]
        return torch.from_numpy(blocks * self.layout.block_size + tokens % self.layout.block_size)
