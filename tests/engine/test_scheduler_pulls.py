"""Decodes whose KV comes from another worker."""

from __future__ import annotations

import pytest

from quartet.engine.base import EngineRequest
from quartet.engine.runner import RequestState
from quartet.transfer.base import PieceCopy
from tests.engine.fakes import expected_output, make_request
from tests.engine.stepping import Stepper


def _request(stepper: Stepper, num_prompt: int, *, max_tokens: int = 4, start: int = 0) -> EngineRequest:
    """A decode after a prefill elsewhere of ``num_prompt`` tokens, with the token sampled there."""
    prompt = range(start, start + num_prompt)
    generated = expected_output(make_request(prompt, max_tokens=1).generation)
    hand_off = stepper.puller.offer_prefix([*prompt, *generated])
    return make_request(prompt, generated=generated, max_tokens=max_tokens, hand_off=hand_off)


def _state(stepper: Stepper, request: EngineRequest) -> RequestState:
    return stepper.scheduler.live[request.id].state


def test_all_pieces_are_pulled_into_an_empty_cache_and_one_token_is_computed() -> None:
    stepper = Stepper()
    request = _request(stepper, 10)
    stepper.add(request)
    stepper.step()
    [pull] = stepper.pulls
    table = stepper.scheduler.live[request.id].seq.block_table
    assert tuple(pull.copies) == tuple(PieceCopy(piece, table[piece]) for piece in range(3))
    assert stepper.runner.chunk_sizes == [[]]
    assert _state(stepper, request) is RequestState.PULLING
    stepper.copy(pull)
    stepper.scheduler.end_pull(request.id, succeeded=True)
    stepper.run()
    assert stepper.runner.chunk_sizes[1:] == [[1], [1], [1]]
    assert stepper.outputs[request.id] == expected_output(request.generation)[1:]


def test_the_block_after_the_last_pulled_token_is_not_pulled() -> None:
    stepper = Stepper()
    stepper.add(request := _request(stepper, 8))
    stepper.step()
    assert len(stepper.scheduler.live[request.id].seq.block_table) == 3
    assert [copy.piece for copy in stepper.pulls[0].copies] == [0, 1]


def test_only_blocks_that_are_not_cached_here_are_pulled() -> None:
    stepper = Stepper()
    stepper.add(make_request(range(8), max_tokens=1))
    stepper.run()
    stepper.add(request := _request(stepper, 10))
    stepper.step()
    assert [copy.piece for copy in stepper.pulls[0].copies] == [2]
    assert stepper.scheduler.live[request.id].num_cached_tokens == 8
    stepper.copy(stepper.pulls[0])
    stepper.scheduler.end_pull(request.id, succeeded=True)
    stepper.run()
    assert stepper.outputs[request.id] == expected_output(request.generation)[1:]


def test_a_pull_of_no_blocks_is_still_a_pull_so_that_the_source_is_notified() -> None:
    stepper = Stepper()
    stepper.add(make_request(range(8), max_tokens=2))
    stepper.run()
    stepper.add(_request(stepper, 8))
    stepper.step()
    assert [tuple(pull.copies) for pull in stepper.pulls] == [()]


def test_pulled_blocks_can_be_shared() -> None:
    stepper = Stepper()
    stepper.add(request := _request(stepper, 10))
    stepper.step()
    stepper.copy(stepper.pulls[0])
    stepper.scheduler.end_pull(request.id, succeeded=True)
    stepper.add(other := make_request(range(9)))
    stepper.step()
    assert stepper.scheduler.live[other.id].num_cached_tokens == 8


@pytest.mark.parametrize("ends_early", [False, True])
def test_pulled_blocks_are_named_after_the_first_step_or_when_the_request_ends_before(ends_early: bool) -> None:
    stepper = Stepper()
    stepper.add(request := _request(stepper, 10))
    stepper.step()
    stepper.copy(stepper.pulls[0])
    stepper.scheduler.end_pull(request.id, succeeded=True)
    assert not stepper.blocks.stored_blocks()
    if ends_early:
        stepper.scheduler.cancel(request.id)
        assert stepper.counts.cached == 2
    else:
        stepper.step()
    assert len(stepper.blocks.stored_blocks()) == 2


def test_other_requests_decode_while_a_pull_goes_on() -> None:
    stepper = Stepper()
    stepper.add(request := _request(stepper, 10), other := make_request([40, 41]))
    stepper.run()
    assert stepper.outputs[other.id] == expected_output(other.generation)
    assert _state(stepper, request) is RequestState.PULLING


def test_a_pull_counts_towards_max_num_seqs_so_that_its_request_can_run_at_once() -> None:
    stepper = Stepper(max_num_seqs=1)
    stepper.add(_request(stepper, 10), make_request([40]))
    stepper.step()
    assert (stepper.scheduler.num_running, len(stepper.scheduler.waiting)) == (1, 1)


def test_a_failed_pull_ends_the_request_and_frees_its_blocks() -> None:
    stepper = Stepper()
    stepper.add(request := _request(stepper, 10))
    stepper.step()
    assert stepper.scheduler.end_pull(request.id, succeeded=False).state is RequestState.ENDED
    assert stepper.counts.free == stepper.counts.total
    assert not stepper.scheduler.live


def test_blocks_of_a_cancelled_pull_stay_until_nothing_writes_to_them() -> None:
    stepper = Stepper()
    stepper.add(request := _request(stepper, 10))
    stepper.step()
    assert stepper.scheduler.cancel(request.id) is RequestState.PULLING
    assert stepper.counts.in_use == 3
    assert stepper.scheduler.end_pull(request.id, succeeded=True).state is RequestState.ENDED
    assert stepper.counts.free == stepper.counts.total


def test_pulling_blocks_are_never_taken_by_preemption() -> None:
    stepper = Stepper(num_blocks=6)
    stepper.add(decode := make_request([50] * 8, max_tokens=12))
    stepper.step()
    stepper.add(request := _request(stepper, 10))
    stepper.run()
    assert stepper.scheduler.num_preemptions == 1
    assert _state(stepper, decode) is RequestState.WAITING
    assert _state(stepper, request) is RequestState.PULLING


def test_a_preempted_request_with_a_hand_off_is_computed_not_pulled_again() -> None:
    stepper = Stepper(num_blocks=7)
    stepper.add(first := make_request([50] * 8, max_tokens=12))
    stepper.step()
    stepper.add(request := _request(stepper, 10, max_tokens=8))
    stepper.step()
    stepper.copy(stepper.pulls[0])
    stepper.scheduler.end_pull(request.id, succeeded=True)
    stepper.run()
    assert stepper.scheduler.num_preemptions == 1
    assert len(stepper.pulls) == 1
    assert stepper.outputs[request.id] == expected_output(request.generation)[1:]
    assert stepper.outputs[first.id] == expected_output(first.generation)


def test_tokens_to_be_pulled_do_not_count_as_queued_prefill() -> None:
    stepper = Stepper()
    stepper.add(_request(stepper, 10))
    assert stepper.scheduler.num_queued_prefill_tokens == 0
