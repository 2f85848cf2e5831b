"""What an engine refuses of a prompt's media before it spends anything on the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet.engine.base import EngineRequest
from quartet.errors import InvalidRequestError, UnsupportedFieldError
from quartet.kvcache.block_hash import MediaSpan, ordered_spans


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """What bounds the media of a request where a model takes any.

    Attributes:
        placeholder_id: the token at all positions that media fills, and nowhere else in a prompt; ``None``: any is.
        block_size: tokens of one block of the pool of embeddings.
        num_blocks: of that pool.
    """

    placeholder_id: int | None
    block_size: int
    num_blocks: int


def check_media(request: EngineRequest, limits: MediaLimits | None) -> None:
    """Refuse media that can't be what the prompt says. ``limits`` is ``None`` where the model takes text only.

    Raises:
        InvalidRequestError: field ``media``; or ``prompt_token_ids``: placeholders that no item fills.
        UnsupportedFieldError: field ``media``; this model takes none.
    """
    if limits is None:
        if request.generation.media or request.media_blocks:
            raise UnsupportedFieldError("this model takes text only", field="media")
        return
    media, prompt = request.generation.media, request.generation.prompt_token_ids
    ordered_spans(media, len(prompt))
    if request.media_blocks:
        _check_blocks(media, request.media_blocks, limits)
    if limits.placeholder_id is not None:
        _check_placeholders(media, prompt, limits.placeholder_id)


def _check_blocks(media: Sequence[MediaSpan], blocks: Sequence[Sequence[int]], limits: MediaLimits) -> None:
    if len(blocks) != len(media):
        raise InvalidRequestError(f"{len(media)} media items, and blocks of {len(blocks)}", field="media")
    for span, block_ids in zip(media, blocks, strict=True):
        if len(block_ids) * limits.block_size < span.num_tokens:
            message = f"a media item fills {span.num_tokens} tokens, and its blocks hold fewer"
            raise InvalidRequestError(message, field="media")
        # A block outside the pool would break the step of everybody in the batch.
        if min(block_ids) < 0 or max(block_ids) >= limits.num_blocks:
            raise InvalidRequestError(f"blocks of media must be in [0, {limits.num_blocks})", field="media")


def _check_placeholders(media: Sequence[MediaSpan], prompt: Sequence[int], placeholder_id: int) -> None:
    # Of the arrays that prompts come as this copies nothing: 0.02 ms for 32 k tokens, where ``count`` takes 1.6.
    is_placeholder = np.asarray(prompt) == placeholder_id
    for span in media:
        filled = is_placeholder[span.first_position : span.first_position + span.num_tokens]
        if not filled.all():
            raise InvalidRequestError("a media item lies on other tokens than its placeholder", field="media")
        filled[:] = False
    if is_placeholder.any():
        raise InvalidRequestError("the prompt has placeholders that no media item fills", field="prompt_token_ids")
