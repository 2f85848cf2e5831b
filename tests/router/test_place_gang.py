"""Choices of one Place call: signed together, kept alive until then, and never waiting for each other's room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quartet import errors
from quartet.api.placement import PlacedRequest
from quartet.api.request import TokenPrompt
from quartet.engine.sampling import Sampling
from quartet.streams.messages import SignedPlacement
from quartet.transfer.config import TransferConfig
from quartet.v1 import types_pb2
from router.config import AdmissionConfig, AttemptConfig
from tests.router.fakes import TIMEOUT_S, Fleet, Plan
from tests.router.records import make_load
from tests.router.system import Stub, System, expected, running_system
from tests.router.test_place import PROMPT, make_request, take_up
from tests.router.test_place import place as place_over_the_wire
from tests.router.test_place_failures import GONE, num_booked, place

HAND_OFF_TTL_S = 2.0


async def settle(placing: asyncio.Task[PlacedRequest]) -> PlacedRequest:
    async with asyncio.timeout(TIMEOUT_S):
        return await placing


def signed_for(fleet: Fleet, choice: int) -> frozenset[str]:
    """Workers for which that choice of the only request was signed."""
    return fleet.table.placed_at(fleet.hops.calls[0].start.context.request_id, choice)


async def test_a_ready_choice_is_kept_alive_and_signed_only_with_the_last_one() -> None:
    fleet, gate = Fleet("prefill-0", "decode-0"), asyncio.Event()
    fleet.hops.plan("prefill", Plan(), Plan(gate=gate))
    placing = asyncio.create_task(place(fleet, num_choices=2))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.hops.hung.wait()
        await fleet.hops.keeping.wait()
    assert len(fleet.hops.kept) == 1
    assert signed_for(fleet, 0) == frozenset()
    gate.set()
    placed = await settle(placing)
    assert all(isinstance(choice.next, SignedPlacement) for choice in placed.choices)
    assert signed_for(fleet, 0) == signed_for(fleet, 1) == {"decode-0"}
    # What is left is the client's: the router renews it no more.
    assert (len(fleet.hops.held), fleet.hops.kept, num_booked(fleet)) == (2, set(), 2)


async def test_if_the_choices_do_not_fit_at_once_none_waits_and_none_stays() -> None:
    fleet = Fleet("prefill-0", "decode-0", num_blocks=10)
    with pytest.raises(errors.PlaceTooLargeError):
        await place(fleet, num_choices=2, sampling=Sampling(max_tokens=60))
    assert fleet.hops.calls == []
    fleet.assert_nothing_left()


async def test_a_failed_choice_whose_blocks_were_taken_does_not_wait_for_the_other_choices() -> None:
    fleet = Fleet("prefill-0", "decode-0", num_blocks=16)
    fleet.hops.plan("prefill", Plan(), Plan(error=errors.OutOfBlocksError("full", retry_delay_s=0.01)))

    def take_room() -> None:
        [status] = [status for status in fleet.table.statuses(0.0) if status.record.worker_id == "decode-0"]
        fleet.table.report(make_load(status.record, num_in_use_blocks=8), 0.0)

    fleet.on_pause = take_room
    with pytest.raises(errors.PlaceTooLargeError):
        await place(fleet, num_choices=2, sampling=Sampling(max_tokens=60))
    fleet.assert_nothing_left()


async def test_if_no_choice_has_room_all_choices_wait() -> None:
    fleet = Fleet("prefill-0", "decode-0", num_blocks=16, admission=AdmissionConfig(queue_timeout_s=30))
    decode = fleet.table.statuses(0.0)[0].record
    fleet.table.report(make_load(decode, num_in_use_blocks=16), 0.0)
    placing = asyncio.create_task(place(fleet, num_choices=2, sampling=Sampling(max_tokens=60)))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.policy.kept_waiting.wait()
    assert not placing.done()
    fleet.table.report(make_load(decode), 0.0)
    assert len((await settle(placing)).choices) == 2


async def test_a_worker_lost_before_the_last_choice_is_ready_costs_only_its_own_choice_an_attempt() -> None:
    fleet, gate = Fleet("prefill-0", "decode-0", "decode-1"), asyncio.Event()
    fleet.hops.plan("prefill", Plan(), Plan(gate=gate))
    placing = asyncio.create_task(place(fleet, num_choices=2))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.hops.keeping.wait()
    fleet.break_worker("decode-0")
    gate.set()
    placed = await settle(placing)
    assert {choice.placement.decode.worker_id for choice in placed.choices if choice.placement} == {"decode-1"}
    assert sorted(choice.num_attempts for choice in placed.choices) == [1, 2]
    assert (len(fleet.hops.held), fleet.hops.kept, num_booked(fleet)) == (2, set(), 2)


async def test_a_choice_that_ends_with_its_first_token_is_not_waited_for() -> None:
    fleet, gate = Fleet("prefill-0", "decode-0"), asyncio.Event()
    fleet.hops.plan("prefill", Plan(gate=gate), Plan())
    placing = asyncio.create_task(place(fleet, num_choices=2, sampling=Sampling(max_tokens=2)))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.hops.keeping.wait()
    fleet.hops.eos_at = 0
    gate.set()
    placed = await settle(placing)
    assert [isinstance(choice.next, SignedPlacement) for choice in placed.choices] == [False, True]
    assert num_booked(fleet) == 1


@pytest.mark.parametrize("error", [GONE, errors.EngineError("broke")])
async def test_when_a_choice_fails_for_good_the_kept_hand_offs_are_dropped(error: errors.ServingError) -> None:
    fleet, gate = Fleet("prefill-0", "decode-0", attempts=AttemptConfig(max_attempts=1)), asyncio.Event()
    fleet.hops.plan("prefill", Plan(), Plan(gate=gate, error=error))
    placing = asyncio.create_task(place(fleet, num_choices=2, prompt=TokenPrompt([1] * 20)))
    async with asyncio.timeout(TIMEOUT_S):
        await fleet.hops.keeping.wait()
    gate.set()
    with pytest.raises(type(error)):
        await settle(placing)
    fleet.assert_nothing_left()


async def test_choices_stay_valid_if_their_prefills_end_further_apart_than_the_hand_off_ttl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"transfer": TransferConfig(hand_off_ttl_s=HAND_OFF_TTL_S)}
    workers = ("prefill-0", "prefill-1", "decode-0")
    async with running_system(tmp_path, monkeypatch, *workers, gated=("prefill-1",), worker=settings) as (system, stub):
        tokens = await _place_with_prefills_far_apart(system, stub)
        assert tokens == [expected(PROMPT, 12, choice=number) for number in range(2)]
        await system.wait_idle()


async def _place_with_prefills_far_apart(system: System, stub: Stub) -> list[list[int]]:
    sampling = types_pb2.Sampling(max_tokens=12)
    placing = asyncio.create_task(place_over_the_wire(stub, make_request(num_choices=2, sampling=sampling)))
    await system.wait_workers(lambda known: known["prefill-0"].load.ranks[0].num_held_blocks > 0)
    # Real time has to pass: the time to live is the source's.
    await asyncio.sleep(1.5 * HAND_OFF_TTL_S)
    assert not placing.done()
    system.gates["prefill-1"].release(100)
    placed = await placing
    return list(await asyncio.gather(*(take_up(choice) for choice in placed.choices)))
