"""When the engine's thread may sleep, with nothing left to do and never sooner; and what is said while a step runs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from quartet.engine import scheduler
from quartet.engine.base import EngineRequest, EngineStats, RequestKind, StepOutput
from quartet.engine.runner import SampledToken, ScheduledChunk
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_loop import Cancel, FetchFailed, Message, StepLoop, StepReport, Submit
from quartet.engine.validation import EngineLimits, check_request
from quartet.errors import EngineError, MediaLostError, TransferError
from quartet.kvcache.block_hash import MediaSpan
from tests.engine.fakes import FakePuller, FakeRunner, make_request

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)


class Loop:
    """A step loop on a fake runner, which must have nothing to do whenever it is idle.

    Attributes:
        now: what its clock says; steps take no time but what ``step_s`` says.
        during: statistics as the last step that computed something ran.
        num_begins: steps that it reported as they began.
        early_pulls: requests whose pull it asked for as a step began.
    """

    def __init__(self, *, num_blocks: int = 64, num_embedding_blocks: int = 0) -> None:
        self.now = 100.0
        self.step_s = 0.0
        self.during = EngineStats()
        self.num_begins = 0
        self.early_pulls: list[int] = []
        self.runner = FakeRunner(num_blocks=num_blocks, num_embedding_blocks=num_embedding_blocks)
        self.run = self.runner.run
        self.runner.run = self.compute  # type: ignore[method-assign]
        self.steps = StepLoop(self.runner, CONFIG, lambda: self.now, self.begin)
        self.ended: list[int] = []

    def begin(self, report: StepReport) -> None:
        assert report, "it has something to say"
        assert report.output in (None, StepOutput())
        self.num_begins += report.output is not None
        self.early_pulls += [pull.id for pull in report.pulls]

    def compute(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        self.during = self.steps.snapshot.stats
        self.now += self.step_s
        return self.run(chunks)

    @property
    def is_idle(self) -> bool:
        return self.steps.is_idle

    def step(self, *messages: Message) -> StepReport:
        report = self.steps.step(messages)
        if report.output is not None:
            for ended in (report.output.finished, report.output.prefilled, report.output.failed):
                self.ended += [item.id for item in ended]
        return report

    def run_until_idle(self, messages: Iterable[Message]) -> None:
        self.step(*messages)
        while not self.is_idle:
            self.step()
        num_steps = self.runner.num_steps
        assert not self.step(), "it was said to be idle"
        assert self.runner.num_steps == num_steps, "it was said to be idle"


def submit(request: EngineRequest) -> Submit:
    return Submit(request, 0.0)


def pulling() -> EngineRequest:
    runner, puller = FakeRunner(), FakePuller()
    assert runner.memory is not None
    puller.attach(runner.memory, runner.layout)
    prompt = range(9)
    return make_request(prompt, generated=[1], hand_off=puller.offer_prefix([*prompt, 1]))


def test_the_loop_is_idle_after_the_step_that_ends_the_last_request() -> None:
    loop = Loop()
    request = make_request(range(9), kind=RequestKind.PREFILL)
    loop.step(submit(request))
    assert loop.ended == [request.id]
    assert loop.is_idle


def test_the_loop_is_idle_while_its_only_request_is_pulled() -> None:
    loop = Loop()
    report = loop.step(submit(request := pulling()))
    assert [pull.id for pull in report.pulls] == [request.id]
    assert loop.is_idle
    loop.run_until_idle([FetchFailed(request.id, TransferError("lost"))])
    assert loop.ended == [request.id]


def test_a_request_decodes_while_another_one_is_pulled() -> None:
    loop = Loop()
    decoding, pulled = make_request(range(5), max_tokens=3), pulling()
    # It has not to wait for the step to have its bytes fetched.
    assert not loop.step(submit(decoding), submit(pulled)).pulls
    assert loop.early_pulls == [pulled.id]
    assert not loop.is_idle
    loop.run_until_idle([])
    assert loop.ended == [decoding.id]


def test_a_request_that_can_not_be_taken_in_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, bad, good = Loop(), make_request(range(5)), make_request(range(9), kind=RequestKind.PREFILL)

    def check(request: EngineRequest, limits: EngineLimits) -> None:
        if request is bad:
            raise TypeError("a bug that this request brings out")
        check_request(request, limits)

    monkeypatch.setattr(scheduler, "check_request", check)
    report = loop.step(submit(bad), submit(good))
    assert report.output is not None
    [failed] = report.output.failed
    assert (failed.id, type(failed.error)) == (bad.id, EngineError)
    assert loop.ended == [good.id, bad.id]
    assert loop.is_idle


def test_a_request_that_lost_its_media_fails_at_once() -> None:
    loop = Loop(num_embedding_blocks=4)
    prompt, media = [1, *[5] * 6, 2], (MediaSpan(bytes(32), 1, 6),)
    lost, later = make_request(prompt, media=media), make_request(prompt, max_tokens=1)
    report = loop.step(submit(lost), submit(later))
    assert report.output is not None
    [failed] = report.output.failed
    assert (failed.id, type(failed.error)) == (lost.id, MediaLostError)
    assert loop.ended == [later.id, lost.id]
    assert loop.is_idle
    loop.run_until_idle([submit(alone := make_request(prompt, media=media))])
    assert loop.ended[2:] == [alone.id]


@pytest.mark.parametrize("seed", range(20))
def test_the_loop_becomes_idle_only_after_every_request_ended(seed: int) -> None:
    rng = random.Random(seed)
    loop = Loop(num_blocks=8)  # 32 tokens: they take turns, and are preempted
    submitted: list[int] = []
    for _ in range(6):
        requests = [make_request(range(rng.randint(1, 14)), max_tokens=rng.randint(1, 16)) for _ in range(5)]
        submitted += [request.id for request in requests]
        cancels = [Cancel(request.id) for request in requests if rng.random() < 0.2]
        loop.run_until_idle([*map(submit, requests), *cancels])
        assert sorted(loop.ended) == submitted


def prompt_tokens(stats: EngineStats) -> tuple[int, int]:
    return stats.num_queued_prefill_tokens, stats.num_unbegun_prefill_tokens


def test_a_step_that_runs_has_begun_what_it_computes() -> None:
    loop = Loop()
    loop.step(submit(make_request(range(40))), submit(make_request(range(50, 57))))
    # 16 of the first prompt's tokens are in the step.
    assert prompt_tokens(loop.during) == (47, 31)
    assert prompt_tokens(loop.steps.snapshot.stats) == (31, 31)
    # Half of the next step is for short prompts, and one waits.
    assert loop.during.num_spare_prefill_tokens == 8 - 7
    loop.step()
    assert loop.during.num_spare_prefill_tokens == 8
    assert prompt_tokens(loop.during) == (31, 15)
    loop.step()
    assert prompt_tokens(loop.during) == (15, 0)
    assert loop.during.num_spare_prefill_tokens == 0
    assert prompt_tokens(loop.steps.snapshot.stats) == (0, 0)
    assert (loop.during.num_prompt_steps, loop.during.max_step_tokens) == (3, 16)
    assert loop.during.max_running == loop.steps.snapshot.stats.max_running == 4


def test_the_stats_count_decoding_requests_and_their_tokens() -> None:
    loop = Loop()
    loop.step(submit(make_request(range(5))), submit(make_request(range(10, 18))))
    assert (loop.during.num_decoding, loop.during.num_context_tokens) == (0, 0)
    after = loop.steps.snapshot.stats
    assert (after.num_decoding, after.num_context_tokens) == (2, 6 + 9)
    loop.step(submit(make_request(range(30, 50))))
    assert (loop.during.num_decoding, loop.during.num_context_tokens) == (2, 6 + 9)
    assert prompt_tokens(loop.during) == (20, 6)
    assert loop.steps.snapshot.stats.num_context_tokens == 7 + 10


def test_a_step_is_reported_as_it_begins_if_no_prompt_was_or_is_left_to_begin() -> None:
    loop = Loop()
    loop.step(submit(make_request(range(40), max_tokens=3)))
    assert loop.num_begins == 1  # nothing was
    loop.step()
    assert loop.num_begins == 1  # 8 of 24 are
    loop.step()
    assert loop.num_begins == 2  # nothing is
    loop.run_until_idle([])
    assert loop.num_begins == 2  # no caller waits for steps that only decode
    loop.step(submit(make_request(range(3), max_tokens=1)))
    assert loop.num_begins == 3


def test_the_end_of_a_step_is_predicted_from_earlier_steps() -> None:
    loop = Loop()
    for num_tokens in (4, 8, 12, 16) * 4:
        loop.step_s = 0.01 + 0.001 * num_tokens
        loop.step(submit(make_request([num_tokens + index for index in range(num_tokens)], max_tokens=1)))
        loop.now += 1.0  # there is nothing to do for a while
    assert loop.steps.snapshot.stats.step_ends_at == 0.0
    loop.step_s = 0.02
    loop.step(submit(make_request(range(10), max_tokens=1)))
    assert loop.during.step_time is not None
    assert loop.during.step_ends_at == pytest.approx(loop.now, abs=0.0005)


def test_the_time_between_two_consecutive_steps_counts_for_the_second() -> None:
    loop = Loop()
    loop.step_s = 0.01
    loop.step(submit(make_request(range(5), max_tokens=100)))
    for _ in range(50):
        loop.now += 0.002  # what it takes to say what the last one brought
        loop.step()
    time = loop.steps.snapshot.stats.step_time
    assert time is not None
    assert time.decode_s(50) == pytest.approx(0.012, rel=0.02)
