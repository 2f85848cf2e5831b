"""CUDA graphs of the launches that draw tokens, for logits that lie in the same place each time.

A dozen launches take the host a millisecond, one launch of a graph some microseconds. What graphs of decode steps
leave is always in one place, and so are the rows' settings, the memory in between and the tokens here. There is a graph
for each of a few numbers of rows and each kind of ``Searches``; a step takes the next larger one, filled up with rows
that take their best token, whatever it is. All are captured once, before the first request.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quartet.engine.torch.graphs import batch_sizes, capture, free_size_bytes, give_up, stopping
from quartet.engine.torch.kernels.draw import NUM_FIELDS, ROW, Scratch, Searches, launch_draw

_LOG = logging.getLogger(__name__)


class DrawGraphs:
    """The graphs for one place of logits.

    Attributes:
        max_rows: rows of a step at most.
        scratch: enough for steps of so many rows, by graphs or without; of one at a time, in the order of a stream.
    """

    def __init__(self, logits: torch.Tensor, max_rows: int) -> None:
        """Nothing is captured before ``capture``.

        Args:
            logits: ``[N, V]``, as ``launch_draw`` takes them; a step's are the first rows.
            max_rows: rows of a step at most.
        """
        sizes = batch_sizes(logits.shape[0])
        # The largest one that is needed has room for all of ``max_rows``.
        self._sizes = [size for size, before in zip(sizes, [0, *sizes], strict=False) if before < max_rows]
        num_rows, vocab_size = self._sizes[-1], logits.shape[1]
        self.max_rows = min(max_rows, num_rows)
        self._logits = logits[:num_rows]
        idle = idle_rows(num_rows).view(np.int64).reshape(num_rows, NUM_FIELDS)
        self._rows = torch.from_numpy(idle).to(logits.device)
        self._token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        self.scratch = Scratch.up_to(num_rows, self.max_rows, vocab_size, logits.device)
        self._graphs: dict[tuple[int, Searches], torch.cuda.CUDAGraph] = {}

    @classmethod
    def measure_size_bytes(cls, logits: torch.Tensor, max_rows: int) -> int:
        """Device memory that these graphs take, found by capturing them; raises as ``capture``.

        Arguments as for the constructor. There are no graphs afterwards.
        """
        # First of all what is loaded and kept whether there are graphs or not, such as kernels.
        cls(logits, max_rows).capture()
        free = free_size_bytes(logits.device)
        graphs = cls(logits, max_rows)
        graphs.capture()
        return free - free_size_bytes(logits.device)

    def capture(self) -> None:
        """Capture all of them.

        Raises:
            Exception: any; there are no graphs then.
        """
        started_at = time.monotonic()
        device = self._logits.device
        memory: Any = None
        kinds = Searches.every(self._logits.shape[1])
        try:
            with stopping(device):
                memory = torch.cuda.graph_pool_handle()
                for searches in kinds:
                    # What is compiled or loaded at the first call can't be captured.
                    self._draw(self._sizes[-1], searches)
                for size in self._sizes:
                    for searches in kinds:
                        self._graphs[size, searches] = capture(partial(self._draw, size, searches), memory)
        except BaseException:
            give_up(memory, device)
            self._graphs.clear()
            raise
        took = time.monotonic() - started_at
        _LOG.info("captured %d CUDA graphs that draw up to %d tokens in %.1f s", len(self._graphs), self.max_rows, took)

    def size_for(self, logits: torch.Tensor) -> int | None:
        """Rows of the graph that draws from these logits, ``[N, V]``; ``None``: no graph does."""
        num_rows = logits.shape[0]
        if num_rows > self.max_rows or logits.data_ptr() != self._logits.data_ptr():
            return None
        if logits.stride() != self._logits.stride() or logits.shape[1] != self._logits.shape[1]:
            return None
        return next((size for size in self._sizes if size >= num_rows), None)

    def run(self, rows: torch.Tensor, searches: Searches) -> torch.Tensor:
        """Draw, on the device's current stream, without waiting.

        Args:
            rows: ``[N, NUM_FIELDS]`` int64, pinned, of a size that ``size_for`` gave: ``idle_rows`` after the step's.
            searches: of these rows.

        Returns:
            ``[N]`` int64, valid on the stream until the next run.
        """
        size = len(rows)
        self._rows[:size].copy_(rows, non_blocking=True)
        self._graphs[size, searches].replay()
        return self._token_ids[:size]

    def _draw(self, size: int, searches: Searches) -> None:
        launch_draw(self._logits[:size], self._rows[:size], searches, self.scratch, self._token_ids[:size])


def idle_rows(num_rows: int) -> npt.NDArray[np.void]:
    """``[num_rows]`` of ``ROW``: rows that take their best token, without rules."""
    rows = np.zeros(num_rows, ROW)
    rows["ruled_row"] = rows["filtered_row"] = -1
    return rows
