"""The paced engine: which request gets a token in which step, and what the client reads from the shared clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.paced_clock import MAX_STREAMS, PacedClock
from benchmarks.paced_engine import PERIOD, PacedSteps, Submit
from quartet.engine.base import EngineRequest, FinishReason, Generation, RequestKind, StepOutput
from quartet.engine.sampling import Sampling


@pytest.fixture
def clock(tmp_path: Path) -> PacedClock:
    made = PacedClock(tmp_path / "clock", create=True)
    made.set_period(PERIOD)
    return made


@pytest.fixture
def steps(clock: PacedClock) -> PacedSteps:
    return PacedSteps(clock)


def submit(id: int, *, max_tokens: int | None = None, num_generated: int = 0) -> Submit:
    generation = Generation(
        prompt_token_ids=[1],
        generated_token_ids=[7] * num_generated,
        sampling=Sampling(max_tokens=max_tokens),
        seed=id,
    )
    return Submit(EngineRequest(id=id, kind=RequestKind.DECODE, generation=generation), at=0.0)


def run(steps: PacedSteps, num_steps: int, messages: list[Submit | int], first: int = 0) -> list[StepOutput | None]:
    return [steps.step(first + step, 1.0, messages if not step else []) for step in range(num_steps)]


def test_each_stream_has_its_turn_once_in_a_period(steps: PacedSteps) -> None:
    outputs = run(steps, 3 * PERIOD, [submit(id) for id in range(25)])
    sizes = [len(output.ids) for output in outputs if output is not None]
    assert sizes == [3, 3, 3, 3, 3, 2, 2, 2, 2, 2] * 3
    for id in range(25):
        offsets = [
            offset
            for output in outputs
            if output is not None
            for one, offset in zip(output.ids, output.token_offsets, strict=True)
            if one == id
        ]
        assert offsets == [0, 1, 2]


def test_a_request_ends_with_its_last_token_and_has_no_output_after_that(steps: PacedSteps) -> None:
    outputs = [output for output in run(steps, 5 * PERIOD, [submit(1, max_tokens=2)]) if output is not None]
    assert [list(output.token_offsets) for output in outputs] == [[0], [1]]
    [finished] = outputs[-1].finished
    assert (finished.id, finished.reason, finished.num_output_tokens) == (1, FinishReason.LENGTH, 2)
    assert steps.num_running == 0


def test_a_request_goes_on_after_what_was_generated_before(steps: PacedSteps, clock: PacedClock) -> None:
    outputs = [out for out in run(steps, 2 * PERIOD, [submit(1, max_tokens=7, num_generated=5)]) if out is not None]
    assert [list(output.token_offsets) for output in outputs] == [[5], [6]]
    assert outputs[-1].finished[0].num_output_tokens == 7


def test_a_cancelled_request_fails_once_and_others_go_on(steps: PacedSteps) -> None:
    run(steps, PERIOD, [submit(1), submit(2)])
    outputs = [output for output in run(steps, PERIOD, [1, 1, 99], first=PERIOD) if output is not None]
    assert [failed.id for output in outputs for failed in output.failed] == [1]
    assert [id for output in outputs for id in output.ids] == [2]


def test_every_request_is_reported_as_started_before_its_first_token(steps: PacedSteps) -> None:
    first, *_ = run(steps, 1, [submit(1), submit(2)])
    assert first is not None
    assert [started.id for started in first.started] == [1, 2]
    assert first.started[0].queue_s == 1.0


def test_requests_can_be_taken_before_any_step_is_made(steps: PacedSteps, clock: PacedClock) -> None:
    taken = steps.take(0, 1.0, [submit(1), submit(2)])
    assert taken is not None
    assert ([item.id for item in taken.started], list(taken.ids)) == ([1, 2], [])
    assert steps.take(0, 1.0, []) is None
    outputs = [output for output in run(steps, PERIOD, []) if output is not None]
    assert [(list(output.ids), list(output.token_offsets)) for output in outputs] == [([1], [0]), ([2], [0])]
    assert not clock.is_held
    clock.is_held = True
    assert clock.is_held


def test_an_idle_step_gives_out_nothing(steps: PacedSteps) -> None:
    assert run(steps, 1, []) == [None]


def test_the_clock_shows_when_each_token_was_given_out(clock: PacedClock, steps: PacedSteps) -> None:
    made_at: dict[tuple[int, int], int] = {}
    for step in range(4 * PERIOD):
        output = steps.step(step, 0.0, [submit(step, num_generated=step)] if step in (0, 13) else [])
        at_ns = 1_000_000 * step + 17 * step * step  # late in its own way each time
        for id, offset in zip(output.ids, output.token_offsets, strict=True) if output is not None else ():
            made_at[id, offset] = at_ns
        clock.note_step(step, at_ns, 0, 0)
    assert len(made_at) > 4
    for (seed, offset), at_ns in made_at.items():
        assert clock.made_at_ns(seed, offset) == at_ns


def test_both_processes_see_one_clock(clock: PacedClock, tmp_path: Path) -> None:
    clock.note_step(0, 5, 100, 3_000_000_000)
    clock.note_step(1, 6, 11, 4_000_000_000)
    other = PacedClock(tmp_path / "clock")
    assert (other.num_steps, other.num_tokens, other.engine_cpu_s) == (2, 111, 4.0)


def test_requests_without_a_row_write_nowhere(clock: PacedClock) -> None:
    clock.set_period(PERIOD)
    clock.note_step(0, 42, 0, 0)
    clock.begin(MAX_STREAMS, 3, 0)
    clock.begin(2**64 - 1, 3, 0)
    assert clock.made_at_ns(0, 0) == 42
