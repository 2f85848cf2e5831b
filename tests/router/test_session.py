"""Session over the wire, in front of real workers with a fake model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from quartet.api.request import SessionLimits
from quartet.v1 import router_pb2 as pb
from quartet.v1 import types_pb2
from tests.router.session_reader import Received, SessionReader
from tests.router.system import Stub, System, expected, running_system
from tests.router.test_servicer import PROMPT, make_start

LENGTH, CANCELLED = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_CANCELLED


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[System, Stub]]:
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0") as system:
        yield system


async def test_many_requests_share_a_stream_and_half_closing_ends_it_with_the_last(
    served: tuple[System, Stub],
) -> None:
    system, stub = served
    session = SessionReader(stub)
    for slot in range(20):
        await session.start(slot, make_start(token_ids=pb.TokenIds(ids=[slot + 30, *PROMPT])))
    await session.half_close()
    assert await session.read_all() == grpc.StatusCode.OK
    for slot in range(20):
        received = session.received[slot]
        assert received.token_ids[0] == expected([slot + 30, *PROMPT], 12)
        assert received.reasons == [LENGTH]
        assert received.accepted.choices[0].decode.worker_id == "decode-0"
    await system.wait_idle()


async def test_choices_text_and_logprobs_come_in_columns(served: tuple[System, Stub]) -> None:
    _system, stub = served
    session = SessionReader(stub)
    await session.start(7, make_start(num_choices=3, output=types_pb2.OutputOptions(logprobs=0)))
    await session.start(3, make_start(text_options=pb.TextOptions(omit_text=True)))
    await session.read_ends(7, 3)
    for choice in range(3):
        assert session.received[7].token_ids[choice] == expected(PROMPT, 12, choice=choice)
        assert session.received[7].logprobs[choice] == expected(PROMPT, 12, choice=choice)
        assert session.received[7].texts[choice]
    assert session.received[3].token_ids[0] == expected(PROMPT, 12)
    assert session.received[3].texts == {0: ""}
    assert not session.received[3].logprobs


async def test_a_bad_request_fails_alone_by_field(served: tuple[System, Stub]) -> None:
    _system, stub = served
    session = SessionReader(stub)
    await session.start(0, make_start(sampling=types_pb2.Sampling(top_p=0)))
    await session.start(1, make_start(model="none"))
    await session.start(2, make_start())
    await session.read_ends(0, 1, 2)
    failures = [session.received[slot].failure for slot in (0, 1)]
    assert [(failure.code, failure.field) for failure in failures] == [
        (grpc.StatusCode.INVALID_ARGUMENT.value[0], "sampling.top_p"),
        (grpc.StatusCode.NOT_FOUND.value[0], "model"),
    ]
    assert session.received[2].token_ids[0] == expected(PROMPT, 12)
    await session.start(0, make_start())  # its slot is free again
    await session.read_ends(0)
    assert session.received[0].token_ids[0] == expected(PROMPT, 12)


async def test_a_resumed_request_gives_the_rest_of_its_answer(served: tuple[System, Stub]) -> None:
    system, stub = served
    whole = expected(PROMPT, 12)
    given = pb.TokenIds(ids=whole[:5])
    resume = pb.Resume(request_id="ab" * 16, attempt=1, seed=3, generated_token_ids=given)
    session = SessionReader(stub)
    await session.start(0, make_start(), resume=resume)
    session.received[0].token_ids[0] = whole[:5]
    await session.read_ends(0)
    received = session.received[0]
    assert received.accepted is not None
    assert (received.accepted.request_id, received.accepted.seed) == ("ab" * 16, 3)
    assert received.token_ids[0] == whole
    await session.start(1, make_start(), resume=pb.Resume(request_id="ab", attempt=1))
    await session.read_ends(1)
    assert session.received[1].failure is not None
    assert session.received[1].failure.field == "resume.request_id"
    await system.wait_idle()


async def test_a_cancel_ends_each_choice_and_frees_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0", gated=("decode-0",)) as (system, stub):
        session = SessionReader(stub)
        await session.start(0, make_start(num_choices=2))
        await session.start(1, make_start())
        await session.read_until(lambda: all(received.accepted is not None for received in session.received.values()))
        await session.cancel(0)
        await session.read_ends(0)
        assert session.received[0].reasons == [CANCELLED] * 2
        system.gates["decode-0"].release(1000)
        await session.read_ends(1)
        assert session.received[1].reasons == [LENGTH]
        await system.wait_idle()


@pytest.mark.parametrize("is_rude", [True, False], ids=["vanishes", "breaks the rules"])
async def test_a_broken_session_frees_all_that_its_requests_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_rude: bool
) -> None:
    gated = ("decode-0",)
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0", gated=gated) as (system, stub):
        session = SessionReader(stub)
        for slot in range(3):
            await session.start(slot, make_start())
        await session.read_until(lambda: all(received.token_ids for received in session.received.values()))
        if is_rude:
            session.call.cancel()
        else:
            await session.start(2, make_start())
            assert await session.read_all() == grpc.StatusCode.INVALID_ARGUMENT
        # Not before all have ended may the engine go on: else they would end by themselves.
        await system.wait_workers(lambda known: all(status.num_requests == 0 for status in known.values()))
        system.gates["decode-0"].release(1000)
        await system.wait_idle()


async def test_a_reader_that_stops_loses_only_what_it_does_not_read_and_all_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SessionLimits(max_pending_tokens=16)
    async with running_system(tmp_path, monkeypatch, "decode-0", session=limits) as (system, stub):
        options = [("grpc.http2.bdp_probe", 0)]  # small windows
        async with grpc.aio.insecure_channel(system.address, options) as channel:
            stopped, other = SessionReader(Stub(channel)), SessionReader(stub)
            wordy = make_start(sampling=types_pb2.Sampling(max_tokens=150), output=types_pb2.OutputOptions(logprobs=20))
            for slot in range(50):  # more than windows and sockets hold
                await stopped.start(slot, wordy)
            await system.wait_idle()  # no caller waited for it
            await other.start(0, make_start())
            await other.read_ends(0)
            assert other.received[0].token_ids[0] == expected(PROMPT, 12)
            await stopped.half_close()
            assert await stopped.read_all() == grpc.StatusCode.OK
        ends = {_end_of(received) for received in stopped.received.values()}
        assert ends == {"LENGTH", "RESOURCE_EXHAUSTED READER_TOO_SLOW"}


async def test_a_drain_gives_running_requests_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = ("decode-0",)
    async with running_system(tmp_path, monkeypatch, "decode-0", gated=gated, drain_timeout_s=1.0) as (system, stub):
        session = SessionReader(stub)
        await session.start(0, make_start())
        await session.start(1, make_start(sampling=types_pb2.Sampling(max_tokens=100)))
        await session.read_until(lambda: all(received.accepted is not None for received in session.received.values()))
        assert system.router is not None
        system.router.stop.set()
        system.gates["decode-0"].release(30)
        await session.read_ends(0)
        assert session.received[0].reasons == [LENGTH]
        assert await session.read_all() == grpc.StatusCode.UNAVAILABLE
        assert session.received[1].failure is not None
        assert session.received[1].failure.reason == "DRAINING"


def _end_of(received: Received) -> str:
    if received.failure is not None:
        [status] = [status.name for status in grpc.StatusCode if status.value[0] == received.failure.code]
        return f"{status} {received.failure.reason}"
    return "LENGTH" if received.reasons == [LENGTH] else str(received.reasons)
