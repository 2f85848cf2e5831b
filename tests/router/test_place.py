"""Place over the wire: a signed way to real decode workers with a fake model, and what is left when nobody takes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quartet import errors
from quartet.rpc.errors import from_failure, from_rpc_error
from quartet.streams.signed_start import SigningKeys
from quartet.transfer.config import TransferConfig
from quartet.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from quartet.v1 import router_pb2 as pb
from tests.router.system import TIMEOUT_S, Stub, System, expected, running_system

PROMPT = list(range(20, 40))


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[System, Stub]]:
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0") as system:
        yield system


def make_request(resume: pb.Resume | None = None, **changes: Any) -> pb.PlaceRequest:
    fields = {"token_ids": pb.TokenIds(ids=PROMPT), "sampling": types_pb2.Sampling(max_tokens=12), **changes}
    return pb.PlaceRequest(start=pb.GenerateStart(**fields), resume=resume)


async def place(stub: Stub, request: pb.PlaceRequest | None = None) -> pb.PlaceResponse:
    return await stub.Place(request or make_request(), timeout=TIMEOUT_S)


def signed_start(choice: pb.PlacedChoice, slot: int = 0) -> decode_pb2.DecodeRequest:
    stream = choice.stream
    signed = decode_pb2.SignedDecodeStart(
        slot=slot, signed_start=stream.signed_start, key_id=stream.key_id, mac=stream.mac
    )
    return decode_pb2.DecodeRequest(signed_start=signed)


async def decode(address: str, *requests: decode_pb2.DecodeRequest) -> list[decode_pb2.DecodeResponse]:
    """Everything that one stream brings for these starts."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(TIMEOUT_S):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        return [response async for response in stub.Decode(iter(requests))]


async def take_up(choice: pb.PlacedChoice) -> list[int]:
    """All tokens of a placed choice, the first included."""
    responses = await decode(choice.stream.address, signed_start(choice))
    assert not [failure for response in responses for failure in response.failures]
    return [*choice.token_ids, *(token_id for response in responses for token_id in response.token_ids)]


async def refusal(choice: pb.PlacedChoice) -> errors.ServingError:
    responses = await decode(choice.stream.address, signed_start(choice))
    [failure] = [failure for response in responses for failure in response.failures]
    return from_failure(failure.failure)


async def fails(stub: Stub, request: pb.PlaceRequest) -> errors.ServingError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await place(stub, request)
    return from_rpc_error(caught.value)


async def test_a_placed_request_is_decoded_by_its_client(served: tuple[System, Stub]) -> None:
    system, stub = served
    response = await place(stub, make_request(seed=3))
    [choice] = response.choices
    assert (response.attempt, response.seed, response.num_prompt_tokens, len(response.request_id)) == (0, 3, 20, 32)
    assert (response.model, list(response.prompt_tail_token_ids)) == ("tiny", PROMPT[-4:])
    assert response.model_fingerprint == "fake"
    assert choice.placement.prefill.worker_id == "prefill-0"
    assert choice.placement.decode.worker_id == "decode-0"
    assert (len(choice.token_ids), choice.num_attempts) == (1, 1)
    assert choice.prefill.ToNanoseconds() > 0
    assert await take_up(choice) == expected(PROMPT, 12)
    await system.wait_idle()


async def test_tokens_and_their_log_probabilities_are_those_of_generate(served: tuple[System, Stub]) -> None:
    _, stub = served
    output = types_pb2.OutputOptions(logprobs=0)
    [choice] = (await place(stub, make_request(output=output))).choices
    assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
    await take_up(choice)  # the drain would wait for it


async def test_a_placement_whose_decode_worker_prefills_has_no_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0") as (system, stub):
        [choice] = (await place(stub)).choices
        assert not choice.token_ids
        assert not choice.placement.HasField("prefill")
        assert not choice.HasField("prefill")
        assert await take_up(choice) == expected(PROMPT, 12)
        await system.wait_idle()


async def test_each_choice_is_placed_separately(served: tuple[System, Stub]) -> None:
    system, stub = served
    response = await place(stub, make_request(num_choices=3))
    assert [choice.choice for choice in response.choices] == [0, 1, 2]
    tokens = await asyncio.gather(*(take_up(choice) for choice in response.choices))
    assert list(tokens) == [expected(PROMPT, 12, choice=number) for number in range(3)]
    await system.wait_idle()


async def test_a_first_token_that_ends_it_leaves_nothing_to_stream(served: tuple[System, Stub]) -> None:
    system, stub = served
    [choice] = (await place(stub, make_request(sampling=types_pb2.Sampling(max_tokens=1)))).choices
    assert list(choice.token_ids) == expected(PROMPT, 1)
    assert choice.finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert choice.finished.usage.num_output_tokens == 1
    await system.wait_idle()


async def test_a_broken_answer_is_placed_again_with_the_same_tokens(served: tuple[System, Stub]) -> None:
    system, stub = served
    first = await place(stub, make_request(num_choices=2))
    whole = expected(PROMPT, 12, choice=1)
    resume = pb.Resume(
        request_id=first.request_id,
        attempt=first.attempt + 1,
        seed=first.seed,
        choice=1,
        generated_token_ids=pb.TokenIds(ids=whole[:5]),
        num_text_bytes=3,
    )
    again = await place(stub, make_request(resume, num_choices=2))
    [choice] = again.choices
    assert (again.request_id, again.attempt, again.seed, choice.choice) == (first.request_id, 1, first.seed, 1)
    assert [*whole[:5], *await take_up(choice)] == whole
    for placed in first.choices:
        await take_up(placed)
    await system.wait_idle()


async def test_placing_a_complete_answer_returns_its_finish_reason(served: tuple[System, Stub]) -> None:
    system, stub = served
    ids = pb.TokenIds(ids=expected(PROMPT, 12))
    resume = pb.Resume(request_id="ab" * 16, attempt=1, seed=0, generated_token_ids=ids)
    [choice] = (await place(stub, make_request(resume))).choices
    assert choice.finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert not choice.HasField("placement")
    await system.wait_idle()


async def test_a_placement_can_be_used_once(served: tuple[System, Stub]) -> None:
    system, stub = served
    [choice] = (await place(stub)).choices
    await take_up(choice)
    assert isinstance(await refusal(choice), errors.SignedStartUsedError)
    await system.wait_idle()


async def test_an_altered_placement_is_refused_and_the_true_one_still_works(served: tuple[System, Stub]) -> None:
    system, stub = served
    [choice] = (await place(stub)).choices
    altered = pb.PlacedChoice()
    altered.CopyFrom(choice)
    altered.stream.signed_start = choice.stream.signed_start[:-1] + bytes([choice.stream.signed_start[-1] ^ 1])
    assert isinstance(await refusal(altered), errors.SignedStartError)
    assert await take_up(choice) == expected(PROMPT, 12)
    await system.wait_idle()


async def test_without_a_signing_key_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0", signing_keys_file=None) as (_, stub):
        assert isinstance(await fails(stub, make_request()), errors.NoSigningKeyError)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.PlaceRequest(), "start"),
        (make_request(num_choices=65), "num_choices"),
        (make_request(pb.Resume(request_id="no", attempt=1)), "resume.request_id"),
        (make_request(pb.Resume(request_id="ab" * 16)), "resume.attempt"),
        (make_request(model="unknown"), "model"),
    ],
)
async def test_bad_input_is_refused_by_its_field(
    served: tuple[System, Stub], request_: pb.PlaceRequest, field: str
) -> None:
    assert (await fails(served[1], request_)).field == field


async def test_an_unused_placement_expires_with_its_hand_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.signing._MARGIN_S", 0.1)
    settings = {"transfer": TransferConfig(hand_off_ttl_s=1.0)}
    async with running_system(
        tmp_path, monkeypatch, "prefill-0", "decode-0", worker=settings, signed_start_ttl_s=20.0
    ) as (
        system,
        stub,
    ):
        [choice] = (await place(stub)).choices
        await system.wait_workers(lambda known: known["prefill-0"].load.ranks[0].num_held_blocks > 0)
        await system.wait_idle()  # the hand-off has expired, and the booking is gone
        assert isinstance(await refusal(choice), errors.SignedStartExpiredError)
        # The room is usable again.
        sampling = types_pb2.Sampling(max_tokens=170, ignore_eos=True)
        [whole] = (await place(stub, make_request(sampling=sampling))).choices
        assert await take_up(whole) == expected(PROMPT, 170)
        await system.wait_idle()


async def test_a_client_that_goes_away_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0", gated=("prefill-0",)) as (system, stub):
        call = stub.Place(make_request(num_choices=2))
        await system.wait_workers(lambda known: {status.num_requests for status in known.values()} == {2})
        call.cancel()
        await system.wait_workers(lambda known: {status.num_requests for status in known.values()} == {0})
        system.gates["prefill-0"].release(1000)
        await system.wait_idle()


async def test_an_ended_placement_is_booked_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The signature outlives the test: only the worker's word can end the booking.
    async with running_system(tmp_path, monkeypatch, "decode-0", signed_start_ttl_s=200.0) as (system, stub):
        [choice] = (await place(stub)).choices
        await system.wait_workers(lambda known: known["decode-0"].num_requests == 1)
        await take_up(choice)
        await system.wait_workers(lambda known: known["decode-0"].num_requests == 0)


async def test_the_death_of_a_worker_that_only_clients_use_is_noticed_at_once(
    served: tuple[System, Stub],
) -> None:
    system, stub = served
    [choice] = (await place(stub)).choices
    await take_up(choice)  # the router itself has no stream to it
    died = system.workers["decode-0"].task
    died.cancel()  # it says nothing of it
    await system.wait_workers(lambda known: known["decode-0"].state == pb.WORKER_STATE_SUSPECT)
    await asyncio.wait([died])


async def test_keys_rotate_while_starts_are_placed_and_taken_up(
    served: tuple[System, Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    system, stub = served
    # The router sees a change at once, so the worker sees it late: only for the name that it does not know.
    monkeypatch.setattr(
        SigningKeys, "signing_key", property(lambda keys: next(iter(keys._file.current(is_unknown=True).values())))
    )
    monkeypatch.setattr("quartet.rpc.secret_file._UNKNOWN_POLL_INTERVAL_S", 0.0)
    old, new = f"test {'5e' * 32}\n", f"new {'6f' * 32}\n"
    [held] = (await place(stub)).choices
    for content, key_id in ((old + new, "test"), (new + old, "new"), (new, "new")):
        if content == new:  # nothing that the old key signed is under way any more
            assert await take_up(held) == expected(PROMPT, 12)
        write_keys(system, content)
        async with asyncio.timeout(TIMEOUT_S):
            num_taken_up = 0
            while num_taken_up < 5:
                [choice] = (await place(stub)).choices
                assert await take_up(choice) == expected(PROMPT, 12)
                num_taken_up += choice.stream.key_id == key_id
    assert choice.stream.key_id == "new"
    await system.wait_idle()


def write_keys(system: System, content: str) -> None:
    """Replace the file at once, as an editor or Kubernetes does."""
    file = system.directory / "new_signing_keys"
    file.touch(mode=0o600)
    file.write_text(content)
    file.rename(system.signing_keys_file)
