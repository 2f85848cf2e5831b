"""What an engine learns of its own steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import isfinite, sin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.engine.mock.model import StepTiming
from quartet.engine.step_time import StepClock, StepTimeFit, StepWork

TIMING = StepTiming()
WORKS = ((100, 0), (1000, 0), (4000, 0), (8192, 50_000), (0, 5_000), (0, 150_000))


# By number of the step: what it does.
Works = Callable[[random.Random, int], tuple[int, int]]


def contexts_that_wander(rng: random.Random, number: int) -> tuple[int, int]:
    return 0, 10_000 + int(25_000 * (1 + sin(number / 500)))


def prompts_now_and_then(rng: random.Random, number: int) -> tuple[int, int]:
    return rng.randint(1, 8192) if number % 21 == 0 else 0, rng.randint(1000, 100_000)


def prompts_only(rng: random.Random, number: int) -> tuple[int, int]:
    return rng.randint(1, 8192), 0


PROMPTS, CONTEXTS = ((200, 0), (1000, 0), (8192, 0)), ((0, 12_000), (0, 60_000))


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


def test_the_time_of_prompts_is_remembered_through_a_long_answer() -> None:
    fit, rng = StepTimeFit(), random.Random(4)
    for _ in range(200):
        observe(fit, rng)
    for num_tokens in range(50_000):
        fit.observe(0, 1000 + num_tokens % 4000, TIMING.step_ms(0, 1000 + num_tokens % 4000) / 1e3)
    fit.observe(300, 2000, 1.1 * TIMING.step_ms(300, 2000) / 1e3)
    for work in ((100, 0), (1000, 0), (4000, 0), (8192, 0)):
        assert forecast_s(fit, *work) == pytest.approx(TIMING.step_ms(*work) / 1e3, rel=0.03)


def test_steps_that_are_all_alike_do_not_degrade_the_estimate() -> None:
    fit = StepTimeFit()
    for _ in range(100_000):
        fit.observe(512, 0, TIMING.step_ms(512, 0) / 1e3)
    # A few steps of another kind separate the terms that equal steps could not separate.
    for num_tokens in (100, 2000, 4000) * 3:
        fit.observe(num_tokens, 0, TIMING.step_ms(num_tokens, 0) / 1e3)
    for work in ((512, 0), (1000, 0), (3000, 0)):
        assert forecast_s(fit, *work) == pytest.approx(TIMING.step_ms(*work) / 1e3, rel=0.02)


def test_it_gives_no_estimate_before_a_few_steps_and_never_a_negative_one() -> None:
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


@pytest.mark.parametrize(
    ("works", "noise", "seen"),
    [
        (contexts_that_wander, 0.01, CONTEXTS),
        (contexts_that_wander, 0.03, CONTEXTS),
        (prompts_now_and_then, 0.03, PROMPTS + CONTEXTS),
        (prompts_only, 0.03, PROMPTS),
    ],
)
def test_the_estimate_does_not_degrade_over_many_steps(
    works: Works, noise: float, seen: tuple[tuple[int, int], ...]
) -> None:
    fit, rng = StepTimeFit(), random.Random(6)
    for number in range(30_000):
        work = works(rng, number)
        fit.observe(*work, TIMING.step_ms(*work) / 1e3 * rng.gauss(1.0, noise))
        if number % 1000 == 999:
            for size in seen:
                assert forecast_s(fit, *size) == pytest.approx(TIMING.step_ms(*size) / 1e3, rel=0.1)


def test_short_prompts_and_stalls_barely_change_the_estimate_for_long_prompts() -> None:
    fit, rng = StepTimeFit(), random.Random(7)
    for number in range(20_000):
        work = (rng.randint(10, 128), 0)
        stall_s = rng.choice((0.01, 0.2, 5.0)) if rng.random() < 0.01 else 0.0
        fit.observe(*work, TIMING.step_ms(*work) / 1e3 * rng.gauss(1.0, 0.03) + stall_s)
        if number % 100 == 99:
            assert 0.5 < forecast_s(fit, 8192, 0) / (TIMING.step_ms(8192, 0) / 1e3) < 1.5
    # Long ones are known as soon as a few come.
    for num_tokens in (2000, 4000, 8192) * 3:
        fit.observe(num_tokens, 0, TIMING.step_ms(num_tokens, 0) / 1e3)
    for num_tokens in (100, 3000, 8192):
        assert forecast_s(fit, num_tokens, 0) == pytest.approx(TIMING.step_ms(num_tokens, 0) / 1e3, rel=0.05)


def test_it_follows_a_machine_that_slows_down_however_alike_the_steps_are() -> None:
    fit = StepTimeFit()
    for _ in range(20_000):
        fit.observe(512, 0, TIMING.step_ms(512, 0) / 1e3)
    for _ in range(4000):
        fit.observe(512, 0, 2 * TIMING.step_ms(512, 0) / 1e3)
    assert forecast_s(fit, 512, 0) == pytest.approx(2 * TIMING.step_ms(512, 0) / 1e3, rel=0.05)


steps = st.tuples(
    st.sampled_from((0, 1, 100, 8192, 1 << 20)),
    st.sampled_from((0, 1, 30_000, 10**9)),
    st.sampled_from((0.0, 1e-9, 0.02, 1e3, 1e300, float("inf"), float("nan"))),
)


@given(st.lists(steps, max_size=60))
def test_the_estimate_is_always_finite_and_never_negative(observed: list[tuple[int, int, float]]) -> None:
    fit = StepTimeFit()
    for step in observed:
        fit.observe(*step)
        values = () if fit.step_time is None else vars(fit.step_time).values()
        assert all(isfinite(value) and value >= 0.0 for value in values)


def test_after_an_overflow_it_begins_anew() -> None:
    fit, rng = StepTimeFit(), random.Random(8)
    for _ in range(20):
        fit.observe(1, 0, 1.7e308)
    assert fit.step_time is not None
    fit.observe(0, 1, 1.7e308)
    assert fit.step_time is None
    for _ in range(200):
        observe(fit, rng)
    for work in WORKS:
        assert forecast_s(fit, *work) == pytest.approx(TIMING.step_ms(*work) / 1e3, rel=0.03)


def test_how_long_a_step_should_take_is_unknown_for_sizes_far_beyond_those_measured() -> None:
    now = 0.0
    clock = StepClock(lambda: now)
    small, large, deep = StepWork(100, 0, 100), StepWork(8192, 0, 8192), StepWork(0, 100_000, 1)
    for _ in range(20):
        assert clock.expected_s(large) is None
        clock.begin(is_continued=False)
        now += 0.1
        clock.end(small)
    assert clock.expected_s(StepWork(200, 0, 200)) is not None
    assert clock.expected_s(large) is None
    assert clock.expected_s(deep) is None
    clock.begin(is_continued=False)
    assert clock.forecast(large) > now, "what routers are told is the best estimate all the same"
