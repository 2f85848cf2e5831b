"""What attention of one chunk of a prompt takes: as the engine does it, by blocks alone, and by PyTorch on copies.

The engine has one kernel, which reads keys and values in their blocks, or loads copies of them by TMA where that takes
less. PyTorch's flash attention reads copies, too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.runner import RunningRequest, ScheduledChunk
from quartet.engine.torch.attention import LayerAttention, PagedStep, Step
from quartet.engine.torch.batch import build_batch
from quartet.engine.torch.pool import KeysValues, KvPool
from quartet.kvcache.layout import KvLayout
from quartet.kvcache.sequence import Sequence as TokenSequence

# A GPU is kept busy for so long before each loop that the host has launched all of it: about 50 ms.
_NUM_BUSY_CYCLES = 100_000_000
_LAYER = 1
# Relative, and of the deviation of all results: both ways round to bfloat16 once or twice.
_TOLERANCE, _SHARE_OF_DEVIATION = 4e-2, 0.1


@dataclass(frozen=True, kw_only=True)
class ChunkCase:
    """Attention of one layer to one chunk.

    Attributes:
        context: tokens of the sequence before the chunk.
        is_copied: whether the engine copies.
        engine_us: microseconds by the engine's own way, copying included.
        paged_us: of the engine's kernel reading blocks.
        flash_us: of copying keys and values, and flash attention on them.
        ratio: ``engine_us`` over ``paged_us``.
    """

    num_tokens: int
    context: int
    is_copied: bool
    engine_us: float
    paged_us: float
    flash_us: float
    ratio: float


def measure_chunk(
    device: str, num_heads: int, layout: dict[str, Any], num_tokens: int, context: int, num_runs: int
) -> ChunkCase:
    """Time each way ``num_runs`` times, after three to warm up.

    Args:
        device: where.
        num_heads: query heads of the layer.
        layout: fields of the ``KvLayout`` of the pool, with all layers: one layer's blocks lie as far apart.
        num_tokens: of the chunk.
        context: tokens of the sequence before it.
        num_runs: of each way.

    Raises:
        RuntimeError: two ways yield different results.
    """
    on = torch.device(device)
    num_blocks = -(-(context + num_tokens) // layout["block_size"])
    pool = KvPool(KvLayout(model_fingerprint="", **layout), num_blocks, on)
    try:
        with torch.inference_mode():
            return _measure(_Attention(pool, num_heads, num_tokens, context), num_runs)
    finally:
        pool.close()


class _Attention:
    """One layer's queries, keys and values, and the ways."""

    def __init__(self, pool: KvPool, num_heads: int, num_tokens: int, context: int) -> None:
        torch.manual_seed(1)
        self.num_tokens, self.context = num_tokens, context
        self._pool = pool
        layout, like = pool.layout, pool.tensor
        pool.tensor[:, _LAYER].normal_()
        self._layer = LayerAttention(_LAYER, layout.head_dim**-0.5, None, None, None)
        rows = (like.new_empty(num_tokens, count, layout.head_dim).normal_() for count in _counts(num_heads, layout))
        # ``[1, heads, T, D]``, as a model's modules have them.
        self._query, *fresh = (part.transpose(0, 1)[None] for part in rows)
        self._fresh = KeysValues(*fresh)
        self._output = like.new_empty(num_tokens, num_heads, layout.head_dim)
        blocks = random.Random(1).sample(range(pool.num_blocks), pool.num_blocks)
        chunk = _chunk(blocks, layout.block_size, num_tokens, context)
        self._step, self._paged_step, self.is_copied = _steps(pool, num_heads, chunk)
        self._step.store_and_attend(self._layer, self._fresh, self._query)
        keys = (torch.tensor(blocks) * layout.num_layers + _LAYER) * 2
        self._rows = torch.cat((keys, keys + 1)).to(like.device)
        self._mask = causal_lower_right(num_tokens, context + num_tokens)

    @property
    def device(self) -> torch.device:
        return self._output.device

    def by_engine(self) -> torch.Tensor:
        self._step.attend(self._layer, self._query, self._fresh, self._output)
        return self._output

    def by_pages(self) -> torch.Tensor:
        self._paged_step.attend(self._layer, self._query, self._fresh, self._output)
        return self._output

    def gather(self) -> KeysValues:
        found = self._pool.gather(self._rows, 1)
        num_keys = self.context + self.num_tokens
        return KeysValues(found.keys[:, :, :num_keys], found.values[:, :, :num_keys])

    def by_flash(self) -> torch.Tensor:
        found, scale = self.gather(), self._layer.scale
        attended = functional.scaled_dot_product_attention(
            self._query, found.keys, found.values, attn_mask=self._mask, scale=scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


def _measure(attention: _Attention, num_runs: int) -> ChunkCase:
    is_cuda = attention.device.type == "cuda"
    ways = (attention.by_engine, attention.by_pages, attention.by_flash)
    with _flash_attention(attention.by_pages()):
        expected = attention.by_flash().float()
        for way in ways[:2]:
            found = way().float()
            if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=_SHARE_OF_DEVIATION * float(expected.std())):
                raise RuntimeError(f"{way.__name__} and by_flash differ by {float((found - expected).abs().max())}")
        time_us = _time_on_gpu if is_cuda else _time_on_cpu
        engine_us, paged_us, flash_us = (time_us(way, num_runs) for way in ways)
    return ChunkCase(
        num_tokens=attention.num_tokens,
        context=attention.context,
        is_copied=attention.is_copied,
        engine_us=engine_us,
        paged_us=paged_us,
        flash_us=flash_us,
        ratio=engine_us / paged_us,
    )


def _flash_attention(output: torch.Tensor) -> AbstractContextManager[None]:
    """No other kernel is used within it, where there is one for the dtype of ``output``."""
    has_it = output.device.type == "cuda" and output.dtype.itemsize == 2
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if has_it else nullcontext()


def _time_on_gpu(run: Callable[[], object], num_runs: int) -> float:
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(_NUM_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(num_runs):
        run()
    end.record()
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return 1e3 * elapsed_ms / num_runs


def _time_on_cpu(run: Callable[[], object], num_runs: int) -> float:
    began = time.perf_counter()
    for _ in range(num_runs):
        run()
    return 1e6 * (time.perf_counter() - began) / num_runs


def _counts(num_heads: int, layout: KvLayout) -> tuple[int, int, int]:
    return num_heads, layout.num_kv_heads, layout.num_kv_heads


def _steps(pool: KvPool, num_heads: int, chunk: ScheduledChunk) -> tuple[Step, Step, bool]:
    """The chunk as the engine has it there, and read in its blocks; whether the two differ."""
    if pool.tensor.device.type == "cpu":
        step = PagedStep(pool, build_batch([chunk], pool.layout, pool.tensor.device))
        return step, step, False
    from quartet.engine.torch.kernel_step import StepBuilder

    builder = StepBuilder(pool, num_heads)
    inputs = builder.lay_out([chunk])
    usual, paged = builder.make(inputs), builder.make(inputs, copies=False)
    return usual, paged, usual.chunks is not None and usual.chunks.copies is not None


def _chunk(blocks: list[int], block_size: int, num_tokens: int, context: int) -> ScheduledChunk:
    prompt = (16,) * (context + num_tokens)
    request = EngineRequest(id=1, kind=RequestKind.DECODE, generation=Generation(prompt_token_ids=prompt))
    seq = TokenSequence(prompt, block_size=block_size)
    seq.block_table = blocks
    return ScheduledChunk(RunningRequest(request=request, seq=seq), context, num_tokens, samples=True)
