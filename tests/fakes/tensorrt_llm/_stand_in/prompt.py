"""A prompt that is ready to be computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from zlib import crc32

import torch


@dataclass(frozen=True)
class PreparedPrompt:
    """Tokens, with each picture's placeholder expanded, and one way to what goes in its place.

    An item's tokens are ids beyond the vocabulary, none of them the id that stood in the prompt; or, in later releases,
    that very id.

    Attributes:
        vocab_size: ids from here on are items'; ``None``: the prompt has none.
        placeholder: the id within the vocabulary that is items', too, if any.
        pixel_values: [num_pictures, 3, height, width], for the vision tower.
        features: [tokens of items, hidden size], ready.
        handles: of an encoder's results, one a picture.
        item_hashes: of each picture, in order; 8 ints.
        item_tokens: tokens of each picture.
        item_names: what each picture was called by who gave it.
    """

    text: str | None
    token_ids: list[int]
    vocab_size: int | None = None
    placeholder: int | None = None
    pixel_values: torch.Tensor | None = None
    features: torch.Tensor | None = None
    handles: list[dict[str, Any]] = field(default_factory=list)
    item_hashes: list[list[int]] = field(default_factory=list)
    item_tokens: list[int] = field(default_factory=list)
    item_names: list[str | None] = field(default_factory=list)

    def extra_ids(self) -> list[int]:
        """Return each token's ``token_extra_id``: 0, or for an item's what marks its picture."""
        marks = self._marks()
        return [next(marks, 0) if self.is_item(token_id) else 0 for token_id in self.token_ids]

    def items(self) -> list[tuple[str, int, int]]:
        """Of each picture its name, else its hash in hex digits; its first position, its tokens."""
        places = iter([place for place, token_id in enumerate(self.token_ids) if self.is_item(token_id)])
        found = []
        for item_hash, name, num_tokens in zip(self.item_hashes, self.item_names, self.item_tokens, strict=True):
            first = next(places, None)
            if first is None:
                break  # a decode's prompt, which has no pictures
            found.append((name or "".join(f"{part & 0xFFFFFFFF:08x}" for part in item_hash), first, num_tokens))
            next(islice(places, num_tokens - 1, num_tokens - 1), None)
        return found

    def is_item(self, token_id: int) -> bool:
        """Whether ``token_id`` stands for a part of an item."""
        return token_id == self.placeholder or (self.vocab_size is not None and token_id >= self.vocab_size)

    def _marks(self) -> Iterator[int]:
        for item_hash, name, num_tokens in zip(self.item_hashes, self.item_names, self.item_tokens, strict=True):
            # As upstream, items of one content under two names are two items.
            yield from [((item_hash[0] ^ crc32((name or "").encode())) & 0x7FFFFFFF) or 1] * num_tokens
