"""Which rows of a step are media's, and the embeddings that come there in place of the placeholder's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.runner import ScheduledChunk


@dataclass(frozen=True)
class MediaRows:
    """What media is in one step.

    Attributes:
        rows: ``[M]`` int64: rows of the flat batch.
        embeddings: ``[M, hidden_size]``, of the model's dtype and on its device.
    """

    rows: torch.Tensor
    embeddings: torch.Tensor

    def put_into(self, hidden: torch.Tensor) -> None:
        """Replace these rows of ``hidden``, the embeddings of all tokens of the step, ``[T, hidden_size]``."""
        hidden.index_copy_(0, self.rows, self.embeddings)


def media_rows(
    chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], pool: EmbeddingPoolView, device: torch.device
) -> MediaRows | None:
    """Copy what the chunks need out of the pool; ``None`` where they are all text.

    Args:
        chunks: any part of an item's tokens may lie in one.
        first_rows: where each of them begins in the flat batch.
        pool: has the items in their requests' ``media_blocks``.
        device: the model's.
    """
    rows: list[npt.NDArray[np.int64]] = []
    embeddings: list[torch.Tensor] = []
    for chunk, first_row in zip(chunks, first_rows, strict=True):
        begin, end = chunk.first_position, chunk.first_position + chunk.num_tokens
        if begin >= chunk.running.media_end:
            continue
        request = chunk.running.request
        for span, block_ids in zip(request.generation.media, request.media_blocks, strict=True):
            first = max(span.first_position, begin)
            num_tokens = min(span.first_position + span.num_tokens, end) - first
            if num_tokens > 0:
                rows.append(np.arange(num_tokens) + (first_row + first - begin))
                embeddings.append(pool.read(block_ids, first - span.first_position, num_tokens))
    if not rows:
        return None
    return MediaRows(torch.from_numpy(np.concatenate(rows)).to(device), torch.cat(embeddings).to(device))
