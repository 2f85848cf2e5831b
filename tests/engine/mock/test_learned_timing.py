"""What a step loop learns of the mock engine's own timing, by the time that its steps take."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quartet.engine.mock import MockEngineConfig, MockRunner, MockSettings, SharedByRanks, StepTiming
from quartet.engine.mock.runner import StepPacer
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_loop import StepLoop, Submit
from tests.engine.fakes import make_request

TIMING = StepTiming()


class Clock:
    """Time passes as steps sleep, and a little between them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, duration_s: float) -> None:
        self.now += duration_s + 0.0001  # no sleep ends in time

    def read(self) -> float:
        self.now += 0.00001
        return self.now


@pytest.mark.parametrize("speed_up", [1.0, 10.0])
def test_a_step_loop_learns_the_timing_that_it_is_paced_by(text_dir: Path, speed_up: float) -> None:
    clock, rng = Clock(), random.Random(1)
    settings = MockSettings(speed_up=speed_up)
    config = MockEngineConfig(
        model_path=str(text_dir), num_blocks=4096, block_size=32, max_model_len=40_000, settings=settings
    )
    runner = MockRunner(SharedByRanks(config), pacer=StepPacer(clock.read, clock.sleep))
    bounds = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192)
    steps = StepLoop(runner, bounds, clock.read)
    for _ in range(60):
        prompt = [rng.randrange(300, 600)] * rng.randint(1, 12_000)
        steps.step([Submit(make_request(prompt, max_tokens=rng.randint(1, 40)), clock.now)])
        for _ in range(rng.randint(1, 10)):
            if steps.is_idle:
                clock.now += 0.5
                break
            steps.step([])
    runner.close()
    time = steps.snapshot.stats.step_time
    assert time is not None
    for num_tokens in (200, 1000, 4000, 8192):
        expected_s = TIMING.prefill_ms(num_tokens) / 1e3 / speed_up
        assert time.prefill_s(num_tokens) == pytest.approx(expected_s, rel=0.03)
    for num_tokens in (4_000, 40_000):
        assert time.decode_s(num_tokens) == pytest.approx(TIMING.decode_ms(num_tokens) / 1e3 / speed_up, rel=0.03)
