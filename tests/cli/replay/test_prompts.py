"""A trace's prompts, block by block: what is worked out once for each block is what the tokens say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.replay.prompts import Prompts
from cli.traces.format import BLOCK_SIZE, TraceRequest
from quartet.errors import InvalidRequestError
from quartet.kvcache.block_hash import pack_token_ids, sequence_hashes, split_blocks


def _request(hash_ids: tuple[int, ...], num_last_tokens: int) -> TraceRequest:
    num_tokens = (len(hash_ids) - 1) * BLOCK_SIZE + num_last_tokens
    return TraceRequest(arrival_s=0.0, num_input_tokens=num_tokens, num_output_tokens=1, hash_ids=hash_ids)


requests = st.builds(
    _request, st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), st.integers(1, BLOCK_SIZE)
)


@given(trace=st.lists(requests, min_size=1, max_size=4), block_size=st.sampled_from([32, 48, 64, 512, 1024]))
def test_names_and_contents_are_those_of_the_tokens(trace: list[TraceRequest], block_size: int) -> None:
    prompts = Prompts(trace, block_size)
    for request in trace:
        token_ids, blocks = prompts.token_ids(request), prompts.blocks(request)
        assert len(token_ids) == request.num_input_tokens
        assert blocks.hashes == sequence_hashes(token_ids, block_size)
        contents = split_blocks(pack_token_ids(token_ids), block_size)
        assert list(blocks.contents) == contents[: len(blocks.contents)]
        assert len(blocks.contents) == (0 if BLOCK_SIZE % block_size else len(contents))


@given(ones=requests, others=requests)
def test_prompts_are_equal_as_far_as_their_ids(ones: TraceRequest, others: TraceRequest) -> None:
    prompts = Prompts([ones, others], 64)
    first, second = prompts.token_ids(ones), prompts.token_ids(others)
    for index in range(min(len(first), len(second)) // BLOCK_SIZE):
        tokens = slice(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
        assert (first[tokens] == second[tokens]) == (ones.hash_ids[index] == others.hash_ids[index])


def test_ids_may_be_any_numbers() -> None:
    request = _request((1 << 63, 5), 100)
    assert len(Prompts([request], 64).blocks(request).hashes) == 9


def test_tokens_without_an_id_are_refused() -> None:
    request = TraceRequest(arrival_s=0.0, num_input_tokens=513, num_output_tokens=1, hash_ids=(7,))
    with pytest.raises(InvalidRequestError, match="request 1 has 1 hash_ids for 513 tokens") as refused:
        Prompts([request], 64)
    assert refused.value.field == "hash_ids"
