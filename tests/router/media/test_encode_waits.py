"""Requests with pictures wait while every encode worker is away, and hold nothing meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from quartet import errors
from quartet.discovery.base import Role, WorkerKey
from quartet.media.items import MediaPart, MediaUrl
from router.config import AttemptConfig
from tests.router.fakes import Fleet, Plan, collect, expected_tokens
from tests.router.media.test_media_encoded import EXPANDED, A, B, calls_of, join, media_fleet, media_start, until

TOKENS = expected_tokens(5, 0, len(EXPANDED), 12)


def suspect(fleet: Fleet) -> None:
    fleet.break_worker("encode-0")


def forget(fleet: Fleet) -> None:
    fleet.break_worker("encode-0")
    fleet.table.unlist(WorkerKey(Role.ENCODE, "encode-0"))
    assert fleet.table.forget_gone(0.0)


@pytest.mark.parametrize("leave", [suspect, forget])
@pytest.mark.parametrize("parts", [(A, B), (MediaUrl("https://example.org/a.png"), B), (MediaUrl("data:,"),) * 2])
async def test_a_request_waits_for_an_encode_worker_and_nothing_is_fetched_meanwhile(
    leave: Callable[[Fleet], None], parts: Sequence[MediaPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    fetch = fleet.media.fetch
    monkeypatch.setattr(fleet.media, "fetch", lambda _parts, *rest: fetch((A, B), *rest))
    leave(fleet)
    answering = asyncio.create_task(collect(fleet.generate(media_start(media=parts))))
    await until(lambda: fleet.num_awaiting_encode == 1)
    fleet.join("prefill-1")  # a change that does not help
    assert not fleet.media.asked.is_set()
    assert fleet.hops.calls == []
    join(fleet, "encode-0")
    assert (await answering).token_ids[0] == TOKENS
    assert len(calls_of(fleet, "encode")) == 1
    fleet.assert_nothing_left()


async def test_waiting_costs_no_attempt_of_a_request_whose_encode_worker_died() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0", attempts=AttemptConfig(max_attempts=2))
    fleet.hops.plan("encode", Plan(error=errors.WorkerUnavailableError("gone")))
    fleet.on_pause = lambda: suspect(fleet)
    answering = asyncio.create_task(collect(fleet.generate(media_start())))
    await until(lambda: fleet.num_awaiting_encode == 1)
    assert len(calls_of(fleet, "encode")) == 1
    join(fleet, "encode-0")
    assert (await answering).token_ids[0] == TOKENS
    fleet.assert_nothing_left()


async def test_embeddings_that_a_dead_worker_held_are_encoded_again_once_there_is_a_worker() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    fleet.hops.plan("prefill", Plan(error=errors.TransferError("torn")))
    fleet.on_pause = lambda: forget(fleet)
    answering = asyncio.create_task(collect(fleet.generate(media_start())))
    await until(lambda: fleet.num_awaiting_encode == 1)
    join(fleet, "encode-1")
    assert (await answering).token_ids[0] == TOKENS
    fleet.assert_nothing_left()


def fleet_without_encode(*, is_begun: bool) -> Fleet:
    """Its encode worker is away, or goes once a request ``is_begun``."""
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    if is_begun:
        fleet.hops.plan("encode", Plan(error=errors.WorkerUnavailableError("gone")))
        fleet.on_pause = lambda: suspect(fleet)
    else:
        suspect(fleet)
    return fleet


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_waiting_request_ends_at_its_timeout_and_says_what_it_lacked(is_begun: bool) -> None:
    fleet = fleet_without_encode(is_begun=is_begun)
    with pytest.raises(errors.RequestTimeoutError, match="no encode worker of this model is ready"):
        await collect(fleet.generate(media_start(timeout_s=0.1)))
    fleet.assert_nothing_left()


@pytest.mark.parametrize("is_begun", [False, True])
async def test_cancelling_a_waiting_request_leaves_nothing(is_begun: bool) -> None:
    fleet = fleet_without_encode(is_begun=is_begun)
    run = fleet.generate(media_start())
    answering = asyncio.create_task(collect(run))
    await until(lambda: fleet.num_awaiting_encode == 1)
    run.cancel()
    assert (await answering).token_ids == {}
    fleet.assert_nothing_left()
    join(fleet, "encode-0")
    assert (await collect(fleet.generate(media_start()))).token_ids[0] == TOKENS


async def test_of_too_many_that_wait_the_last_ones_of_the_largest_tenant_are_refused() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    suspect(fleet)
    many = [asyncio.create_task(collect(fleet.generate(media_start(tenant="many")))) for _ in range(8)]
    await until(lambda: fleet.num_awaiting_encode == 8)
    # Two at once: the one that the first keeps out has not left yet when the second comes.
    few = [asyncio.create_task(collect(fleet.generate(media_start(tenant="few")))) for _ in range(2)]
    await until(lambda: all(answering.done() for answering in many[-2:]))
    assert all(isinstance(answering.exception(), errors.QueueFullError) for answering in many[-2:])
    join(fleet, "encode-0")
    for answering in (*many[:-2], *few):
        assert (await answering).token_ids[0] == TOKENS
    fleet.assert_nothing_left()


async def test_a_worker_that_encodes_files_itself_ends_the_wait() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    suspect(fleet)
    answering = asyncio.create_task(collect(fleet.generate(media_start())))
    await until(lambda: fleet.num_awaiting_encode == 1)
    join(fleet, "prefill-1", {"prefill": ("image", "hand_off")})
    assert (await answering).token_ids[0] == TOKENS
    assert calls_of(fleet, "encode") == []
    fleet.assert_nothing_left()


async def test_explaining_a_request_with_pictures_waits_for_nobody() -> None:
    fleet = media_fleet("encode-0", "prefill-0", "decode-0")
    forget(fleet)
    explanation = await fleet.pipeline.explain(media_start())
    assert any(option.is_chosen for option in explanation.options)
    fleet.assert_nothing_left()
