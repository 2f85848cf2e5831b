from __future__ import annotations

import pytest

from quartet.engine.base import EngineRequest, FinishReason, Generation, RequestKind
from quartet.engine.runner import RequestState
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.engine.scheduler import MAX_REPORTED_TOKENS, Scheduler, SchedulerConfig
from quartet.engine.validation import EngineLimits
from quartet.kvcache.block_pool import BlockManager
from tests.engine.fakes import expected_output, make_request, next_token
from tests.engine.stepping import Stepper


def test_a_prompt_is_computed_and_then_one_token_a_step() -> None:
    stepper = Stepper()
    request = make_request(range(10), max_tokens=3)
    stepper.add(request)
    stepper.run()
    assert stepper.runner.chunk_sizes == [[10], [1], [1]]
    assert stepper.outputs[request.id] == expected_output(request.generation)
    assert stepper.finished[request.id] is FinishReason.LENGTH
    assert stepper.counts.in_use == 0


def test_decodes_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
    stepper = Stepper(max_num_batched_tokens=8)
    stepper.add(make_request([1, 2], max_tokens=9))
    stepper.step()
    stepper.add(make_request(range(10)), make_request(range(20, 27)))
    for _ in range(3):
        stepper.step()
    assert stepper.runner.chunk_sizes[1:] == [[1, 7], [1, 3, 4], [1, 1, 3]]


def test_short_prompts_go_with_the_steps_of_a_long_one_which_keeps_half_of_each() -> None:
    stepper = Stepper(max_num_batched_tokens=16)
    stepper.add(make_request(range(60), max_tokens=1))
    stepper.step()
    stepper.add(*(make_request([n] * 3, max_tokens=1) for n in range(4)))
    for _ in range(4):
        stepper.step()
    assert stepper.runner.chunk_sizes == [[16], [3, 3, 10], [3, 3, 10], [16], [8]]


def test_a_long_prompt_leaves_nothing_to_those_that_would_not_end_or_have_a_lower_priority() -> None:
    stepper = Stepper(max_num_batched_tokens=16)
    stepper.add(make_request(range(60), max_tokens=1))
    stepper.step()
    stepper.add(make_request([9] * 9, max_tokens=1), make_request([1, 2], priority=-1, max_tokens=1))
    for _ in range(3):
        stepper.step()
    assert stepper.runner.chunk_sizes == [[16], [16], [16], [12, 4]]


def test_only_the_chunk_with_the_last_token_samples() -> None:
    stepper = Stepper(max_num_batched_tokens=8)
    request = make_request(range(20), max_tokens=1)
    stepper.add(request)
    assert [len(stepper.step()) for _ in range(3)] == [0, 0, 1]


def test_a_step_reports_at_most_so_many_prompt_tokens_and_others_go_with_them() -> None:
    stepper = Stepper(num_blocks=512, max_num_batched_tokens=2048)
    output = OutputOptions(num_prompt_logprobs=0)
    stepper.add(*(make_request([n] * 200, max_tokens=1, output=output) for n in range(4)))
    stepper.add(make_request([9] * 40, max_tokens=1))
    stepper.run()
    num_left = MAX_REPORTED_TOKENS - 2 * 199  # the token that samples is not reported
    assert stepper.runner.chunk_sizes == [[200, 200, num_left, 40], [200 - num_left, 200]]


def test_a_prompt_that_is_reported_shares_no_cached_block_and_others_share_its_own() -> None:
    stepper = Stepper()
    for output, size in ((None, 10), (OutputOptions(num_prompt_logprobs=0), 10), (None, 2)):
        stepper.add(make_request(range(10), max_tokens=1, output=output))
        stepper.run()
        assert stepper.runner.chunk_sizes[-1] == [size]


def test_higher_priority_goes_first_then_first_come_first_served() -> None:
    stepper = Stepper(max_num_seqs=1)
    low, first, second = (make_request([n], priority=p, max_tokens=1) for n, p in ((1, 0), (2, 5), (3, 5)))
    stepper.add(low, first, second)
    stepper.run()
    assert list(stepper.outputs) == [first.id, second.id, low.id]


def test_a_request_that_does_not_fit_yet_keeps_later_ones_waiting() -> None:
    stepper = Stepper(num_blocks=4)
    running, large, small = (make_request([n] * size, max_tokens=4) for n, size in ((1, 5), (2, 12), (3, 2)))
    stepper.add(running, large, small)
    stepper.step()
    assert stepper.scheduler.num_running == 1
    stepper.run()
    assert list(stepper.outputs) == [running.id, large.id, small.id]


def test_max_num_seqs_bounds_those_with_blocks() -> None:
    stepper = Stepper(max_num_seqs=2)
    stepper.add(*(make_request([n]) for n in range(5)))
    stepper.step()
    assert (stepper.scheduler.num_running, len(stepper.scheduler.waiting)) == (2, 3)


def test_a_second_request_shares_the_full_blocks_of_a_running_one() -> None:
    stepper = Stepper()
    stepper.add(make_request(range(10), max_tokens=8))
    stepper.step()
    second = make_request(range(11), max_tokens=2)
    stepper.add(second)
    stepper.step()
    assert stepper.runner.chunk_sizes[-1] == [1, 3]
    assert stepper.scheduler.live[second.id].num_cached_tokens == 8


def test_when_blocks_run_out_the_latest_of_the_lowest_priority_is_computed_again() -> None:
    stepper = Stepper(num_blocks=6)
    first, second = make_request([1] * 8, max_tokens=12), make_request([2] * 8, max_tokens=12)
    stepper.add(first, second)
    while not stepper.scheduler.num_preemptions:
        stepper.step()
    assert stepper.scheduler.live[first.id].state is RequestState.RUNNING
    assert stepper.scheduler.live[second.id].state is RequestState.WAITING
    stepper.run()
    assert stepper.outputs[first.id] == expected_output(first.generation)
    assert stepper.outputs[second.id] == expected_output(second.generation)


def test_priority_decides_who_is_preempted() -> None:
    stepper = Stepper(num_blocks=6)
    first, urgent = make_request([1] * 8, max_tokens=12), make_request([2] * 8, max_tokens=12, priority=1)
    stepper.add(first, urgent)
    while not stepper.scheduler.num_preemptions:
        stepper.step()
    assert stepper.scheduler.live[urgent.id].state is RequestState.RUNNING
    assert stepper.scheduler.live[first.id].state is RequestState.WAITING


def test_nothing_is_admitted_to_blocks_that_were_just_taken_from_another() -> None:
    stepper = Stepper(num_blocks=6)
    stepper.add(make_request([1] * 8, max_tokens=12), make_request([2] * 8, max_tokens=12))
    while not stepper.scheduler.running or len(stepper.scheduler.running[0].seq) <= 12:  # three blocks each
        stepper.step()
    urgent = make_request([3], max_tokens=1, priority=1)
    stepper.add(urgent)
    stepper.step()
    assert stepper.scheduler.num_preemptions == 1
    assert stepper.scheduler.live[urgent.id].state is RequestState.WAITING
    stepper.run()
    assert len(stepper.outputs) == 3


def test_a_request_preempts_itself_if_the_rest_of_the_pool_is_held() -> None:
    stepper = Stepper(num_blocks=4)
    prefill = make_request([1] * 8, kind=RequestKind.PREFILL)
    decode = make_request([2] * 8, max_tokens=4)
    stepper.add(prefill, decode)
    stepper.run()
    assert stepper.scheduler.num_preemptions == 1
    assert len(stepper.outputs[decode.id]) == 1
    stepper.scheduler.release(prefill.id)
    stepper.run()
    assert stepper.outputs[decode.id] == expected_output(decode.generation)


def test_after_a_preemption_a_request_that_fits_is_admitted_without_a_message() -> None:
    stepper = Stepper(num_blocks=4)
    prefill = make_request([1] * 8, kind=RequestKind.PREFILL)
    decode = make_request([2] * 8, max_tokens=4)
    stepper.add(prefill, decode)
    stepper.step()
    urgent = make_request([3], max_tokens=1, priority=9)
    stepper.add(urgent)
    stepper.run()
    assert len(stepper.outputs[urgent.id]) == 1


def test_a_prefill_gives_one_token_and_holds_its_blocks_until_released() -> None:
    stepper = Stepper()
    request = make_request(range(10), kind=RequestKind.PREFILL)
    stepper.add(request)
    [out] = stepper.step()
    assert out.sampled.token_id == next_token(range(10), 64)
    assert (len(out.held_block_ids), out.num_held_tokens, out.finished) == (3, 10, None)
    assert (stepper.counts.held, stepper.counts.in_use) == (3, 0)
    stepper.scheduler.release(request.id)
    assert (stepper.counts.held, stepper.counts.cached) == (0, 2)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=2),
        Sampling(max_tokens=9, stop_token_ids=(next_token([1, 2, 3, 4, 5, 6], 64),)),
    ],
)
def test_a_prefill_whose_token_ends_the_generation_holds_no_blocks(sampling: Sampling) -> None:
    stepper = Stepper()
    stepper.add(make_request([1, 2, 3, 4, 5], generated=[6], kind=RequestKind.PREFILL, sampling=sampling))
    [out] = stepper.step()
    assert out.finished is not None
    assert out.held_block_ids == ()
    assert (stepper.counts.held, stepper.counts.in_use) == (0, 0)


def test_generated_tokens_count_as_output() -> None:
    stepper = Stepper()
    whole = make_request([1, 2, 3], max_tokens=8)
    output = expected_output(whole.generation)
    resumed = make_request([1, 2, 3], generated=output[:5], max_tokens=8)
    stepper.add(resumed)
    stepper.run()
    assert stepper.outputs[resumed.id] == output[5:]


def test_an_end_of_sequence_token_is_the_last_one_given_out() -> None:
    eos = expected_output(make_request([5, 6], max_tokens=4).generation)[2]
    stepper = Stepper(eos_token_ids=[eos])
    request = make_request([5, 6], max_tokens=9)
    stepper.add(request)
    stepper.run()
    assert stepper.outputs[request.id][-1] == eos
    assert len(stepper.outputs[request.id]) == 3
    assert stepper.finished[request.id] is FinishReason.STOP_ID


def test_ignore_eos_ignores_the_models_ids_but_not_the_callers() -> None:
    output = expected_output(make_request([5, 6], max_tokens=9).generation)
    stepper = Stepper(eos_token_ids=output[:1])
    ignoring = make_request([5, 6], sampling=Sampling(max_tokens=9, ignore_eos=True))
    stopping = make_request([5, 6], sampling=Sampling(max_tokens=9, ignore_eos=True, stop_token_ids=(output[1],)))
    stepper.add(ignoring, stopping)
    stepper.run()
    assert stepper.outputs[ignoring.id] == output
    assert stepper.outputs[stopping.id] == output[:2]


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, FinishReason.STOP_ID), (1, None), (3, None)])
def test_no_stop_id_ends_the_output_before_min_tokens_even_if_it_is_sampled(
    min_tokens: int, expected: FinishReason | None
) -> None:
    stepper = Stepper()
    output = expected_output(make_request([5, 6], max_tokens=9).generation)
    sampling = Sampling(max_tokens=9, min_tokens=min_tokens, stop_token_ids=(output[0],))
    stepper.add(request := make_request([5, 6], sampling=sampling))
    running = stepper.scheduler.live[request.id]
    running.stop_ids, stop_ids = frozenset(), running.stop_ids  # a sampler that masks nothing
    schedule = stepper.scheduler.schedule()
    sampled = stepper.runner.run(schedule.chunks)
    running.stop_ids = stop_ids
    [out] = stepper.scheduler.update(schedule.chunks, sampled)
    assert out.sampled.token_id in stop_ids
    assert out.finished is expected


def test_without_max_tokens_the_model_length_ends_the_output() -> None:
    stepper = Stepper(max_model_len=16)
    stepper.add(request := make_request(range(10), max_tokens=None))
    stepper.run()
    assert len(stepper.outputs[request.id]) == 6
    assert stepper.finished[request.id] is FinishReason.LENGTH


def test_without_max_tokens_a_pool_smaller_than_the_model_length_ends_the_output() -> None:
    stepper = Stepper(num_blocks=3)
    stepper.add(request := make_request(range(10), max_tokens=None))
    stepper.run()
    assert len(stepper.outputs[request.id]) == 3  # 12 tokens in the pool, and one that nothing attends to


def test_a_cancelled_request_gives_its_blocks_back_wherever_it_stands() -> None:
    stepper = Stepper(max_num_seqs=1)
    running, waiting = make_request(range(10)), make_request(range(10))
    stepper.add(running, waiting)
    stepper.step()
    assert stepper.scheduler.cancel(running.id) is RequestState.ENDED
    assert stepper.scheduler.cancel(waiting.id) is RequestState.ENDED
    assert stepper.scheduler.cancel(running.id) is None
    assert stepper.scheduler.schedule().is_idle
    assert stepper.counts.in_use == 0


def test_queued_prefill_tokens_are_those_that_are_not_computed_yet() -> None:
    stepper = Stepper(max_num_batched_tokens=8)
    stepper.add(make_request(range(20)), make_request([1, 2, 3]))
    assert stepper.scheduler.num_queued_prefill_tokens == 23
    stepper.step()
    assert stepper.scheduler.num_queued_prefill_tokens == 15
    stepper.run()
    assert stepper.scheduler.num_queued_prefill_tokens == 0


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(0, 8), (9, 8)])
def test_impossible_bounds_are_refused(num_seqs: int, num_tokens: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)


def test_blocks_computed_in_a_step_are_shared_within_it_if_the_runner_allows_that() -> None:
    def cached_tokens(*, shares_within_step: bool) -> list[int]:
        blocks = BlockManager(16, 4)
        limits = EngineLimits(max_model_len=64, num_pool_tokens=64, vocab_size=100)
        scheduler = Scheduler(SchedulerConfig(), blocks, limits, shares_within_step=shares_within_step)
        for id in (1, 2):
            generation = Generation(prompt_token_ids=[1, 2, 3, 4, 5, 6, 7, 8, id], sampling=Sampling(max_tokens=1))
            scheduler.add(EngineRequest(id=id, kind=RequestKind.DECODE, generation=generation))
        return [chunk.running.num_cached_tokens for chunk in scheduler.schedule().chunks]

    assert cached_tokens(shares_within_step=False) == [0, 0]
    assert cached_tokens(shares_within_step=True) == [0, 8]
