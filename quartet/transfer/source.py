"""The source's side of hand-offs: what this worker offers to others, and the clock that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from quartet.errors import DrainingError, HandOffNotFoundError
from quartet.kvcache.hand_off import HandOffCounts, HandOffState, HandOffTicket, Offer, Offers
from quartet.kvcache.layout import HandOff, OpaquePayload, Payload
from quartet.supervision import vital
from quartet.transfer.base import BlockMemory
from quartet.transfer.config import TransferConfig


class TransferSource:
    """The offers of one epoch of a worker. Lives on one event loop; ``close`` withdraws what is left.

    Every hand-off ends exactly once, in bounded time once its taker falls silent. ``on_end`` is then called with its
    holder and how it ended: the holder's blocks are to be released.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        epoch: int,
        config: TransferConfig,
        on_end: Callable[[int, HandOffState], None],
        memory: BlockMemory | None = None,
    ) -> None:
        """Offer nothing yet.

        Args:
            worker_id: this worker.
            epoch: of this worker.
            config: time to live and bounds.
            on_end: called on the event loop; must not raise.
            memory: the pool whose blocks are offered; ``None`` where every hand-off is opaque.
        """
        self.memory = memory
        self._worker_id = worker_id
        self._address = ""
        self._on_end = on_end
        self._offers = Offers(epoch, config.hand_off_ttl_s, config.max_pull_s)
        self._time_to_live = timedelta(seconds=config.hand_off_ttl_s)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0  # of the timer: where it is due, uvloop's has no ``when``
        self._is_closed = False

    @property
    def counts(self) -> HandOffCounts:
        """Hand-offs alive now, by state, and ended since the start, by how."""
        return self._offers.counts

    def advertise(self, address: str) -> None:
        """Say at which ``host:port`` this worker's TransferService is dialled; before the first ``offer``."""
        self._address = address

    def offer(self, holder: int, block_ids: Sequence[int], payload: Payload) -> HandOff:
        """Offer what ``holder`` has to the worker that shows the ticket; its time to live starts now.

        Raises:
            DrainingError: the source is closed; nothing is held.
        """
        if self._is_closed:
            raise DrainingError("the worker is closing and hands nothing off")
        assert self._address, "an address is advertised before anything is offered"
        if not isinstance(payload, OpaquePayload):
            assert len(block_ids) == payload.num_pieces, "one block a piece"
            if self.memory is not None:
                payload = replace(payload, block_ids=tuple(block_ids))
        ticket = self._offers.offer(holder, tuple(block_ids), payload, now=self._loop.time()).ticket
        self._arm()
        return HandOff(
            hand_off_id=ticket.hand_off_id,
            secret=ticket.secret,
            worker_id=self._worker_id,
            epoch=ticket.epoch,
            address=self._address,
            time_to_live=self._time_to_live,
            payload=payload,
        )

    def withdraw(self, holder: int) -> None:
        """End ``holder``'s hand-off, pulled or not; nothing happens where it has none any more."""
        offer = self._offers.withdraw(holder)
        if offer is not None:
            self._notify(offer)

    def begin(self, ticket: HandOffTicket, pieces: Sequence[int]) -> Offer:
        """Start the one pull of a hand-off. Raises as ``Offers.begin`` does."""
        offer = self._offers.begin(ticket, pieces, now=self._loop.time())
        self._arm()
        return offer

    def renew(self, ticket: HandOffTicket) -> timedelta:
        """Start the time to live anew and return it. Raises as ``Offers.renew`` does."""
        self._offers.renew(ticket, now=self._loop.time())
        return self._time_to_live

    def finish(self, ticket: HandOffTicket) -> None:
        """End a pull: only when this returns does what was read count. Raises as ``Offers.finish`` does.

        ``on_end`` is called soon: the taker, who waits for the answer, goes first.
        """
        self._loop.call_soon(self._notify, self._offers.finish(ticket, now=self._loop.time()))

    def abort(self, ticket: HandOffTicket) -> None:
        """End a hand-off that its taker released. Raises as ``Offers.abort`` does."""
        self._notify(self._offers.abort(ticket, now=self._loop.time()))

    def check_pulling(self, offer: Offer) -> None:
        """Raise ``HandOffNotFoundError`` if the blocks may no longer be read: before each part that is sent."""
        if not self._offers.is_pulling(offer.ticket.hand_off_id, now=self._loop.time()):
            raise HandOffNotFoundError("the hand-off ended while it was pulled")

    def close(self) -> None:
        """Withdraw every offer and make no more. May be called twice."""
        self._is_closed = True
        for offer in self._offers.withdraw_all():
            self._notify(offer)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _notify(self, offer: Offer) -> None:
        self._on_end(offer.holder, offer.state)

    def _arm(self) -> None:
        """Wake at the next deadline. A timer that is set earlier stays: waking in vain is cheap."""
        deadline = self._offers.next_deadline()
        if deadline is None or (self._timer is not None and self._wakes_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._wakes_at = self._loop.call_at(deadline, self._expire), deadline

    @vital
    def _expire(self) -> None:
        self._timer = None
        expired = self._offers.expire(now=self._loop.time())
        self._arm()
        for offer in expired:
            self._notify(offer)
