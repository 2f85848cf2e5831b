"""The choices of one request that is placed for its client: all of them at once, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quartet.errors import ServingError
from quartet.kvcache.layout import HandOff
from router.book import Reservation
from router.hops import Hops
from router.sealing import SealedRun


@dataclass(frozen=True, eq=False)
class _Ready:
    """A choice that could be sealed now."""

    seal: Callable[[], SealedRun]
    sealed: asyncio.Future[SealedRun]


class Together:
    """Has choices wait for each other before they are sealed: one answer tells of them all, and seals soon expire.

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
        self._seal_all()

    async def seal(self, seal: Callable[[], SealedRun]) -> SealedRun:
        """What ``seal`` gives once all others could be sealed too. Cancelled, it leaves nothing booked.

        ``seal`` may be called several times, as others' seals may fail; what it gave then is let go of.

        Raises:
            ServingError: as ``seal`` raised; the others go on waiting for this choice.
        """
        ready = _Ready(seal, asyncio.get_running_loop().create_future())
        self._ready.append(ready)
        self._seal_all()
        try:
            return await ready.sealed
        except asyncio.CancelledError:
            # Sealed in the very moment in which it was cancelled.
            if ready.sealed.done() and not ready.sealed.cancelled() and ready.sealed.exception() is None:
                ready.sealed.result().booking.release()
            raise
        finally:
            if ready in self._ready:
                self._ready.remove(ready)

    def _seal_all(self) -> None:
        if len(self._ready) < self._num_open:
            return
        sealed: dict[_Ready, SealedRun] = {}
        for ready in tuple(self._ready):
            try:
                sealed[ready] = ready.seal()
            except ServingError as error:
                self._ready.remove(ready)
                ready.sealed.set_exception(error)
        if len(sealed) < self._num_open:
            for run in sealed.values():
                run.booking.release()
            return
        self._ready.clear()
        for ready, run in sealed.items():
            ready.sealed.set_result(run)
