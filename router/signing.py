"""Signs what a choice has come to, so that its client may go on alone, and books it for as long as it may."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from quartet.errors import ServingError
from quartet.kvcache.layout import HandOff
from quartet.streams.messages import SignedPlacement, WorkerStart
from quartet.streams.signed_start import Keys, check_signed_size, sign
from router.book import PlacedBooking, Reservation
from router.fleet import Hops
from router.workers import WorkerTable

# A signature ends well before the hand-off of the blocks that it leads to: they are still to be asked for.
_TTL_SHARE = 0.8

# Of one that was renewed meanwhile: each third of it, and once more a ninth later where that failed.
_KEPT_TTL_SHARE = 0.5

# Clocks of router and worker differ a little, and a report that tells of a start takes its time.
_MARGIN_S = 5.0

_TOKEN_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class SigningTerms:
    """What a signed start hangs on.

    Attributes:
        request_id, choice: whose it is.
        hand_off: what it decodes from; ``None``: the decode rank prefills it itself.
        is_kept: the time to live of ``hand_off`` did not begin just now, but was renewed up to now.
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
class SignedRun:
    """One choice that its client is to go on with."""

    signed: SignedPlacement
    hand_off: HandOff | None = field(repr=False)
    booking: PlacedBooking

    def let_go(self, hops: Hops) -> None:
        """The client won't get it: nothing is held for it any more."""
        self.booking.release()
        if self.hand_off is not None:
            hops.drop(self.hand_off)


class Signer:
    """Signs starts with the router's first key."""

    def __init__(
        self, keys: Keys, table: WorkerTable, *, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A signature is good for ``ttl_s`` seconds, or less: the blocks behind it are not held for longer."""
        self._keys = keys
        self._table = table
        self._ttl_s = ttl_s
        self._clock = clock

    def check_size(self, num_tokens: int) -> None:
        """Refuse early what is certainly too long to be signed. Raises ``MessageTooLargeError``."""
        check_signed_size(_TOKEN_BYTES * num_tokens)

    def sign(
        self, reservation: Reservation, terms: SigningTerms, make_start: Callable[[int], WorkerStart]
    ) -> SignedRun:
        """Sign what ``make_start`` gives for the number of the placement, for the reservation's decode rank.

        The reservation is released as ever; what is booked for the client is apart from it.

        Raises:
            WorkerUnavailableError: the rank takes nothing any more.
            MessageTooLargeError: the start is too long.
        """
        now, rank, epoch = self._clock(), reservation.placement.decode, reservation.decode.epoch
        record = self._table.ready_decode(rank, epoch, now)
        ttl_s = self._time_to_live_s(terms, now)
        booking = reservation.decode.commit(
            terms.request_id,
            terms.choice,
            num_first_tokens=terms.num_first_tokens,
            lapses_at=now + ttl_s + _MARGIN_S,
            # Its time begins anew when it is brought, which is the signature's time later at most.
            ends_at=terms.deadline + ttl_s + _MARGIN_S,
        )
        try:
            signed = sign(
                make_start(booking.number),
                self._keys.signing_key,
                address=record.grpc_address,
                worker_id=record.worker_id,
                epoch=epoch,
                expires_at_unix_s=time.time() + ttl_s,
            )
        except ServingError:
            booking.release()
            raise
        return SignedRun(signed, terms.hand_off, booking)

    def _time_to_live_s(self, terms: SigningTerms, now: float) -> float:
        ttl_s = min(self._ttl_s, terms.deadline - now)
        if terms.hand_off is not None:
            share = _KEPT_TTL_SHARE if terms.is_kept else _TTL_SHARE
            ttl_s = min(ttl_s, terms.hand_off.time_to_live.total_seconds() * share)
        return max(ttl_s, 0.0)


# The choices of one request that is placed for its client: all of them at once, or none.


@dataclass(frozen=True, eq=False)
class _Ready:
    """A choice that could be signed now."""

    sign: Callable[[], SignedRun]
    signed: asyncio.Future[SignedRun]


class Together:
    """Has choices wait for each other before they are signed: one answer tells of them all, and signatures soon expire.

    A choice that waited for room while others hold some might wait for theirs; so might two requests for each other's.
    """

    def __init__(self, num_choices: int) -> None:
        """None of ``num_choices`` is placed yet."""
        self._num_open = num_choices
        self._is_alone = num_choices == 1
        self._reservations: list[Reservation] = []
        self._ready: list[_Ready] = []

    @property
    def is_alone(self) -> bool:
        """Whether there is but one choice, which waits for nobody."""
        return self._is_alone

    @property
    def holds_room(self) -> bool:
        """Whether any choice holds room now."""
        return any(not reservation.is_released for reservation in self._reservations)

    def booked(self, reservation: Reservation) -> None:
        """One choice has got room."""
        self._reservations.append(reservation)

    @contextmanager
    def kept(self, hand_off: HandOff | None, hops: Hops) -> Iterator[None]:
        """Keeps ``hand_off`` alive for as long as others are waited for. Raises ``TransferError``."""
        if hand_off is None or self._is_alone:
            yield
            return
        kept = hops.keep(hand_off)
        try:
            yield
        finally:
            kept.stop()

    def leave(self) -> None:
        """One choice has ended: the others wait for it no more."""
        self._num_open -= 1
        self._sign_all()

    async def sign(self, sign: Callable[[], SignedRun]) -> SignedRun:
        """What ``sign`` gives once all others could be signed too. Cancelled, it leaves nothing booked.

        ``sign`` may be called several times, as others' signatures may fail; what it gave then is let go of.

        Raises:
            ServingError: as ``sign`` raised; the others go on waiting for this choice.
        """
        ready = _Ready(sign, asyncio.get_running_loop().create_future())
        self._ready.append(ready)
        self._sign_all()
        try:
            return await ready.signed
        except asyncio.CancelledError:
            # Signed in the very moment in which it was cancelled.
            if ready.signed.done() and not ready.signed.cancelled() and ready.signed.exception() is None:
                ready.signed.result().booking.release()
            raise
        finally:
            if ready in self._ready:
                self._ready.remove(ready)

    def _sign_all(self) -> None:
        if len(self._ready) < self._num_open:
            return
        signed: dict[_Ready, SignedRun] = {}
        for ready in tuple(self._ready):
            try:
                signed[ready] = ready.sign()
            except ServingError as error:
                self._ready.remove(ready)
                ready.signed.set_exception(error)
        if len(signed) < self._num_open:
            for run in signed.values():
                run.booking.release()
            return
        self._ready.clear()
        for ready, run in signed.items():
            ready.signed.set_result(run)
