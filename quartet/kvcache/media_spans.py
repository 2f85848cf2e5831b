"""Prompts with media: one placeholder an item becomes as many tokens as the item fills."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.errors import InvalidRequestError
from quartet.kvcache.block_hash import MediaSpan
from quartet.media.items import MediaSize


def expand_placeholders(
    token_ids: Sequence[int], placeholder_id: int, sizes: Sequence[MediaSize]
) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """Repeat the placeholder of each item as often as it fills tokens.

    Returns:
        The prompt, and where each item lies in it, in order.

    Raises:
        InvalidRequestError: field ``media``; there are not as many placeholders as items.
    """
    check_placeholders(token_ids, placeholder_id, len(sizes))
    expanded: list[int] = []
    spans: list[MediaSpan] = []
    begin = 0
    for size in sizes:
        at = token_ids.index(placeholder_id, begin)
        expanded += token_ids[begin:at]
        spans.append(MediaSpan(size.media_id, len(expanded), size.num_tokens))
        expanded += [placeholder_id] * size.num_tokens
        begin = at + 1
    expanded += token_ids[begin:]
    return expanded, tuple(spans)


def check_placeholders(token_ids: Sequence[int], placeholder_id: int, num_items: int) -> None:
    """Refuse a prompt without exactly one placeholder an item. Raises ``InvalidRequestError``, field ``media``."""
    num_placeholders = token_ids.count(placeholder_id)
    if num_placeholders != num_items:
        message = f"the prompt has {num_placeholders} places for media, and there are {num_items} items"
        raise InvalidRequestError(message, field="media")
