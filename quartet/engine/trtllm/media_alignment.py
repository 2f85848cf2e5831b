"""Where media lie in a prompt that TensorRT-LLM has laid out itself, found by what of the text is left around them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from quartet.errors import EngineError
from quartet.kvcache.block_hash import MediaSpan
from quartet.media.media_id import MEDIA_ID_SIZE_BYTES


def find_media(came: Sequence[int], became: Sequence[int], placeholder_id: int) -> tuple[MediaSpan, ...]:
    """The runs of ``became`` that stand in place of the placeholders of ``came``; what is between is as it was.

    Some models put tokens of their own between an item's parts, so that only the text around tells where it ends.

    Returns:
        A span an item, in order, with zeros for its name; each has at least one token.

    Raises:
        EngineError: ``became`` is not what ``came`` can have become, or in more than one way.
    """
    pieces = _split(came, placeholder_id)
    first = _leftmost(pieces, list(became))
    last = _leftmost([piece[::-1] for piece in reversed(pieces)], list(reversed(became)))
    if first is None or last is None:
        raise EngineError("the engine's prompt is not the one that it was given, with its media in it")
    if first != [(len(became) - end, len(became) - begin) for begin, end in reversed(last)]:
        raise EngineError("where each of the prompt's media ends can't be told: put text between them")
    return tuple(MediaSpan(bytes(MEDIA_ID_SIZE_BYTES), begin, end - begin) for begin, end in first)


def _split(token_ids: Sequence[int], placeholder_id: int) -> list[list[int]]:
    """The text before, between and after the placeholders."""
    places = [index for index, token_id in enumerate(token_ids) if token_id == placeholder_id]
    return [list(token_ids[begin + 1 : end]) for begin, end in pairwise([-1, *places, len(token_ids)])]


def _leftmost(pieces: Sequence[list[int]], token_ids: list[int]) -> list[tuple[int, int]] | None:
    """Beginnings and ends of the items, each of which ends as early as it can; ``None``: they are not there."""
    head, *between, tail = pieces
    end = len(token_ids) - len(tail)
    if token_ids[: len(head)] != head or token_ids[end:] != tail:
        return None
    items: list[tuple[int, int]] = []
    begin = len(head)
    for piece in between:
        at = _find(token_ids, piece, begin + 1, end)
        if at is None:
            return None
        items.append((begin, at))
        begin = at + len(piece)
    return [*items, (begin, end)] if begin < end else None


def _find(token_ids: list[int], piece: list[int], begin: int, end: int) -> int | None:
    if not piece:
        return begin if begin <= end else None
    while True:
        try:
            begin = token_ids.index(piece[0], begin, end)
        except ValueError:
            return None
        if begin + len(piece) <= end and token_ids[begin : begin + len(piece)] == piece:
            return begin
        begin += 1
