"""The stub engine: the mock engine with steps of a fixed time, whatever they hold, and a real model's block size.

So the time that a request takes beyond its steps is Quartet's own cost, and a hand-off moves as many bytes as with a
model of one billion parameters. Each block has a digest of its tokens, as the mock engine's blocks have, so the engine
ends if a transfer brings wrong bytes, or none.

    QUARTET_BENCHMARK_ROLE=prefill|decode python -m benchmarks.stub_engine --config FILE     (a worker)
"""

from __future__ import annotations

import os

from benchmarks.children import ROLE_VARIABLE
from quartet.discovery.base import Role
from quartet.engine.base import Engine, RequestKind
from quartet.engine.mock import SAMPLING_FIELDS, MockEngineConfig, MockRunner, MockSettings, SharedByRanks, StepTiming
from quartet.engine.mock.runner import StepPacer
from quartet.engine.step_engine import StepEngine
from quartet.kvcache.layout import KvLayout
from quartet.transfer.base import PoolMemory, Puller
from services.workers.config import WorkerConfig
from services.workers.process import main

#: Seconds of every step, whatever it holds.
STEP_S = 0.010

_STEP_MS = 1e3 * STEP_S
# A step of one request either prefills or decodes.
_TIMING = StepTiming(
    prefill_base=_STEP_MS,
    prefill_linear=0.0,
    prefill_square=0.0,
    decode_base=_STEP_MS,
    decode_linear=0.0,
    decode_square=0.0,
)
_DTYPE = "bfloat16"
_NUM_LAYERS, _NUM_KV_HEADS, _HEAD_DIM = 16, 8, 64


def stub_layout(fingerprint: str, block_size: int) -> KvLayout:
    """Blocks of a model of one billion parameters (16 layers, 8 heads of 64, bfloat16): 1 MiB for 32 tokens."""
    return KvLayout(
        model_fingerprint=fingerprint,
        dtype=_DTYPE,
        num_layers=_NUM_LAYERS,
        num_kv_heads=_NUM_KV_HEADS,
        head_dim=_HEAD_DIM,
        block_size=block_size,
    )


class StubShared(SharedByRanks):
    """The shared state of a mock engine with one rank, with larger blocks."""

    def __init__(self, config: MockEngineConfig) -> None:
        """Read the model's text files, reserve the pool. Raises ``ModelFilesError`` as ``SharedByRanks`` does."""
        super().__init__(config)
        self.memory.close()
        self.layout = stub_layout(self.model.fingerprint, config.block_size)
        self.memory = PoolMemory(config.num_blocks, self.layout.piece_size_bytes)


class WholeSteps(StepPacer):
    """Gives each step its whole time from when it really began.

    The mock engine's pacer deducts the time by which the step before was late. Only a worker that does both steps of a
    request can do so, which would overstate the cost of a handed-off request.
    """

    def begin(self, *, is_continued: bool) -> None:
        """A step begins."""
        self._began_at = self._clock()


def create_engine(config: WorkerConfig, kind: RequestKind, puller: Puller) -> Engine:
    """A ``StepEngine`` on the mock engine's runner; it uses only the model's text files."""
    settings = config.engine
    mock = MockEngineConfig(
        model_path=config.model_path,
        num_blocks=settings.num_pool_blocks,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        settings=MockSettings(timing=_TIMING),
    )
    return StepEngine(
        lambda: MockRunner(StubShared(mock), pacer=WholeSteps()),
        settings.scheduler,
        puller=puller,
        kinds=frozenset({kind}),
        sampling_fields=SAMPLING_FIELDS,
    )


if __name__ == "__main__":
    main(Role(os.environ[ROLE_VARIABLE]), create_engine)
