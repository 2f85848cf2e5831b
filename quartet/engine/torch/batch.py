"""Lays out one step: the tokens of all chunks as one flat batch, the groups that attend together, and the media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.runner import ScheduledChunk
from quartet.engine.torch.copies import to_device
from quartet.kvcache.layout import KvLayout

_Ids = npt.NDArray[np.int64]

# Decode rows whose sequences differ by more than this factor in blocks are not padded to one length.
_MAX_PADDING = 1.5

_NUM_PROBE_TOKENS = 8

_NO_ROWS: _Ids = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class KvSpan:
    """The part of the KV cache that one segment attends to, under one window.

    Attributes:
        rows: for each layer, ``[2 * num_seqs * num_blocks]`` int64: pool rows to read (``KvPool.gather``), padded.
        first_token: tokens to cut off at the begin of those blocks.
        end_token: where to cut off the tokens at the end.
        mask: ``[num_seqs, 1, num_queries, num_tokens]`` of the model's dtype, to be added to scores: 0 where a query
            attends, else minus infinity; ``None``: it attends to all.
    """

    rows: Sequence[torch.Tensor]
    first_token: int
    end_token: int
    mask: torch.Tensor | None


@dataclass(eq=False)
class Segment:
    """Rows of the flat batch that attend in one call: decode rows of similar length, or one chunk of a prompt.

    Attributes:
        begin: its first row.
        num_queries: rows of each sequence.
        block_tables: one for each sequence.
        first_positions: ``[num_seqs]``: position of each sequence's first query.
    """

    begin: int
    num_queries: int
    block_tables: list[_Ids]
    first_positions: _Ids
    layout: KvLayout
    device: torch.device
    _spans: dict[int | None, KvSpan] = field(default_factory=dict)

    @property
    def num_seqs(self) -> int:
        """Sequences in it; 1 where ``num_queries`` is more than 1."""
        return len(self.block_tables)

    @property
    def end(self) -> int:
        """The row after its last one."""
        return self.begin + self.num_seqs * self.num_queries

    def is_whole(self, window: int | None) -> bool:
        """Whether it is a sequence from its begin on, none of whose tokens lies outside the window of a later one."""
        is_first = self.num_seqs == 1 and self.num_queries > 1 and self.first_positions[0] == 0
        return is_first and (window is None or self.num_queries <= window)

    def span(self, window: int | None) -> KvSpan:
        """The part of the cache that it attends to in layers with this window, made once for all of them."""
        if window not in self._spans:
            self._spans[window] = self._make_span(window)
        return self._spans[window]

    def _make_span(self, window: int | None) -> KvSpan:
        block_size = self.layout.block_size
        lengths = self.first_positions + self.num_queries
        # Blocks that lie before every query's window are not even read.
        first_tokens = np.zeros_like(lengths) if window is None else np.maximum(self.first_positions - window + 1, 0)
        first_blocks = first_tokens // block_size
        num_blocks = -(-lengths // block_size) - first_blocks
        rows = np.empty((self.num_seqs, num_blocks.max()), dtype=np.int64)
        for row, table, first, num in zip(rows, self.block_tables, first_blocks, num_blocks, strict=True):
            row[:num] = table[first : first + num]
            row[num:] = row[num - 1]  # padding repeats a block of the sequence: other requests' blocks are not read
        pool_rows = self._pool_rows(rows)
        starts = first_blocks * block_size
        if self.num_seqs > 1:
            end_token = rows.shape[1] * block_size
            return KvSpan(pool_rows, 0, end_token, self._mask(starts, end_token, window))
        first_token, end_token = int(first_tokens[0] - starts[0]), int(lengths[0] - starts[0])
        mask = self._mask(first_tokens, end_token - first_token, window) if self.num_queries > 1 else None
        return KvSpan(pool_rows, first_token, end_token, mask)

    def _pool_rows(self, block_ids: _Ids) -> Sequence[torch.Tensor]:
        num_layers = self.layout.num_layers
        of_keys = block_ids.ravel() * (num_layers * 2)
        of_both = np.concatenate((of_keys, of_keys + 1))
        return _tensor(of_both + np.arange(0, num_layers * 2, 2)[:, None], self.device).unbind()

    def _mask(self, starts: _Ids, num_tokens: int, window: int | None) -> torch.Tensor:
        queries = (self.first_positions[:, None] + np.arange(self.num_queries))[:, None, :, None]
        keys = (starts[:, None] + np.arange(num_tokens))[:, None, None, :]
        is_hidden = keys > queries
        if window is not None:
            is_hidden |= keys <= queries - window
        mask = torch.zeros(is_hidden.shape, dtype=getattr(torch, self.layout.dtype), device=self.device)
        return mask.masked_fill_(_tensor(is_hidden, self.device), float("-inf"))


@dataclass(frozen=True)
class SampledRows:
    """The rows whose logits are wanted, as a batch of their own: for others the last layer makes keys and values only.

    Attributes:
        rows: ``[S]`` int64: which rows of the whole step they are, from the shortest sequence on.
        segments: these ``S`` rows, numbered from 0, each with all its sequence's tokens before it.
        order: ``[S]`` int64: where among them each of ``FlatBatch.last_rows`` is.
    """

    rows: torch.Tensor
    segments: tuple[Segment, ...]
    order: torch.Tensor


@dataclass(frozen=True)
class MediaRows:
    """The media of one step.

    Attributes:
        rows: ``[M]`` int64: rows of the flat batch.
        embeddings: ``[M, hidden_size]``, of the model's dtype and on its device.
    """

    rows: torch.Tensor
    embeddings: torch.Tensor

    def put_into(self, hidden: torch.Tensor) -> None:
        """Replace these rows of ``hidden``, the embeddings of all tokens of the step, ``[T, hidden_size]``."""
        hidden.index_copy_(0, self.rows, self.embeddings)


@dataclass(frozen=True)
class FlatBatch:
    """One step's tokens.

    Attributes:
        token_ids: ``[1, T]`` int64.
        positions: ``[1, T]`` int64.
        slots: for each layer, ``[2, T]`` int64: where each token's keys go, and its values (``KvPool.write``); empty,
            as ``segments`` and those of ``sampled``, where kernels attend, which have inputs of their own.
        last_rows: ``[S]`` int64: row of the last token of each chunk that samples, in the order of the chunks; then the
            rows of tokens that chunks report, chunk by chunk.
        sampled: the same rows as a batch of their own; ``None``: they are all rows, or some chunk reports its own.
        media: replaces the embeddings of some tokens; ``None``: all is text.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: Sequence[torch.Tensor]
    last_rows: torch.Tensor
    segments: tuple[Segment, ...]
    sampled: SampledRows | None = None
    media: MediaRows | None = None


def build_batch(
    chunks: Sequence[ScheduledChunk],
    layout: KvLayout,
    device: torch.device,
    embeddings: EmbeddingPoolView | None = None,
    unread: torch.Tensor | None = None,
) -> FlatBatch:
    """Lay out a step: single tokens first, from the shortest sequence on, then the longer chunks.

    On a GPU nothing here waits for it.

    Args:
        chunks: the step's.
        layout: of the pool's blocks.
        device: of the tensors.
        embeddings: the pool with the chunks' media; ``None``: the model takes none.
        unread: ``[S]`` int64 on ``device``: tokens of the step before, which sequences have as unread tokens; ``None``:
            no sequence has any.
    """
    order = sorted(range(len(chunks)), key=lambda i: (chunks[i].num_tokens > 1, chunks[i].first_position))
    ordered = [chunks[i] for i in order]
    tables = [np.array(chunk.running.seq.block_table, dtype=np.int64) for chunk in ordered]
    first_positions = np.array([chunk.first_position for chunk in ordered], dtype=np.int64)
    sizes = np.array([chunk.num_tokens for chunk in ordered], dtype=np.int64)
    ends = np.cumsum(sizes)
    positions = np.arange(ends[-1]) + np.repeat(first_positions - ends + sizes, sizes)
    last_row_of = dict(zip(order, (ends - 1).tolist(), strict=True))
    last_rows = np.array([last_row_of[i] for i, chunk in enumerate(chunks) if chunk.samples], dtype=np.int64)
    reported = _reported_rows(chunks, last_row_of)
    token_ids = _tensor(_token_ids(ordered), device)
    if unread is not None:
        fill_unread(token_ids, ordered, ends - 1, unread)
    return FlatBatch(
        token_ids=token_ids[None],
        positions=_tensor(positions, device)[None],
        slots=_slots(_blocks_of_tokens(ordered, tables, positions, layout), positions, layout, device),
        last_rows=_tensor(np.concatenate((last_rows, reported)), device),
        segments=tuple(
            Segment(
                begin=int(ends[first] - sizes[first]),
                num_queries=int(sizes[first]),
                block_tables=tables[first:end],
                first_positions=first_positions[first:end],
                layout=layout,
                device=device,
            )
            for first, end in _group(first_positions, sizes, layout.block_size)
        ),
        sampled=None
        if len(reported) or len(last_rows) == ends[-1]
        else _sampled(ordered, tables, ends - 1, last_rows, layout, device),
        media=None if embeddings is None else media_rows(ordered, (ends - sizes).tolist(), embeddings, device),
    )


def fill_unread(
    token_ids: torch.Tensor, chunks: Sequence[ScheduledChunk], last_rows: _Ids, unread: torch.Tensor
) -> None:
    """Put the tokens that only the device knows into ``token_ids``: each is the last one of its chunk.

    Args:
        token_ids: ``[T]`` int64 on the device, changed in place.
        chunks: in the order of their rows.
        last_rows: the last row of each.
        unread: as for ``build_batch``.
    """
    pairs = [
        (row, chunk.running.unread_row)
        for row, chunk in zip(last_rows.tolist(), chunks, strict=True)
        if chunk.running.seq.num_unread_tokens
    ]
    if pairs:
        rows, sources = _tensor(np.array(pairs, dtype=np.int64).T.copy(), token_ids.device).unbind()
        token_ids.index_copy_(0, rows, unread.index_select(0, sources))


def probe_batch(layout: KvLayout, vocab_size: int, device: torch.device) -> FlatBatch:
    """A few tokens of one sequence in block 0, with the logits of all of them: to try a model out."""
    positions = np.arange(min(_NUM_PROBE_TOKENS, layout.block_size))
    block_0, first = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return FlatBatch(
        token_ids=_tensor((positions + 1) * vocab_size // (len(positions) + 1), device)[None],
        positions=_tensor(positions, device)[None],
        slots=_slots(np.zeros_like(positions), positions, layout, device),
        last_rows=_tensor(positions, device),
        segments=(Segment(0, len(positions), [block_0], first, layout, device),),
    )


def _token_ids(chunks: Sequence[ScheduledChunk]) -> _Ids:
    token_ids: list[int] = []
    for chunk in chunks:
        first = chunk.first_position
        token_ids += chunk.running.seq.token_ids[first : first + chunk.num_tokens]
    return np.array(token_ids, dtype=np.int64)


def _reported_rows(chunks: Sequence[ScheduledChunk], last_row_of: Mapping[int, int]) -> _Ids:
    """The rows of the tokens that chunks report, chunk by chunk; ``last_row_of`` has the last row of each."""
    rows = [
        np.arange(chunk.num_reported, dtype=np.int64) + (last_row_of[i] + 1 - chunk.num_tokens)
        for i, chunk in enumerate(chunks)
        if chunk.num_reported
    ]
    return np.concatenate(rows) if rows else _NO_ROWS


def _blocks_of_tokens(
    chunks: Sequence[ScheduledChunk], tables: Sequence[_Ids], positions: _Ids, layout: KvLayout
) -> _Ids:
    """``[T]``: the block that each token's KV goes to."""
    blocks = np.empty_like(positions)
    indices = positions // layout.block_size
    first = 0
    for chunk, table in zip(chunks, tables, strict=True):
        rows = slice(first, first + chunk.num_tokens)
        blocks[rows] = table[indices[rows]]
        first = rows.stop
    return blocks


def _slots(blocks: _Ids, positions: _Ids, layout: KvLayout, device: torch.device) -> Sequence[torch.Tensor]:
    """As ``FlatBatch.slots``; row ``((block * num_layers + layer) * 2 + is_value) * block_size + offset``."""
    block_size, num_layers = layout.block_size, layout.num_layers
    in_first_layer = blocks * (num_layers * 2 * block_size) + positions % block_size
    parts = np.arange(num_layers * 2).reshape(num_layers, 2, 1) * block_size
    return _tensor(in_first_layer + parts, device).unbind()


def _sampled(
    chunks: Sequence[ScheduledChunk],
    tables: Sequence[_Ids],
    ends: _Ids,
    last_rows: _Ids,
    layout: KvLayout,
    device: torch.device,
) -> SampledRows:
    """``ends`` are the chunks' last rows, ``last_rows`` those of them that sample, in the order of the answer."""
    sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
    sampling.sort(key=lambda i: chunks[i].first_position + chunks[i].num_tokens)
    positions = np.array([chunks[i].first_position + chunks[i].num_tokens - 1 for i in sampling], dtype=np.int64)
    rows = ends[sampling] if sampling else np.empty(0, dtype=np.int64)
    index_of = {row: index for index, row in enumerate(rows.tolist())}
    segments = tuple(
        Segment(
            begin=first,
            num_queries=1,
            block_tables=[tables[i] for i in sampling[first:end]],
            first_positions=positions[first:end],
            layout=layout,
            device=device,
        )
        for first, end in _group(positions, np.ones_like(positions), layout.block_size)
    )
    order = np.array([index_of[row] for row in last_rows.tolist()], dtype=np.int64)
    return SampledRows(_tensor(rows, device), segments, _tensor(order, device))


def media_rows(
    chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], pool: EmbeddingPoolView, device: torch.device
) -> MediaRows | None:
    """Copy the embeddings that the chunks need out of the pool; ``None``: they are all text.

    Args:
        chunks: each may hold any part of an item's tokens.
        first_rows: where each of them begins in the flat batch.
        pool: has the items in their requests' ``media_blocks``.
        device: the model's.
    """
    rows: list[_Ids] = []
    slots: list[_Ids] = []
    for chunk, first_row in zip(chunks, first_rows, strict=True):
        begin, end = chunk.first_position, chunk.first_position + chunk.num_tokens
        if begin >= chunk.running.media_end:
            continue
        request = chunk.running.request
        for span, block_ids in zip(request.generation.media, request.media_blocks, strict=True):
            first = max(span.first_position, begin)
            num_tokens = min(span.first_position + span.num_tokens, end) - first
            if num_tokens > 0:
                rows.append(np.arange(num_tokens) + (first_row + first - begin))
                slots.append(pool.slots(block_ids, first - span.first_position, num_tokens))
    if not rows:
        return None
    return MediaRows(_tensor(np.concatenate(rows), device), pool.take(np.concatenate(slots)).to(device))


def _group(first_positions: _Ids, sizes: _Ids, block_size: int) -> list[tuple[int, int]]:
    """Ranges of chunks, single tokens first and from the shortest sequence on, that make one segment each."""
    groups: list[tuple[int, int]] = []
    longest_allowed = 0.0
    for i, (first_position, size) in enumerate(zip(first_positions.tolist(), sizes.tolist(), strict=True)):
        num_blocks = first_position // block_size + 1
        if groups and size == 1 and num_blocks <= longest_allowed:
            groups[-1] = (groups[-1][0], i + 1)
        else:
            groups.append((i, i + 1))
            longest_allowed = num_blocks * _MAX_PADDING
    return groups


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return to_device(torch.from_numpy(array), device)
