"""Learns how long steps take from those that were taken: recursive least squares that slowly forgets."""

from __future__ import annotations

from math import sqrt

from quartet.events.step_time import StepTime

# Features are of the order of one at these sizes.
_PROMPT_SCALE, _CONTEXT_SCALE = 1024.0, 16384.0
# A step's weight has fallen to a third after a thousand more of its kind.
_FORGETTING = 0.999
# How unsure the first guess of a coefficient is, in units of the variance of one step's time.
_FIRST_VARIANCE = 1000.0
# Steps that something else held up are no news: what is beyond so much of the forecast, and this, is cut off.
_MAX_SURPRISE, _MIN_SURPRISE_S = 1.0, 0.005
# But where the forecast itself is less sure than that, in the same units, steps are taken at their word.
_MAX_DOUBT = 0.25
# Before so many steps nothing is said.
_NUM_NEEDED = 8

_COUNT = 5
_PREFILL, _DECODE = range(3), range(3, _COUNT)


class StepTimeFit:
    """``StepTime`` of one engine, from its steps.

    Only what a step's kind tells of is forgotten: thousands of steps that decode take nothing from what is known of
    prompts. Nor is anything forgotten of which less is known than at first, so that the covariance stays bounded
    however alike the steps are.
    """

    def __init__(self) -> None:
        """Begin with ``StepTime``'s defaults."""
        first = StepTime()
        self._coefficients = [
            first.prefill_base_s,
            first.prefill_s_per_token * _PROMPT_SCALE,
            first.prefill_s_per_token2 * _PROMPT_SCALE**2,
            first.decode_base_s,
            first.decode_s_per_context_token * _CONTEXT_SCALE,
        ]
        self._covariance = [[_FIRST_VARIANCE * (row == column) for column in range(_COUNT)] for row in range(_COUNT)]
        self._num_observed = 0
        self._step_time: StepTime | None = None

    @property
    def step_time(self) -> StepTime | None:
        """What is known now, nothing in it negative; ``None`` before the first few steps."""
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
        """A step computed so many prompt tokens, beside requests that decode over so many of context, in so long."""
        prompt, context = num_prompt_tokens / _PROMPT_SCALE, num_context_tokens / _CONTEXT_SCALE
        features: list[tuple[int, float]] = []
        if num_prompt_tokens:
            features += ((0, 1.0), (1, prompt), (2, prompt * prompt))
        if num_context_tokens:
            features += ((3, 1.0), (4, context))
        if not features:
            return
        self._learn(features, step_s)
        self._forget([*(_PREFILL if num_prompt_tokens else ()), *(_DECODE if num_context_tokens else ())])
        self._num_observed += 1
        self._step_time = None

    def _learn(self, features: list[tuple[int, float]], step_s: float) -> None:
        covariance = self._covariance
        forecast_s = sum([self._coefficients[index] * value for index, value in features])
        gains = [sum([row[index] * value for index, value in features]) for row in covariance]
        doubt = sum([gains[index] * value for index, value in features])
        surprise_s = step_s - forecast_s
        if doubt < _MAX_DOUBT:
            bound_s = max(_MAX_SURPRISE * abs(forecast_s), _MIN_SURPRISE_S)
            surprise_s = max(-bound_s, min(surprise_s, bound_s))
        shares = [gain / (1.0 + doubt) for gain in gains]
        self._coefficients = [
            value + share * surprise_s for value, share in zip(self._coefficients, shares, strict=True)
        ]
        for row, share in zip(covariance, shares, strict=True):
            row[:] = [value - share * other for value, other in zip(row, gains, strict=True)]

    def _forget(self, indices: list[int]) -> None:
        covariance = self._covariance
        if max([covariance[index][index] for index in indices]) > _FIRST_VARIANCE * _FORGETTING:
            return
        # Rows and columns each by the root: the covariance stays one.
        root = sqrt(_FORGETTING)
        scales = [1.0] * _COUNT
        for index in indices:
            scales[index] = 1.0 / root
        for row, scale in zip(covariance, scales, strict=True):
            row[:] = [value * scale * other for value, other in zip(row, scales, strict=True)]
