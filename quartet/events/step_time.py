"""How long a worker's steps take, as it has measured: what a router needs to forecast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step: a part for the ``n`` prompt tokens that it computes, one for those that decode.

    The first is ``prefill_base_s + n (prefill_s_per_token + n prefill_s_per_token2)``, the second, where those that
    decode have ``c`` tokens of context together, ``decode_base_s + decode_s_per_context_token c``. A part that has
    nothing to do takes no time. The defaults are only good for comparing ranks without measurements.
    """

    prefill_base_s: float = 0.01
    prefill_s_per_token: float = 2e-5
    prefill_s_per_token2: float = 0.0
    decode_base_s: float = 0.01
    decode_s_per_context_token: float = 0.0

    def prefill_s(self, num_tokens: int) -> float:
        """The first part."""
        if not num_tokens:
            return 0.0
        return self.prefill_base_s + num_tokens * (self.prefill_s_per_token + num_tokens * self.prefill_s_per_token2)

    def prefill_in_steps_s(self, num_tokens: int, max_step_tokens: int, decode_s: float) -> float:
        """Seconds until ``num_tokens`` prompt tokens are computed, in steps that also take ``decode_s`` each."""
        num_full, rest = divmod(num_tokens, max_step_tokens)
        full_s = num_full * (self.prefill_s(max_step_tokens) + decode_s) if num_full else 0.0
        return full_s + (self.prefill_s(rest) + decode_s if rest else 0.0)

    def decode_s(self, num_context_tokens: int) -> float:
        """The second part."""
        if not num_context_tokens:
            return 0.0
        return self.decode_base_s + self.decode_s_per_context_token * num_context_tokens
