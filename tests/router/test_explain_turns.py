"""What Explain costs: its tenant's share, turns among tenants, and a line in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import pytest

from quartet.api.request import TokenPrompt
from quartet.errors import ModelNotFoundError, QueueFullError
from router.explain import ExplainTurns
from router.fair_queue import FIXED_TOKENS, FairShare, Standing
from router.workers import PoolKey
from tests.router.fakes import TIMEOUT_S, Fleet
from tests.router.test_explain import explain
from tests.router.test_generate import make_start

POOL = PoolKey("tiny", "ab" * 32)


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="router")


def said_in(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """The fields of the lines of explained requests."""
    return [record.quartet_fields for record in caplog.records if record.name == "router.explain"]


async def test_one_line_is_logged_for_an_explained_request(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet("decode-0")
    await explain(fleet, make_start(tenant="acme", client_request_id="mine"))
    [said] = said_in(caplog)
    assert (said["path"], said["outcome"], said["tenant"]) == ("explain", "explained", "acme")
    assert (said["client_request_id"], said["model"], said["num_prompt_tokens"]) == ("mine", "tiny", 20)
    assert {"tokenize_s", "total_s"} <= said.keys()


async def test_a_refused_explain_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet("decode-0")
    with pytest.raises(ModelNotFoundError):
        await explain(fleet, make_start(tenant="acme", model="none"))
    [said] = said_in(caplog)
    assert (said["outcome"], said["tenant"]) == ("model_not_found", "acme")


async def test_explained_tokens_are_charged_to_the_tenant() -> None:
    fleet = Fleet("decode-0")
    start = make_start(tenant="asker", prompt=TokenPrompt(tuple(range(20, 70))))
    for _ in range(3):
        await explain(fleet, start)
    # So its next request stands behind those of a tenant that asked nothing.
    assert fleet.admission.share.start("asker") == 3 * (FIXED_TOKENS + 50)
    assert fleet.admission.share.start("other") == 2 * (FIXED_TOKENS + 50)


class Scene:
    """Turns whose work takes as much CPU time as a test says."""

    def __init__(self, **limits: int) -> None:
        self.cpu_s = 0.0
        self.done: list[str] = []
        self.turns = ExplainTurns(FairShare(), cpu_clock=lambda: self.cpu_s, **limits)
        self.num_standings = 0

    def ask(self, name: str, num_tokens: int = 100, cost_s: float = 0.0) -> asyncio.Task[str]:
        """``flood-1`` is a call of the tenant ``flood``."""
        self.num_standings += 1
        tenant = name.partition("-")[0]
        standing = Standing(pool=POOL, tenant=tenant, number=self.num_standings, num_tokens=num_tokens)
        return asyncio.create_task(self.turns.run(standing, lambda: self.work(name, cost_s)))

    def work(self, name: str, cost_s: float) -> str:
        self.cpu_s += cost_s
        self.done.append(name)
        return name


async def within(work: Coroutine[Any, Any, object]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await work


async def test_the_tenant_that_asked_least_is_explained_first() -> None:
    scene = Scene()
    tasks = [scene.ask(f"flood-{number}") for number in range(5)]
    tasks.append(scene.ask("small"))
    await within(asyncio.wait(tasks))
    assert scene.done == ["flood-0", "small", "flood-1", "flood-2", "flood-3", "flood-4"]
    assert [task.result() for task in tasks] == [*(f"flood-{number}" for number in range(5)), "small"]


async def test_explaining_rests_four_times_as_long_as_it_computed() -> None:
    scene = Scene()
    await within(asyncio.wait([scene.ask("long", cost_s=1e6)]))
    late = scene.ask("late")
    for _ in range(20):
        await asyncio.sleep(0)
    assert scene.done == ["long"] and not late.done()
    assert scene.turns._next is not None
    assert scene.turns._next.when() == pytest.approx(asyncio.get_running_loop().time() + 4e6, abs=1e5)
    late.cancel()
    await within(asyncio.wait([late]))


async def test_a_full_line_refuses_its_last() -> None:
    scene = Scene(max_waiting=2)
    last, first, second = scene.ask("last", num_tokens=1_000), scene.ask("first"), scene.ask("second")
    await within(asyncio.wait([last, first, second]))
    assert scene.done == ["first", "second"]
    error = last.exception()
    assert isinstance(error, QueueFullError) and error.retry_delay_s


@pytest.mark.parametrize("num_loops", [1, 2, 3])
async def test_who_leaves_keeps_nobody_waiting(num_loops: int) -> None:
    scene = Scene()
    gone, stays = scene.ask("gone"), scene.ask("stays")
    for _ in range(num_loops):  # before, when and after its turn comes
        await asyncio.sleep(0)
    gone.cancel()
    await within(asyncio.wait([gone, stays]))
    assert stays.result() == "stays"
    await within(asyncio.wait([scene.ask("next")]))
    assert scene.done[-2:] == ["stays", "next"]


async def test_an_error_of_one_is_nobody_elses() -> None:
    scene = Scene()

    def fail() -> str:
        raise ModelNotFoundError("gone")

    failing = asyncio.create_task(scene.turns.run(Standing(pool=POOL), fail))
    other = scene.ask("other")
    await within(asyncio.wait([failing, other]))
    assert isinstance(failing.exception(), ModelNotFoundError)
    assert other.result() == "other"
