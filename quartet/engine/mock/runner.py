"""A ``ModelRunner`` whose steps take the time of a model, over a real pool of tiny blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quartet.engine.core import ALL_SAMPLING_FIELDS
from quartet.engine.mock.config import MockEngineConfig
from quartet.engine.mock.model import MockModel
from quartet.engine.mock.pacer import StepPacer
from quartet.engine.mock.stamps import BlockStamps
from quartet.engine.mock.tokens import MockTokens
from quartet.engine.runner import SampledToken
from quartet.engine.running import ScheduledChunk
from quartet.engine.step_work import step_work
from quartet.errors import ModelFilesError
from quartet.kvcache.layout import KvLayout
from quartet.transfer.base import PoolMemory

#: What requests may ask for: all but log probabilities, which tokens that nobody computed don't have.
SAMPLING_FIELDS = ALL_SAMPLING_FIELDS - {"logprobs"}

_MS_PER_S = 1e3
# Bytes of K, and of V, of one token: enough for the stamps, whatever the block size.
_TOKEN_BYTES = 4


def mock_layout(fingerprint: str, block_size: int) -> KvLayout:
    """Blocks of 8 bytes a token."""
    return KvLayout(
        model_fingerprint=fingerprint,
        dtype="uint8",
        num_layers=1,
        num_kv_heads=1,
        head_dim=_TOKEN_BYTES,
        block_size=block_size,
    )


class MockRunner:
    """Gives out tokens of ``MockTokens`` in the time of ``StepTiming``. Needs neither torch nor weights.

    What it writes to blocks are ``BlockStamps``, so a block that was mixed up or came wrong ends the engine.

    Attributes:
        layout: of one block.
        memory: the pool's bytes.
        num_blocks: of the pool.
        eos_token_ids: tokens that end an output; they come only where a request's ``logit_bias`` wants them.
        vocab_size: token ids are below it.
        max_model_len: tokens of prompt and output together.
    """

    def __init__(self, config: MockEngineConfig, pacer: StepPacer | None = None) -> None:
        """Read the model's text files, reserve the pool.

        Raises:
            ModelFilesError: the files are missing or malformed, or say nothing of a length that ``config`` leaves open.
        """
        model = MockModel.load(Path(config.model_path))
        max_model_len = config.max_model_len or model.max_model_len
        if max_model_len is None:
            raise ModelFilesError("set max_model_len: config.json has no max_position_embeddings")
        self.layout = mock_layout(model.fingerprint, config.block_size)
        self.num_blocks = config.num_blocks
        self.max_model_len = max_model_len
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.memory: PoolMemory | None = PoolMemory(config.num_blocks, self.layout.piece_size_bytes)
        self._stamps = BlockStamps(self.memory, config.block_size)
        self._tokens = MockTokens(model.word_ids)
        self._settings = config.settings
        self._pacer = pacer or StepPacer()
        self._last_ids: frozenset[int] = frozenset()

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        """Stamp the blocks that the chunks fill, choose a token for each that samples, take a step's time.

        Raises:
            WrongBlocksError: a block does not hold what its request's tokens give.
        """
        ids = frozenset(chunk.running.id for chunk in chunks)
        self._pacer.begin(is_continued=not ids.isdisjoint(self._last_ids))
        self._last_ids = ids
        self._stamps.take(chunks)
        token_ids = self._tokens.next([chunk.running for chunk in chunks if chunk.samples])
        self._pacer.end(self.step_s(chunks))
        return [SampledToken(token_id) for token_id in token_ids]

    def step_s(self, chunks: Sequence[ScheduledChunk]) -> float:
        """Seconds that a step of ``chunks`` takes."""
        work = step_work(chunks)
        step_ms = self._settings.timing.step_ms(work.num_prompt_tokens, work.num_context_tokens)
        return max(0.0, step_ms) / _MS_PER_S / self._settings.speed_up

    def close(self) -> None:
        """Give the pool back."""
        if self.memory is not None:
            self.memory.close()
