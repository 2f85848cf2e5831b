"""The block pool as tensors: block-major, so that one block is one contiguous piece to move.

``num_pool_blocks`` says how many blocks a pool gets; ``Buffers`` keeps memory for intermediate results between steps.
``reserve_embeddings`` makes the pool of media embeddings, which ``quartet.engine.media.embeddings`` shows as a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quartet.engine.media_config import make_embedding_memory
from quartet.engine.torch.config import TorchEngineConfig
from quartet.errors import InvalidRequestError
from quartet.kvcache.layout import EmbeddingLayout, KvLayout
from quartet.transfer.base import BlockMemory, EmbeddingMemory, PoolMemory, TransferWay
from quartet.transfer.cuda.driver import CudaError, cuda_driver
from quartet.transfer.cuda.memory import DeviceMemory

_LOG = logging.getLogger(__name__)


class KvPool:
    """``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`` on one device.

    The tensor lies in a ``PoolMemory`` or, on a GPU, in a ``DeviceMemory``, which transfers read and write.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """Reserve the pool, zeroed: a masked position must not hold NaN.

        Raises:
            InvalidRequestError: field ``device``: the GPU's driver can't be called, or has no room; the message says.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self._memory: PoolMemory | DeviceMemory
        if device.type == "cpu":
            self._memory = PoolMemory(num_blocks, layout.piece_size_bytes)
            self.tensor = torch.frombuffer(self._memory.view, dtype=dtype).view(shape)
        else:
            self._memory = _reserve("KV blocks", device, num_blocks, layout.piece_size_bytes)
            self._memory.compute_stream = torch.cuda.current_stream(device).cuda_stream
            self.tensor = torch.as_tensor(self._memory, device=device).view(dtype).view(shape).zero_()
        # Row (block * num_layers + layer) * 2 holds a block's keys of a layer, the next one its values.
        self._blocks = self.tensor.view(num_blocks * layout.num_layers * 2, -1)
        self._tokens = self.tensor.view(-1, layout.num_kv_heads, layout.head_dim)
        self._buffers = Buffers(self.tensor)

    @property
    def memory(self) -> BlockMemory | None:
        """The pool's bytes; ``None``: no transfer reaches them."""
        return self._memory if self._memory.ways else None

    def write(self, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store a layer's new tokens.

        Args:
            slots: ``[2, T]`` int64: where their keys go, and their values, as rows of ``[num_kv_heads, head_dim]``.
            keys_values: ``[2, T, num_kv_heads, head_dim]``.
        """
        self._tokens[slots] = keys_values

    def gather(self, rows: torch.Tensor, num_seqs: int) -> KeysValues:
        """Read whole blocks into memory that the next call may overwrite.

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
        self._memory.close()


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of ``n`` sequences, each ``[n, num_kv_heads, num_tokens, head_dim]``, strided."""

    keys: torch.Tensor
    values: torch.Tensor


def reserve_embeddings(layout: EmbeddingLayout, num_blocks: int, device: torch.device) -> EmbeddingMemory:
    """A pool of media embeddings, zeroed, on ``device``.

    A GPU whose driver pins no host memory could give embeddings to some workers only, or take them from some. There the
    pool is in host memory, which every worker reaches.

    Raises:
        InvalidRequestError: field ``device``: the GPU's driver can't be called, or has no room; the message says.
    """
    if device.type == "cpu":
        return make_embedding_memory(layout, num_blocks)
    memory = _reserve("media embeddings (num_embedding_blocks)", device, num_blocks, layout.piece_size_bytes)
    if TransferWay.GRPC not in memory.ways:
        memory.close()
        _LOG.warning("media embeddings are kept in host memory: all workers can be given them from there")
        return make_embedding_memory(layout, num_blocks)
    torch.as_tensor(memory, device=device).zero_()
    torch.cuda.current_stream(device).synchronize()  # transfers write on streams of their own
    return EmbeddingMemory(layout, memory)


def _reserve(what: str, device: torch.device, num_blocks: int, piece_size_bytes: int) -> DeviceMemory:
    torch.cuda.empty_cache()  # PyTorch frees what it caches for its own allocations only
    try:
        return DeviceMemory(cuda_driver(), device.index, num_blocks, piece_size_bytes)
    except CudaError as error:
        size = f"{num_blocks * piece_size_bytes >> 20} MiB"
        raise InvalidRequestError(f"the pool of {what} on {device}, {size}: {error}", field="device") from error


def num_pool_blocks(
    config: TorchEngineConfig,
    layout: KvLayout,
    free_size_bytes: Callable[[], int] | None = None,
    reserved_size_bytes: int = 0,
) -> int:
    """Blocks of the pool of ``config``.

    It divides the memory that is still free: call it once weights and embeddings have theirs.

    Args:
        config: gives the number of blocks, or the share of free memory.
        layout: of one block.
        free_size_bytes: returns the free bytes on the device; ``None``: ask the device.
        reserved_size_bytes: bytes of them that something else takes.

    Raises:
        InvalidRequestError: field ``free_gpu_memory_fraction``: the share holds no block.
    """
    fraction = config.free_gpu_memory_fraction
    if fraction is None:
        assert config.num_blocks is not None, "the configuration has one of the two"
        return config.num_blocks
    free = _cuda_free_size_bytes(config.device) if free_size_bytes is None else free_size_bytes()
    num_blocks = int(max(0, free - reserved_size_bytes) * fraction) // layout.piece_size_bytes
    memory = f"{fraction:g} of the {free >> 20} MiB that are free on {config.device}"
    if reserved_size_bytes:
        memory += f", but for {reserved_size_bytes >> 20} MiB that CUDA graphs and sampling take,"
    if num_blocks < 1:
        message = f"{memory} hold no block of {layout.piece_size_bytes} bytes"
        if reserved_size_bytes:
            message += "; a lower engine.max_batch_size or engine.cuda_graph_max_batch_size leaves more"
        raise InvalidRequestError(message, field="free_gpu_memory_fraction")
    _LOG.info("%d KV blocks take %s", num_blocks, memory.removesuffix(","))
    return num_blocks


class Buffers:
    """Named buffers that grow to the largest size asked for, kept from step to step on a CPU.

    A large tensor that a step allocates and frees goes back to the system, and every page of the next one is a page
    fault (measured on a CPU: copying 2 MB into it took 2100 us instead of 120). On a GPU, PyTorch keeps what is freed,
    and a CUDA graph would go on using a buffer that was replaced by a larger one: buffers are new each time.
    """

    def __init__(self, like: torch.Tensor) -> None:
        """Buffers of the dtype and on the device of ``like``."""
        self._like = like
        self._is_kept = like.device.type == "cpu"
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Memory of this shape, uninitialised; on a CPU the same as at the last call with this name."""
        if not self._is_kept:
            return self._like.new_empty(shape)
        num_elements = torch.Size(shape).numel()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_elements:
            buffer = self._buffers[name] = self._like.new_empty(num_elements)
        return buffer[:num_elements].view(shape)


def _cuda_free_size_bytes(device: str) -> int:
    # Memory that loading needed and PyTorch caches is free, too.
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return free
