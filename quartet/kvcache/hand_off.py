"""The life of hand-offs at their source: what a worker offers to another one, and until when it holds that.

    HELD -> PULLING -> TAKEN | EXPIRED | CANCELLED

The source *offers* the blocks of a holder and gives a ticket for them to the router. The taker *claims* the ticket:
it renews the hand-off, then pulls it (``begin``, ``finish``) or *releases* its claim (``abort``). The source can also
*withdraw* the offer. Once the hand-off has ended, in whichever way, the source releases the holder's blocks.

- An offer is HELD for its time to live, and each renewal starts that anew. A taker renews while its request queues, so
  an offer expires because its taker is dead, never because it is busy.
- ``begin`` makes it PULLING: the blocks stay where they are until the pull finishes, is aborted or takes too long. A
  lost stream counts as an abort: the taker throws away what it has.
- The bound on a pull is for one-sided ways, which read memory unknown to the source. After it ``finish`` fails, so
  the taker knows that another request may have overwritten what it read.

So every hand-off ends in bounded time once its taker falls silent, and the source learns of each end exactly once.

Pure code: no clock, no lock. ``now`` is in seconds of one monotonic clock, and never goes back between calls.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

from quartet.errors import HandOffNotFoundError, HandOffStateError, InvalidRequestError, StaleEpochError
from quartet.kvcache.layout import Payload

_ID_SIZE_BYTES = 16


class HandOffState(StrEnum):
    """Where a hand-off is in its life; the last three are ends."""

    HELD = "held"
    PULLING = "pulling"
    TAKEN = "taken"  # pulled, and finished in time
    EXPIRED = "expired"  # not renewed in time, or pulled for too long
    CANCELLED = "cancelled"  # aborted by its taker, withdrawn by its source, or its pull's stream was lost


@dataclass(frozen=True)
class HandOffTicket:
    """Names a hand-off and proves the right to it.

    Attributes:
        hand_off_id: 16 random bytes that name it.
        secret: 16 random bytes without which a caller may not touch it.
        epoch: of the worker that made it.
    """

    hand_off_id: bytes
    secret: bytes = field(repr=False)
    epoch: int


@dataclass(eq=False, slots=True)
class Offer:
    """A hand-off as its source knows it. Only ``Offers`` changes it.

    Attributes:
        ticket: what the taker has to show.
        holder: under which the engine holds the blocks.
        block_ids: held blocks in the order of the sequence: piece ``i`` is in ``block_ids[i]``. Empty if opaque.
        deadline: when it expires, if nothing happens before.
    """

    ticket: HandOffTicket
    holder: int
    block_ids: tuple[int, ...]
    payload: Payload
    deadline: float
    state: HandOffState = HandOffState.HELD


@dataclass(frozen=True)
class HandOffCounts:
    """Hand-offs alive now, by state, and ended since the start, by how."""

    held: int
    pulling: int
    taken: int
    expired: int
    cancelled: int


class Offers:
    """All offers of one epoch of a worker. Ended ones leave nothing behind but a count.

    Every method that takes a ticket raises ``StaleEpochError`` for another epoch, and ``HandOffNotFoundError`` for an
    id that is unknown, ended or past its deadline, or a wrong secret, without saying which; then nothing has changed.
    A method that ends an offer returns it with its last ``state``: its holder's blocks are to be released now.
    """

    def __init__(
        self, epoch: int, ttl_s: float, max_pull_s: float, draw: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        """Start empty.

        Args:
            epoch: this worker's.
            ttl_s: how long a hand-off lives without a renewal.
            max_pull_s: how long one pull may take.
            draw: gives that many unguessable bytes.
        """
        self.epoch = epoch
        self.ttl_s = ttl_s
        self.max_pull_s = max_pull_s
        self._draw = draw
        # All offers have one time to live, and all pulls one bound: each of the two is in the order of deadlines.
        self._held: OrderedDict[bytes, Offer] = OrderedDict()
        self._pulling: OrderedDict[bytes, Offer] = OrderedDict()
        self._by_holder: dict[int, Offer] = {}
        self._num_ended = {HandOffState.TAKEN: 0, HandOffState.EXPIRED: 0, HandOffState.CANCELLED: 0}

    @property
    def counts(self) -> HandOffCounts:
        """How many hand-offs are, and ended, in which state."""
        return HandOffCounts(
            held=len(self._held),
            pulling=len(self._pulling),
            taken=self._num_ended[HandOffState.TAKEN],
            expired=self._num_ended[HandOffState.EXPIRED],
            cancelled=self._num_ended[HandOffState.CANCELLED],
        )

    def offer(self, holder: int, block_ids: tuple[int, ...], payload: Payload, *, now: float) -> Offer:
        """Offer what ``holder``, unique among the living ones, holds; its time to live starts."""
        assert holder not in self._by_holder, "this holder already has a hand-off"
        ticket = HandOffTicket(self._draw(_ID_SIZE_BYTES), self._draw(_ID_SIZE_BYTES), self.epoch)
        offer = Offer(ticket, holder, block_ids, payload, deadline=now + self.ttl_s)
        self._held[ticket.hand_off_id] = self._by_holder[holder] = offer
        return offer

    def begin(self, ticket: HandOffTicket, pieces: Sequence[int], *, now: float) -> Offer:
        """Start the one pull of a hand-off, which keeps it alive for at most ``max_pull_s``.

        ``pieces`` are the positions in the sequence that will be read; there may be none.

        Raises:
            HandOffStateError: it is already being pulled.
            InvalidRequestError: field ``pieces``; out of range or repeated.
        """
        offer = self._find(ticket, now)
        if offer.state is HandOffState.PULLING:
            raise HandOffStateError("the hand-off is already being pulled")
        if len(pieces) > len(offer.block_ids):
            raise InvalidRequestError(f"there are {len(offer.block_ids)} pieces", field="pieces")
        is_outside = min(pieces, default=0) < 0 or max(pieces, default=-1) >= len(offer.block_ids)
        if is_outside or len(set(pieces)) < len(pieces):
            raise InvalidRequestError(f"pieces must differ and be below {len(offer.block_ids)}", field="pieces")
        offer.state, offer.deadline = HandOffState.PULLING, now + self.max_pull_s
        self._pulling[ticket.hand_off_id] = self._held.pop(ticket.hand_off_id)
        return offer

    def renew(self, ticket: HandOffTicket, *, now: float) -> None:
        """Start the time to live anew; a pull that has begun keeps its own bound."""
        offer = self._find(ticket, now)
        if offer.state is HandOffState.HELD:
            offer.deadline = now + self.ttl_s
            self._held.move_to_end(ticket.hand_off_id)

    def finish(self, ticket: HandOffTicket, *, now: float) -> Offer:
        """End a pull: only when this returns may what was read be used.

        Raises:
            HandOffStateError: no pull has begun.
        """
        offer = self._find(ticket, now)
        if offer.state is HandOffState.HELD:
            raise HandOffStateError("the pull of this hand-off has not begun")
        return self._end(offer, HandOffState.TAKEN)

    def abort(self, ticket: HandOffTicket, *, now: float) -> Offer:
        """End a hand-off whose taker released its claim, or whose pull broke."""
        return self._end(self._find(ticket, now), HandOffState.CANCELLED)

    def withdraw(self, holder: int) -> Offer | None:
        """End ``holder``'s hand-off for reasons of the source; ``None`` where it has none any more."""
        offer = self._by_holder.get(holder)
        return None if offer is None else self._end(offer, HandOffState.CANCELLED)

    def withdraw_all(self) -> list[Offer]:
        """End every hand-off for reasons of the source."""
        return [self._end(offer, HandOffState.CANCELLED) for offer in list(self._by_holder.values())]

    def is_pulling(self, hand_off_id: bytes, *, now: float) -> bool:
        """Whether the blocks may still be read: ask before each piece that is sent, since anyone may have aborted."""
        offer = self._pulling.get(hand_off_id)
        return offer is not None and now < offer.deadline

    def expire(self, *, now: float) -> list[Offer]:
        """End every hand-off whose deadline is not after ``now``."""
        due: list[Offer] = []
        for living in (self._held, self._pulling):
            due += takewhile(lambda offer: offer.deadline <= now, living.values())
        return [self._end(offer, HandOffState.EXPIRED) for offer in due]

    def next_deadline(self) -> float | None:
        """When ``expire`` is worth calling next; ``None`` while nothing is alive."""
        first = [next(iter(living.values())).deadline for living in (self._held, self._pulling) if living]
        return min(first, default=None)

    def _find(self, ticket: HandOffTicket, now: float) -> Offer:
        if ticket.epoch != self.epoch:
            raise StaleEpochError("the hand-off is of another epoch of this worker")
        offer = self._held.get(ticket.hand_off_id) or self._pulling.get(ticket.hand_off_id)
        if offer is None or not hmac.compare_digest(ticket.secret, offer.ticket.secret) or offer.deadline <= now:
            raise HandOffNotFoundError("no such hand-off")
        return offer

    def _end(self, offer: Offer, state: HandOffState) -> Offer:
        living = self._held if offer.state is HandOffState.HELD else self._pulling
        del living[offer.ticket.hand_off_id], self._by_holder[offer.holder]
        offer.state = state
        self._num_ended[state] += 1
        return offer
