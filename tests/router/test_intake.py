"""Requests begin one at a time, turns of the event loop apart, and those first whose tenant had least."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise

import pytest

from quartet.supervision import Supervisor, TaskEndedError
from router.fair_queue import FairShare
from router.intake import Intake
from router.tenants import TenantConfig, Tenants


class Entering:
    """Requests of tenants, and the turns of the event loop in which they begin."""

    def __init__(self, tenants: Tenants | None = None) -> None:
        self.intake = Intake(FairShare(tenants))
        self.begun: list[list[str]] = [[]]
        self._tasks: list[asyncio.Task[None]] = []

    def enter(self, tenant: str, num_tokens: int = 0, count: int = 1) -> None:
        self._tasks += [asyncio.create_task(self._enter(tenant, num_tokens)) for _ in range(count)]

    async def turn(self) -> list[str]:
        """Those that begin in the next turn."""
        self.begun.append([])
        await asyncio.sleep(0)
        return self.begun[-1]

    async def all(self) -> list[str]:
        """All that began."""
        await asyncio.gather(*self._tasks)
        return [tenant for turn in self.begun for tenant in turn]

    def cancel(self, first: int, end: int) -> None:
        for task in self._tasks[first:end]:
            task.cancel()

    async def _enter(self, tenant: str, num_tokens: int) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self.intake.enter(tenant, num_tokens)
            self.begun[-1].append(tenant)


async def test_a_request_alone_begins_at_once() -> None:
    entering = Intake(FairShare()).enter("acme", 1_000_000)
    with pytest.raises(StopIteration):
        entering.send(None)


async def test_one_begins_at_a_time_with_turns_for_all_else_between_them() -> None:
    entering = Entering()
    entering.enter("acme", count=20)
    turns: list[list[str]] = []
    while sum(map(len, turns)) < 20:
        turns.append(await entering.turn())
    assert max(map(len, turns)) == 1
    begun = [number for number, turn in enumerate(turns) if turn]
    assert {later - earlier for earlier, later in pairwise(begun)} <= {4, 5}, "four, and the one in which it begins"
    assert entering.intake.length == 0


async def test_long_prompts_count_for_more() -> None:
    entering = Entering()
    entering.enter("acme", 30_000, count=10)
    turns = [await entering.turn() for _ in range(30)]
    assert max(map(len, turns)) == 1
    assert len(await entering.all()) == 10


async def test_after_long_ones_the_loop_is_left_to_others_for_a_while() -> None:
    entering, loop = Entering(), asyncio.get_running_loop()
    began_at = loop.time()
    entering.enter("acme", 50_000, count=5)
    assert len(await entering.all()) == 5
    assert loop.time() - began_at >= 4 * 0.009
    while await entering.turn():
        pass
    entering.enter("acme")
    await entering.all()
    assert entering.intake.length == 0


async def test_a_tenant_that_comes_later_does_not_wait_for_all_of_another() -> None:
    entering = Entering()
    entering.enter("flood", count=100)
    await entering.turn()
    entering.enter("other", count=2)
    order = await entering.all()
    assert [index for index, tenant in enumerate(order) if tenant == "other"][-1] < 6


async def test_a_tenant_of_twice_the_weight_begins_twice_as_often() -> None:
    entering = Entering(Tenants({"big": TenantConfig(weight=2.0)}))
    entering.enter("small", count=60)
    entering.enter("big", count=60)
    order = await entering.all()
    assert order[4:64].count("big") == pytest.approx(40, abs=4)


async def test_those_that_are_cancelled_leave_the_line_and_hold_up_no_one() -> None:
    entering = Entering()
    entering.enter("acme", count=20)
    await entering.turn()
    assert entering.intake.length == 19
    entering.cancel(1, 20)
    entering.enter("other")
    assert (await entering.all()).count("other") == 1
    assert entering.intake.length == 0


async def test_one_that_comes_while_only_cancelled_ones_wait_gets_its_turn() -> None:
    intake = Intake(FairShare())
    await intake.enter("acme", 0)
    waiting = intake.enter("acme", 0)
    waiting.send(None).cancel()
    await asyncio.sleep(0)
    assert intake.length == 1, "it has not noticed yet"
    async with asyncio.timeout(60.0):
        await intake.enter("other", 0)
    with pytest.raises(asyncio.CancelledError):
        waiting.throw(asyncio.CancelledError)
    assert intake.length == 0


async def test_an_error_in_a_turn_ends_the_process_instead_of_all_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: FairShare, _tenant: str, _num_tokens: int) -> None:
        raise RuntimeError("no share")

    async with asyncio.timeout(30):
        with pytest.raises(TaskEndedError, match=r"Intake\._turn has ended.*no share"):
            async with Supervisor() as supervisor:
                entering = Entering()
                entering.enter("acme", count=2)
                await entering.turn()
                monkeypatch.setattr(FairShare, "serve", fail)
                await supervisor.run_until(asyncio.Event())
