"""The life of hand-offs: what a worker holds for whoever takes it next, and until when.

    HELD -> PULLING -> RELEASED | EXPIRED | CANCELLED

A hand-off is HELD for its time to live, which each renewal starts anew: one that expires has a dead taker, not a busy
one. ``begin`` makes it PULLING: its blocks stay where they are until the pull finishes, is aborted (which a lost stream
counts as: the puller throws away what it has) or has taken too long. That last bound is for one-sided ways, which read
memory without telling us: after it, ``finish`` fails and the puller knows that its data may be another's. So every
hand-off ends in bounded time once nobody speaks for it, and whoever ends it is told, once, what to let go.

Pure code: no clock, no lock. ``now`` is in seconds of one monotonic clock, and never goes back between calls.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from quartet.errors import HandOffNotFoundError, HandOffStateError, InvalidRequestError, StaleEpochError
from quartet.kvcache.layout import Payload

_ID_SIZE_BYTES = 16


class HandOffState(StrEnum):
    """Where a hand-off is in its life; the last three are ends."""

    HELD = "held"
    PULLING = "pulling"
    RELEASED = "released"  # taken
    EXPIRED = "expired"  # not renewed in time, or pulled for too long
    CANCELLED = "cancelled"  # aborted, withdrawn, or its pull's stream was lost


@dataclass(frozen=True)
class HandOffEntry:
    """A hand-off as its worker knows it.

    Attributes:
        hand_off_id: 16 random bytes that name it.
        secret: 16 random bytes without which nobody may touch it.
        holder: under which the engine holds the blocks.
        block_ids: held blocks in the order of the sequence: piece ``i`` is in ``block_ids[i]``. Empty if opaque.
    """

    hand_off_id: bytes
    secret: bytes = field(repr=False)
    holder: int
    block_ids: tuple[int, ...]
    payload: Payload


@dataclass(frozen=True)
class EndedHandOff:
    """The end of a hand-off, told once: the blocks under ``holder`` are to be released now."""

    hand_off_id: bytes
    holder: int
    state: HandOffState


@dataclass(frozen=True)
class HandOffCounts:
    """Hand-offs alive now, by state, and ended since the start, by how."""

    held: int
    pulling: int
    released: int
    expired: int
    cancelled: int


class HandOffTable:
    """All hand-offs of one life of a worker. Ended ones leave nothing behind but a count.

    Every method that takes an id also takes its secret and the worker's epoch, and raises ``StaleEpochError`` for
    another epoch and ``HandOffNotFoundError`` for an id that is unknown, ended or past its deadline, or not of that
    secret, without telling which; then nothing has changed.
    """

    def __init__(
        self, epoch: int, ttl_s: float, max_pull_s: float, draw: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        """Start empty.

        Args:
            epoch: this life of the worker.
            ttl_s: how long a hand-off lives without a renewal.
            max_pull_s: how long one pull may take.
            draw: gives that many unguessable bytes.
        """
        self.epoch = epoch
        self.ttl_s = ttl_s
        self.max_pull_s = max_pull_s
        self._draw = draw
        # All hand-offs live equally long, and all pulls have one bound: each of the two is in the order of deadlines.
        self._held: OrderedDict[bytes, _Live] = OrderedDict()
        self._pulling: OrderedDict[bytes, _Live] = OrderedDict()
        self._id_by_holder: dict[int, bytes] = {}
        self._num_ended = {HandOffState.RELEASED: 0, HandOffState.EXPIRED: 0, HandOffState.CANCELLED: 0}

    @property
    def counts(self) -> HandOffCounts:
        """How many hand-offs are, and ended, in which state."""
        return HandOffCounts(
            held=len(self._held),
            pulling=len(self._pulling),
            released=self._num_ended[HandOffState.RELEASED],
            expired=self._num_ended[HandOffState.EXPIRED],
            cancelled=self._num_ended[HandOffState.CANCELLED],
        )

    def offer(self, holder: int, block_ids: tuple[int, ...], payload: Payload, *, now: float) -> HandOffEntry:
        """Make a hand-off of what ``holder``, unique among the living ones, holds; its time to live starts."""
        assert holder not in self._id_by_holder, "this holder already has a hand-off"
        entry = HandOffEntry(self._draw(_ID_SIZE_BYTES), self._draw(_ID_SIZE_BYTES), holder, block_ids, payload)
        self._held[entry.hand_off_id] = _Live(entry, now + self.ttl_s)
        self._id_by_holder[holder] = entry.hand_off_id
        return entry

    def begin(
        self, hand_off_id: bytes, secret: bytes, epoch: int, pieces: Sequence[int], *, now: float
    ) -> HandOffEntry:
        """Start the one pull of a hand-off, which keeps it alive for at most ``max_pull_s``.

        ``pieces`` are the positions in the sequence that will be read; there may be none.

        Raises:
            HandOffStateError: it is already being pulled.
            InvalidRequestError: field ``pieces``; out of range or repeated.
        """
        live = self._find(hand_off_id, secret, epoch, now)
        if hand_off_id in self._pulling:
            raise HandOffStateError("the hand-off is already being pulled")
        if len(set(pieces)) < len(pieces) or any(not 0 <= piece < len(live.entry.block_ids) for piece in pieces):
            raise InvalidRequestError(f"pieces must differ and be below {len(live.entry.block_ids)}", field="pieces")
        del self._held[hand_off_id]
        live.deadline = now + self.max_pull_s
        self._pulling[hand_off_id] = live
        return live.entry

    def renew(self, hand_off_id: bytes, secret: bytes, epoch: int, *, now: float) -> None:
        """Start the time to live anew; a pull that has begun keeps its own bound."""
        live = self._find(hand_off_id, secret, epoch, now)
        if hand_off_id in self._held:
            live.deadline = now + self.ttl_s
            self._held.move_to_end(hand_off_id)

    def finish(self, hand_off_id: bytes, secret: bytes, epoch: int, *, now: float) -> EndedHandOff:
        """End a pull: only when this returns may what was read be used.

        Raises:
            HandOffStateError: no pull has begun.
        """
        live = self._find(hand_off_id, secret, epoch, now)
        if hand_off_id in self._held:
            raise HandOffStateError("the pull of this hand-off has not begun")
        return self._end(live, HandOffState.RELEASED)

    def abort(self, hand_off_id: bytes, secret: bytes, epoch: int, *, now: float) -> EndedHandOff:
        """End a hand-off that nobody will take, or whose pull broke."""
        return self._end(self._find(hand_off_id, secret, epoch, now), HandOffState.CANCELLED)

    def withdraw(self, holder: int) -> EndedHandOff | None:
        """End ``holder``'s hand-off for reasons of our own; ``None`` where it has none any more."""
        hand_off_id = self._id_by_holder.get(holder)
        if hand_off_id is None:
            return None
        return self._end(self._held.get(hand_off_id) or self._pulling[hand_off_id], HandOffState.CANCELLED)

    def is_pulling(self, hand_off_id: bytes, *, now: float) -> bool:
        """Whether the blocks may still be read: ask before each piece that is sent, since anyone may have aborted."""
        live = self._pulling.get(hand_off_id)
        return live is not None and now < live.deadline

    def expire(self, *, now: float) -> list[EndedHandOff]:
        """End every hand-off whose deadline is not after ``now``."""
        due: list[_Live] = []
        for living in (self._held, self._pulling):
            for live in living.values():
                if live.deadline > now:
                    break
                due.append(live)
        return [self._end(live, HandOffState.EXPIRED) for live in due]

    def next_deadline(self) -> float | None:
        """When ``expire`` is worth calling next; ``None`` while nothing is alive."""
        first = [next(iter(living.values())).deadline for living in (self._held, self._pulling) if living]
        return min(first, default=None)

    def _find(self, hand_off_id: bytes, secret: bytes, epoch: int, now: float) -> _Live:
        if epoch != self.epoch:
            raise StaleEpochError("the hand-off is of another life of this worker")
        live = self._held.get(hand_off_id) or self._pulling.get(hand_off_id)
        if live is None or not hmac.compare_digest(secret, live.entry.secret) or live.deadline <= now:
            raise HandOffNotFoundError("no such hand-off")
        return live

    def _end(self, live: _Live, state: HandOffState) -> EndedHandOff:
        hand_off_id = live.entry.hand_off_id
        (self._held if hand_off_id in self._held else self._pulling).pop(hand_off_id)
        del self._id_by_holder[live.entry.holder]
        self._num_ended[state] += 1
        return EndedHandOff(hand_off_id, live.entry.holder, state)


@dataclass(slots=True)
class _Live:
    """A hand-off that has not ended, and when it will if nothing happens."""

    entry: HandOffEntry
    deadline: float
