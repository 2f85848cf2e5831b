"""How long a step takes, as a function of what it computes."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.errors import ConfigError

#: Context tokens at which the cost of decoding is given: ``StepTiming``'s ``decode_*`` are polynomials of the share.
FULL_CONTEXT_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Milliseconds of a step: a part for the prompt tokens that it computes, one for the requests that decode.

    With ``n`` new prompt tokens the first part is ``prefill_base + prefill_linear n + prefill_square n^2``; with ``p``
    the sum of the contexts of all requests that decode, over 1,048,576, the second one is ``decode_base +
    decode_linear p + decode_square p^2``. A part that has nothing to do takes no time.

    The defaults are the public model of the mock engine of ai-dynamo/dynamo (``lib/mocker/src/common/perf_model.rs``),
    so that results can be compared with its.
    """

    prefill_base: float = 16.50142
    prefill_linear: float = 0.01518344
    prefill_square: float = 4.209989e-7
    decode_base: float = 5.74
    decode_linear: float = 54.01
    decode_square: float = -25.74

    def __post_init__(self) -> None:
        """Refuse timings under which an empty step takes less than no time."""
        for name in ("prefill_base", "prefill_linear", "prefill_square", "decode_base", "decode_linear"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative")

    def prefill_ms(self, num_tokens: int) -> float:
        """The first part, for ``num_tokens`` new prompt tokens."""
        if not num_tokens:
            return 0.0
        return self.prefill_base + num_tokens * (self.prefill_linear + num_tokens * self.prefill_square)

    def decode_ms(self, num_context_tokens: int) -> float:
        """The second part, where the requests that decode have ``num_context_tokens`` tokens together."""
        if not num_context_tokens:
            return 0.0
        share = num_context_tokens / FULL_CONTEXT_TOKENS
        return self.decode_base + share * (self.decode_linear + share * self.decode_square)

    def step_ms(self, num_prompt_tokens: int, num_context_tokens: int) -> float:
        """The whole step."""
        return self.prefill_ms(num_prompt_tokens) + self.decode_ms(num_context_tokens)
