"""A source's batches, whatever is lost of them: nothing is applied twice, out of order, or relied on after a gap."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quartet.events.ordered_feed import OrderedFeed
from quartet.events.vllm import VllmBatch


class Sink:
    """The times of the batches that were applied since the last drop, and what was asked for."""

    def __init__(self, *, can_replay: bool, max_waiting_batches: int = 100) -> None:
        self.applied: list[float] = []
        self.asked: list[int] = []
        self.feed = OrderedFeed(self, can_replay=can_replay, max_waiting_batches=max_waiting_batches)

    def apply(self, batch: VllmBatch) -> None:
        self.applied.append(batch.time_s)

    def drop(self) -> None:
        self.applied.clear()

    def ask(self, first_number: int) -> None:
        self.asked.append(first_number)

    def take(self, *numbers: int) -> None:
        for number in numbers:
            self.feed.take(number, batch(number), 10)

    def replay(self, *numbers: int) -> None:
        for number in numbers:
            self.feed.take_replayed(number, batch(number))
        self.feed.end_replay()


def batch(number: float) -> VllmBatch:
    return VllmBatch(time_s=number, events=[])


def test_without_replays_it_begins_anywhere_and_a_gap_drops_all() -> None:
    sink = Sink(can_replay=False)
    sink.feed.begin()
    sink.take(5, 6)
    assert sink.applied == [5, 6]
    sink.take(8, 9)
    assert sink.applied == [8, 9]
    assert (sink.feed.num_gaps, sink.feed.num_drops, sink.feed.num_restarts) == (1, 1, 0)


def test_numbers_that_go_back_are_a_restart() -> None:
    sink = Sink(can_replay=False)
    sink.take(5, 6, 0, 1)
    assert sink.applied == [0, 1]
    assert (sink.feed.num_gaps, sink.feed.num_restarts) == (0, 1)


def test_a_source_that_can_is_first_asked_for_all_that_it_has_kept() -> None:
    sink = Sink(can_replay=True)
    sink.feed.begin()
    sink.feed.begin()
    sink.take(7)
    assert (sink.asked, sink.applied) == ([0], [])
    sink.replay(4, 5, 6, 7)
    assert sink.applied == [4, 5, 6, 7]
    sink.take(8)
    assert sink.applied == [4, 5, 6, 7, 8]
    assert sink.feed.num_gaps == sink.feed.num_drops == 0


def test_a_replay_fills_a_gap() -> None:
    sink = Sink(can_replay=True)
    sink.feed.begin()
    sink.replay()
    sink.take(0, 1, 4, 5)
    assert (sink.asked, sink.applied) == ([0, 2], [0, 1])
    sink.replay(0, 1, 2, 3, 4)
    assert sink.applied == [0, 1, 2, 3, 4, 5]
    assert (sink.feed.num_gaps, sink.feed.num_drops) == (1, 0)


def test_what_a_replay_does_not_reach_drops_all_before_it() -> None:
    sink = Sink(can_replay=True)
    sink.feed.begin()
    sink.replay()
    sink.take(0, 1, 5)
    sink.replay(3, 4, 5)
    assert sink.applied == [3, 4, 5]
    assert sink.feed.num_drops == 1


def test_a_replay_that_fails_drops_all_before_the_gap() -> None:
    sink = Sink(can_replay=True)
    sink.feed.begin()
    sink.replay()
    sink.take(0, 1, 5, 6)
    sink.feed.end_replay()
    assert (sink.applied, sink.asked) == ([5, 6], [0, 2])


def test_a_restart_during_a_replay_begins_anew() -> None:
    sink = Sink(can_replay=True)
    sink.feed.begin()
    sink.replay()
    sink.take(0, 5, 0)
    assert (sink.asked, sink.applied) == ([0, 1, 0], [])
    sink.replay(0)
    assert sink.applied == [0]


def test_a_lost_source_has_nothing_and_is_asked_again_when_it_comes_back() -> None:
    sink = Sink(can_replay=True)
    sink.feed.begin()
    sink.replay()
    sink.take(0, 1)
    sink.feed.lose()
    assert sink.applied == []
    sink.feed.take_replayed(2, batch(2))
    assert sink.applied == []
    sink.feed.begin()
    assert sink.asked == [0, 0]


def test_a_gap_among_those_that_waited_is_asked_for_too() -> None:
    sink = Sink(can_replay=True)
    sink.feed.begin()
    sink.take(0, 1, 4, 5)
    sink.replay()
    assert (sink.asked, sink.applied) == ([0, 2], [0, 1])
    sink.replay(2, 3)
    assert sink.applied == [0, 1, 2, 3, 4, 5]


def test_what_waits_has_a_bound() -> None:
    sink = Sink(can_replay=True, max_waiting_batches=2)
    sink.feed.begin()
    sink.take(0, 1, 2)
    sink.feed.end_replay()
    assert sink.applied == [1, 2]


class LossySource(RuleBasedStateMachine):
    """A source that publishes to a feed that loses messages, restarts, and replays the last three batches.

    Batches bear the life and number as one time. ``reached`` is what the feed could know at best.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sink = Sink(can_replay=True, max_waiting_batches=4)
        self.life, self.number = 1, 0
        self.replay: list[int] | None = None
        self.num_asked = 0
        self.sink.feed.begin()
        self.note_asked()

    def stamp(self, number: int) -> float:
        return self.life * 1000 + number

    def note_asked(self) -> None:
        """A request arrives at once; a new one ends the replay before it."""
        if len(self.sink.asked) > self.num_asked:
            self.num_asked = len(self.sink.asked)
            first = max(self.sink.asked[-1], self.number - 3, 0)
            self.replay = list(range(first, self.number))

    @rule(is_lost=st.booleans())
    def publish(self, is_lost: bool) -> None:
        number, self.number = self.number, self.number + 1
        if not is_lost:
            self.sink.feed.take(number, batch(self.stamp(number)), 10)
            self.note_asked()

    @precondition(lambda self: self.replay is not None)
    @rule(is_lost=st.booleans())
    def go_on_with_the_replay(self, is_lost: bool) -> None:
        if self.replay and not is_lost:
            number = self.replay.pop(0)
            self.sink.feed.take_replayed(number, batch(self.stamp(number)))
        else:
            self.replay = None
            self.sink.feed.end_replay()
            self.note_asked()

    @rule()
    def restart(self) -> None:
        """The connection ends first."""
        self.sink.feed.lose()
        self.replay = None
        self.life, self.number = self.life + 1, 0
        self.sink.feed.begin()
        self.note_asked()

    @invariant()
    def what_is_applied_has_no_gap_and_is_of_one_life(self) -> None:
        applied = self.sink.applied
        assert applied == [applied[0] + index for index in range(len(applied))] if applied else True
        assert all(stamp // 1000 == self.life for stamp in applied)

    @invariant()
    def it_awaits_a_replay_as_long_as_one_runs(self) -> None:
        assert self.sink.feed.is_asking == (self.replay is not None)


TestLossySource = LossySource.TestCase
