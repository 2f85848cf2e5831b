"""Whatever disturbs a hand-off once, it keeps its promises; ``tests.chaos.test_hand_off_model`` tries all there is."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from unittest import mock

import pytest

from quartet.kvcache.block_pool import BlockManager
from quartet.kvcache.hand_off import HandOffState, Offer, Offers
from quartet.transfer.grpc import puller
from tests.engine.fakes import FakeRunner
from tests.engine.launching import LaunchingRunner
from tests.model.hand_off import MakeRunner, Scenario, explore
from tests.model.simulation import SimLoop

CLOCKS = (time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns, time.time, time.time_ns)


@pytest.mark.parametrize(("make_runner", "one_in", "num_runs"), [(FakeRunner, 16, 100), (LaunchingRunner, 32, 50)])
def test_a_disturbance_at_any_moment_breaks_no_promise(make_runner: MakeRunner, one_in: int, num_runs: int) -> None:
    found = explore(1, make_runner=make_runner, one_in=one_in)
    assert found.broken == []
    assert found.num_runs > num_runs


def test_a_hand_off_that_is_never_renewed_is_found() -> None:
    async def never(_hand_off: object, _puller: object) -> None:
        return

    with mock.patch.object(puller, "_renew", never):
        [(problem, trace)] = explore(0).broken
    assert "expired" in problem
    assert any("Prefill outputs" in line for line in trace)


def test_a_source_that_forgets_to_free_blocks_is_found() -> None:
    with mock.patch.object(BlockManager, "release", lambda _blocks, _holder: None):
        [(problem, _trace)] = explore(0).broken
    assert problem == "prefill-0 holds blocks that it does not offer"


def test_a_source_that_lets_two_takers_pull_is_found() -> None:
    begin = Offers.begin

    def begin_again(offers: Offers, ticket: object, pieces: object, *, now: float) -> Offer:
        offer = offers._pulling.pop(ticket.hand_off_id, None)  # type: ignore[attr-defined]
        if offer is not None:
            offer.state = HandOffState.HELD
            offers._held[offer.ticket.hand_off_id] = offer
        return begin(offers, ticket, pieces, now=now)  # type: ignore[arg-type]

    with mock.patch.object(Offers, "begin", begin_again):
        [(problem, trace)] = explore(1, [Scenario.PLACED], one_in=4).broken
    assert problem == "2 streams pull one hand-off of prefill-0"
    assert any("** somebody repeats begin" in line for line in trace)


@pytest.mark.parametrize("scenario", Scenario)
def test_undisturbed_each_scenario_takes_one_attempt(scenario: Scenario) -> None:
    assert explore(0, [scenario]).num_runs == 1


@pytest.mark.parametrize("make_runner", [FakeRunner, LaunchingRunner])
def test_no_run_depends_on_the_clocks_of_the_machine(make_runner: MakeRunner) -> None:
    with reads_of_clocks() as reads:
        assert explore(1, make_runner=make_runner, one_in=64).broken == []
    assert reads == set()


@contextmanager
def reads_of_clocks() -> Iterator[set[str]]:
    """Where code that runs in a simulation calls a clock of the machine, in spite of the mocks."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, called: object) -> None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        is_ours = "site-packages" not in place  # hypothesis times each collection of garbage in its process
        if event == "c_call" and called in CLOCKS and is_ours and isinstance(asyncio._get_running_loop(), SimLoop):
            found.add(place)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
