"""The block pool as tensors: block-major, so that one block is one contiguous piece to move."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quartet.engine.torch.buffers import Buffers
from quartet.kvcache.layout import KvLayout
from quartet.transfer.base import PoolMemory


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of ``n`` sequences, each ``[n, num_kv_heads, num_tokens, head_dim]``, strided."""

    keys: torch.Tensor
    values: torch.Tensor


class KvPool:
    """``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`` on one device.

    On the CPU the tensor lies in a ``PoolMemory``, which transfers read and write.

    Attributes:
        memory: the pool's bytes; ``None`` off the CPU.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """Reserve the pool, zeroed: a masked position must not hold what is no number."""
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self.memory: PoolMemory | None = None
        if device.type == "cpu":
            self.memory = PoolMemory(num_blocks, layout.piece_size_bytes)
            self.tensor = torch.frombuffer(self.memory.view, dtype=dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        # Row (block * num_layers + layer) * 2 holds a block's keys of a layer, the next one its values.
        self._blocks = self.tensor.view(num_blocks * layout.num_layers * 2, -1)
        self._tokens = self.tensor.view(-1, layout.num_kv_heads, layout.head_dim)
        self._buffers = Buffers(self.tensor)

    def write(self, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store a layer's new tokens.

        Args:
            slots: ``[2, T]`` int64: where their keys go, and their values, as rows of ``[num_kv_heads, head_dim]``.
            keys_values: ``[2, T, num_kv_heads, head_dim]``.
        """
        self._tokens[slots] = keys_values

    def gather(self, rows: torch.Tensor, num_seqs: int) -> KeysValues:
        """Read whole blocks, into memory that the next call writes over.

        Args:
            rows: ``[2 * num_seqs * num_blocks]`` int64: pool rows of all keys, sequence after sequence, then values.
            num_seqs: how many sequences, of as many blocks each.
        """
        blocks = self._buffers.take("blocks", rows.shape[0], self._blocks.shape[1])
        torch.index_select(self._blocks, 0, rows, out=blocks)
        both = blocks.view(2, num_seqs, -1, self.layout.num_kv_heads, self.layout.head_dim).transpose(2, 3)
        return KeysValues(both[0], both[1])

    def close(self) -> None:
        """Give the memory back."""
        if self.memory is not None:
            self.memory.close()
