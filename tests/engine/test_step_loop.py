"""When the engine's thread may sleep: with nothing left to do, found out without a step for it, and never sooner."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from quartet.engine.base import EngineRequest, RequestKind
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_loop import Cancel, FetchFailed, Message, StepLoop, StepReport, Submit
from quartet.errors import TransferError
from tests.engine.fakes import FakePuller, FakeRunner, make_request

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)


class Loop:
    """A step loop on a fake runner, which must have nothing to do whenever it is idle."""

    def __init__(self, *, num_blocks: int = 64) -> None:
        self.runner = FakeRunner(num_blocks=num_blocks)
        self.steps = StepLoop(self.runner, CONFIG)
        self.ended: list[int] = []

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


def test_the_step_that_ends_the_last_request_leaves_nothing_to_do() -> None:
    loop = Loop()
    request = make_request(range(9), kind=RequestKind.PREFILL)
    loop.step(submit(request))
    assert loop.ended == [request.id]
    assert loop.is_idle


def test_whoever_only_waits_for_bytes_leaves_nothing_to_do() -> None:
    loop = Loop()
    report = loop.step(submit(request := pulling()))
    assert [pull.id for pull in report.pulls] == [request.id]
    assert loop.is_idle
    loop.run_until_idle([FetchFailed(request.id, TransferError("lost"))])
    assert loop.ended == [request.id]


def test_who_decodes_is_not_left_waiting_beside_who_pulls() -> None:
    loop = Loop()
    decoding = make_request(range(5), max_tokens=3)
    assert loop.step(submit(decoding), submit(pulling())).pulls
    assert not loop.is_idle
    loop.run_until_idle([])
    assert loop.ended == [decoding.id]


@pytest.mark.parametrize("seed", range(20))
def test_an_idle_loop_has_nothing_to_do_and_has_left_nobody_out(seed: int) -> None:
    rng = random.Random(seed)
    loop = Loop(num_blocks=8)  # 32 tokens: they take turns, and are preempted
    submitted: list[int] = []
    for _ in range(6):
        requests = [make_request(range(rng.randint(1, 14)), max_tokens=rng.randint(1, 16)) for _ in range(5)]
        submitted += [request.id for request in requests]
        cancels = [Cancel(request.id) for request in requests if rng.random() < 0.2]
        loop.run_until_idle([*map(submit, requests), *cancels])
        assert sorted(loop.ended) == submitted
