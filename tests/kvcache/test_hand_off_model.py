"""Hand-offs in every order of begin, renew, finish, abort, withdrawal, expiry and restart."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quartet.errors import HandOffNotFoundError, HandOffStateError, StaleEpochError
from quartet.kvcache.hand_off import HandOffState, HandOffTicket, Offer, Offers
from quartet.kvcache.layout import OpaquePayload

TTL_S = 6.0
MAX_PULL_S = 4.0
ENDS = (HandOffState.TAKEN, HandOffState.EXPIRED, HandOffState.CANCELLED)


@dataclass
class Known:
    """What the model knows of a hand-off."""

    offer: Offer
    epoch: int
    deadline: float
    state: HandOffState = HandOffState.HELD


class HandOffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.offers = Offers(1, TTL_S, MAX_PULL_S)
        self.known: list[Known] = []  # of all lives, ended ones too
        self.freed: list[int] = []  # in this life

    @precondition(lambda self: len(self.alive()) < 4)
    @rule()
    def offer(self) -> None:
        holder = len(self.known)
        offer = self.offers.offer(holder, (holder,), OpaquePayload("engine", b""), now=self.now)
        self.known.append(Known(offer, self.offers.epoch, self.now + TTL_S))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        known, offer = self.draw(data)
        if self.is_refused(known) or known.state is HandOffState.PULLING:
            with pytest.raises(self.refusal(known)):
                self.offers.begin(offer.ticket, [0], now=self.now)
            return
        assert self.offers.begin(offer.ticket, [0], now=self.now) is offer
        known.state, known.deadline = HandOffState.PULLING, self.now + MAX_PULL_S

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        known, offer = self.draw(data)
        if self.is_refused(known):
            with pytest.raises(self.refusal(known)):
                self.offers.renew(offer.ticket, now=self.now)
            return
        self.offers.renew(offer.ticket, now=self.now)
        if known.state is HandOffState.HELD:
            known.deadline = self.now + TTL_S

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        known, offer = self.draw(data)
        if self.is_refused(known) or known.state is HandOffState.HELD:
            with pytest.raises(self.refusal(known)):
                self.offers.finish(offer.ticket, now=self.now)
            return
        ended = self.offers.finish(offer.ticket, now=self.now)
        self.end(known, ended, HandOffState.TAKEN)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        known, offer = self.draw(data)
        if self.is_refused(known):
            with pytest.raises(self.refusal(known)):
                self.offers.abort(offer.ticket, now=self.now)
            return
        ended = self.offers.abort(offer.ticket, now=self.now)
        self.end(known, ended, HandOffState.CANCELLED)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        known, offer = self.draw(data)
        ended = self.offers.withdraw(offer.holder)
        if known not in self.alive():
            assert ended is None
            return
        assert ended is not None
        self.end(known, ended, HandOffState.CANCELLED)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def touch_with_a_wrong_secret(self, data: st.DataObject) -> None:
        known, offer = self.draw(data)
        for touch in (self.offers.abort, self.offers.finish, self.offers.renew):
            with pytest.raises((HandOffNotFoundError, StaleEpochError)):
                touch(HandOffTicket(offer.ticket.hand_off_id, b"?" * 16, known.epoch), now=self.now)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        due = [known for known in self.alive() if known.deadline <= self.now]
        ended = {end.ticket.hand_off_id: end for end in self.offers.expire(now=self.now)}
        assert set(ended) == {known.offer.ticket.hand_off_id for known in due}
        for known in due:
            self.end(known, ended[known.offer.ticket.hand_off_id], HandOffState.EXPIRED)

    @precondition(lambda self: len(self.known) % 3 == 2)  # now and then
    @rule()
    def restart(self) -> None:
        self.offers = Offers(self.offers.epoch + 1, TTL_S, MAX_PULL_S)
        self.freed = []

    @invariant()
    def counts_equal_the_models(self) -> None:
        mine = [known for known in self.known if known.epoch == self.offers.epoch]
        counts = self.offers.counts
        for state in HandOffState:
            assert getattr(counts, state.value) == sum(known.state is state for known in mine)
        assert sorted(self.freed) == sorted(known.offer.holder for known in mine if known.state in ENDS)

    @invariant()
    def the_next_deadline_is_the_earliest(self) -> None:
        assert self.offers.next_deadline() == min((known.deadline for known in self.alive()), default=None)

    @invariant()
    def only_a_running_pull_may_be_read(self) -> None:
        for known in self.known:
            pulls = known in self.alive() and known.state is HandOffState.PULLING and self.now < known.deadline
            assert self.offers.is_pulling(known.offer.ticket.hand_off_id, now=self.now) == pulls

    def teardown(self) -> None:
        """Without another call everything has ended after the longest bound, and was freed once."""
        self.now += max(TTL_S, MAX_PULL_S)
        self.expire()
        self.counts_equal_the_models()
        assert self.alive() == []
        assert self.offers.next_deadline() is None

    def draw(self, data: st.DataObject) -> tuple[Known, Offer]:
        """One of the last few, mostly one that is alive."""
        known = data.draw(st.sampled_from(self.alive() * 3 + self.known[-3:]))
        return known, known.offer

    def alive(self) -> list[Known]:
        return [known for known in self.known if known.epoch == self.offers.epoch and known.state not in ENDS]

    def is_refused(self, known: Known) -> bool:
        return known not in self.alive() or known.deadline <= self.now

    def refusal(self, known: Known) -> type[Exception]:
        if known.epoch != self.offers.epoch:
            return StaleEpochError
        return HandOffNotFoundError if self.is_refused(known) else HandOffStateError

    def end(self, known: Known, ended: Offer, state: HandOffState) -> None:
        assert ended is known.offer
        assert ended.state is state
        known.state = state
        self.freed.append(ended.holder)


TestHandOffs = HandOffMachine.TestCase
TestHandOffs.settings = settings(stateful_step_count=40)
