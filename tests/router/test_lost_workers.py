"""A request that ends its worker does not end one after another."""

from __future__ import annotations

import pytest

from quartet import errors
from quartet.streams.slots import PeerLostError
from router.config import AttemptConfig
from tests.router.fakes import Fleet, Plan, collect
from tests.router.test_isolation import make_start

NAMES = [f"decode-{number}" for number in range(6)]


async def run(fleet: Fleet, error: errors.ServingError, *, is_lost: bool) -> list[str]:
    """The workers to which a request goes of which each attempt fails with ``error``; ``is_lost``: for good."""
    fleet.hops.plan("decode", *[Plan(error=error, fail_after=1)] * 20)

    def after_attempt() -> None:
        if is_lost:
            fleet.break_worker(fleet.hops.calls[-1].rank.worker_id)

    fleet.on_pause = after_attempt
    with pytest.raises(type(error) if not is_lost else errors.WorkersLostError):
        await collect(fleet.generate(make_start("a", 50)))
    fleet.assert_nothing_left()
    return [call.rank.worker_id for call in fleet.hops.calls]


@pytest.mark.parametrize("error", [PeerLostError("socket closed"), errors.EngineError("the engine is lost")])
@pytest.mark.parametrize("max_lost_workers", [1, 2, 3])
async def test_a_request_ends_once_as_many_workers_as_may_be_were_lost_with_it(
    error: errors.ServingError, max_lost_workers: int
) -> None:
    fleet = Fleet(*NAMES, attempts=AttemptConfig(max_lost_workers=max_lost_workers))
    assert len(await run(fleet, error, is_lost=True)) == max_lost_workers


async def test_the_error_names_the_workers_and_asks_for_no_retry() -> None:
    fleet = Fleet(*NAMES)
    fleet.hops.plan("decode", *[Plan(error=PeerLostError("socket closed"))] * 5)
    fleet.on_pause = lambda: fleet.break_worker(fleet.hops.calls[-1].rank.worker_id)
    with pytest.raises(errors.WorkersLostError) as raised:
        await collect(fleet.generate(make_start("a", 50)))
    assert all(call.rank.worker_id in raised.value.message for call in fleet.hops.calls)
    assert (raised.value.reason, raised.value.retry_delay_s) == ("WORKERS_LOST", None)


async def test_workers_that_are_back_in_the_same_life_were_not_lost() -> None:
    fleet = Fleet(*NAMES, attempts=AttemptConfig(max_lost_workers=2))
    assert len(await run(fleet, PeerLostError("cut"), is_lost=False)) == AttemptConfig.max_attempts


async def test_a_prefill_worker_that_is_well_was_not_lost() -> None:
    fleet = Fleet("prefill-0", "prefill-1", "prefill-2", "decode-0", attempts=AttemptConfig(max_lost_workers=2))
    fleet.hops.plan("prefill", *[Plan(error=PeerLostError("cut"))] * 2)
    answer = await collect(fleet.generate(make_start("a", 10)))
    assert len(answer.token_ids[0]) == 10
    assert [call.kind for call in fleet.hops.calls] == [*["prefill"] * 3, "decode"]
    fleet.assert_nothing_left()


@pytest.mark.parametrize(
    "error",
    [
        errors.WorkerUnavailableError("refused"),
        errors.TransferError("torn"),
        errors.OutOfBlocksError("full"),
    ],
)
async def test_failures_without_a_lost_process_do_not_count(error: errors.ServingError) -> None:
    fleet = Fleet(*NAMES, attempts=AttemptConfig(max_lost_workers=1))
    assert len(await run(fleet, error, is_lost=False)) == AttemptConfig.max_attempts


async def test_a_request_that_loses_two_workers_goes_on() -> None:
    fleet = Fleet("prefill-0", "prefill-1", "decode-0", "decode-1")
    fleet.hops.plan("prefill", Plan(error=PeerLostError("killed")))
    fleet.hops.plan("decode", Plan(error=PeerLostError("killed"), fail_after=2))

    def lose() -> None:
        fleet.break_worker(fleet.hops.calls[-1].rank.worker_id)

    fleet.on_pause = lose
    answer = await collect(fleet.generate(make_start("a", 10)))
    assert len(answer.token_ids[0]) == 10
