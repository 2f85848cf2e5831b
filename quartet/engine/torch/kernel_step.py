"""Steps whose attention is kernels': what they need on the device, and the ``Step`` that models get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch

from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.runner import ScheduledChunk
from quartet.engine.torch.attention import LayerAttention
from quartet.engine.torch.batch import FlatBatch, MediaRows, SampledRows, media_rows
from quartet.engine.torch.inputs import HostInputs, SequenceTables, Staging, Tokens, lay_out
from quartet.engine.torch.kernels import attention as kernels
from quartet.engine.torch.kernels.attention import BlockTables, Chunks, Scores
from quartet.engine.torch.kernels.gather import Copies, Room
from quartet.engine.torch.pool import KeysValues, KvPool

# Where there is no GPU, kernels are interpreted: as on a Hopper.
_NUM_SMS = 132

# Keys that are read by so many queries are worth a copy, as measured.
_MIN_COPIED_QUERIES = 180
# A longer step's keys and values, of one layer, are read where they are.
_MAX_COPIED_SIZE_BYTES = 256 << 20

_NO_INTS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class Singles:
    """Rows that are a sequence each: row ``i`` is the last token of sequence ``i`` of ``tables``.

    Attributes:
        num_splits: in how many parts their keys are split.
    """

    tables: BlockTables
    num_rows: int
    num_splits: int


@dataclass(frozen=True)
class KernelStep:
    """A ``Step`` on the device.

    Attributes:
        pool: where keys and values are.
        batch: without what ``PagedStep`` needs only.
        slots: ``[T]`` int64: where each token's keys and values go; -1: nowhere.
        singles: the first rows of the step.
        chunks: the rows after them; ``None``: there are none. Their sequences are numbered by ``singles.tables``.
        sampled: the rows of ``batch.sampled``; ``None``: it is ``None``, too.
    """

    pool: KvPool
    batch: FlatBatch
    slots: torch.Tensor
    singles: Singles
    chunks: Chunks | None = None
    sampled: Singles | None = None
    layers: list[LayerAttention] = field(default_factory=list)

    def store_and_attend(self, layer: LayerAttention, fresh: KeysValues, query: torch.Tensor) -> torch.Tensor:
        """As ``Step`` says."""
        key, value = (rows_of(part) for part in (fresh.keys, fresh.values))
        kernels.store_kv(key, value, self.slots, self.pool.tensor, layer.index)
        output = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
        self.attend(layer, query, fresh, output)
        return output

    def store(self, layer: LayerAttention, keys_values: torch.Tensor) -> None:
        """As ``Step`` says."""
        kernels.store_kv(keys_values[0], keys_values[1], self.slots, self.pool.tensor, layer.index)

    def attend(
        self,
        layer: LayerAttention,
        query: torch.Tensor,
        fresh: KeysValues,
        output: torch.Tensor,
        *,
        is_sampled: bool = False,
    ) -> None:
        """As ``Step`` says; ``fresh`` is read from the pool."""
        self.attend_rows(layer, rows_of(query), output, is_sampled=is_sampled)

    def attend_rows(
        self, layer: LayerAttention, query: torch.Tensor, output: torch.Tensor, *, is_sampled: bool = False
    ) -> None:
        """As ``attend``, of queries ``[T, H, D]``, whose last dimension is contiguous."""
        sampled = self.sampled if is_sampled else None
        singles = self.singles if sampled is None else sampled
        scores = Scores(layer.scale, layer.window, layer.softcap, layer.sinks)
        first = slice(0, singles.num_rows)
        kernels.attend_decode(
            query[first], output[first], self.pool.tensor, layer.index, singles.tables, scores, singles.num_splits
        )
        if self.chunks is not None and sampled is None:
            kernels.attend_chunks(query, output, self.pool.tensor, layer.index, singles.tables, self.chunks, scores)


def rows_of(heads: torch.Tensor) -> torch.Tensor:
    """``[1, heads, T, D]`` as ``[T, heads, D]``, whose last dimension is contiguous."""
    rows = heads[0].transpose(0, 1)
    return rows if rows.stride(2) == 1 else rows.contiguous()


#: Writes a step's KV to the pool; logits ``[R, V]`` of the rows that sample.
Compute: TypeAlias = Callable[[KernelStep], torch.Tensor]


class StepBuilder:
    """Makes the steps of one pool, by way of one stream."""

    def __init__(self, pool: KvPool, num_heads: int, *, copies: bool = True) -> None:
        """``num_heads`` are the query heads of a layer. ``copies``: chunks may attend to copies of keys and values."""
        self.pool = pool
        self.device = pool.tensor.device
        self.staging = Staging(self.device)
        self._tables = SequenceTables()
        self._tile_queries = kernels.queries_per_tile(num_heads, pool.tensor)
        self._copied_span = (kernels.copied_span(num_heads, pool.tensor) or 0) if copies else 0
        self._room = Room(pool.tensor, _MAX_COPIED_SIZE_BYTES)
        is_cuda = self.device.type == "cuda"
        self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count if is_cuda else _NUM_SMS

    def lay_out(self, chunks: Sequence[ScheduledChunk]) -> HostInputs:
        """The inputs of these chunks, on the host."""
        return lay_out([self._tables.tokens_of(chunk) for chunk in chunks], self.pool.layout.block_size)

    def num_splits(self, num_rows: int, longest: int) -> int:
        """In how many parts the keys of ``num_rows`` single queries are split."""
        return kernels.num_splits(max(num_rows, 1), self.pool.layout.num_kv_heads, longest, self._num_sms)

    def media(
        self, inputs: HostInputs, chunks: Sequence[ScheduledChunk], embeddings: EmbeddingPoolView | None
    ) -> MediaRows | None:
        """The media of ``chunks``, whose inputs these are; ``None``: they are all text."""
        if embeddings is None:
            return None
        ordered = [chunks[i] for i in inputs.order]
        return media_rows(ordered, inputs.query_begins[:-1].tolist(), embeddings, self.device)

    @property
    def can_copy(self) -> bool:
        """Whether chunks may attend to copies of their keys and values."""
        return bool(self._copied_span)

    def make(self, inputs: HostInputs, media: MediaRows | None = None, *, copies: bool | None = None) -> KernelStep:
        """The step of these inputs, on the device. Its tensors are its own.

        ``copies``: whether chunks attend to copies of their keys and values; ``None``: if that takes less.
        """
        tile_seqs, tile_begins = inputs.tiles(self._tile_queries)
        num_splits = kernels.num_chunk_splits(
            max(len(tile_seqs), 1), self.pool.layout.num_kv_heads, inputs.longest, self._num_sms
        )
        span = self._span(inputs, num_splits) if copies is None else self._copied_span * copies
        span_seqs, span_begins = inputs.spans(span) if span else (_NO_INTS, _NO_INTS)
        sampled = inputs.last_rows
        seqs = inputs.seqs_of(sampled)
        parts = self.staging.send(
            (
                inputs.token_ids,
                inputs.positions,
                inputs.slots,
                sampled,
                np.arange(len(sampled)),
                inputs.contexts,
                inputs.table_begins,
                inputs.blocks,
                inputs.query_begins,
                tile_seqs,
                tile_begins,
                span_seqs,
                span_begins,
                np.searchsorted(span_seqs, np.arange(len(inputs.contexts))).astype(np.int32) * span,
                inputs.positions[sampled].astype(np.int32),
                inputs.table_begins[seqs],
            )
        )
        token_ids, positions, slots, last_rows, order, contexts, begins, blocks, query_begins, *others = parts
        # Rows that are reported attend with their chunk, as in the layers before.
        has_all = inputs.num_reported > 0 or len(sampled) == len(inputs.token_ids)
        return KernelStep(
            pool=self.pool,
            batch=FlatBatch(
                token_ids=token_ids[None],
                positions=positions[None],
                slots=(),
                last_rows=last_rows,
                segments=(),
                sampled=None if has_all else SampledRows(last_rows, (), order),
                media=media,
            ),
            slots=slots,
            singles=self._singles(BlockTables(blocks, begins, contexts), inputs.num_singles, inputs.longest),
            chunks=self._chunks(inputs, num_splits, query_begins, others[:5], span) if len(tile_seqs) else None,
            sampled=None
            if has_all
            else self._singles(BlockTables(blocks, others[6], others[5]), len(sampled), inputs.longest),
        )

    def _span(self, inputs: HostInputs, num_splits: int) -> int:
        """``Copies.span``, if attending to copies takes less; else 0."""
        span = self._copied_span
        if not span or num_splits > 1 or inputs.num_singles == len(inputs.contexts):
            return 0
        lengths = inputs.chunk_lengths.astype(np.int64)
        contexts = inputs.contexts[inputs.num_singles :]
        # Each of a chunk's own tokens is read by half of its queries.
        num_reads = (lengths - contexts) * (lengths + contexts) // 2
        is_worth_it = num_reads.sum() >= _MIN_COPIED_QUERIES * lengths.sum()
        return span if is_worth_it and self._room.holds(int((-(-lengths // span)).sum()) * span) else 0

    def _chunks(
        self, inputs: HostInputs, num_splits: int, query_begins: torch.Tensor, parts: Sequence[torch.Tensor], span: int
    ) -> Chunks:
        tile_seqs, tile_begins, span_seqs, span_begins, copy_begins = parts
        copies = Copies(self._room, span, copy_begins, span_seqs, span_begins) if span else None
        return Chunks(self._tile_queries, inputs.num_singles, num_splits, query_begins, tile_seqs, tile_begins, copies)

    def _singles(self, tables: BlockTables, num_rows: int, longest: int) -> Singles:
        return Singles(tables, num_rows, self.num_splits(num_rows, longest))


def probe_logits(
    builder: StepBuilder, compute: Compute, token_ids: Sequence[int], num_splits: int = 1, *, copies: bool = False
) -> torch.Tensor:
    """Logits of all these tokens of one sequence in block 0: of a chunk, and of the last one as a decoding sequence.

    There are at most as many as a block has. ``copies``: the chunk attends to copies of keys and values.
    """
    block_0 = np.zeros(1, dtype=np.int32)
    logits = []
    for first, end in ((0, len(token_ids) - 1), (len(token_ids) - 1, len(token_ids))):
        if first < end:
            inputs = lay_out([Tokens(token_ids[first:end], first, block_0, True)], builder.pool.layout.block_size)
            step = builder.make(inputs, copies=copies)
            everything = torch.arange(end - first, device=builder.device)
            batch = FlatBatch(step.batch.token_ids, step.batch.positions, (), everything, ())
            singles = replace(step.singles, num_splits=num_splits)
            chunks = step.chunks and replace(step.chunks, num_splits=min(num_splits, kernels.MAX_CHUNK_SPLITS))
            logits.append(compute(replace(step, batch=batch, singles=singles, chunks=chunks, sampled=None)))
    return torch.cat(logits)
