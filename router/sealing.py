"""Seals what a choice has come to, so that its client may go on alone, and books it for as long as it may."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from quartet.errors import ServingError
from quartet.kvcache.layout import HandOff
from quartet.rpc.inner import InnerStart
from quartet.rpc.placement import SealedPlacement
from quartet.rpc.seal import Keys, check_sealed_size, seal
from router.book import Reservation
from router.hops import Hops
from router.placed_book import PlacedBooking
from router.worker_table import WorkerTable

# A seal ends well before the lease of the blocks that it leads to: they are still to be asked for.
_LEASE_SHARE = 0.8
# Of one that was renewed meanwhile: each third of it, and once more a ninth later where that failed.
_KEPT_LEASE_SHARE = 0.5
# Clocks of router and worker differ a little, and a report that tells of a start takes its time.
_MARGIN_S = 5.0
_TOKEN_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class SealTerms:
    """What a sealed start hangs on.

    Attributes:
        request_id, choice: whose it is.
        hand_off: what it decodes from; ``None``: the decode place prefills it itself.
        is_kept: the lease of ``hand_off`` did not begin just now, but was renewed up to now.
        deadline: of its request, monotonic seconds.
        num_first_tokens: tokens whose KV it has from its first step on.
    """

    request_id: str
    choice: int
    hand_off: HandOff | None
    deadline: float
    num_first_tokens: int
    is_kept: bool = False


@dataclass(frozen=True)
class SealedRun:
    """One choice that its client is to go on with."""

    sealed: SealedPlacement
    hand_off: HandOff | None = field(repr=False)
    booking: PlacedBooking

    def let_go(self, hops: Hops) -> None:
        """The client won't get it: nothing is held for it any more."""
        self.booking.release()
        if self.hand_off is not None:
            hops.drop(self.hand_off)


class Sealer:
    """Seals starts with the router's first key."""

    def __init__(
        self, keys: Keys, table: WorkerTable, *, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A seal is good for ``ttl_s`` seconds, or less: the blocks behind it are not held for longer."""
        self._keys = keys
        self._table = table
        self._ttl_s = ttl_s
        self._clock = clock

    def check_size(self, num_tokens: int) -> None:
        """Refuse early what is certainly too long to be sealed. Raises ``MessageTooLargeError``."""
        check_sealed_size(_TOKEN_BYTES * num_tokens)

    def seal(self, reservation: Reservation, terms: SealTerms, make_start: Callable[[int], InnerStart]) -> SealedRun:
        """Seal what ``make_start`` gives for the number of the placement, for the reservation's decode place.

        The reservation is released as ever; what is booked for the client is apart from it.

        Raises:
            WorkerUnavailableError: the place takes nothing any more.
            MessageTooLargeError: the start is too long.
        """
        now, place, epoch = self._clock(), reservation.placement.decode, reservation.decode.epoch
        record = self._table.ready_decode(place, epoch, now)
        ttl_s = self._time_to_live_s(terms, now)
        booking = reservation.decode.place(
            terms.request_id,
            terms.choice,
            num_first_tokens=terms.num_first_tokens,
            lapses_at=now + ttl_s + _MARGIN_S,
            # Its time begins anew when it is brought, which is the seal's time later at most.
            ends_at=terms.deadline + ttl_s + _MARGIN_S,
        )
        try:
            sealed = seal(
                make_start(booking.number),
                self._keys.sealing_key,
                address=record.grpc_address,
                worker_id=record.worker_id,
                epoch=epoch,
                expires_at_unix_s=time.time() + ttl_s,
            )
        except ServingError:
            booking.release()
            raise
        return SealedRun(sealed, terms.hand_off, booking)

    def _time_to_live_s(self, terms: SealTerms, now: float) -> float:
        ttl_s = min(self._ttl_s, terms.deadline - now)
        if terms.hand_off is not None:
            share = _KEPT_LEASE_SHARE if terms.is_kept else _LEASE_SHARE
            ttl_s = min(ttl_s, terms.hand_off.lease.total_seconds() * share)
        return max(ttl_s, 0.0)
