"""Steps end when they are due, in a time that only the test moves."""

from __future__ import annotations

import pytest

from quartet.engine.mock.runner import StepPacer

STEP_S = 0.010


class Clock:
    """A time in which sleeping takes ``overshoot_s`` too long."""

    def __init__(self, overshoot_s: float = 0.0) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []
        self.overshoot_s = overshoot_s

    def read(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.now += duration_s + self.overshoot_s


def run_step(clock: Clock, pacer: StepPacer, *, busy_s: float = 0.0, is_continued: bool = True) -> None:
    pacer.begin(is_continued=is_continued)
    clock.now += busy_s
    pacer.end(STEP_S)


def test_late_wake_ups_and_time_between_steps_do_not_add_up() -> None:
    clock = Clock(overshoot_s=0.0007)
    pacer = StepPacer(clock.read, clock.sleep)
    began = clock.now
    for number in range(1000):
        run_step(clock, pacer, busy_s=0.001, is_continued=number > 0)
        clock.now += 0.002
    assert clock.now - began == pytest.approx(1000 * STEP_S + clock.overshoot_s + 0.002)


def test_a_step_after_a_pause_takes_its_whole_time() -> None:
    clock = Clock()
    pacer = StepPacer(clock.read, clock.sleep)
    for _ in range(3):
        run_step(clock, pacer, is_continued=False)
        clock.now += 0.005
    assert clock.sleeps == pytest.approx([STEP_S] * 3)


def test_a_step_right_after_another_ones_begins_when_that_was_due() -> None:
    clock = Clock(overshoot_s=0.0004)
    pacer = StepPacer(clock.read, clock.sleep)
    run_step(clock, pacer, is_continued=False)
    run_step(clock, pacer, is_continued=False)
    assert clock.sleeps == pytest.approx([STEP_S, STEP_S - 0.0004])


def test_the_next_step_makes_up_for_one_that_takes_too_long() -> None:
    clock = Clock()
    pacer = StepPacer(clock.read, clock.sleep)
    run_step(clock, pacer, busy_s=0.016, is_continued=False)
    run_step(clock, pacer)
    assert clock.sleeps == pytest.approx([2 * STEP_S - 0.016])


def test_only_a_part_of_a_long_standstill_is_made_up_for() -> None:
    clock = Clock()
    pacer = StepPacer(clock.read, clock.sleep)
    run_step(clock, pacer, is_continued=False)
    clock.now += 60.0
    resumed = clock.now
    for _ in range(30):
        run_step(clock, pacer)
    assert clock.now - resumed == pytest.approx(30 * STEP_S - 0.1)
