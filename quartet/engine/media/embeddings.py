"""The pool of media embeddings as tensors: encoders and pullers write it, steps read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from quartet.transfer.base import BlockMemory, EmbeddingMemory, PoolMemory
from quartet.transfer.cuda.memory import DeviceMemory

#: Places of tokens in a pool, ``[num_tokens]`` int64: block times block size, and the place in the block.
Slots: TypeAlias = npt.NDArray[np.int64]


class EmbeddingPoolView:
    """``[num_blocks, block_size, hidden_size]`` over an ``EmbeddingMemory``, where that is: on the CPU or a GPU.

    One memory may have several views. The owner of the pool makes sure that no block is written while it is read.
    """

    def __init__(self, memory: EmbeddingMemory) -> None:
        """View ``memory`` without a copy."""
        self.layout = memory.layout
        dtype: torch.dtype = getattr(torch, memory.layout.dtype)
        num_rows = memory.memory.num_blocks * memory.layout.block_size
        self._rows = _bytes_of(memory.memory).view(dtype).view(num_rows, memory.layout.hidden_size)

    def read(self, block_ids: Sequence[int], first: int, num_tokens: int) -> torch.Tensor:
        """Tokens ``[first, first + num_tokens)`` of the item in ``block_ids``: ``[num_tokens, hidden_size]``, a copy.

        Raises:
            IndexError: the item's blocks hold fewer tokens.
        """
        return self.take(self.slots(block_ids, first, num_tokens))

    def slots(self, block_ids: Sequence[int], first: int, num_tokens: int) -> Slots:
        """Where those tokens are, for ``take``. Raises as ``read`` does."""
        tokens = np.arange(first, first + num_tokens)
        blocks = np.asarray(block_ids, dtype=np.int64)[tokens // self.layout.block_size]
        return blocks * self.layout.block_size + tokens % self.layout.block_size

    def take(self, slots: Slots) -> torch.Tensor:
        """The tokens at ``slots``, of one item or several: ``[len(slots), hidden_size]``, a copy on the pool's device.

        On a GPU the current stream makes it, so that it is done when the step is.
        """
        return self._rows.index_select(0, self._index(slots))

    def write(self, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        """Put an item's ``rows``, ``[num_tokens, hidden_size]`` of any dtype and device, into its blocks.

        They are there when this returns, also on a GPU, where transfers read them on streams of their own.

        Raises:
            IndexError: the blocks hold fewer tokens; nothing was written.
        """
        index = self._index(self.slots(block_ids, 0, rows.shape[0]))
        self._rows[index] = rows.detach().to(self._rows.device, self._rows.dtype)
        if self._rows.device.type == "cuda":
            torch.cuda.current_stream(self._rows.device).synchronize()

    def _index(self, slots: Slots) -> torch.Tensor:
        return torch.from_numpy(slots).to(self._rows.device)


def _bytes_of(memory: BlockMemory) -> torch.Tensor:
    """All bytes of a pool as a tensor, not a copy."""
    if isinstance(memory, DeviceMemory):
        return torch.as_tensor(memory, device=torch.device("cuda", memory.device))
    assert isinstance(memory, PoolMemory), "a pool is in host memory or on a GPU"
    return torch.frombuffer(memory.view, dtype=torch.uint8)
