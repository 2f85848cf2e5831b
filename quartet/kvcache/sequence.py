"""A sequence: the tokens of one running request, and the blocks that hold their KV."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quartet.kvcache.block_hash import (
    NO_EXTRA_KEY,
    ExtraKey,
    MediaSpan,
    chain_hashes,
    media_suffixes,
    pack_token_ids,
    split_blocks,
)

if TYPE_CHECKING:
    from quartet.kvcache.tiers import TierBlock


@dataclass(frozen=True)
class KnownBlocks:
    """What the caller has already computed of a sequence's full blocks, from the first one on.

    Attributes:
        contents: as ``Sequence.block_content`` gives them.
        hashes: as ``Sequence.sequence_hash`` gives them; may be more or fewer.
    """

    contents: Items[bytes] = ()
    hashes: Items[int] = ()


_NOTHING_KNOWN = KnownBlocks()

#: Stands for a token that is not known yet; no token's id, and nothing can be named by it.
UNREAD_TOKEN_ID = -1


class Sequence:
    """Tokens known so far and where their KV is. Owned by the engine's thread.

    ``BlockManager`` alone changes ``block_table`` and ``num_named_blocks``, and sets ``blocks_below``.

    Attributes:
        token_ids: prompt, generated and output so far; only ever appended to, but for unread tokens.
        num_unread_tokens: tokens at the end that a device has sampled and nobody has read: ``token_ids`` has
            ``UNREAD_TOKEN_ID`` in their place until ``read``.
        num_computed_tokens: tokens, from the first on, whose KV is in the blocks, or written by a step in flight.
        block_table: physical blocks, in the order of the sequence.
        num_named_blocks: blocks, from the first on, whose content the pool knows.
        blocks_below: what tiers below the device have of the blocks after the cached ones, as of ``allocate``; whoever
            allocated loads or releases them.
    """

    def __init__(
        self,
        token_ids: Iterable[int],
        *,
        block_size: int,
        extra_key: ExtraKey = NO_EXTRA_KEY,
        media: tuple[MediaSpan, ...] = (),
        known: KnownBlocks = _NOTHING_KNOWN,
    ) -> None:
        """Start with ``token_ids`` and no blocks; what is ``known`` of these and ``media`` is taken as true.

        Raises:
            InvalidRequestError: field ``media``; items overlap or go beyond the tokens.
        """
        self.token_ids = list(token_ids)
        self.block_size = block_size
        self.extra_key = extra_key
        self.num_unread_tokens = 0
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.num_named_blocks = 0
        self.blocks_below: Items[TierBlock] = ()
        self._media_suffixes = media_suffixes(media, block_size, len(self.token_ids)) if media else {}
        self._contents = list(known.contents)
        self._hashes = list(known.hashes)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that all tokens need, a partly filled last one included."""
        return -(-len(self.token_ids) // self.block_size)

    def append(self, token_id: int) -> None:
        """Add a token, whose KV is not computed yet."""
        self.token_ids.append(token_id)

    def append_unread(self) -> None:
        """Add a token that a step in flight samples."""
        self.token_ids.append(UNREAD_TOKEN_ID)
        self.num_unread_tokens += 1

    def read(self, token_id: int) -> None:
        """The first of the unread tokens is this one."""
        self.token_ids[-self.num_unread_tokens] = token_id
        self.num_unread_tokens -= 1

    @property
    def num_read_tokens(self) -> int:
        """Tokens that are known."""
        return len(self.token_ids) - self.num_unread_tokens

    def block_content(self, index: int) -> bytes:
        """What full block ``index`` says: its token ids and media, the bytes that its block hash is of."""
        if index >= len(self._contents):
            self._read_new_blocks()
        return self._contents[index]

    def sequence_hash(self, index: int) -> int:
        """The public name of full block ``index`` with all before it."""
        if index >= len(self._hashes):
            self._name_blocks(index + 1)
        return self._hashes[index]

    def _name_blocks(self, num_blocks: int) -> None:
        parent = self._hashes[-1] if self._hashes else self.extra_key.hash_seed
        self.block_content(num_blocks - 1)  # has the contents of those before it, too
        self._hashes += chain_hashes(parent, self._contents[len(self._hashes) : num_blocks])

    def _read_new_blocks(self) -> None:
        first = len(self._contents)
        known = self.token_ids[first * self.block_size : self.num_read_tokens]
        blocks = split_blocks(pack_token_ids(known), self.block_size)
        if self._media_suffixes:
            blocks = [block + self._media_suffixes.get(index, b"") for index, block in enumerate(blocks, first)]
        self._contents += blocks
