"""The order of a queue: tenants by fair share, each tenant's own requests by priority, and who is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quartet.errors import QueueFullError
from router.fair_queue import FairQueue, FairShare, Lane, Position, Standing
from router.tenants import TenantConfig, Tenants
from router.workers import PoolKey

POOL, OTHER_POOL = PoolKey("tiny", "aa"), PoolKey("other", "bb")
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0}


class Turn:
    """Stands in for a future, and counts how often anybody looks at one."""

    num_looks = 0

    def __init__(self) -> None:
        self.is_over = False
        self.error: Exception | None = None

    def set_exception(self, error: Exception) -> None:
        self.is_over, self.error = True, error

    def done(self) -> bool:
        Turn.num_looks += 1
        return self.is_over


@dataclass(eq=False)
class Waiter:
    """An entry."""

    standing: Standing
    adapter: str = ""
    is_retry: bool = False
    placed: Any = field(default_factory=Turn)
    lane: Lane[Waiter] | None = None
    position: Position = (0, 0, 0)


class QueueScene:
    """A queue, with a name for each entry."""

    def __init__(self) -> None:
        self.share = FairShare()
        self.queue: FairQueue[Waiter] = FairQueue(self.share)
        self.names: dict[Waiter, str] = {}
        self.num = 0

    def add(self, name: str, *, priority: int = 0, num_tokens: int = 100, **entry: Any) -> Waiter:
        """Add an entry; its tenant is the first letter of ``name``."""
        self.num += 1
        pool = entry.pop("pool", POOL)
        standing = Standing(pool=pool, tenant=name[0], priority=priority, number=self.num, num_tokens=num_tokens)
        waiter = Waiter(standing, **entry)
        self.queue.add(waiter)
        self.names[waiter] = name
        return waiter

    def order(self) -> list[str]:
        return [self.names[entry] for entry in self.queue.in_order(lambda lane: False)]


def test_tenants_take_turns_and_a_priority_only_orders_its_own_tenants_requests() -> None:
    scene = QueueScene()
    for number in range(3):
        scene.add(f"b{number}")
    for number, priority in enumerate((0, 2**31 - 1, -5, 7)):
        scene.add(f"a{number}", priority=priority)
    assert scene.order() == ["b0", "a1", "b1", "a3", "b2", "a0", "a2"]


def test_a_priority_does_not_decide_between_tenants_that_start_together() -> None:
    scene = QueueScene()
    scene.add("b0")
    scene.add("a0", priority=2**31 - 1)
    assert scene.order() == ["b0", "a0"]


def test_a_tenant_in_debt_waits_until_the_others_have_had_as_much() -> None:
    scene = QueueScene()
    scene.share.serve("a", 100)
    scene.share.charge("a", 160)
    for number in range(3):
        scene.add(f"a{number}")
        scene.add(f"b{number}")
    assert scene.order() == ["b0", "b1", "b2", "a0", "a1", "a2"]


def test_it_knows_the_adapters_for_which_entries_wait() -> None:
    scene = QueueScene()
    waiters = [scene.add(name, adapter=adapter) for name, adapter in (("a", "x"), ("b", "y"), ("c", "x"), ("d", ""))]
    assert scene.queue.adapters() == {"x", "y"}
    scene.queue.remove(waiters[1])
    assert scene.queue.adapters() == {"x"}


def test_requests_for_several_adapters_are_no_more_tenants() -> None:
    scene = QueueScene()
    for number in range(3):
        scene.add(f"a{number}", adapter=f"adapter-{number}")
    for number in range(2):
        scene.add(f"b{number}")
    assert scene.order() == ["a0", "b0", "a1", "b1", "a2"]


def test_a_retry_precedes_others_and_is_neither_charged_nor_refused() -> None:
    scene = QueueScene()
    scene.share.serve("a", 1000)
    for name in ("b0", "b1", "b2"):
        scene.add(name)
    scene.add("a0", is_retry=True)
    scene.add("a1", is_retry=True)
    assert scene.order() == ["a0", "a1", "b0", "b1", "b2"]
    last = scene.queue.last()
    assert last is not None and scene.names[last] == "b2"
    assert scene.queue.num_new == 3


def test_the_last_request_of_the_tenant_that_fills_the_queue_is_refused_whatever_its_priority() -> None:
    scene = QueueScene()
    for number in range(3):
        scene.add(f"b{number}")
    for number in range(4):
        scene.add(f"a{number}", priority=1000 - number)

    def refused(newcomer: Standing | None = None, num_choices: int = 0) -> str | None:
        last = scene.queue.last(newcomer, num_choices)
        return None if last is None else scene.names[last]

    assert refused() == "a3"
    new = Standing(pool=POOL, tenant="b", priority=2**31 - 1, number=100, num_tokens=100)
    assert refused(new, 1) == "b2", "its own lower priority, not the other tenant's request"
    new.priority = 0
    assert refused(new, 2) is None, "it would be the last itself"
    stranger = Standing(pool=POOL, tenant="d", number=101, num_tokens=100)
    assert refused(stranger, 4) is None
    assert refused(stranger, 3) == "a3"


def refuse(scene: QueueScene, max_new: int) -> list[str]:
    """Shorten the queue; returns the names of those that were refused, in the order in which they came."""
    scene.queue.shorten(max_new, lambda: QueueFullError("full"))
    return [name for waiter, name in scene.names.items() if waiter.placed.error is not None]


def test_the_only_request_of_a_tenant_stays_however_long_it_is_and_however_small_those_that_fill_the_queue() -> None:
    scene = QueueScene()
    scene.add("b0", num_tokens=33_280)
    for number in range(100):
        scene.add(f"a{number}", num_tokens=2)
    assert refuse(scene, 100) == ["a99"]
    assert refuse(scene, 2) == [f"a{number}" for number in range(1, 100)]
    assert refuse(scene, 1) == ["b0", *(f"a{number}" for number in range(1, 100))], "of two the one with more tokens"


def test_choices_that_are_still_to_come_count_for_their_tenant() -> None:
    scene = QueueScene()
    scene.add("b0", num_tokens=1000)
    first = scene.add("a0")
    scene.queue.expect(first.standing, 3)
    scene.add("c0", num_tokens=1000)
    assert refuse(scene, 5) == ["a0"]
    scene.queue.expect(first.standing, -3)
    assert scene.queue.num_new == 2


def test_entries_whose_wait_has_ended_make_room_first_at_the_tenant_that_has_most() -> None:
    scene = QueueScene()
    scene.add("b0")
    for number in range(3):
        scene.add(f"a{number}").placed.is_over = True
    assert refuse(scene, 1) == []
    assert len(scene.queue) == 1


class CountingShare(FairShare):
    """Counts how often the queue asks for a tenant's weight."""

    num_asked = 0

    def length(self, tenant: str, num_tokens: int) -> float:
        self.num_asked += 1
        return super().length(tenant, num_tokens)


def test_an_arrival_at_a_full_queue_costs_no_more_with_a_thousand_tenants() -> None:
    scene = QueueScene()
    share = CountingShare()
    scene.queue = FairQueue(share)

    def add(number: int) -> None:
        standing = Standing(pool=POOL, tenant=f"tenant {number % 1500}", number=number)
        waiter = Waiter(standing)
        scene.queue.add(waiter)
        scene.names[waiter] = str(number)

    for number in range(1000):
        add(number)
    refuse(scene, 999)
    Turn.num_looks = share.num_asked = 0
    for number in range(1000, 3000):
        add(number)
        scene.queue.shorten(999, lambda: QueueFullError("full"))
    assert scene.queue.num_new == 999
    assert Turn.num_looks <= 10 * 2000
    assert share.num_asked <= 30 * 2000


def test_the_last_of_a_tenants_requests_is_found_whatever_adapter_it_needs() -> None:
    scene = QueueScene()
    for name, adapter, priority in [("a0", "x", 0), ("a1", "y", 0), ("a2", "x", 0), ("a3", "y", 5)]:
        scene.add(name, adapter=adapter, priority=priority)
    refused = []
    while (last := scene.queue.last()) is not None:
        refused.append(scene.names[last])
        scene.queue.remove(last)
    assert refused == ["a2", "a1", "a0", "a3"]


def test_the_head_is_found_without_looking_at_a_long_tail() -> None:
    scene = QueueScene()
    for number in range(5_000):
        scene.add(f"a{number}", adapter="absent" if number % 2 else "")
    for name in ("b0", "c0", "b1"):
        scene.add(name)
    Turn.num_looks = 0
    head = scene.queue.in_order(lambda lane: lane.adapter == "absent")
    assert [scene.names[next(head)] for _ in range(5)] == ["a0", "b0", "c0", "a2", "b1"]
    # The first entry of each lane, and one more after each that was taken.
    assert Turn.num_looks <= 3 + 5


def test_lanes_that_are_kept_waiting_meanwhile_are_left_out() -> None:
    scene = QueueScene()
    for number in range(3):
        scene.add(f"a{number}", pool=OTHER_POOL if number == 1 else POOL)
    kept: set[PoolKey] = set()

    def seen() -> Iterator[str]:
        for entry in scene.queue.in_order(lambda lane: lane.pool in kept):
            kept.add(entry.standing.pool)
            yield scene.names[entry]

    assert list(seen()) == ["a0", "a1"]
    assert (scene.queue.num_waiting(POOL), scene.queue.pools()) == (2, [POOL, OTHER_POOL])


class QueueMachine(RuleBasedStateMachine):
    """The queue against lists of each tenant's entries that are sorted and searched whenever one is needed."""

    @initialize()
    def begin(self) -> None:
        tenants = Tenants({name: TenantConfig(weight=weight) for name, weight in WEIGHTS.items()})
        self.share = FairShare(tenants)
        self.queue: FairQueue[Waiter] = FairQueue(self.share)
        self.entries: list[Waiter] = []
        self.num_added = 0

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.integers(-1, 1),
        num_tokens=st.integers(1, 5),
        is_retry=st.booleans(),
    )
    def add(self, tenant: str, priority: int, num_tokens: int, is_retry: bool) -> None:
        self.num_added += 1
        standing = Standing(pool=POOL, tenant=tenant, priority=priority, number=self.num_added, num_tokens=num_tokens)
        self.entries.append(Waiter(standing, is_retry=is_retry))
        self.queue.add(self.entries[-1])

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.entries:
            entry = self.entries.pop(data.draw(st.integers(0, len(self.entries) - 1)))
            assert self.queue.remove(entry)
            assert not self.queue.remove(entry)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.entries:
            data.draw(st.sampled_from(self.entries)).placed.is_over = True

    @rule(num_left=st.integers(0, 6))
    def shorten(self, num_left: int) -> None:
        self.queue.shorten(num_left, lambda: QueueFullError("full"))
        assert self.queue.num_new <= num_left
        gone = [entry for entry in self.entries if entry.lane is None]
        assert all(entry.placed.error is not None or entry.placed.is_over for entry in gone)
        self.entries = [entry for entry in self.entries if entry.lane is not None]

    @rule(num_served=st.integers(1, 3), more=st.integers(-5, 5))
    def serve(self, num_served: int, more: int) -> None:
        for entry in list(self.queue.in_order(lambda lane: False))[:num_served]:
            if not entry.is_retry:
                self.share.serve(entry.standing.tenant, entry.standing.num_tokens)
                self.share.charge(entry.standing.tenant, more)
            self.queue.remove(entry)
            self.entries.remove(entry)

    @invariant()
    def the_order_is_that_of_the_model(self) -> None:
        waiting = {name: sorted((e for e in self._live() if e.standing.tenant == name), key=_own) for name in WEIGHTS}
        share = copy.deepcopy(self.share)
        expected = []
        while any(waiting.values()):
            heads = [queue[0] for queue in waiting.values() if queue]
            best = min(
                heads,
                key=lambda entry: (
                    -1.0 if entry.is_retry else share.start(entry.standing.tenant),
                    entry.standing.number,
                ),
            )
            tenant = best.standing.tenant
            expected.append(waiting[tenant].pop(0))
            if not best.is_retry:
                share.serve(tenant, best.standing.num_tokens)
        assert list(self.queue.in_order(lambda lane: False)) == expected

    @invariant()
    def the_last_one_is_that_of_the_model(self) -> None:
        refusable = [entry for entry in self._live() if not entry.is_retry]
        last = self.queue.last()
        if not refusable:
            assert last is None
            return
        assert last is not None
        amounts: dict[str, tuple[float, float]] = {}
        for name in {entry.standing.tenant for entry in refusable}:
            own = [e.standing.num_tokens for e in self.entries if e.standing.tenant == name and not e.is_retry]
            amounts[name] = len(own) / WEIGHTS[name], sum(own) / WEIGHTS[name]
        assert amounts[last.standing.tenant] == max(amounts.values())
        assert last is max((e for e in refusable if e.standing.tenant == last.standing.tenant), key=_own)

    @invariant()
    def the_counts_are_right(self) -> None:
        assert len(self.queue) == len(self.entries) == self.queue.num_waiting(POOL) == len(list(self.queue))
        assert self.queue.num_new == sum(not entry.is_retry for entry in self.entries)
        assert self.queue.pools() == ([POOL] if self.entries else [])

    def _live(self) -> list[Waiter]:
        return [entry for entry in self.entries if not entry.placed.is_over]


def _own(entry: Waiter) -> tuple[int, int]:
    return -entry.standing.priority, entry.standing.number


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(stateful_step_count=25)
