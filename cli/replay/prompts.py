"""What a trace's prompts say, block by block: token ids that are equal where, and only where, the trace says so."""

from __future__ import annotations

from collections.abc import Sequence

from cli.traces.format import BLOCK_SIZE, TraceRequest
from quartet.errors import InvalidRequestError
from quartet.kvcache.block_hash import chain_hash, hash_bytes, pack_token_ids, sequence_hashes
from quartet.kvcache.sequence import KnownBlocks


class Prompts:
    """Names each block of a trace once, however many requests begin with it."""

    def __init__(self, requests: Sequence[TraceRequest], block_size: int) -> None:
        """For KV blocks of ``block_size`` tokens.

        Raises:
            InvalidRequestError: field ``hash_ids``; a request has none for some of its tokens.
        """
        for number, request in enumerate(requests, 1):
            if len(request.hash_ids) * BLOCK_SIZE < request.num_input_tokens:
                raise InvalidRequestError(
                    f"request {number} has {len(request.hash_ids)} hash_ids for {request.num_input_tokens} tokens: "
                    f"it needs one for each {BLOCK_SIZE}",
                    field="hash_ids",
                )
        self._block_size = block_size
        # Blocks of the trace that are made of whole KV blocks, all of which then say the same.
        self._num_blocks_each = 0 if BLOCK_SIZE % block_size else BLOCK_SIZE // block_size
        self._token_ids: dict[int, int] = {}  # by hash id, which may be any number
        self._contents: dict[int, tuple[bytes, int]] = {}  # by hash id: what a KV block says, and the hash of that
        self._hashes: dict[tuple[int | None, int], tuple[int, ...]] = {}  # by hash before and hash id

    def token_ids(self, request: TraceRequest) -> list[int]:
        """The prompt."""
        token_ids: list[int] = []
        for hash_id in request.hash_ids:
            token_ids += [self._token_id(hash_id)] * BLOCK_SIZE
        del token_ids[request.num_input_tokens :]
        return token_ids

    def blocks(self, request: TraceRequest) -> KnownBlocks:
        """What the prompt's full KV blocks say, as far as that is known without looking, and all their names."""
        if not self._num_blocks_each:
            return KnownBlocks((), sequence_hashes(self.token_ids(request), self._block_size))
        contents: list[bytes] = []
        hashes: list[int] = []
        parent: int | None = None
        for hash_id in request.hash_ids:
            content, _ = self._content(hash_id)
            contents += [content] * self._num_blocks_each
            named = self._hashes.get((parent, hash_id))
            if named is None:
                named = self._hashes[parent, hash_id] = self._name(parent, hash_id)
            hashes += named
            parent = named[-1]
        num_full = request.num_input_tokens // self._block_size
        del contents[num_full:], hashes[num_full:]
        return KnownBlocks(contents, hashes)

    def _token_id(self, hash_id: int) -> int:
        return self._token_ids.setdefault(hash_id, len(self._token_ids))

    def _content(self, hash_id: int) -> tuple[bytes, int]:
        known = self._contents.get(hash_id)
        if known is None:
            content = pack_token_ids([self._token_id(hash_id)] * self._block_size)
            known = self._contents[hash_id] = (content, hash_bytes(content))
        return known

    def _name(self, parent: int | None, hash_id: int) -> tuple[int, ...]:
        _, block_hash = self._content(hash_id)
        hashes: list[int] = []
        for _ in range(self._num_blocks_each):
            parent = chain_hash(parent, block_hash)
            hashes.append(parent)
        return tuple(hashes)
