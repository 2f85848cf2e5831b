"""Runs a model's steps on a GPU with the kernels' attention: those of few tokens by CUDA graphs, others not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.runner import ScheduledChunk
from quartet.engine.torch.batch import fill_unread
from quartet.engine.torch.config import TorchEngineConfig
from quartet.engine.torch.graphs import DecodeGraphs, GraphBounds
from quartet.engine.torch.inputs import HostInputs
from quartet.engine.torch.kernel_step import Compute, StepBuilder, probe_logits
from quartet.engine.torch.kernels.attention import DTYPES, SPLITS
from quartet.engine.torch.pool import KvPool

_LOG = logging.getLogger(__name__)

# The kernels are written for what these multiprocessors have: products of bfloat16, and copies that are not waited for.
_LEAST_CAPABILITY = (8, 0)

# A chunk's queries that are rows of a graph read its sequence each; so much takes as long as to launch all one by one.
_MAX_REREAD_SIZE_BYTES = 20 << 30


class KernelForward:
    """Writes a step's KV to the pool and returns logits, without waiting for the GPU."""

    def __init__(
        self,
        pool: KvPool,
        compute: Compute,
        num_heads: int,
        embeddings: EmbeddingPoolView | None,
        *,
        copies: bool = True,
    ) -> None:
        """No graphs yet.

        Args:
            pool: of keys and values.
            compute: the model.
            num_heads: query heads of a layer.
            embeddings: the pool with the chunks' media; ``None``: the model takes none.
            copies: whether chunks may attend to copies of keys and values.
        """
        self.pool = pool
        self._num_heads = num_heads
        self._copies = copies
        self._builder = StepBuilder(pool, num_heads, copies=copies)
        self._token_size_bytes = pool.layout.piece_size_bytes // pool.layout.block_size
        self._compute = compute
        self._embeddings = embeddings
        self._graphs: DecodeGraphs | None = None

    def __call__(self, chunks: Sequence[ScheduledChunk], unread: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[R, V]`` of the chunks that sample, in their order; valid until the next call.

        ``unread``: as for ``build_batch``.
        """
        inputs = self._builder.lay_out(chunks)
        media = self._builder.media(inputs, chunks, self._embeddings)

        def fill(token_ids: torch.Tensor, last_rows: npt.NDArray[np.int64] = inputs.ends) -> None:
            if unread is not None:
                fill_unread(token_ids, [chunks[i] for i in inputs.order], last_rows, unread)

        if self._graphs is not None and media is None:
            logits = self._run_graph(self._graphs, inputs, fill)
            if logits is not None:
                return logits
        step = self._builder.make(inputs, media)
        fill(step.batch.token_ids[0])
        return self._compute(step)

    def _run_graph(self, graphs: DecodeGraphs, inputs: HostInputs, fill: Callable[..., None]) -> torch.Tensor | None:
        """Logits as of a call; ``None``: no graph computes them, or launching all one by one takes less."""
        if inputs.num_reported or len(inputs.token_ids) > graphs.max_rows:
            return None
        if inputs.num_singles == len(inputs.contexts) == len(inputs.last_rows):
            return graphs.run(inputs, fill)
        if inputs.num_reread * self._token_size_bytes > _MAX_REREAD_SIZE_BYTES:
            return None
        singles, row_of = inputs.as_singles()
        return graphs.run(singles, lambda token_ids: fill(token_ids, row_of[inputs.ends]))

    def over(self, pool: KvPool) -> KernelForward:
        """The same over another pool, without graphs."""
        return KernelForward(pool, self._compute, self._num_heads, self._embeddings, copies=self._copies)

    @staticmethod
    def graph_bounds(config: TorchEngineConfig, max_model_len: int) -> GraphBounds | None:
        """What ``config`` has captured; ``None``: nothing."""
        if not config.cuda_graph_max_batch_size:
            return None
        return GraphBounds(config.cuda_graph_max_batch_size, config.cuda_graph_padding, max_model_len)

    def capture(self, bounds: GraphBounds) -> None:
        """Have decode steps run by graphs from now on, where that is possible; else warn."""
        try:
            graphs = DecodeGraphs(self._builder, self._compute, bounds)
            graphs.capture()
        except Exception:  # noqa: BLE001  # whatever a model does that can't be captured: it runs without
            _LOG.warning("decode steps run without CUDA graphs: they can't be captured", exc_info=True)
            return
        self._graphs = graphs

    @property
    def repeated_logits(self) -> torch.Tensor | None:
        """``[N, V]``: of steps that graphs run, of up to ``N`` rows; ``None``: there are no graphs."""
        return None if self._graphs is None else self._graphs.logits

    def graphs_size_bytes(self, bounds: GraphBounds) -> int:
        """Device memory that ``capture`` will take over another pool."""
        try:
            return DecodeGraphs(self._builder, self._compute, bounds).measure_size_bytes()
        except Exception:  # noqa: BLE001  # capture will find the same, and say it
            _LOG.debug("CUDA graphs can't be measured", exc_info=True)
            return 0

    def probe(self, token_ids: Sequence[int]) -> list[torch.Tensor] | None:
        """Logits of all these tokens, computed in block 0 in each way that there is: no step has to compile any later.

        ``None``, with a warning: the kernels don't work here.
        """
        try:
            return [probe_logits(self._builder, self._compute, token_ids, splits) for splits in SPLITS]
        except Exception:  # noqa: BLE001  # such as a machine without a C compiler, which Triton needs
            _LOG.warning("attention runs without kernels: they can't be run here", exc_info=True)
            return None

    def try_copies(self, token_ids: Sequence[int], is_right: Callable[[torch.Tensor], bool]) -> None:
        """Compute as ``probe`` with copies of keys and values; do without from now on, with a warning, if that fails.

        ``is_right`` judges the logits.
        """
        if not self._builder.can_copy:
            return
        try:
            if is_right(probe_logits(self._builder, self._compute, token_ids, copies=True)):
                return
            _LOG.warning("keys and values of prompts are read in their blocks: copies of them give other logits here")
        except Exception:  # noqa: BLE001  # such as a GPU with less shared memory than it says
            _LOG.warning("keys and values of prompts are read in their blocks: copies fail here", exc_info=True)
        self._copies = False
        self._builder = StepBuilder(self.pool, self._num_heads, copies=False)


def can_compute(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels know this dtype and this device."""
    is_known = dtype in DTYPES and device.type == "cuda"
    return is_known and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
