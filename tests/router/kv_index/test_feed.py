"""What a router knows of a worker's blocks, over a network that drops, repeats and reorders messages."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quartet.discovery.base import Rank
from quartet.events.kv import KvBatch, KvSnapshotPart, Removed, Stored, Tier
from router.kv_index.feed import FeedState, KvFeed
from tests.router.kv_truth import SetIndex, TruthfulWorker

WORKER = "decode-0"


class Feeding:
    """One worker and one router; the network in between is a list of frames: batches, and numbers of load reports.

    Frames carry the epoch, as real ones do: who brings them to a feed brings it only those of its life.
    """

    def __init__(self) -> None:
        self.index = SetIndex()
        self.num_lives = 0
        self.frames: list[tuple[int, KvBatch | int]] = []
        self.parts: list[KvSnapshotPart] | None = None  # of the snapshot that is under way
        self.start()

    def start(self) -> None:
        self.num_lives += 1
        self.worker = TruthfulWorker(WORKER, self.num_lives, seed=self.num_lives)
        self.feed = KvFeed(WORKER, self.worker.epoch, 2, self.index, max_waiting_batches=6)
        self.parts = None

    def change(self, num_batches: int) -> None:
        self.frames += [(self.worker.epoch, self.worker.change()) for _ in range(num_batches)]

    def report(self) -> None:
        self.frames.append((self.worker.epoch, self.worker.number))

    def arrive(self, num_frames: int) -> None:
        for _ in range(min(num_frames, len(self.frames))):
            epoch, content = self.frames.pop(0)
            if epoch == self.feed.epoch:
                if isinstance(content, KvBatch):
                    self.feed.take_batch(content)
                else:
                    self.feed.take_number(content)

    def drop(self, position: int, num_frames: int) -> None:
        if self.frames:
            begin = position % len(self.frames)
            del self.frames[begin : begin + num_frames]

    def overtake(self, position: int) -> None:
        if self.frames:
            self.frames.insert(0, self.frames.pop(position % len(self.frames)))

    def repeat(self, position: int) -> None:
        if self.frames:
            self.frames.append(self.frames[position % len(self.frames)])

    def ask(self) -> None:
        if self.feed.state is FeedState.JOINING and self.parts is None:
            self.parts = self.worker.snapshot()

    def load(self, num_parts: int) -> None:
        if self.parts is None:
            return
        for _ in range(min(num_parts, len(self.parts))):
            if not self.feed.take_part(self.parts.pop(0)):
                self.fail()
                return
        if not self.parts:
            self.feed.finish()
            self.fail()

    def fail(self) -> None:
        self.feed.abandon()
        self.parts = None

    def restart(self) -> None:
        """The worker's next life; frames of the last one are still under way."""
        self.feed.close()
        assert not self.index.held
        self.start()

    def rest(self) -> None:
        """What is under way arrives, a heartbeat too, and as many snapshots as it takes: then everything is known."""
        self.report()
        self.arrive(len(self.frames))
        for _ in range(2):  # one may have been under way that is too old by now
            self.ask()
            self.load(1000)
        assert self.feed.state is FeedState.LIVE
        assert self.index.held == self.worker.held

    def check(self) -> None:
        """Who is up to date knows the truth."""
        if self.feed.state is FeedState.LIVE and self.feed.number == self.worker.number:
            assert self.index.held == self.worker.held


_positions = st.integers(0, 20)


class FeedMachine(RuleBasedStateMachine):
    """Everything in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.feeding = Feeding()

    @rule(num_batches=st.integers(1, 6), reports=st.booleans())
    def change(self, num_batches: int, reports: bool) -> None:
        self.feeding.change(num_batches)
        if reports:
            self.feeding.report()

    @rule(num_frames=st.integers(1, 4))
    def arrive(self, num_frames: int) -> None:
        self.feeding.arrive(num_frames)

    @rule(position=_positions, num_frames=st.integers(1, 5))
    def drop(self, position: int, num_frames: int) -> None:
        self.feeding.drop(position, num_frames)

    @rule(position=_positions)
    def overtake(self, position: int) -> None:
        self.feeding.overtake(position)

    @rule(position=_positions)
    def repeat(self, position: int) -> None:
        self.feeding.repeat(position)

    @rule()
    def ask(self) -> None:
        self.feeding.ask()

    @rule(num_parts=st.integers(1, 4))
    def load(self, num_parts: int) -> None:
        self.feeding.load(num_parts)

    @rule(restarts=st.booleans())
    def break_off(self, restarts: bool) -> None:
        if restarts:
            self.feeding.restart()
        else:
            self.feeding.fail()

    @rule()
    def rest(self) -> None:
        self.feeding.rest()

    @invariant()
    def who_is_up_to_date_knows_the_truth(self) -> None:
        self.feeding.check()

    def teardown(self) -> None:
        self.feeding.rest()


TestFeed = FeedMachine.TestCase
TestFeed.settings = settings(stateful_step_count=50)


@pytest.mark.parametrize("seed", range(8))
def test_after_thousands_of_losses_the_index_equals_what_the_worker_holds(seed: int) -> None:
    draw, feeding = random.Random(seed), Feeding()
    some, anywhere = lambda: draw.randint(1, 4), lambda: draw.randrange(20)
    accidents: list[tuple[float, Callable[[], None]]] = [
        (6, lambda: feeding.change(1)),
        (3, feeding.report),
        (8, lambda: feeding.arrive(some())),
        (0.5, lambda: feeding.drop(anywhere(), 1)),
        (0.1, lambda: feeding.drop(anywhere(), 8)),
        (0.5, lambda: feeding.overtake(anywhere())),
        (0.5, lambda: feeding.repeat(anywhere())),
        (4, feeding.ask),
        (4, lambda: feeding.load(some())),
        (0.2, feeding.fail),
        (0.02, feeding.restart),
        (0.05, feeding.rest),
    ]
    weights, actions = zip(*accidents, strict=True)
    for action in draw.choices(actions, weights, k=4000):
        action()
        feeding.check()
    feeding.rest()


def batch(number: int, *stored: int, rank: int = 0) -> KvBatch:
    events = [Stored(None, stored)]
    return KvBatch(worker_id=WORKER, epoch=1, number=number, data_parallel_rank=rank, events=events)


def part(number: int, *stored: int, epoch: int = 1) -> KvSnapshotPart:
    return KvSnapshotPart(number=number, epoch=epoch, data_parallel_rank=0, stored=[Stored(None, stored)])


def make_feed(index: SetIndex, **settings_: int) -> KvFeed:
    return KvFeed(WORKER, 1, 1, index, **settings_)


def known(index: SetIndex) -> set[int]:
    return {named for _, named in index.held.get(Rank(WORKER), set())}


def live_feed(index: SetIndex, number: int, *stored: int) -> KvFeed:
    feed = make_feed(index)
    feed.take_number(number)
    assert feed.take_part(part(number, *stored))
    assert feed.finish()
    return feed


def test_no_snapshot_is_wanted_before_the_first_message() -> None:
    feed = make_feed(SetIndex())
    assert feed.state is FeedState.LISTENING
    feed.take_number(0)
    assert feed.state is FeedState.JOINING


def test_batches_above_the_snapshot_are_applied_to_it_and_those_below_are_in_it() -> None:
    index = SetIndex()
    feed = make_feed(index)
    for number in (4, 5, 6):
        feed.take_batch(batch(number, number))
    assert feed.take_part(part(5, 50))
    assert feed.finish()
    assert (feed.state, feed.number, known(index)) == (FeedState.LIVE, 6, {50, 6})


def test_a_snapshot_older_than_the_first_batch_is_refused() -> None:
    index = SetIndex()
    feed = make_feed(index)
    feed.take_batch(batch(9, 9))
    assert not feed.take_part(part(7, 7))
    assert not feed.finish()
    assert (feed.state, known(index)) == (FeedState.JOINING, set())


def test_a_heartbeat_reveals_a_lost_tail() -> None:
    index = SetIndex()
    feed = live_feed(index, 3, 1)
    feed.take_number(3)
    assert feed.state is FeedState.LIVE
    feed.take_number(4)
    assert feed.state is FeedState.JOINING
    assert known(index) == {1}  # better than nothing until the snapshot comes
    feed.take_part(part(4, 2))
    feed.finish()
    assert known(index) == {2}


def test_repeated_and_late_batches_change_nothing() -> None:
    index = SetIndex()
    feed = live_feed(index, 3, 1)
    for number in (3, 1, 4, 4):
        feed.take_batch(batch(number, 10 + number))
    feed.take_number(2)
    assert (feed.state, feed.number, known(index)) == (FeedState.LIVE, 4, {1, 14})


def test_waiting_batches_are_bounded_and_the_next_snapshot_replaces_the_dropped_ones() -> None:
    index = SetIndex()
    feed = make_feed(index, max_waiting_batches=10)
    feed.take_batch(batch(1, 1))
    assert feed.take_part(part(1, 1))
    for number in range(2, 13):
        feed.take_batch(batch(number, number))
    assert not feed.finish()
    assert feed.take_part(part(12, *range(1, 13)))
    assert feed.finish()
    assert (feed.number, known(index)) == (12, set(range(1, 13)))


def test_a_part_of_another_snapshot_or_epoch_is_refused() -> None:
    feed = make_feed(SetIndex())
    feed.take_number(1)
    assert not feed.take_part(part(1, epoch=2))
    assert feed.take_part(part(2, 1))
    assert not feed.take_part(part(3, 2))


def test_a_rank_that_the_worker_does_not_have_is_left_out() -> None:
    index = SetIndex()
    feed = live_feed(index, 0)
    feed.take_batch(batch(1, 5, rank=7))
    feed.take_batch(
        KvBatch(worker_id=WORKER, epoch=1, number=2, data_parallel_rank=0, events=[Removed([5], Tier.HOST)])
    )
    assert (feed.number, index.held) == (2, {})


def test_a_snapshot_of_a_rank_that_the_worker_does_not_have_is_left_out() -> None:
    index = SetIndex()
    feed = KvFeed(WORKER, 1, 2, index)
    feed.take_number(3)
    for rank in (0, 2):
        stored = [Stored(None, [5 + rank])]
        assert feed.take_part(KvSnapshotPart(number=3, epoch=1, data_parallel_rank=rank, stored=stored))
    assert feed.finish()
    assert set(index.held) == {Rank(WORKER, 0)}


def test_only_what_is_lost_after_all_was_known_is_a_gap() -> None:
    gaps: list[int] = []
    feed = KvFeed(WORKER, 1, 1, SetIndex(), on_gap=lambda: gaps.append(feed.number))

    def join(number: int) -> None:
        feed.take_part(part(number))
        assert feed.finish()

    feed.take_batch(batch(5, 1))  # the first that it hears of the worker
    feed.take_batch(batch(9, 2))  # nothing was known yet
    join(9)
    feed.take_batch(batch(10, 3))
    assert gaps == []
    feed.take_batch(batch(12, 4))
    feed.take_batch(batch(14, 5))  # the same gap: a snapshot is needed anyway
    join(14)
    feed.take_number(14)
    assert gaps == [10]
    feed.take_number(15)
    assert gaps == [10, 14]
