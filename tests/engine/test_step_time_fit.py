"""What an engine learns of its own steps."""

from __future__ import annotations

import random

import pytest

from quartet.engine.mock.timing import StepTiming
from quartet.engine.step_time_fit import StepTimeFit

TIMING = StepTiming()
WORKS = ((100, 0), (1000, 0), (4000, 0), (8192, 50_000), (0, 5_000), (0, 150_000))


def observe(fit: StepTimeFit, rng: random.Random, *, slowdown: float = 1.0) -> None:
    num_prompt_tokens = rng.choice((0, 0, 0, rng.randint(1, 8192)))
    num_context_tokens = rng.choice((0, rng.randint(100, 200_000))) if num_prompt_tokens else rng.randint(100, 200_000)
    step_s = TIMING.step_ms(num_prompt_tokens, num_context_tokens) / 1e3 * slowdown
    fit.observe(num_prompt_tokens, num_context_tokens, step_s)


def forecast_s(fit: StepTimeFit, num_prompt_tokens: int, num_context_tokens: int) -> float:
    time = fit.step_time
    assert time is not None
    return time.prefill_s(num_prompt_tokens) + time.decode_s(num_context_tokens)


@pytest.mark.parametrize("slowdown", [1.0, 0.05, 20.0])
def test_it_learns_a_models_timing(slowdown: float) -> None:
    fit, rng = StepTimeFit(), random.Random(1)
    for _ in range(100):
        observe(fit, rng, slowdown=slowdown)
    for work in WORKS:
        # The model's decode time is no straight line: that is what is left.
        assert forecast_s(fit, *work) == pytest.approx(slowdown * TIMING.step_ms(*work) / 1e3, rel=0.03)


def test_it_follows_a_machine_that_slows_down() -> None:
    fit, rng = StepTimeFit(), random.Random(2)
    for _ in range(1000):
        observe(fit, rng)
    for _ in range(4000):
        observe(fit, rng, slowdown=2.0)
    for work in WORKS:
        assert forecast_s(fit, *work) == pytest.approx(2 * TIMING.step_ms(*work) / 1e3, rel=0.1)


def test_a_stall_now_and_then_changes_little() -> None:
    calm, stalled, rng = StepTimeFit(), StepTimeFit(), random.Random(3)
    for number in range(2000):
        work = (rng.randint(1, 8192), 0)
        step_s = TIMING.step_ms(*work) / 1e3
        calm.observe(*work, step_s)
        stalled.observe(*work, step_s + (5.0 if number % 200 == 100 else 0.0))
    assert forecast_s(stalled, 4000, 0) == pytest.approx(forecast_s(calm, 4000, 0), rel=0.05)


def test_what_is_known_of_prompts_outlasts_a_long_answer() -> None:
    fit, rng = StepTimeFit(), random.Random(4)
    for _ in range(200):
        observe(fit, rng)
    for num_tokens in range(50_000):
        fit.observe(0, 1000 + num_tokens % 4000, TIMING.step_ms(0, 1000 + num_tokens % 4000) / 1e3)
    fit.observe(300, 2000, 1.1 * TIMING.step_ms(300, 2000) / 1e3)
    for work in ((100, 0), (1000, 0), (4000, 0), (8192, 0)):
        assert forecast_s(fit, *work) == pytest.approx(TIMING.step_ms(*work) / 1e3, rel=0.03)


def test_steps_that_are_all_alike_do_not_wear_it_out() -> None:
    fit = StepTimeFit()
    for _ in range(100_000):
        fit.observe(512, 0, TIMING.step_ms(512, 0) / 1e3)
    # What could not be told apart for so long is told apart by a few steps of another kind.
    for num_tokens in (100, 2000, 4000) * 3:
        fit.observe(num_tokens, 0, TIMING.step_ms(num_tokens, 0) / 1e3)
    for work in ((512, 0), (1000, 0), (3000, 0)):
        assert forecast_s(fit, *work) == pytest.approx(TIMING.step_ms(*work) / 1e3, rel=0.02)


def test_it_says_nothing_before_a_few_steps_and_never_anything_negative() -> None:
    fit = StepTimeFit()
    assert fit.step_time is None
    fit.observe(0, 0, 1.0)
    fit.observe(10, 0, 1.0)
    assert fit.step_time is None
    rng = random.Random(5)
    for _ in range(200):
        fit.observe(rng.choice((0, 1, 5000)), rng.choice((1, 90_000)), rng.random() * 1e-6)
    for _ in range(200):
        fit.observe(rng.choice((0, 1, 5000)), rng.choice((1, 90_000)), rng.random() * 1e-6)
        assert fit.step_time is not None
        assert min(vars(fit.step_time).values()) >= 0
