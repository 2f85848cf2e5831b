"""The block pool as tensors: block-major, so that one block is one contiguous piece to move."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
        self._tokens = self.tensor.view(self._blocks.shape[0] * layout.block_size, -1)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens.

        Args:
            layer: which one's.
            slots: ``[T]`` int64: row of each token's keys in layer 0: ``block * num_layers * 2 * block_size + offset``.
            keys: ``[num_kv_heads, T, head_dim]``.
            values: the same.
        """
        block_size = self.layout.block_size
        key_rows = slots + layer * 2 * block_size
        self._tokens.index_copy_(0, key_rows, _by_token(keys))
        self._tokens.index_copy_(0, key_rows + block_size, _by_token(values))

    def gather(self, layer: int, first_rows: torch.Tensor, num_seqs: int) -> KeysValues:
        """Read whole blocks.

        Args:
            layer: which one's.
            first_rows: ``[num_seqs * num_blocks]`` int64: row of each block's layer 0, sequence after sequence.
            num_seqs: how many sequences, of as many blocks each.
        """
        key_rows = first_rows + 2 * layer
        return KeysValues(self._read(key_rows, num_seqs), self._read(key_rows + 1, num_seqs))

    def close(self) -> None:
        """Give the memory back."""
        if self.memory is not None:
            self.memory.close()

    def _read(self, rows: torch.Tensor, num_seqs: int) -> torch.Tensor:
        blocks = self._blocks.index_select(0, rows)
        return blocks.view(num_seqs, -1, self.layout.num_kv_heads, self.layout.head_dim).transpose(1, 2)


def _by_token(states: torch.Tensor) -> torch.Tensor:
    return states.transpose(0, 1).reshape(states.shape[1], -1)
