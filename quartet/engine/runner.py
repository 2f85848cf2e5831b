"""The seam between scheduling and the model: compute these chunks, sample where asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quartet.engine.running import ScheduledChunk
from quartet.engine.sampling import TokenLogprobs
from quartet.kvcache.layout import KvLayout
from quartet.transfer.base import EmbeddingMemory, PoolMemory


@dataclass(frozen=True)
class SampledToken:
    """One sampled token; ``logprobs`` where the request's output options ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class ModelRunner(Protocol):
    """A loaded, warmed-up model with its block pool. Made, used and closed in the engine thread."""

    @property
    def layout(self) -> KvLayout:
        """Shape of one block."""
        ...

    @property
    def memory(self) -> PoolMemory | None:
        """The block pool's bytes; ``None`` where no transfer can reach them."""
        ...

    @property
    def embeddings(self) -> EmbeddingMemory | None:
        """Where it reads embeddings of media; ``None``: its model takes none."""
        ...

    @property
    def placeholder_id(self) -> int | None:
        """The token that stands for media in prompts; ``None``: it takes text only."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output unless ``ignore_eos``."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are in ``[0, vocab_size)``."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, numbered from 0."""
        ...

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        """Write the KV of all chunks' tokens into the blocks of their ``seq.block_table``; sample.

        Block tables cover the chunks' tokens. A request is in at most one chunk.

        Returns:
            One token for each chunk that samples, in the order of the chunks.

        Raises:
            Exception: whatever it is, the engine is dead then.
        """
        ...

    def close(self) -> None:
        """Give the model and the pool back; called once, last."""
        ...
