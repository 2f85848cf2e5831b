"""What an engine learns of its own steps."""

from __future__ import annotations

import random

import pytest

from quartet.engine.mock.timing import StepTiming
from quartet.engine.step_time_fit import StepTimeFit
from quartet.events.step_time import StepTime

TIMING = StepTiming()


def observe(fit: StepTimeFit, rng: random.Random, *, slowdown: float = 1.0) -> None:
    num_prompt_tokens = rng.choice((0, 0, 0, rng.randint(1, 8192)))
    num_context_tokens = rng.choice((0, rng.randint(100, 200_000))) if num_prompt_tokens else rng.randint(100, 200_000)
    step_s = TIMING.step_ms(num_prompt_tokens, num_context_tokens) / 1e3 * slowdown
    fit.observe(num_prompt_tokens, num_context_tokens, step_s)


def forecast_s(time: StepTime, num_prompt_tokens: int, num_context_tokens: int) -> float:
    return time.prefill_s(num_prompt_tokens) + time.decode_s(num_context_tokens)


@pytest.mark.parametrize("slowdown", [1.0, 0.05, 20.0])
def test_it_learns_a_models_timing(slowdown: float) -> None:
    fit, rng = StepTimeFit(), random.Random(1)
    for _ in range(500):
        observe(fit, rng, slowdown=slowdown)
    for work in ((100, 0), (4000, 0), (8192, 50_000), (0, 5_000), (0, 150_000)):
        assert forecast_s(fit.step_time, *work) == pytest.approx(
            slowdown * TIMING.step_ms(*work) / 1e3, rel=0.1, abs=0.002 * slowdown
        )


def test_it_follows_a_machine_that_slows_down() -> None:
    fit, rng = StepTimeFit(), random.Random(2)
    for _ in range(1000):
        observe(fit, rng)
    for _ in range(4000):
        observe(fit, rng, slowdown=2.0)
    assert forecast_s(fit.step_time, 4000, 0) == pytest.approx(2 * TIMING.step_ms(4000, 0) / 1e3, rel=0.1)


def test_a_stall_now_and_then_changes_little() -> None:
    calm, stalled, rng = StepTimeFit(), StepTimeFit(), random.Random(3)
    for number in range(2000):
        work = (rng.randint(1, 8192), 0)
        step_s = TIMING.step_ms(*work) / 1e3
        calm.observe(*work, step_s)
        stalled.observe(*work, step_s + (5.0 if number % 200 == 100 else 0.0))
    assert forecast_s(stalled.step_time, 4000, 0) == pytest.approx(forecast_s(calm.step_time, 4000, 0), rel=0.05)


def test_before_any_step_it_says_the_defaults_and_never_anything_negative() -> None:
    fit = StepTimeFit()
    assert fit.step_time == StepTime()
    rng = random.Random(4)
    for _ in range(200):
        fit.observe(rng.choice((0, 1, 5000)), rng.choice((0, 1, 90_000)), rng.random() * 1e-6)
        assert min(vars(fit.step_time).values()) >= 0
