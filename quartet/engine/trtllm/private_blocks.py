"""Requests of whose KV blocks tokens alone don't decide the contents: those with a salt, an adapter or media.

``RankMirror`` asks ``PrivateBlocks`` what is in a block before it gives it a name.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from quartet.engine.trtllm.kv_events import LlmBlock
from quartet.kvcache.block_hash import (
    NO_EXTRA_KEY,
    TOKEN_SIZE_BYTES,
    ExtraKey,
    MediaSpan,
    media_suffixes,
    pack_token_ids,
    sequence_hashes,
)

#: How long after a request's end its last events may still be sent; its last steps are long over by then.
_GRACE_S = 5.0

#: Private blocks of requests that ended and whose events may still come, some 500 bytes each: one a request, and one
#: for each block with a part of its media.
_MAX_ENDED = 1 << 15

_Place = TypeVar("_Place")
_Entry = TypeVar("_Entry")


@dataclass(frozen=True, kw_only=True)
class PrivateRequest:
    """A request of whose blocks tokens alone don't decide the contents.

    Attributes:
        token_ids: of its prompt, and of what it has generated already.
        salt: its cache salt.
        adapter: its adapter, which no event names.
        media: where its media lie.
        media_names: what events call each of them; empty: that is not known, so their blocks get no names.
        unknown_from: first position from which the engine computes other tokens than ``token_ids``; ``None``: nowhere.
    """

    token_ids: Sequence[int] = field(repr=False)
    salt: str = field(default="", repr=False)
    adapter: str = ""
    media: Sequence[MediaSpan] = ()
    media_names: Sequence[str] = ()
    unknown_from: int | None = None

    @property
    def first_position(self) -> int:
        """Where its contents begin to differ from a plain request's; behind its tokens if nowhere."""
        if self.salt or self.adapter:
            return 0
        places = [span.first_position for span in self.media]
        return min([len(self.token_ids), *places, *([] if self.unknown_from is None else [self.unknown_from])])


class PrivateBlocks:
    """Remembers private requests, for as long as events may still report their blocks. Thread-safe.

    Where events say nothing of salts and media, a private block looks like a plain one. A block after one without a
    name of ours has no name either, so to know one such block for each request is enough. The tokens that it had at
    first are enough, too: any block that begins with them might be the request's. This also withholds plain blocks
    that begin alike and are stored meanwhile: too little is reported, never too much.

    Where an event names a salt or media, the block gets a name if it fits a remembered request: its salt, its tokens,
    the ids of its media and where they lie; and if it might not be one with an adapter as well. The block after which
    it comes has a name already, which says all about what is before it.

    If too many requests end while no event comes, they are forgotten, and no block gets a name until events catch up.
    """

    def __init__(
        self,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        max_ended: int = _MAX_ENDED,
        *,
        names_private: bool = False,
    ) -> None:
        """With ``names_private``, blocks of salts and media get names, if an event says that they are such."""
        self._block_size_bytes = block_size * TOKEN_SIZE_BYTES
        self._block_size = block_size
        self._clock = clock
        self._max_ended = max_ended
        self._names_private = names_private
        self._lock = threading.Lock()
        # By parent: how many requests have exactly this block, or so far only its front.
        self._full: dict[int | None, dict[bytes, int]] = {}
        self._fronts: dict[int | None, dict[bytes, int]] = {}
        # By salt and parent: blocks that events can name, each with the number of requests that have it.
        self._known: dict[tuple[str, int | None], dict[_KnownBlock, int]] = {}
        self._ended: deque[tuple[float, _Noted]] = deque()
        self._num_ended_blocks = 0
        self._num_requests = 0
        self._overflowed_at: float | None = None

    def __len__(self) -> int:
        """The number of requests that are remembered."""
        with self._lock:
            return self._num_requests

    def add(self, request: PrivateRequest) -> ExitStack:
        """Call this before submitting a private request, and close what it returns when its last output came."""
        noted = _Noted(tuple(self._starts(request)), tuple(self._blocks(request)) if self._names_private else ())
        with self._lock:
            self._count(noted, 1)
        stack = ExitStack()
        stack.callback(self._end, noted)
        return stack

    def contents(self, parent: int | None, stored: LlmBlock) -> bytes | None:
        """What our block hash of ``stored`` is made of, after the block named ``parent``.

        ``None``: it is not known, or might be something else.
        """
        with self._lock:
            if self._overflowed_at is not None:
                return None
            if stored.media is None and (parent is not None or not stored.salt):
                token_bytes = stored.token_bytes
                return None if token_bytes is None or self._might_be_private(parent, token_bytes) else token_bytes
            known = self._known.get((stored.salt, parent), ())
            fitting = {block.contents(stored) for block in known if block.fits(stored)}
        return fitting.pop() if len(fitting) == 1 else None

    def forget(self, read_until: float) -> None:
        """Forget old requests: all events sent before ``read_until``, in ``clock``'s seconds, were read."""
        with self._lock:
            while self._ended and self._ended[0][0] + _GRACE_S <= read_until:
                self._drop_oldest()
            if self._overflowed_at is not None and self._overflowed_at + _GRACE_S <= read_until:
                self._overflowed_at = None

    def _might_be_private(self, parent: int | None, token_bytes: bytes) -> bool:
        if token_bytes in self._full.get(parent, ()):
            return True
        return any(token_bytes.startswith(front) for front in self._fronts.get(parent, ()))

    def _starts(self, request: PrivateRequest) -> Iterator[_Start]:
        """Its first private block, as events without salts and media show it; and its first one within its salt."""
        yield self._start(request, request.first_position, NO_EXTRA_KEY)
        within = replace(request, salt="", adapter="").first_position
        if request.salt and self._names_private and within < len(request.token_ids):
            yield self._start(request, within, ExtraKey(cache_salt=request.salt))

    def _start(self, request: PrivateRequest, position: int, key: ExtraKey) -> _Start:
        first = position // self._block_size * self._block_size
        before = sequence_hashes(request.token_ids[:first], self._block_size, key)
        block = request.token_ids[first : first + self._block_size]
        return _Start(before[-1] if before else None, pack_token_ids(block))

    def _blocks(self, request: PrivateRequest) -> Iterator[tuple[tuple[str, int | None], _KnownBlock]]:
        """Its blocks that an event must name by more than tokens, with salt and parent: the first one, and its media's.

        None follows one that no event can name, as then those after it have no name either.
        """
        size = self._block_size
        suffixes = media_suffixes(request.media, size, len(request.token_ids))
        is_unknown = bool(request.adapter) or (request.unknown_from is not None and request.unknown_from < size)
        if request.salt or request.adapter:
            known = self._known_block(request, 0, suffixes.pop(0, b""))
            yield (request.salt, None), replace(known, is_unknown=is_unknown)
        if is_unknown or not suffixes or not request.media_names:
            return
        names = sequence_hashes(request.token_ids, size, ExtraKey(cache_salt=request.salt), request.media)
        for place, suffix in suffixes.items():
            parent = names[place - 1] if place else None
            yield (request.salt, parent), self._known_block(request, place * size, suffix)

    def _known_block(self, request: PrivateRequest, begin: int, suffix: bytes) -> _KnownBlock:
        end = min(begin + self._block_size, len(request.token_ids))
        if request.unknown_from is not None:
            end = max(begin, min(end, request.unknown_from))
        names = request.media_names or ("",) * len(request.media)  # no event has the second
        spans = [
            (span, name)
            for span, name in zip(request.media, names, strict=True)
            if span.first_position < end and begin < span.first_position + span.num_tokens
        ]
        return _KnownBlock(
            front=pack_token_ids(request.token_ids[begin:end]),
            places=tuple(
                (max(span.first_position, begin) - begin, min(span.first_position + span.num_tokens, end) - begin)
                for span, _ in spans
            ),
            parts=tuple((max(begin - span.first_position, 0), name) for span, name in spans),
            suffix=suffix,
        )

    def _end(self, noted: _Noted) -> None:
        with self._lock:
            self._ended.append((self._clock(), noted))
            self._num_ended_blocks += noted.num_blocks
            if self._num_ended_blocks > self._max_ended:
                self._overflowed_at = self._ended[-1][0]
                while self._ended:
                    self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, noted = self._ended.popleft()
        self._num_ended_blocks -= noted.num_blocks
        self._count(noted, -1)

    def _count(self, noted: _Noted, change: int) -> None:
        self._num_requests += change
        for start in noted.starts:
            is_full = len(start.token_bytes) == self._block_size_bytes
            _add(self._full if is_full else self._fronts, start.parent, start.token_bytes, change)
        for place, block in noted.blocks:
            _add(self._known, place, block, change)


@dataclass(frozen=True)
class _Start:
    """The first private block of a sequence: after the block named ``parent``, and with these tokens at its front."""

    parent: int | None
    token_bytes: bytes


@dataclass(frozen=True, kw_only=True)
class _KnownBlock:
    """A block of a request, as far as its tokens are known; generated ones may follow.

    Attributes:
        front: its tokens, with our placeholders.
        places: positions in it that parts of media fill, as (begin, end).
        parts: of each of them, where it begins in its item, and what events call the item.
        suffix: what media add to the hashed bytes.
        is_unknown: there is something in it, or before it, that no event names.
    """

    front: bytes
    places: tuple[tuple[int, int], ...]
    parts: tuple[tuple[int, str], ...]
    suffix: bytes
    is_unknown: bool = False

    @cached_property
    def _token_ids(self) -> tuple[int | None, ...]:
        token_ids: list[int | None] = [*struct.unpack(f"<{len(self.front) // TOKEN_SIZE_BYTES}I", self.front)]
        for begin, end in self.places:
            token_ids[begin:end] = [None] * (end - begin)
        return tuple(token_ids)

    def fits(self, stored: LlmBlock) -> bool:
        """Whether ``stored`` might be this block."""
        if stored.media is None:
            return not self.places and stored.token_bytes is not None and stored.token_bytes.startswith(self.front)
        num_known = len(self._token_ids)
        if stored.media.token_ids[:num_known] != self._token_ids:
            return False
        said = stored.media.parts
        return self.is_unknown or (
            None not in stored.media.token_ids[num_known:]
            and len(said) == len(self.parts)
            and all(
                offset == begin and name in names
                for (offset, name), (begin, names) in zip(self.parts, said, strict=True)
            )
        )

    def contents(self, stored: LlmBlock) -> bytes | None:
        """The bytes to hash if ``stored`` is this block; ``None``: unknown."""
        if self.is_unknown or stored.media is None:
            return None if self.is_unknown else stored.token_bytes
        rest = [token_id for token_id in stored.media.token_ids[len(self._token_ids) :] if token_id is not None]
        return self.front + pack_token_ids(rest) + self.suffix


@dataclass(frozen=True)
class _Noted:
    """What is remembered of a request: ``blocks`` with salt and parent."""

    starts: tuple[_Start, ...]
    blocks: tuple[tuple[tuple[str, int | None], _KnownBlock], ...]

    @property
    def num_blocks(self) -> int:
        return len(self.starts) + len(self.blocks)


def _add(table: dict[_Place, dict[_Entry, int]], place: _Place, entry: _Entry, change: int) -> None:
    """Change how often ``entry`` is at ``place``; what is there no more leaves nothing behind."""
    entries = table.setdefault(place, {})
    entries[entry] = entries.get(entry, 0) + change
    if not entries[entry]:
        del entries[entry]
    if not entries:
        del table[place]
