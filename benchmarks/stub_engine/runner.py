"""A ``ModelRunner`` whose step takes a fixed time and computes nothing, over a real pool in host memory.

So what a request takes beyond its steps is Quartet's own cost. It does stamp each full block with a digest of its
tokens, and looks at the stamps of a request's blocks in its first decode step: bytes that came wrong over a transfer,
or never came, are found at once.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from weakref import WeakSet

import numpy as np

from quartet.engine.base import Engine, RequestKind
from quartet.engine.core import StepEngine
from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.runner import ModelRunner, SampledToken
from quartet.engine.running import RunningRequest, ScheduledChunk
from quartet.kvcache.layout import KvLayout
from quartet.transfer.base import PoolMemory, Puller
from services.workers.config import WorkerConfig

#: Seconds of every step, whatever is in it.
STEP_S = 0.010

_DTYPE = "bfloat16"
_NUM_LAYERS, _NUM_KV_HEADS, _HEAD_DIM = 16, 8, 64
# Ids given out, in turn: words of the small random model's vocabulary, behind its special tokens and single bytes.
_FIRST_TOKEN_ID, _END_TOKEN_ID = 300, 600
_VOCAB_SIZE = 640
_DEFAULT_MAX_MODEL_LEN = 8192


class WrongBlocksError(Exception):
    """Blocks do not hold the tokens of the request that they were given to."""


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

    def __init__(self, layout: KvLayout, num_blocks: int, max_model_len: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.vocab_size = _VOCAB_SIZE
        self.eos_token_ids: frozenset[int] = frozenset()
        self.memory: PoolMemory | None = PoolMemory(num_blocks, layout.piece_size_bytes)
        pool = np.frombuffer(self.memory.view, np.uint32).reshape(num_blocks, -1)
        self._stamps = pool[:, 0]
        self._last_words = pool[:, -1]  # a block that came half
        self._checked: WeakSet[RunningRequest] = WeakSet()

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        """Stamp the blocks that the chunks fill; take a step's time.

        Raises:
            WrongBlocksError: a block does not hold what its request's tokens give.
        """
        ends_at = time.monotonic() + STEP_S
        for chunk in chunks:
            if chunk.running not in self._checked:
                self._checked.add(chunk.running)
                self._check(chunk.running, chunk.first_position)
            self._stamp(chunk)
        sampled = [SampledToken(_token_at(len(chunk.running.seq))) for chunk in chunks if chunk.samples]
        time.sleep(max(0.0, ends_at - time.monotonic()))
        return sampled

    def close(self) -> None:
        """Give the pool back."""
        if self.memory is not None:
            self.memory.close()

    def _stamp(self, chunk: ScheduledChunk) -> None:
        size, seq = self.layout.block_size, chunk.running.seq
        first, end = chunk.first_position // size, (chunk.first_position + chunk.num_tokens) // size
        if first < end:
            stamps = _stamps(seq.token_ids[first * size : end * size], size)
            self._stamps[seq.block_table[first:end]] = stamps
            self._last_words[seq.block_table[first:end]] = stamps

    def _check(self, running: RunningRequest, num_tokens: int) -> None:
        """Look at the full blocks of the first ``num_tokens`` tokens, whoever computed them."""
        size = self.layout.block_size
        num_full = num_tokens // size
        blocks = running.seq.block_table[:num_full]
        expected = _stamps(running.seq.token_ids[: num_full * size], size)
        wrong = (self._stamps[blocks] != expected) | (self._last_words[blocks] != expected)
        if wrong.any():
            raise WrongBlocksError(f"blocks {np.flatnonzero(wrong).tolist()} of the sequence hold something else")


def create_engine(config: WorkerConfig, kind: RequestKind, puller: Puller) -> Engine:
    """A ``StepEngine`` on a ``StubRunner``; of the model only the tokenizer and the fingerprint are used."""
    settings = config.engine

    def load() -> ModelRunner:
        layout = stub_layout(model_fingerprint(config.model_path, _DTYPE), settings.block_size)
        return StubRunner(layout, settings.num_blocks, settings.max_model_len or _DEFAULT_MAX_MODEL_LEN)

    return StepEngine(load, settings.scheduler, puller=puller, kinds=frozenset({kind}))


def _token_at(position: int) -> int:
    return _FIRST_TOKEN_ID + position % (_END_TOKEN_ID - _FIRST_TOKEN_ID)


def _stamps(token_ids: Sequence[int], block_size: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """One digest a block, never 0: a block that nobody wrote is."""
    tokens = np.asarray(token_ids, np.uint32).reshape(-1, block_size)
    return np.array([zlib.crc32(block.data) or 1 for block in tokens], np.uint32)
