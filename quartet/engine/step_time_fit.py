"""Learns how long steps take from those that were taken: recursive least squares that slowly forgets."""

from __future__ import annotations

from quartet.events.step_time import StepTime

# Features are of the order of one at these sizes.
_PROMPT_SCALE, _CONTEXT_SCALE = 1024.0, 16384.0
# A step's weight has fallen to a third after a thousand more.
_FORGETTING = 0.999
# Square seconds: how unsure the first guess is, for each coefficient.
_FIRST_VARIANCE = 1.0
# Steps that something else held up are no news: what is beyond so much of the forecast, and this, is cut off.
_MAX_SURPRISE, _MIN_SURPRISE_S = 1.0, 0.005
# Steps to take at their word before that.
_NUM_TRUSTED = 16


class StepTimeFit:
    """``StepTime`` of one engine, from its steps."""

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
        count = len(self._coefficients)
        self._covariance = [[_FIRST_VARIANCE * (row == column) for column in range(count)] for row in range(count)]
        self._num_observed = 0

    @property
    def step_time(self) -> StepTime:
        """What is known now; nothing in it is negative."""
        base, linear, square, decode_base, context = (max(value, 0.0) for value in self._coefficients)
        return StepTime(
            prefill_base_s=base,
            prefill_s_per_token=linear / _PROMPT_SCALE,
            prefill_s_per_token2=square / _PROMPT_SCALE**2,
            decode_base_s=decode_base,
            decode_s_per_context_token=context / _CONTEXT_SCALE,
        )

    def observe(self, num_prompt_tokens: int, num_context_tokens: int, step_s: float) -> None:
        """A step computed so many prompt tokens, beside requests that decode over so many of context, in so long."""
        prompt, context = num_prompt_tokens / _PROMPT_SCALE, num_context_tokens / _CONTEXT_SCALE
        features = [float(num_prompt_tokens > 0), prompt, prompt * prompt, float(num_context_tokens > 0), context]
        forecast_s = _dot(self._coefficients, features)
        surprise_s = step_s - forecast_s
        if self._num_observed >= _NUM_TRUSTED:
            bound_s = max(_MAX_SURPRISE * abs(forecast_s), _MIN_SURPRISE_S)
            surprise_s = max(-bound_s, min(surprise_s, bound_s))
        self._num_observed += 1
        gains = [_dot(row, features) for row in self._covariance]
        total = _FORGETTING + _dot(gains, features)
        self._coefficients = [
            value + gain / total * surprise_s for value, gain in zip(self._coefficients, gains, strict=True)
        ]
        self._covariance = [
            [
                min((value - gain * other / total) / _FORGETTING, _FIRST_VARIANCE)
                for value, other in zip(row, gains, strict=True)
            ]
            for row, gain in zip(self._covariance, gains, strict=True)
        ]


def _dot(ones: list[float], others: list[float]) -> float:
    return sum(one * other for one, other in zip(ones, others, strict=True))
