"""Hand-offs in every order of begin, renew, finish, abort, withdrawal, expiry and restart."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quartet.errors import HandOffNotFoundError, HandOffStateError, StaleEpochError
from quartet.kvcache.hand_off import EndedHandOff, HandOffEntry, HandOffState, HandOffTable
from quartet.kvcache.layout import OpaquePayload

TTL_S = 6.0
MAX_PULL_S = 4.0
ENDS = (HandOffState.RELEASED, HandOffState.EXPIRED, HandOffState.CANCELLED)


@dataclass
class Known:
    """What the model knows of a hand-off."""

    entry: HandOffEntry
    epoch: int
    deadline: float
    state: HandOffState = HandOffState.HELD


class HandOffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = HandOffTable(1, TTL_S, MAX_PULL_S)
        self.known: list[Known] = []  # of all lives, ended ones too
        self.freed: list[int] = []  # in this life

    @precondition(lambda self: len(self.alive()) < 4)
    @rule()
    def offer(self) -> None:
        holder = len(self.known)
        entry = self.table.offer(holder, (holder,), OpaquePayload("engine", b""), now=self.now)
        self.known.append(Known(entry, self.table.epoch, self.now + TTL_S))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        known, entry = self.draw(data)
        if self.is_refused(known) or known.state is HandOffState.PULLING:
            with pytest.raises(self.refusal(known)):
                self.table.begin(entry.hand_off_id, entry.secret, known.epoch, [0], now=self.now)
            return
        assert self.table.begin(entry.hand_off_id, entry.secret, known.epoch, [0], now=self.now) == entry
        known.state, known.deadline = HandOffState.PULLING, self.now + MAX_PULL_S

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        known, entry = self.draw(data)
        if self.is_refused(known):
            with pytest.raises(self.refusal(known)):
                self.table.renew(entry.hand_off_id, entry.secret, known.epoch, now=self.now)
            return
        self.table.renew(entry.hand_off_id, entry.secret, known.epoch, now=self.now)
        if known.state is HandOffState.HELD:
            known.deadline = self.now + TTL_S

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        known, entry = self.draw(data)
        if self.is_refused(known) or known.state is HandOffState.HELD:
            with pytest.raises(self.refusal(known)):
                self.table.finish(entry.hand_off_id, entry.secret, known.epoch, now=self.now)
            return
        ended = self.table.finish(entry.hand_off_id, entry.secret, known.epoch, now=self.now)
        self.end(known, ended, HandOffState.RELEASED)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        known, entry = self.draw(data)
        if self.is_refused(known):
            with pytest.raises(self.refusal(known)):
                self.table.abort(entry.hand_off_id, entry.secret, known.epoch, now=self.now)
            return
        ended = self.table.abort(entry.hand_off_id, entry.secret, known.epoch, now=self.now)
        self.end(known, ended, HandOffState.CANCELLED)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        known, entry = self.draw(data)
        ended = self.table.withdraw(entry.holder)
        if known not in self.alive():
            assert ended is None
            return
        assert ended is not None
        self.end(known, ended, HandOffState.CANCELLED)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def touch_with_a_wrong_secret(self, data: st.DataObject) -> None:
        known, entry = self.draw(data)
        for touch in (self.table.abort, self.table.finish, self.table.renew):
            with pytest.raises((HandOffNotFoundError, StaleEpochError)):
                touch(entry.hand_off_id, b"?" * 16, known.epoch, now=self.now)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        due = [known for known in self.alive() if known.deadline <= self.now]
        ended = {end.hand_off_id: end for end in self.table.expire(now=self.now)}
        assert set(ended) == {known.entry.hand_off_id for known in due}
        for known in due:
            self.end(known, ended[known.entry.hand_off_id], HandOffState.EXPIRED)

    @precondition(lambda self: len(self.known) % 3 == 2)  # now and then
    @rule()
    def restart(self) -> None:
        self.table = HandOffTable(self.table.epoch + 1, TTL_S, MAX_PULL_S)
        self.freed = []

    @invariant()
    def counts_equal_the_models(self) -> None:
        mine = [known for known in self.known if known.epoch == self.table.epoch]
        counts = self.table.counts
        for state in HandOffState:
            assert getattr(counts, state.value) == sum(known.state is state for known in mine)
        assert sorted(self.freed) == sorted(known.entry.holder for known in mine if known.state in ENDS)

    @invariant()
    def the_next_deadline_is_the_earliest(self) -> None:
        assert self.table.next_deadline() == min((known.deadline for known in self.alive()), default=None)

    @invariant()
    def only_a_running_pull_may_be_read(self) -> None:
        for known in self.known:
            pulls = known in self.alive() and known.state is HandOffState.PULLING and self.now < known.deadline
            assert self.table.is_pulling(known.entry.hand_off_id, now=self.now) == pulls

    def teardown(self) -> None:
        """If nobody ever asks again, everything has ended after the longest bound, and was freed once."""
        self.now += max(TTL_S, MAX_PULL_S)
        self.expire()
        self.counts_equal_the_models()
        assert self.alive() == []
        assert self.table.next_deadline() is None

    def draw(self, data: st.DataObject) -> tuple[Known, HandOffEntry]:
        """One of the last few, mostly one that is alive."""
        known = data.draw(st.sampled_from(self.alive() * 3 + self.known[-3:]))
        return known, known.entry

    def alive(self) -> list[Known]:
        return [known for known in self.known if known.epoch == self.table.epoch and known.state not in ENDS]

    def is_refused(self, known: Known) -> bool:
        return known not in self.alive() or known.deadline <= self.now

    def refusal(self, known: Known) -> type[Exception]:
        if known.epoch != self.table.epoch:
            return StaleEpochError
        return HandOffNotFoundError if self.is_refused(known) else HandOffStateError

    def end(self, known: Known, ended: EndedHandOff, state: HandOffState) -> None:
        assert ended == EndedHandOff(known.entry.hand_off_id, known.entry.holder, state)
        known.state = state
        self.freed.append(ended.holder)


TestHandOffs = HandOffMachine.TestCase
TestHandOffs.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
