"""A ``ModelRunner`` whose steps take the time of a model, over a real pool of tiny blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
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
from quartet.transfer.base import EmbeddingMemory, PoolMemory

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


class SharedByRanks:
    """What the ranks of one mock engine have in common: the model, and one memory with each rank's blocks in turn."""

    def __init__(self, config: MockEngineConfig) -> None:
        """Read the model's text files, reserve the pools.

        Raises:
            ModelFilesError: the files are missing or malformed, or say nothing of a length that ``config`` leaves open.
        """
        self.config = config
        self.model = MockModel.load(Path(config.model_path))
        max_model_len = config.max_model_len or self.model.max_model_len
        if max_model_len is None:
            raise ModelFilesError("set max_model_len: config.json has no max_position_embeddings")
        self.max_model_len = max_model_len
        self.layout = mock_layout(self.model.fingerprint, config.block_size)
        self.memory = PoolMemory(config.data_parallel_size * config.num_blocks, self.layout.piece_size_bytes)


def rank_loader(config: MockEngineConfig) -> Callable[[int], MockRunner]:
    """Makes the runner of a rank; the first call, which has to end before the next, loads what they share.

    It raises ``ModelFilesError`` as ``SharedByRanks`` does.
    """
    shared = cache(lambda: SharedByRanks(config))
    return lambda rank: MockRunner(shared(), rank)


class MockRunner:
    """Gives out tokens of ``MockTokens`` in the time of ``StepTiming``. Needs neither torch nor weights.

    What it writes to blocks are ``BlockStamps``, so a block that was mixed up or came wrong ends the engine.

    Attributes:
        layout: of one block.
        memory: the bytes of all ranks' pools.
        num_blocks: of this rank's.
        eos_token_ids: tokens that end an output; they come only where a request's ``logit_bias`` wants them.
        vocab_size: token ids are below it.
        max_model_len: tokens of prompt and output together.
    """

    embeddings: EmbeddingMemory | None = None
    placeholder_id: int | None = None

    def __init__(self, shared: SharedByRanks, rank: int = 0, pacer: StepPacer | None = None) -> None:
        """Compute for ``rank``; that of rank 0 closes what is shared."""
        config, model = shared.config, shared.model
        self.layout = shared.layout
        self.num_blocks = config.num_blocks
        self.max_model_len = shared.max_model_len
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.memory: PoolMemory | None = shared.memory
        self._stamps = BlockStamps(shared.memory, config.block_size, rank * config.num_blocks)
        self._tokens = MockTokens(model.word_ids)
        self._settings = config.settings
        self._pacer = pacer or StepPacer()
        self._is_owner = rank == 0
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
        """Give the pools back, where they are its to give."""
        if self._is_owner and self.memory is not None:
            self.memory.close()
