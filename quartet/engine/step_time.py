"""How long steps take: timed by ``StepClock``, learned by ``StepTimeFit`` with slowly forgetting least squares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from operator import mul

from quartet.engine.runner import RunningRequest, ScheduledChunk
from quartet.events.load import StepTime

# With these sizes features are of the order of one.
_PROMPT_SCALE, _CONTEXT_SCALE = 1024.0, 16384.0

# A step's weight falls to a third after a thousand more of its kind.
_FORGETTING = 0.999

_GROWTH = 1.0 / sqrt(_FORGETTING)

# Each coefficient's first and largest variance, in units of the variance of one step's time. The square's coefficient
# stays near 0 until prompts of thousands of tokens show it: in short prompts it is noise, which forecasts for long
# prompts would multiply by thousands.
_MOST_VARIANCE = (1000.0, 1000.0, 0.01, 1000.0, 1000.0)

# A step that was delayed by something else teaches nothing: its difference from the forecast is cut off at this share
# of the forecast, or at this time if that is more.
_MAX_SURPRISE, _MIN_SURPRISE_S = 1.0, 0.005

# If the forecast itself has a larger variance than this, in the same units, nothing is cut off.
_MAX_DOUBT = 0.25

# Steps to observe before ``step_time`` is known.
_NUM_NEEDED = 8

# Steps up to so many times as large as those measured take about as long as the estimate says.
_KNOWN_UP_TO = 2

_COUNT = 5


@dataclass(frozen=True)
class StepWork:
    """The work of one step.

    Attributes:
        num_prompt_tokens: tokens of prompts to compute, and of outputs to compute again.
        num_context_tokens: tokens that all decoding requests attend to, together.
        num_tokens: tokens to compute in all: those of prompts, and one of each decoding request.
    """

    num_prompt_tokens: int
    num_context_tokens: int
    num_tokens: int


@dataclass(frozen=True)
class Backlog:
    """What requests must compute.

    Attributes:
        num_tokens: missing tokens of requests that do not decode yet.
        num_decoding: requests that decode.
        num_context_tokens: tokens of the decoding requests together.
    """

    num_tokens: int
    num_decoding: int
    num_context_tokens: int

    def plus(self, num_tokens: int) -> Backlog:
        """The same with so many more missing tokens."""
        return replace(self, num_tokens=self.num_tokens + num_tokens)


def step_work(chunks: Iterable[ScheduledChunk]) -> StepWork:
    """The work of a step that computes ``chunks``."""
    num_prompt_tokens = num_context_tokens = num_tokens = 0
    for chunk in chunks:
        num_tokens += chunk.num_tokens
        if _decodes(chunk):
            num_context_tokens += chunk.first_position + 1
        else:
            num_prompt_tokens += chunk.num_tokens
    return StepWork(num_prompt_tokens, num_context_tokens, num_tokens)


def backlog(running: Iterable[RunningRequest]) -> Backlog:
    """The backlog of ``running``."""
    num_tokens = num_decoding = num_context_tokens = 0
    for request in running:
        # ``RunningRequest.is_decoding``, inlined: this runs twice a step for every request.
        seq = request.seq
        num_uncomputed = len(seq.token_ids) - seq.num_computed_tokens
        if num_uncomputed == 1:
            num_decoding += 1
            num_context_tokens += len(seq.token_ids)
        else:
            num_tokens += num_uncomputed
    return Backlog(num_tokens, num_decoding, num_context_tokens)


class StepClock:
    """Times an engine's steps and forecasts their ends. One step at a time: ``begin``, ``forecast``, ``end``.

    If steps follow one another, a step begins when the last one ends: the time between them is part of a step's time,
    else forecasts of several steps would be too short. So does a step that was launched while the last one ran.

    Attributes:
        step_time: how long steps take; ``None``: too few were measured.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds."""
        self._clock = clock
        self._fit = StepTimeFit()
        self._began_at = 0.0
        self._ended_at: float | None = None
        self._most_prompt_tokens = self._most_context_tokens = 0
        self.step_time: StepTime | None = None

    def begin(self, *, is_continued: bool) -> None:
        """A step begins; ``is_continued``: the engine did not wait for work since the last step."""
        self._began_at = self._ended_at if is_continued and self._ended_at is not None else self._clock()

    def forecast(self, work: StepWork, next_work: StepWork | None = None) -> float:
        """When the step that has begun, with this work, should end, in seconds of the clock; 0.0: unknown.

        ``next_work``: of a step that waits for that one; then when this one should end.
        """
        if self.step_time is None:
            return 0.0
        prefill_s = self.step_time.prefill_s(work.num_prompt_tokens)
        ends_at = self._began_at + prefill_s + self.step_time.decode_s(work.num_context_tokens)
        if next_work is not None:
            ends_at += self.step_time.prefill_s(next_work.num_prompt_tokens)
            ends_at += self.step_time.decode_s(next_work.num_context_tokens)
        return ends_at

    def expected_s(self, work: StepWork) -> float | None:
        """How long a step with this work should take; ``None``: no step of about that size was measured."""
        is_new = (
            work.num_prompt_tokens > _KNOWN_UP_TO * self._most_prompt_tokens
            or work.num_context_tokens > _KNOWN_UP_TO * self._most_context_tokens
        )
        if self.step_time is None or is_new:
            return None
        return self.step_time.prefill_s(work.num_prompt_tokens) + self.step_time.decode_s(work.num_context_tokens)

    def end(self, work: StepWork) -> None:
        """The step that has begun is over; ``work`` is what it did."""
        self._ended_at = self._clock()
        self._fit.observe(work.num_prompt_tokens, work.num_context_tokens, self._ended_at - self._began_at)
        self.step_time = self._fit.step_time
        self._most_prompt_tokens = max(self._most_prompt_tokens, work.num_prompt_tokens)
        self._most_context_tokens = max(self._most_context_tokens, work.num_context_tokens)


class StepTimeFit:
    """``StepTime`` of one engine, from its steps.

    A step forgets only coefficients of its own kind: thousands of decode steps do not change what is known of prompts.
    No coefficient becomes less certain than it was at first, however similar the steps are: if one would, only what the
    step itself measures is forgotten (R. Kulhavy, Restricted exponential forgetting in real-time identification,
    Automatica 23, 1987).

    The covariance is kept as a factor ``S`` with ``P = S S^T``. A step with features ``f`` changes only the part along
    ``S^T f`` (as J. Potter's square root filter does). So rounding never makes the covariance asymmetric or indefinite,
    however long it runs.
    """

    def __init__(self) -> None:
        """Begin with ``StepTime``'s defaults."""
        self._step_time: StepTime | None = None
        self._begin()

    @property
    def step_time(self) -> StepTime | None:
        """The estimate now, finite and not negative; ``None`` before the first 8 steps."""
        if self._step_time is None and self._num_observed >= _NUM_NEEDED:
            base, linear, square, decode_base, context = (max(value, 0.0) for value in self._coefficients)
            self._step_time = StepTime(
                prefill_base_s=base,
                prefill_s_per_token=linear / _PROMPT_SCALE,
                prefill_s_per_token2=square / _PROMPT_SCALE**2,
                decode_base_s=decode_base,
                decode_s_per_context_token=context / _CONTEXT_SCALE,
            )
        return self._step_time

    def observe(self, num_prompt_tokens: int, num_context_tokens: int, step_s: float) -> None:
        """A step took ``step_s`` for so many prompt tokens, and for decoding requests with so many context tokens."""
        prompt, context = num_prompt_tokens / _PROMPT_SCALE, num_context_tokens / _CONTEXT_SCALE
        features: list[tuple[int, float]] = []
        if num_prompt_tokens:
            features += ((0, 1.0), (1, prompt), (2, prompt * prompt))
        if num_context_tokens:
            features += ((3, 1.0), (4, context))
        if not features or not isfinite(step_s):
            return
        self._learn(features, step_s, 1.0 if self._forget(features) else _FORGETTING)
        if min(self._coefficients) < 0.0:
            self._keep_positive()
        self._num_observed += 1
        self._step_time = None
        if not isfinite(sum(self._coefficients)):
            # It overflowed: begin again.
            self._begin()

    def _begin(self) -> None:
        first = StepTime()
        self._coefficients = [
            first.prefill_base_s,
            first.prefill_s_per_token * _PROMPT_SCALE,
            first.prefill_s_per_token2 * _PROMPT_SCALE**2,
            first.decode_base_s,
            first.decode_s_per_context_token * _CONTEXT_SCALE,
        ]
        self._factor = [
            [sqrt(variance) * (row == column) for column in range(_COUNT)]
            for row, variance in enumerate(_MOST_VARIANCE)
        ]
        self._variances = list(_MOST_VARIANCE)
        self._num_observed = 0
        self._step_time = None

    def _forget(self, features: Sequence[tuple[int, float]]) -> bool:
        """Forget a little of their coefficients, unless one of them is nearly unknown; returns whether it did."""
        for index, _ in features:
            if self._variances[index] > _MOST_VARIANCE[index] * _FORGETTING:
                return False
        for index, _ in features:
            self._factor[index] = [value * _GROWTH for value in self._factor[index]]
        return True

    def _learn(self, features: Sequence[tuple[int, float]], step_s: float, forgetting: float) -> None:
        """Learn from a step; the share ``forgetting`` of earlier knowledge of its kind is left."""
        forecast_s = one = two = three = four = five = 0.0
        for index, value in features:
            forecast_s += self._coefficients[index] * value
            a, b, c, d, e = self._factor[index]
            one += value * a
            two += value * b
            three += value * c
            four += value * d
            five += value * e
        seen = [one, two, three, four, five]  # ``S^T f``
        doubt = sum(map(mul, seen, seen))
        surprise_s = step_s - forecast_s
        if doubt < _MAX_DOUBT:
            bound_s = max(_MAX_SURPRISE * abs(forecast_s), _MIN_SURPRISE_S)
            surprise_s = max(-bound_s, min(surprise_s, bound_s))
        self._update(seen, surprise_s / (1.0 + doubt), (1.0 - 1.0 / sqrt(forgetting * (1.0 + doubt))) / doubt)

    def _update(self, seen: Sequence[float], change_s: float, share: float) -> None:
        """Move the coefficients by ``change_s`` of the gains, and ``S`` by ``share`` of them times ``seen``."""
        one, two, three, four, five = seen
        for index, (a, b, c, d, e) in enumerate(self._factor):
            gain = a * one + b * two + c * three + d * four + e * five
            self._coefficients[index] += gain * change_s
            gain *= share
            row = [a - gain * one, b - gain * two, c - gain * three, d - gain * four, e - gain * five]
            variance = sum(map(mul, row, row))
            if variance > _MOST_VARIANCE[index]:
                shrink = sqrt(_MOST_VARIANCE[index] / variance)
                row, variance = [value * shrink for value in row], _MOST_VARIANCE[index]
            self._factor[index], self._variances[index] = row, variance

    def _keep_positive(self) -> None:
        """Set negative coefficients to 0, and the others to their likeliest values given that.

        Leaving the others unchanged would change the forecasts for sizes that were seen.
        """
        for index in (2, 1, 4, 0, 3):
            excess = self._coefficients[index]
            if excess < 0.0:
                row = self._factor[index]
                excess /= sum(map(mul, row, row))
                for other, factor in enumerate(self._factor):
                    self._coefficients[other] -= excess * sum(map(mul, row, factor))
                self._coefficients[index] = 0.0


def _decodes(chunk: ScheduledChunk) -> bool:
    """Whether it computes its request's newest token, which was sampled here or by the prefill before a hand-off."""
    running = chunk.running
    is_newest = chunk.num_tokens == 1 and chunk.samples
    return is_newest and (chunk.first_position >= running.num_initial_tokens or running.request.hand_off is not None)
