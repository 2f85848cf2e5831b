"""Steps that are launched before the tokens of the last one are read: what waits for what, and what is said of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest

from quartet.engine.base import EngineStats, FinishReason, RequestKind
from quartet.engine.runner import SampledToken, ScheduledChunk
from quartet.engine.sampling import Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.errors import RequestCancelledError
from tests.engine.fakes import expected_output, make_request
from tests.engine.launching import Driver, FakeStep, LaunchingRunner
from tests.engine.stepping import Stepper

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)


class TimedRunner(LaunchingRunner):
    """Its device computes each step in ``step_s``, one after the other; whoever reads one waits for its end.

    Attributes:
        now: the time; a launch takes none.
        waits: of each read: for how long it waited, and how many steps were in flight.
        during: the loop's statistics as the last step was launched.
    """

    def __init__(self, *, step_s: float = 0.01, num_blocks: int = 64, eos_token_ids: frozenset[int] = frozenset()):
        super().__init__(num_blocks=num_blocks, eos_token_ids=eos_token_ids)
        self.step_s = step_s
        self.now = 100.0
        self.waits: list[tuple[float, int]] = []
        self.during = EngineStats()
        self.on_wait = self._wait
        self._ends: deque[float] = deque()
        self._free_at = 0.0
        self.driver = Driver(self, CONFIG, now=lambda: self.now)

    def launch(self, chunks: Sequence[ScheduledChunk]) -> FakeStep:
        self.during = self.driver.steps.snapshot.stats
        self._free_at = max(self._free_at, self.now) + self.step_s
        self._ends.append(self._free_at)
        return super().launch(chunks)

    def _wait(self) -> None:
        end = self._ends.popleft()
        self.waits.append((max(0.0, end - self.now), len(self.in_flight)))
        self.now = max(self.now, end)


def test_the_next_step_is_launched_before_the_last_one_is_read() -> None:
    runner = TimedRunner()
    driver = runner.driver
    driver.submit(request := make_request(range(10), max_tokens=5))
    driver.turn()
    assert (len(runner.in_flight), runner.waits) == (1, []), "there was nothing to read"
    driver.run()
    assert driver.tokens[request.id] == expected_output(request.generation)
    assert [num_in_flight for _, num_in_flight in runner.waits] == [2, 2, 2, 2, 1]
    assert runner.launched == [[request.id]] * 5, "no token too many is computed"
    assert driver.steps.is_idle


def test_a_token_that_ends_the_output_is_seen_a_step_late() -> None:
    prompt = range(10)
    whole = expected_output(make_request(prompt, max_tokens=8).generation)
    runner = TimedRunner(num_blocks=5)
    driver = runner.driver
    driver.submit(ended := make_request(prompt, sampling=Sampling(max_tokens=8, stop_token_ids=(whole[3],))))
    driver.turn()
    driver.submit(other := make_request(range(20, 30), max_tokens=8))  # it waits for the first one's blocks
    while ended.id not in driver.finished:
        driver.turn()
    assert driver.finished[ended.id].reason is FinishReason.STOP_ID
    assert driver.tokens[ended.id] == whole[:4]
    assert runner.launched[-1] == [ended.id], "its surplus step is in flight"
    assert driver.blocks.counts.in_use == 4
    driver.run()
    assert driver.tokens[ended.id] == whole[:4], "the surplus token is dropped"
    assert driver.tokens[other.id] == expected_output(other.generation)
    assert [ids.count(ended.id) for ids in runner.launched] == [1] * 5 + [0] * 8
    assert driver.steps.snapshot.stats.num_output_tokens == 4 + 8


def test_a_cancelled_request_computes_in_no_further_step_and_ends_after_the_one_it_is_in() -> None:
    runner = TimedRunner()
    driver = runner.driver
    driver.submit(request := make_request(range(10), max_tokens=8), other := make_request([1], max_tokens=8))
    driver.turn(3)
    driver.cancel(request.id)
    driver.turn()
    assert isinstance(driver.failed[request.id].error, RequestCancelledError)
    assert [ids.count(request.id) for ids in runner.launched] == [1, 1, 1, 0]
    assert driver.blocks.counts.in_use == 1, "the other's"
    driver.run()
    assert driver.tokens[other.id] == expected_output(other.generation)


def test_the_blocks_of_a_request_that_ends_with_two_steps_in_flight_stay_until_the_second_has_ended() -> None:
    scheduler = (stepper := Stepper()).scheduler
    stepper.add(request := make_request(range(10), max_tokens=8))
    in_flight = []
    for _ in range(2):
        in_flight.append(scheduler.schedule().chunks)
        scheduler.begin(in_flight[-1])
    scheduler.cancel(request.id)
    in_use = []
    for chunks in in_flight:
        assert scheduler.end(chunks, [SampledToken(1)]) == []
        in_use.append(stepper.counts.in_use)
    assert in_use == [3, 0]


def test_a_step_that_needs_the_last_token_waits_for_it() -> None:
    runner = TimedRunner()
    driver = runner.driver
    needy = make_request([1, 2], max_tokens=3)
    runner.needs_tokens = lambda running: running.id == needy.id
    driver.submit(needy, other := make_request(range(5), max_tokens=6))
    driver.run()
    for request in (needy, other):
        assert driver.tokens[request.id] == expected_output(request.generation)
    assert [num_in_flight for _, num_in_flight in runner.waits] == [1, 1, 1, 2, 2, 1]


def test_a_request_is_preempted_only_while_no_step_is_in_flight() -> None:
    runner = TimedRunner(num_blocks=5)
    driver = runner.driver
    requests = [make_request([number] * 7, max_tokens=8) for number in (1, 2)]
    driver.submit(*requests)
    driver.run()
    for request in requests:
        assert driver.tokens[request.id] == expected_output(request.generation)
    assert driver.steps.snapshot.stats.num_preemptions == 1
    assert driver.blocks.counts.in_use == 0


def test_a_prompts_blocks_are_offered_when_its_step_has_ended() -> None:
    runner = TimedRunner()
    driver = runner.driver
    driver.submit(request := make_request(range(10), kind=RequestKind.PREFILL))
    driver.turn()
    assert request.id in driver.started
    assert request.id not in driver.prefilled
    assert driver.blocks.counts.held == 0
    driver.turn()
    assert (driver.prefilled[request.id].num_tokens, driver.blocks.counts.held) == (10, 3)
    assert driver.steps.is_idle
    assert len(runner.launched) == 1


def test_a_prompt_shares_what_the_step_in_flight_computes() -> None:
    runner = TimedRunner()
    driver = runner.driver
    driver.submit(first := make_request(range(9), max_tokens=2))
    driver.turn()
    driver.submit(second := make_request([*range(9), 40], max_tokens=2))
    driver.run()
    assert runner.chunk_sizes[:2] == [[9], [1, 2]]
    for request in (first, second):
        assert driver.tokens[request.id] == expected_output(request.generation)


def test_pulls_begin_before_a_step_is_waited_for() -> None:
    runner = TimedRunner()
    driver = runner.driver
    driver.submit(make_request(range(5), max_tokens=1))
    driver.turn()
    pulled = make_request([1, 2, 3], generated=[4], hand_off=driver.puller.offer_prefix([1, 2, 3, 4]))
    begun: list[int] = []
    on_wait = runner.on_wait

    def wait() -> None:
        begun.extend(driver.pulls)
        on_wait()

    runner.on_wait = wait
    driver.submit(pulled)
    driver.turn()
    assert begun == [pulled.id]
    assert not runner.in_flight


@pytest.mark.parametrize("host_s", [0.0, 0.004])
def test_the_time_of_a_step_is_that_of_the_device_while_it_has_work(host_s: float) -> None:
    runner = TimedRunner()
    driver = runner.driver
    driver.submit(make_request(range(5), max_tokens=100))
    for _ in range(60):
        driver.turn()
        runner.now += host_s  # the host tells what the last step brought, while the device computes the next one
    time = driver.steps.snapshot.stats.step_time
    assert time is not None
    assert time.decode_s(60) == pytest.approx(0.01, rel=0.02)
    stats = driver.steps.snapshot.stats
    assert stats.step_ends_at == pytest.approx(runner.now - host_s + 0.01, rel=1e-4)
    # When a step is launched, the one before it still runs.
    assert runner.during.step_ends_at == pytest.approx(stats.step_ends_at, rel=1e-4)
    assert driver.steps.expected_s == pytest.approx(0.01, rel=0.05)


def prompt_tokens(stats: EngineStats) -> tuple[int, int]:
    return stats.num_queued_prefill_tokens, stats.num_unbegun_prefill_tokens


def test_tokens_in_flight_are_begun_and_still_queued() -> None:
    runner = TimedRunner()
    driver = runner.driver
    driver.submit(make_request(range(40), max_tokens=3))
    driver.turn()
    assert prompt_tokens(runner.during) == prompt_tokens(driver.steps.snapshot.stats) == (40, 24)
    driver.turn()
    assert prompt_tokens(runner.during) == (40, 8), "two steps of 16 are in flight"
    assert prompt_tokens(driver.steps.snapshot.stats) == (24, 8)
    driver.turn()
    assert prompt_tokens(runner.during) == (24, 0)
    assert prompt_tokens(driver.steps.snapshot.stats) == (8, 0)
    driver.turn()
    stats = driver.steps.snapshot.stats
    assert prompt_tokens(stats) == (0, 0)
    assert (stats.num_decoding, stats.num_steps, stats.num_prompt_tokens) == (1, 3, 40)
    driver.run()
    stats = driver.steps.snapshot.stats
    assert (stats.num_steps, stats.num_prompt_steps, stats.num_output_tokens) == (5, 3, 3)
    assert stats.step_ends_at == 0.0, "nothing runs"
