"""A ``ModelRunner`` whose step takes a fixed time and computes nothing, over a real pool in host memory.

So what a request takes beyond its steps is Quartet's own cost. It does stamp each full block with a digest of its
tokens, and looks at the stamps of a request's blocks in its first decode step: bytes that came wrong over a transfer,
or never came, are found at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from quartet.engine.base import Engine, RequestKind
from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.mock.runner import BlockStamps
from quartet.engine.runner import ModelRunner, SampledToken, ScheduledChunk
from quartet.engine.step_engine import StepEngine
from quartet.kvcache.layout import KvLayout
from quartet.transfer.base import EmbeddingMemory, PoolMemory, Puller
from services.workers.config import WorkerConfig

#: Seconds of every step, whatever is in it.
STEP_S = 0.010

_DTYPE = "bfloat16"
_NUM_LAYERS, _NUM_KV_HEADS, _HEAD_DIM = 16, 8, 64
# Ids given out, in turn: words of the tiny model's vocabulary, behind its special tokens and single bytes.
_FIRST_TOKEN_ID, _END_TOKEN_ID = 300, 600
_VOCAB_SIZE = 2048
_DEFAULT_MAX_MODEL_LEN = 8192


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


class StubRunner:
    """Gives out tokens that depend on nothing but their position."""

    embeddings: EmbeddingMemory | None = None
    placeholder_id: int | None = None

    def __init__(self, layout: KvLayout, num_blocks: int, max_model_len: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.vocab_size = _VOCAB_SIZE
        self.eos_token_ids: frozenset[int] = frozenset()
        self.memory: PoolMemory | None = PoolMemory(num_blocks, layout.piece_size_bytes)
        self._stamps = BlockStamps(self.memory, layout.block_size)

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        """Stamp the blocks that the chunks fill; take a step's time.

        Raises:
            WrongBlocksError: a block does not hold what its request's tokens give.
        """
        ends_at = time.monotonic() + STEP_S
        self._stamps.take(chunks)
        sampled = [SampledToken(_token_at(len(chunk.running.seq))) for chunk in chunks if chunk.samples]
        time.sleep(max(0.0, ends_at - time.monotonic()))
        return sampled

    def close(self) -> None:
        """Give the pool back."""
        if self.memory is not None:
            self.memory.close()


def create_engine(config: WorkerConfig, kind: RequestKind, puller: Puller) -> Engine:
    """A ``StepEngine`` on a ``StubRunner``; of the model only the tokenizer and the fingerprint are used."""
    settings = config.engine

    def load() -> ModelRunner:
        layout = stub_layout(model_fingerprint(config.model_path, _DTYPE), settings.block_size)
        return StubRunner(layout, settings.num_pool_blocks, settings.max_model_len or _DEFAULT_MAX_MODEL_LEN)

    return StepEngine(load, settings.scheduler, puller=puller, kinds=frozenset({kind}))


def _token_at(position: int) -> int:
    return _FIRST_TOKEN_ID + position % (_END_TOKEN_ID - _FIRST_TOKEN_ID)
