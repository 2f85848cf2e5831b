"""The inputs of a step whose attention is kernels': made in arrays on the host, and copied to the device in one go.

A sequence's block table is an array that only grows while it runs, so a step adds what is new. ``Staging`` has several
pinned buffers that it uses in turn: the inputs of one step can be made while those of the last one are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from quartet.engine.runner import RunningRequest, ScheduledChunk

_Ints: TypeAlias = npt.NDArray[np.int32]
_Longs: TypeAlias = npt.NDArray[np.int64]
#: One part of a step's inputs.
Part: TypeAlias = npt.NDArray[np.int32 | np.int64]

#: Where each part of the inputs begins is a multiple of it. Triton compiles a kernel again for pointers that are not.
ALIGNMENT = 16

# Steps whose inputs may be on their way at a time, and one that is made.
_NUM_BUFFERS = 3

_NO_INTS: _Ints = np.empty(0, dtype=np.int32)
_NO_LONGS: _Longs = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Tokens:
    """The tokens of one sequence that a step computes.

    Attributes:
        first_position: of the first of them.
        blocks: of the sequence.
        samples: whether the logits of the last one are wanted.
        num_reported: of how many of the first ones they are wanted as well.
    """

    token_ids: Sequence[int]
    first_position: int
    blocks: _Ints
    samples: bool
    num_reported: int = 0


@dataclass(frozen=True)
class HostInputs:
    """A step's inputs on the host: sequences of a single token come first, each with one row, then the chunks.

    Attributes:
        order: numbers of the sequences as they were given, in the order in which they are here.
        token_ids: ``[T]``.
        positions: ``[T]``.
        slots: ``[T]``: ``block * block_size + offset`` of each token.
        last_rows: ``[R]``: rows whose logits are wanted, in the order in which the sequences were given: first those
            that sample, then those that are reported.
        contexts: ``[S]``: tokens of each sequence before the step.
        table_begins: ``[S]``: where in ``blocks`` each one's begin.
        blocks: ``[N]``.
        query_begins: ``[S + 1]``: row of each sequence's first token, and ``T``.
        num_singles: sequences of a single token.
        num_reported: rows at the end of ``last_rows`` that are reported.
    """

    order: list[int]
    token_ids: _Longs
    positions: _Longs
    slots: _Longs
    last_rows: _Longs
    contexts: _Ints
    table_begins: _Ints
    blocks: _Ints
    query_begins: _Ints
    num_singles: int
    num_reported: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, this step's included."""
        return int((self.contexts + np.diff(self.query_begins)).max())

    def seqs_of(self, rows: _Longs) -> _Longs:
        """The sequence of each of these rows."""
        return np.searchsorted(self.query_begins, rows, side="right") - 1

    @property
    def ends(self) -> _Longs:
        """The row of each sequence's last token."""
        return (self.query_begins[1:] - 1).astype(np.int64)

    @property
    def num_reread(self) -> int:
        """Tokens whose keys ``as_singles`` has read once more than here: all that chunks' later queries see."""
        return int(self.positions.sum()) - int(self.positions[self.ends].sum())

    def as_singles(self) -> tuple[HostInputs, _Longs]:
        """The same tokens as a sequence each, those that sample first, in their order; no row is reported.

        A layer's keys are all stored before a query reads any, so a token sees those before it nonetheless.

        Returns:
            The inputs, and where in them each row is.
        """
        assert not self.num_reported, "rows that are reported attend with their chunk"
        num_rows = len(self.token_ids)
        is_last = np.zeros(num_rows, dtype=bool)
        is_last[self.last_rows] = True
        rows = np.concatenate((self.last_rows, np.flatnonzero(~is_last)))
        seqs = self.seqs_of(rows)
        singles = HostInputs(
            order=[self.order[seq] for seq in seqs],
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            last_rows=np.arange(len(self.last_rows)),
            contexts=self.positions[rows].astype(np.int32),
            table_begins=self.table_begins[seqs],
            blocks=self.blocks,
            query_begins=np.arange(num_rows + 1, dtype=np.int32),
            num_singles=num_rows,
        )
        row_of = np.empty_like(rows)
        row_of[rows] = np.arange(num_rows)
        return singles, row_of

    def tiles(self, num_queries: int) -> tuple[_Ints, _Ints]:
        """Sequence and first query of each tile of ``num_queries`` that the chunks are cut in; the longest first."""
        seqs, begins = self._cut(np.diff(self.query_begins)[self.num_singles :], num_queries)
        # A tile's last queries see most keys: what takes longest must not begin last.
        return seqs[::-1], begins[::-1]

    def spans(self, num_tokens: int) -> tuple[_Ints, _Ints]:
        """Sequence and first token of each span of ``num_tokens`` that the chunks' whole sequences are cut in."""
        return self._cut(self.chunk_lengths, num_tokens)

    @property
    def chunk_lengths(self) -> _Ints:
        """Tokens of each chunk's sequence, the chunk included."""
        first = self.num_singles
        return self.contexts[first:] + np.diff(self.query_begins)[first:]

    def _cut(self, lengths: _Ints, size: int) -> tuple[_Ints, _Ints]:
        """Sequence and first element of each part of ``size`` that so many elements of each chunk are cut in."""
        num_parts = -(-lengths // size)
        seqs = np.repeat(np.arange(self.num_singles, len(self.contexts), dtype=np.int32), num_parts)
        begins = np.arange(len(seqs), dtype=np.int32) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
        return seqs, begins.astype(np.int32) * size


#: Of no sequence.
NO_INPUTS = HostInputs([], _NO_LONGS, _NO_LONGS, _NO_LONGS, _NO_LONGS, _NO_INTS, _NO_INTS, _NO_INTS, _NO_INTS, 0)


def lay_out(sequences: Sequence[Tokens], block_size: int) -> HostInputs:
    """Lay out the tokens of a step, of which there is at least one."""
    sizes = np.array([len(tokens.token_ids) for tokens in sequences], dtype=np.int64)
    order = np.argsort(sizes > 1, kind="stable").tolist()
    ordered = [sequences[i] for i in order]
    sizes = sizes[order]
    ends = np.cumsum(sizes)
    contexts = np.array([tokens.first_position for tokens in ordered], dtype=np.int64)
    num_blocks = np.array([len(tokens.blocks) for tokens in ordered], dtype=np.int64)
    begins = np.cumsum(num_blocks) - num_blocks
    blocks = np.concatenate([tokens.blocks for tokens in ordered])
    positions = np.arange(ends[-1]) + np.repeat(contexts - ends + sizes, sizes)
    block_of = blocks[np.repeat(begins, sizes) + positions // block_size].astype(np.int64)
    last_row = np.empty_like(ends)
    last_row[order] = ends - 1
    sampled = last_row[[tokens.samples for tokens in sequences]]
    reported = [
        np.arange(tokens.num_reported, dtype=np.int64) + (last + 1 - len(tokens.token_ids))
        for tokens, last in zip(sequences, last_row.tolist(), strict=True)
        if tokens.num_reported
    ]
    return HostInputs(
        order=order,
        token_ids=np.array([id for tokens in ordered for id in tokens.token_ids], dtype=np.int64),
        positions=positions,
        slots=block_of * block_size + positions % block_size,
        last_rows=np.concatenate((sampled, *reported)),
        contexts=contexts.astype(np.int32),
        table_begins=begins.astype(np.int32),
        blocks=blocks,
        query_begins=np.concatenate(([0], ends)).astype(np.int32),
        num_singles=int((sizes == 1).sum()),
        num_reported=sum(map(len, reported)),
    )


class SequenceTables:
    """Block tables of running sequences as arrays, kept from step to step."""

    def __init__(self) -> None:
        """Know none."""
        self._tables: WeakKeyDictionary[RunningRequest, _Table] = WeakKeyDictionary()

    def tokens_of(self, chunk: ScheduledChunk) -> Tokens:
        """The chunk's tokens."""
        running, first = chunk.running, chunk.first_position
        table = self._tables.get(running)
        if table is None:
            table = self._tables[running] = _Table()
        token_ids = running.seq.token_ids[first : first + chunk.num_tokens]
        blocks = table.blocks_of(running.seq.block_table)
        return Tokens(token_ids, first, blocks, chunk.samples, chunk.num_reported)


class _Table:
    """A copy of one block table, which the pool extends in place, and replaces when it frees the blocks."""

    def __init__(self) -> None:
        self._source: list[int] = []
        self._num_blocks = 0
        self._blocks = _NO_INTS

    def blocks_of(self, source: list[int]) -> _Ints:
        num_blocks = len(source)
        if source is not self._source:
            self._source, self._num_blocks = source, 0
        if num_blocks > self._num_blocks:
            if num_blocks > len(self._blocks):
                grown = np.empty(2 * num_blocks, dtype=np.int32)
                grown[: self._num_blocks] = self._blocks[: self._num_blocks]
                self._blocks = grown
            self._blocks[self._num_blocks : num_blocks] = source[self._num_blocks :]
            self._num_blocks = num_blocks
        return self._blocks[:num_blocks]


class Staging:
    """Copies arrays to a device through pinned memory, all that belong together at once, and waits for none of it."""

    def __init__(self, device: torch.device) -> None:
        """For one stream at a time."""
        self._device = device
        self._buffers = [_Buffer(device) for _ in range(_NUM_BUFFERS)]
        self._turn = 0

    def send(self, arrays: Sequence[Part], target: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Copy them, in the order of the device's stream.

        Args:
            arrays: one-dimensional.
            target: bytes on the device, enough for them; ``None``: they get new memory.

        Returns:
            A tensor for each, in ``target`` one after the other, each where ``offsets`` says.
        """
        begins, size_bytes = offsets([array.nbytes for array in arrays])
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        staged = buffer.take(size_bytes)
        view = staged.numpy()
        for array, begin in zip(arrays, begins, strict=True):
            view[begin : begin + array.nbytes].view(array.dtype)[:] = array
        if target is None:
            target = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        target[:size_bytes].copy_(staged, non_blocking=True)
        buffer.mark()
        return [
            target[begin : begin + array.nbytes].view(_DTYPES[array.dtype])
            for array, begin in zip(arrays, begins, strict=True)
        ]


_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def offsets(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of these sizes begin in one buffer, and how large that is."""
    begins: list[int] = []
    end = 0
    for size in sizes_bytes:
        begins.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return begins, end


class _Buffer:
    """Pinned memory that can be written again once its last copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._copied = torch.cuda.Event() if self._is_pinned else None  # type: ignore[no-untyped-call]
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, size_bytes: int) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        if self._bytes.numel() < size_bytes:
            self._bytes = torch.empty(2 * size_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        return self._bytes[:size_bytes]

    def mark(self) -> None:
        if self._copied is not None:
            self._copied.record()
