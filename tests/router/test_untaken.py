"""Placements that nobody takes up: what a tenant may hold of them, and what becomes of the next ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet import errors
from quartet.engine.sampling import Sampling
from quartet.errors import ConfigError, PlacementBudgetError
from quartet.events.load import PlacementProgress
from router.book import numbering
from router.config import AdmissionConfig
from router.untaken import Capacity, Untaken, UntakenBudgets
from tests.router.fakes import TIMEOUT_S, Fleet, Plan, collect
from tests.router.records import make_load
from tests.router.test_generate import make_start
from tests.router.test_place_failures import num_booked, place

POOL = "pool"


class Scene:
    """Budgets of half of 16 requests and 1000 tokens: 8 placements, 500 tokens, 10,000 token-seconds a minute.

    The tenant ``front/a`` is named by the caller ``front``, whose tenants together have half as much again.
    """

    def __init__(self, *, num_requests: int = 16, max_waiting: int = 100, poll_interval_s: float = TIMEOUT_S) -> None:
        self.now = 0.0
        self.capacity = Capacity(1000, num_requests)
        self.budgets = UntakenBudgets[str](
            lambda _pool: self.capacity,
            share=0.5,
            max_waiting=max_waiting,
            timeout_s=TIMEOUT_S,
            caller=lambda tenant: tenant.partition("/")[0] if "/" in tenant else None,
            poll_interval_s=poll_interval_s,
            clock=lambda: self.now,
        )

    async def signed(self, num_choices: int, num_tokens: int = 10, tenant: str = "a") -> list[Untaken]:
        """Placements that their clients have."""
        async with asyncio.timeout(TIMEOUT_S):
            held = await self.budgets.hold(tenant, POOL, num_choices, num_tokens)
        for untaken in held:
            untaken.keep()
            untaken.drop()  # the call of Place has ended
        return list(held)

    def refused(self, tenant: str = "a") -> PlacementBudgetError:
        with pytest.raises(PlacementBudgetError) as raised:
            self.budgets.check(tenant, POOL)
        return raised.value


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def first_done(tasks: Sequence[asyncio.Task[object]], number: int) -> None:
    pending = set(tasks)
    while len(tasks) - len(pending) < number:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


async def test_a_hoard_of_placements_leaves_room_for_other_tenants() -> None:
    fleet = Fleet("prefill-0", "decode-0", num_blocks=100)
    decode = next(status.record for status in fleet.table.statuses(0.0) if status.record.worker_id == "decode-0")
    fleet.table.report(make_load(decode, max_running=16), 0.0)
    sampling = Sampling(max_tokens=300)  # with its prompt, 32 of 100 blocks
    hoard = [asyncio.create_task(place(fleet, tenant="hoarder", sampling=sampling)) for _ in range(30)]
    await asyncio.wait_for(first_done(hoard, 10), TIMEOUT_S)  # the intake rests by the clock
    await settle()
    assert [task.done() for task in hoard].count(True) == num_booked(fleet) == 10, "half of 16 and a quarter"
    answer = await collect(fleet.generate(make_start(tenant="other", sampling=sampling)))
    assert len(answer.token_ids[0]) == 300
    assert len([call for call in fleet.hops.calls if call.kind == "prefill"]) == 11, "nothing was prefilled in vain"
    fleet.now = 2.0
    with pytest.raises(PlacementBudgetError, match="untaken placements is used up: 10 of this tenant, with 200 tokens"):
        await place(fleet, tenant="hoarder")
    # One is brought to its worker, so the next one is placed.
    name = numbering("router-a", decode.epoch)
    started = {name: PlacementProgress(started=(1,))}
    fleet.table.report(make_load(decode, max_running=16, num_running=1, placements=started), 0.0)
    await settle()
    assert [task.done() for task in hoard].count(True) == 11
    # The others expire.
    fleet.table.tick(25.0)
    await settle()
    assert [task.done() for task in hoard].count(True) == 21
    for task in hoard:
        task.cancel()
    await asyncio.gather(*hoard, return_exceptions=True)
    fleet.table.tick(50.0)


@pytest.mark.parametrize("error", [None, errors.InvalidRequestError("no")])
async def test_a_call_that_signs_nothing_leaves_no_placement_counted(error: errors.ServingError | None) -> None:
    fleet = Fleet("prefill-0", "decode-0", num_blocks=10)
    for _ in range(5):
        # One of two choices ends with its first token, or the call fails.
        fleet.hops.plan("prefill", Plan(error=error))
        if error is None:
            await place(fleet, sampling=Sampling(max_tokens=1))
        else:
            with pytest.raises(errors.InvalidRequestError):
                await place(fleet)
    fleet.assert_nothing_left()
    async with asyncio.timeout(TIMEOUT_S):
        held = await fleet.pipeline._context.untaken.hold("", fleet.table.pools(0.0)[0].key, 2, 25)
    assert len(held) == 2


async def test_a_tenant_is_not_idle_while_its_calls_are_still_being_placed() -> None:
    scene = Scene()
    await scene.signed(1, num_tokens=250)
    [placing] = await scene.budgets.hold("a", POOL, 1, 250)
    scene.now = 2.0
    scene.budgets.check("a", POOL)
    placing.keep()
    placing.drop()
    scene.now = 4.0
    assert "2 of this tenant, with 500 tokens" in str(scene.refused())


async def test_placements_of_tenants_and_pools_are_counted_apart() -> None:
    scene = Scene()
    await scene.signed(8)
    await scene.signed(8, tenant="b")
    scene.now = 5.0
    assert scene.refused().reason == "PLACEMENT_BUDGET"
    scene.budgets.check("a", "other pool")
    scene.budgets.check("c", POOL)


async def test_a_fresh_tenant_for_each_placement_does_not_fill_the_pool() -> None:
    scene = Scene(poll_interval_s=0.001)
    held = [untaken for number in range(12) for untaken in await scene.signed(1, tenant=f"front/{number}")]
    waiting = [asyncio.create_task(scene.signed(1, tenant=f"front/new {number}")) for number in range(3)]
    await settle()
    assert not any(task.done() for task in waiting)
    await scene.signed(4, tenant="other/a")
    held.pop().drop()
    await settle()
    assert [task.done() for task in waiting] == [True, False, False]
    scene.now = 1.1
    for task in waiting[1:]:
        with pytest.raises(PlacementBudgetError, match="12 of this caller, with 120 tokens"):
            await task
    with pytest.raises(PlacementBudgetError, match="of this caller"):
        scene.budgets.check("front/yet another", POOL)
    scene.budgets.check("other/b", POOL)


async def test_a_tenant_at_its_limit_keeps_no_other_tenant_of_its_caller_waiting() -> None:
    scene = Scene()
    held = await scene.signed(8, tenant="front/hoarder")
    waiting = [asyncio.create_task(scene.signed(1, tenant="front/hoarder")) for _ in range(20)]
    await settle()
    other = await scene.signed(4, tenant="front/other")
    late = asyncio.create_task(scene.signed(1, tenant="front/late"))
    await settle()
    assert not late.done()
    other.pop().drop()
    await late
    held.pop().drop()
    await settle()
    assert [task.done() for task in waiting].count(True) == 1
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    for untaken in (*held, *other, *late.result(), *waiting[0].result()):
        untaken.drop()
    caller = scene.budgets._callers["front", POOL]
    assert (caller.num_placements, caller.num_tokens, caller.line) == (0, 0, {})


async def test_names_have_equal_parts_of_their_callers_line() -> None:
    scene = Scene(max_waiting=6)
    await scene.signed(12, tenant="front/first")
    flood = [asyncio.create_task(scene.signed(1, tenant="front/flood")) for _ in range(10)]
    await settle()
    assert [task.done() for task in flood].count(False) == 6
    others = [asyncio.create_task(scene.signed(1, tenant=f"front/{number}")) for number in range(10)]
    await settle()
    assert [task.done() for task in others].count(False) == 5, "one each, while six names wait"
    tasks = [*flood, *others]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not scene.budgets._callers["front", POOL].line


async def test_time_that_a_callers_placements_lay_untaken_counts_together() -> None:
    scene = Scene()
    held = [untaken for number in range(12) for untaken in await scene.signed(1, tenant=f"front/{number}")]
    scene.now = 25.0
    for untaken in held:
        untaken.drop()
    with pytest.raises(PlacementBudgetError, match="this caller's held more than 15000 token-seconds"):
        scene.budgets.check("front/new", POOL)


async def test_a_pool_whose_workers_are_gone_has_the_budgets_that_it_had() -> None:
    scene = Scene()
    [mine, theirs] = [*await scene.signed(1), *await scene.signed(1, tenant="front/b")]
    scene.now = 10.0
    for untaken in (mine, theirs):
        untaken.drop()
    scene.capacity = Capacity(0, 0)
    scene.budgets.check("a", POOL)
    scene.budgets.check("front/b", POOL)
    assert [*await scene.signed(1), *await scene.signed(1, tenant="front/b")]


async def test_one_call_alone_is_let_through_whatever_its_size() -> None:
    scene = Scene()
    first = await scene.signed(12, num_tokens=900)
    waiting = asyncio.create_task(scene.signed(1))
    for untaken in first:
        await settle()
        assert not waiting.done()
        untaken.drop()
    await waiting


async def test_tokens_are_bounded_too_and_alone_where_workers_do_not_say_how_many_they_run() -> None:
    scene = Scene(num_requests=0)
    held = await scene.signed(50, num_tokens=9)
    waiting = asyncio.create_task(scene.signed(1, num_tokens=51))
    await settle()
    assert not waiting.done()
    held.pop().drop()
    await waiting


async def test_calls_wait_in_order_and_one_that_is_cancelled_leaves_nothing() -> None:
    scene = Scene(max_waiting=3)
    [last, *_] = await scene.signed(8)
    first, second, third = (asyncio.create_task(scene.signed(1)) for _ in range(3))
    await settle()
    with pytest.raises(PlacementBudgetError):
        await scene.signed(1)
    second.cancel()
    last.drop()
    await settle()
    assert (first.done(), second.cancelled(), third.done()) == (True, True, False)
    # At the moment of its turn a call is cancelled: its turn is the next one's.
    fourth = asyncio.create_task(scene.signed(1))
    await settle()
    first.result()[0].drop()
    third.cancel()
    await fourth
    assert scene.budgets._accounts["a", POOL].num_placements == 8


async def test_a_call_that_left_the_line_no_longer_counts_in_it_and_keeps_nobody_behind() -> None:
    scene = Scene(max_waiting=2)
    await scene.signed(7)
    large, small = (asyncio.create_task(scene.signed(num_choices)) for num_choices in (2, 1))
    await settle()
    assert not small.done()
    large.cancel()
    await small
    # Nothing is released from here on.
    gone = [asyncio.create_task(scene.signed(1)) for _ in range(2)]
    await settle()
    for call in gone:
        call.cancel()
    await settle()
    waiting = asyncio.create_task(scene.signed(1))
    await settle()
    assert not waiting.done(), "it waits in their place"
    waiting.cancel()


async def test_calls_that_wait_are_refused_once_nothing_is_taken_up_any_more() -> None:
    scene = Scene(poll_interval_s=0.001)
    held = await scene.signed(8)
    waiting = asyncio.create_task(scene.signed(1))
    await settle()
    assert not waiting.done()
    scene.now = 1.1
    with pytest.raises(PlacementBudgetError, match="8 of this tenant, with 80 tokens") as raised:
        await waiting
    assert raised.value.retry_delay_s == 1.0
    held[0].drop()
    await scene.signed(1)


async def test_a_client_that_takes_up_what_it_gets_is_never_refused() -> None:
    scene = Scene()
    for _ in range(300):
        held = await scene.signed(8, num_tokens=60)
        scene.budgets.check("a", POOL)
        scene.now += 0.5
        scene.budgets.check("a", POOL)
        for untaken in held:
            untaken.drop()


async def test_time_that_placements_lay_untaken_is_paid_back_slowly() -> None:
    scene = Scene()
    held = await scene.signed(8, num_tokens=60)
    scene.now = 25.0
    for untaken in held:
        untaken.drop()
    # 8 times 62.5 tokens, a place's part of the pool, for 24 s, of which 10,000 token-seconds are allowed a minute.
    error = scene.refused()
    assert "block-seconds is used up: this tenant's held more than 10000 token-seconds" in error.message
    assert error.retry_delay_s == pytest.approx((8 * 62.5 * 24 - 10_000) * 60 / 10_000)
    scene.now += error.retry_delay_s - 0.1
    scene.refused()
    scene.now += 0.2
    scene.budgets.check("a", POOL)


async def test_accounts_that_owe_nothing_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.untaken._MAX_ACCOUNTS", 3)
    scene = Scene()
    kept = await scene.signed(1, tenant="kept")
    for number in range(10):
        for untaken in await scene.signed(1, tenant=f"gone {number}"):
            untaken.drop()
    assert len(scene.budgets._accounts) <= 3
    assert ("kept", POOL) in scene.budgets._accounts
    kept[0].drop()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 300)), max_size=12), st.randoms())
def test_a_tenant_never_holds_more_than_its_share_beside_its_first_call(
    calls: list[tuple[int, int]], random: object
) -> None:
    async def run() -> None:
        scene, running = Scene(), list[asyncio.Task[list[Untaken]]]()
        account = None
        for num_choices, num_tokens in calls:
            running.append(asyncio.create_task(scene.signed(num_choices, num_tokens)))
        while running:
            await settle()
            account = scene.budgets._accounts["a", POOL]
            done = [task for task in running if task.done()]
            assert done, "some call always goes on"
            if len(done) > 1:
                assert account.num_placements <= 8
                assert account.num_tokens <= 500
            chosen = random.choice(done)  # type: ignore[attr-defined]
            running.remove(chosen)
            for untaken in chosen.result():
                untaken.drop()
        assert account is None or (account.num_placements, account.num_tokens) == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("share", [0.0, 1.01, -1.0, float("nan")])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="untaken_share: must be above 0 and at most 1"):
        AdmissionConfig(untaken_share=share)
