"""Times an engine's steps, learns from them, and says when the one that runs should end."""

from __future__ import annotations

from collections.abc import Callable

from quartet.engine.step_time_fit import StepTimeFit
from quartet.engine.step_work import StepWork
from quartet.events.step_time import StepTime


class StepClock:
    """One step at a time: ``begin``, ``forecast``, ``end``.

    Where steps follow one another, one begins as the last one ends: what lies between them is part of a step's time,
    or forecasts of several would fall short.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds."""
        self._clock = clock
        self._fit = StepTimeFit()
        self._began_at = 0.0
        self._ended_at: float | None = None

    @property
    def step_time(self) -> StepTime | None:
        """How long steps take; ``None``: too few were measured."""
        return self._fit.step_time

    def begin(self, *, is_continued: bool) -> None:
        """A step begins; ``is_continued``: nobody had to wait for work since the last one."""
        self._began_at = self._ended_at if is_continued and self._ended_at is not None else self._clock()

    def forecast(self, work: StepWork) -> float:
        """The clock's reading at which the step that has begun, with this to do, should end; 0.0: unknown."""
        step_time = self._fit.step_time
        if step_time is None:
            return 0.0
        return (
            self._began_at + step_time.prefill_s(work.num_prompt_tokens) + step_time.decode_s(work.num_context_tokens)
        )

    def end(self, work: StepWork) -> None:
        """The step that has begun is over; this is what it did."""
        self._ended_at = self._clock()
        self._fit.observe(work.num_prompt_tokens, work.num_context_tokens, self._ended_at - self._began_at)
