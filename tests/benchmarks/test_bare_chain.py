"""The processes with nothing of Quartet, and the contract's messages that they exchange."""

from __future__ import annotations

from array import array
from dataclasses import asdict
from datetime import timedelta

import pytest

from benchmarks import contract_messages
from benchmarks.bare_chain import bare_chain
from benchmarks.disagg_client import NUM_OUTPUT_TOKENS
from benchmarks.disagg_stack import BLOCK_SIZE
from benchmarks.stub_engine.runner import stub_layout
from quartet.api.convert.answer import from_generate_response
from quartet.api.request import Accepted, Delta
from quartet.engine.sampling import Sampling
from quartet.kvcache.layout import BlocksPayload
from quartet.streams import convert
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.messages import WAY_FROM_PB, host_from_pb, ticket_from_pb
from quartet.v1 import decode_pb2, prefill_pb2, router_pb2, transfer_pb2


@pytest.fixture(params=[1, 128, 4096], ids="{} tokens".format)
def prompt(request: pytest.FixtureRequest) -> list[int]:
    return list(range(16, 16 + int(request.param)))


async def test_the_chains_go_through_their_processes_again_and_again(prompt: list[int]) -> None:
    async with bare_chain() as chain:
        for _ in range(2):
            sample = await chain.measure(prompt)
            assert min(asdict(sample).values()) > 0


async def test_a_bare_chain_that_has_ended_is_an_error() -> None:
    async with bare_chain() as chain:
        pass
    with pytest.raises(RuntimeError, match="ended"):
        await chain.measure([16])


def test_the_prompt_goes_whole_from_the_client_to_both_engines(prompt: list[int]) -> None:
    start = contract_messages.read_generate_start(contract_messages.generate_request(prompt))
    packed = contract_messages.pack_prompt(start)
    assert contract_messages.read_prefill_prompt(contract_messages.prefill_request(packed, start.sampling)) == prompt
    result = contract_messages.read_prefill_result(contract_messages.prefill_response(len(prompt)))
    decoding = contract_messages.read_decode_start(contract_messages.decode_request(packed, start.sampling, result))
    assert contract_messages.list_token_ids(decoding.generation) == [*prompt, result.token_id]


def test_workers_take_the_starts_for_real_ones(prompt: list[int]) -> None:
    start = contract_messages.read_generate_start(contract_messages.generate_request(prompt))
    packed = contract_messages.pack_prompt(start)
    result = contract_messages.read_prefill_result(contract_messages.prefill_response(len(prompt)))
    prefill = prefill_pb2.PrefillRequest.FromString(contract_messages.prefill_request(packed, start.sampling)).start
    decode = decode_pb2.DecodeRequest.FromString(contract_messages.decode_request(packed, start.sampling, result)).start
    prefilling, decoding = convert.from_prefill_start(prefill), convert.from_decode_start(decode)
    for taken in (prefilling, decoding):
        assert taken.generation.prompt_token_ids == array("I", prompt)
        assert taken.generation.sampling == Sampling(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
        assert taken.context.request_id
        assert taken.context.timeout_s == pytest.approx(59.99)
    assert decoding.generation.generated_token_ids == array("I", [result.token_id])
    assert decoding.hand_off == convert.from_hand_off(result.hand_off)


def test_a_router_takes_the_hand_off_for_a_stub_engines(prompt: list[int]) -> None:
    result = contract_messages.read_prefill_result(contract_messages.prefill_response(len(prompt)))
    outcome = convert.from_prefill_result(result)
    assert outcome.hand_off is not None
    assert outcome.hand_off.lease == timedelta(seconds=TransferConfig().lease_s)
    payload = outcome.hand_off.payload
    assert isinstance(payload, BlocksPayload)
    assert payload.layout == stub_layout(payload.layout.model_fingerprint, BLOCK_SIZE)
    assert payload.num_tokens == len(prompt)
    assert len(payload.block_ids) == -(-len(prompt) // BLOCK_SIZE)


def test_a_pull_asks_for_every_block_and_is_told_where_each_is(prompt: list[int]) -> None:
    hand_off = contract_messages.read_prefill_result(contract_messages.prefill_response(len(prompt))).hand_off
    begin = transfer_pb2.PullRequest.FromString(contract_messages.pull_begin(hand_off)).begin
    assert ticket_from_pb(begin.ticket).hand_off_id == hand_off.hand_off_id
    assert host_from_pb(begin.host).boot_id
    assert [WAY_FROM_PB[way] for way in begin.ways] == list(TransferConfig().ways)
    granted = contract_messages.pull_granted(begin)
    piece_size_bytes = stub_layout("", BLOCK_SIZE).piece_size_bytes
    offsets = [block_id * piece_size_bytes for block_id in hand_off.blocks.block_ids]
    assert contract_messages.read_granted_offsets(granted) == offsets
    assert transfer_pb2.PullResponse.FromString(granted).granted.piece_size_bytes == piece_size_bytes


def test_a_pull_ends_with_finish_and_finished() -> None:
    finish = transfer_pb2.PullRequest.FromString(contract_messages.pull_finish())
    finished = transfer_pb2.PullResponse.FromString(contract_messages.pull_finished())
    assert (finish.WhichOneof("message"), finished.WhichOneof("message")) == ("finish", "finished")


def test_a_client_takes_the_answers_for_a_routers() -> None:
    accepted = from_generate_response(router_pb2.GenerateResponse.FromString(contract_messages.accepted(128)))
    assert isinstance(accepted, Accepted)
    assert accepted.num_prompt_tokens == 128
    assert not contract_messages.read_delta(contract_messages.accepted(128))
    delta = contract_messages.first_delta(300)
    assert contract_messages.read_delta(delta) == [300]
    told = from_generate_response(router_pb2.GenerateResponse.FromString(delta))
    assert isinstance(told, Delta)
    assert (told.token_offset, told.token_ids) == (0, (300,))
