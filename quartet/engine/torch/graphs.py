"""CUDA graphs of decode steps: one launch in place of hundreds.

A graph repeats a step on the same addresses, so all read their inputs from one place on the device, and leave their
logits in one. There is a graph for each of a few batch sizes, in each of the few kinds that ``num_splits`` knows, and a
step takes the next larger one, filled up with rows that belong to no sequence. All are captured once, before the first
request, the largest first: the memory in which it computes does for all others.
"""

from __future__ import annotations

import functools
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quartet.engine.torch.batch import FlatBatch
from quartet.engine.torch.inputs import NO_INPUTS, HostInputs, Part, offsets
from quartet.engine.torch.kernel_step import Compute, KernelStep, Singles, StepBuilder
from quartet.engine.torch.kernels.attention import BlockTables

_LOG = logging.getLogger(__name__)

# Up to each of these batch sizes, a graph every so many rows.
_STRIDES = ((64, 8), (128, 16), (256, 32))
_LAST_STRIDE = 64


def batch_sizes(max_batch_size: int) -> list[int]:
    """The batch sizes that have graphs, in rising order: few rows pad a step, and few graphs are captured."""
    sizes = {size for size in (1, 2, 4, 8) if size <= max_batch_size} | {max_batch_size}
    size = 8
    while size < max_batch_size:
        sizes.add(size)
        size += next((stride for end, stride in _STRIDES if size < end), _LAST_STRIDE)
    return sorted(sizes)


@dataclass(frozen=True)
class GraphBounds:
    """What graphs are captured for.

    Attributes:
        max_batch_size: sequences of the largest one.
        pads: whether a step takes the next larger graph; else only one of exactly its size.
        max_model_len: tokens of the longest sequence.
    """

    max_batch_size: int
    pads: bool
    max_model_len: int


class DecodeGraphs:
    """The graphs of one model over one pool."""

    def __init__(self, builder: StepBuilder, compute: Compute, bounds: GraphBounds) -> None:
        """Nothing is captured before ``capture``."""
        self._builder = builder
        self._compute = compute
        self._bounds = bounds
        self._sizes = batch_sizes(bounds.max_batch_size)
        self._inputs = torch.empty(self._inputs_size_bytes(), dtype=torch.uint8, device=builder.device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._logits: torch.Tensor | None = None
        self._memory: Any = None  # of all graphs; its type has no public name
        # A graph keeps nothing alive that it was captured with.
        self._rows = torch.arange(self._sizes[-1], device=builder.device)

    def capture(self) -> None:
        """Capture all of them.

        Raises:
            Exception: any; the model does something that a graph can't repeat. There are no graphs then.
        """
        started_at = time.monotonic()
        self._capture(reversed(self._sizes))
        took = time.monotonic() - started_at
        _LOG.info("captured %d CUDA graphs of up to %d rows in %.1f s", len(self._graphs), self._sizes[-1], took)

    def measure_size_bytes(self) -> int:
        """Device memory that ``capture`` takes, found by capturing the two largest sizes.

        The largest takes what all share; each other one has its own nodes besides, as the second largest. Raises as
        ``capture``; there are no graphs afterwards.
        """
        rest, largest = self._sizes[:-1][::-1], self._sizes[-1]
        # First of all what is loaded and kept whether there are graphs or not, such as kernels.
        with stopping(self._builder.device):
            for splits in self._kinds(largest):
                self._compute(self._step(largest, splits))
        free = [free_size_bytes(self._builder.device)]
        for sizes in ([largest], rest[:1]):
            self._capture(sizes)
            free.append(free_size_bytes(self._builder.device))
        self.clear()
        # Another process may have freed some meanwhile.
        return max(0, free[0] - free[1]) + max(0, free[1] - free[2]) * len(rest)

    @property
    def max_rows(self) -> int:
        """Rows of the largest one."""
        return self._sizes[-1]

    @property
    def logits(self) -> torch.Tensor | None:
        """``[max_batch_size, V]``, where ``run`` leaves logits each time; ``None``: there are no graphs."""
        return self._logits

    def clear(self) -> None:
        """Drop all graphs, and give their memory back."""
        self._graphs.clear()
        self._logits = self._memory = None
        gc.collect()
        torch.cuda.empty_cache()

    def run(
        self, inputs: HostInputs, fill: Callable[[torch.Tensor], None] = lambda _token_ids: None
    ) -> torch.Tensor | None:
        """Compute a step of single tokens, of which the first ones sample; ``None``: no graph does it.

        ``fill`` changes the token ids ``[T]`` on the device, where the host does not know them all.

        Returns:
            Logits ``[R, V]``, valid until the next run.
        """
        size = self._size_for(len(inputs.contexts))
        if size is None:
            return None
        graph = self._graphs.get((size, self._builder.num_splits(size, inputs.longest)))
        arrays = _padded(inputs, size)
        if graph is None or offsets([array.nbytes for array in arrays])[1] > self._inputs.numel():
            return None
        fill(self._builder.staging.send(arrays, self._inputs)[0])
        graph.replay()
        assert self._logits is not None
        return self._logits[: len(inputs.last_rows)]

    def _size_for(self, num_rows: int) -> int | None:
        if not self._bounds.pads:
            return num_rows
        return next((size for size in self._sizes if size >= num_rows), None)

    def _kinds(self, size: int) -> list[int]:
        """Numbers of splits that steps of this size may have."""
        longest = self._bounds.max_model_len
        lengths = [*range(1, longest, 64), longest]
        return sorted({self._builder.num_splits(size, length) for length in lengths})

    def _capture(self, sizes: Iterable[int]) -> None:
        try:
            with stopping(self._builder.device):
                if self._memory is None:
                    self._memory = torch.cuda.graph_pool_handle()
                for size in sizes:
                    for splits in self._kinds(size):
                        self._graphs[size, splits] = self._capture_one(self._step(size, splits), size)
        except BaseException:
            give_up(self._memory, self._builder.device)
            self.clear()
            raise

    def _capture_one(self, step: KernelStep, size: int) -> torch.cuda.CUDAGraph:
        # What is compiled, loaded or chosen at the first call can't be captured.
        logits = self._compute(step)
        if self._logits is None:
            self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
        del logits
        into = self._logits[:size]
        return capture(lambda: into.copy_(self._compute(step)), self._memory)

    def _step(self, size: int, splits: int) -> KernelStep:
        """The step that a graph repeats: on the inputs that ``run`` overwrites, of rows that are no sequences."""
        arrays = _padded(NO_INPUTS, size)
        token_ids, positions, slots, contexts, begins, _ = self._builder.staging.send(arrays, self._inputs)
        begin = offsets([array.nbytes for array in arrays])[0][-1]
        blocks = self._inputs[begin:].view(torch.int32)
        return KernelStep(
            pool=self._builder.pool,
            batch=FlatBatch(token_ids[None], positions[None], (), self._rows[:size], ()),
            slots=slots,
            singles=Singles(BlockTables(blocks, begins, contexts), size, splits),
        )

    def _inputs_size_bytes(self) -> int:
        size = self._sizes[-1]
        # A sequence has room for the token after its last one.
        blocks_each = self._bounds.max_model_len // self._builder.pool.layout.block_size + 1
        *others, _ = (array.nbytes for array in _padded(NO_INPUTS, size))
        return offsets([*others, 4 * size * blocks_each])[1]


def capture(run: Callable[[], object], memory: Any) -> torch.cuda.CUDAGraph:
    """A graph of what ``run`` launches, which has been run before; within ``stopping``.

    ``memory`` is a ``torch.cuda.graph_pool_handle``.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads, which move blocks, may do meanwhile what a capture forbids.
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")
    try:
        run()
    finally:
        graph.capture_end()
    return graph


def give_up(memory: Any, device: torch.device) -> None:
    """Clean up after a capture into ``memory`` that failed; ``None``: none has begun."""
    if memory is not None:
        # PyTorch's allocator does not notice that a capture failed, and would put off frees until its end.
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(device.index, memory)


def free_size_bytes(device: torch.device) -> int:
    """What is free on the device, with what PyTorch keeps of it for later."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free


@contextmanager
def stopping(device: torch.device) -> Iterator[None]:
    """On a stream of its own, as captures must be, with nothing else on the way and nothing collected meanwhile."""
    torch.cuda.synchronize(device)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(_capture_stream(device)):
            yield
    finally:
        if was_enabled:
            gc.enable()
        torch.cuda.synchronize(device)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all, as cuBLAS keeps memory for each stream that it was called on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


def _padded(inputs: HostInputs, size: int) -> list[Part]:
    """A step's inputs as a graph of this size reads them; the block tables come last, as many as there are."""
    num_rows = size - len(inputs.token_ids)

    def fill(part: Part, padding: int) -> Part:
        return np.concatenate((part, np.full(num_rows, padding, dtype=part.dtype)))

    return [
        fill(inputs.token_ids, 0),
        fill(inputs.positions, 0),
        fill(inputs.slots, -1),
        fill(inputs.contexts, -1),
        fill(inputs.table_begins, 0),
        inputs.blocks,
    ]
