"""Signs a choice's decode start so that its client can continue alone, and books room for as long as that may take."""

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
from quartet.streams.wakeable import result_if_done
from router.book import PlacedBooking, Reservation
from router.fleet import Hops
from router.untaken import Untaken
from router.workers import WorkerTable

# A signature expires well before its hand-off does, because the worker must still ask for the blocks.
_TTL_SHARE = 0.8

# For a hand-off that was renewed meanwhile: at each third of its time to live, and again a ninth later on failure.
_RENEWED_TTL_SHARE = 0.5

# Clocks of router and worker differ a little, and the report of a start takes time.
_MARGIN_S = 5.0

_TOKEN_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class SigningTerms:
    """What a signed start depends on.

    Attributes:
        request_id, choice: the choice that it starts.
        hand_off: the hand-off to decode from; ``None``: the decode worker computes the prompt.
        is_renewed: the time to live of ``hand_off`` began a while ago and was renewed since.
        deadline: of its request, in monotonic seconds.
        num_first_tokens: tokens whose KV it has from its first step on.
        untaken: counts it in its tenant's budgets until its client has taken it up.
        on_end: as in ``PlacedShare``.
    """

    request_id: str
    choice: int
    hand_off: HandOff | None
    deadline: float
    num_first_tokens: int
    is_renewed: bool = False
    untaken: Untaken | None = None
    on_end: Callable[[int], None] | None = None


@dataclass(frozen=True)
class SignedRun:
    """One choice that its client continues."""

    signed: SignedPlacement
    hand_off: HandOff | None = field(repr=False)
    booking: PlacedBooking

    def release(self, hops: Hops) -> None:
        """The client won't get it: release its room and drop its hand-off."""
        self.booking.release()
        if self.hand_off is not None:
            hops.drop(self.hand_off)


class Signer:
    """Signs starts with the router's first key."""

    def __init__(
        self, keys: Keys, table: WorkerTable, *, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A signature is valid for ``ttl_s`` seconds, less if its hand-off expires or the request ends sooner."""
        self._keys = keys
        self._table = table
        self._ttl_s = ttl_s
        self._clock = clock

    def check_size(self, num_tokens: int) -> None:
        """Refuse early a start that is certainly too long. Raises ``MessageTooLargeError``."""
        check_signed_size(_TOKEN_BYTES * num_tokens)

    def sign(
        self, reservation: Reservation, terms: SigningTerms, make_start: Callable[[int], WorkerStart]
    ) -> SignedRun:
        """Sign the start that ``make_start`` makes from the placement's number, for the reservation's decode worker.

        The caller must still release the reservation; the client's booking is independent of it.

        Raises:
            WorkerUnavailableError: the worker no longer takes requests.
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
            # The request's time begins anew when the client brings the start, at most the signature's time from now.
            ends_at=terms.deadline + ttl_s + _MARGIN_S,
            untaken=terms.untaken,
            on_end=terms.on_end,
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
            share = _RENEWED_TTL_SHARE if terms.is_renewed else _TTL_SHARE
            ttl_s = min(ttl_s, terms.hand_off.time_to_live.total_seconds() * share)
        return max(ttl_s, 0.0)


# A gang: choices of one request, placed for its client, that all get room together or are all refused.


@dataclass(frozen=True, eq=False)
class _Ready:
    """A member that could be signed now."""

    sign: Callable[[], SignedRun]
    signed: asyncio.Future[SignedRun]


class Gang:
    """Makes choices wait for each other before they are signed: one answer has all of them, and signatures soon expire.

    A member must not wait for room while others hold some: it might wait for theirs, and two gangs might wait for each
    other's.
    """

    def __init__(self, num_choices: int) -> None:
        """Start with ``num_choices`` members, none of them placed yet."""
        self._num_open = num_choices
        self._is_alone = num_choices == 1
        self._reservations: list[Reservation] = []
        self._ready: list[_Ready] = []

    @property
    def is_alone(self) -> bool:
        """Whether there is only one member, which waits for no other."""
        return self._is_alone

    @property
    def holds_room(self) -> bool:
        """Whether any member holds room now."""
        return any(not reservation.is_released for reservation in self._reservations)

    def booked(self, reservation: Reservation) -> None:
        """Note that a member has got room."""
        self._reservations.append(reservation)

    @contextmanager
    def renewed(self, hand_off: HandOff | None, hops: Hops) -> Iterator[None]:
        """Renew ``hand_off`` during the block, in which its member waits for others. Raises ``TransferError``."""
        if hand_off is None or self._is_alone:
            yield
            return
        renewed = hops.renew(hand_off)
        try:
            yield
        finally:
            renewed.stop()

    def leave(self) -> None:
        """A member has ended: the others stop waiting for it."""
        self._num_open -= 1
        self._sign_all()

    async def sign(self, sign: Callable[[], SignedRun]) -> SignedRun:
        """Call ``sign`` once all other members can be signed too; returns its result. If cancelled, it books nothing.

        ``sign`` may be called several times, because other members' signing may fail; earlier results are released.

        Raises:
            ServingError: the error of ``sign``; the others continue to wait for this member.
        """
        ready = _Ready(sign, asyncio.get_running_loop().create_future())
        self._ready.append(ready)
        self._sign_all()
        try:
            return await ready.signed
        except asyncio.CancelledError:
            # The member may have been signed at the very moment of its cancellation.
            if (run := result_if_done(ready.signed)) is not None:
                run.booking.release()
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
