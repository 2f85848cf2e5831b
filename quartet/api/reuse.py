"""What became of the prompt tokens that a request might have found cached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpectedReuse:
    """What a router knew of a prompt when it placed the request.

    Attributes:
        num_held_tokens: the most of its leading tokens that one rank of the model had cached.
        num_matched_tokens: of these, those that the rank had where it was sent to be prefilled.
        num_foreign_tokens: more of them that a rank of another model had.
    """

    num_held_tokens: int
    num_matched_tokens: int
    num_foreign_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reuse:
    """The same with what the engine found.

    ``num_held_tokens + num_unannounced_tokens`` is the sum of ``num_cached_tokens``, ``num_evicted_tokens``,
    ``num_elsewhere_tokens`` and ``num_missing_tokens``.

    Attributes:
        num_cached_tokens: tokens that the engine did not have to compute.
        num_evicted_tokens: matched ones that it had until it needed their blocks for others.
        num_elsewhere_tokens: held ones that another rank had, and the policy chose this one nonetheless.
        num_missing_tokens: matched ones that the engine neither had nor lately evicted: the router was wrong.
        num_unannounced_tokens: cached ones of which the router did not know.
    """

    num_held_tokens: int
    num_matched_tokens: int
    num_cached_tokens: int
    num_evicted_tokens: int
    num_elsewhere_tokens: int
    num_missing_tokens: int
    num_unannounced_tokens: int
    num_foreign_tokens: int


def reuse_of(expected: ExpectedReuse, num_cached_tokens: int, num_evicted_tokens: int) -> Reuse:
    """Split what a router expected by what its engine reports; ``num_evicted_tokens`` follow the cached ones."""
    num_matched = expected.num_matched_tokens
    num_lost = max(num_matched - num_cached_tokens, 0)
    num_evicted = min(num_evicted_tokens, num_lost)
    return Reuse(
        num_held_tokens=expected.num_held_tokens,
        num_matched_tokens=num_matched,
        num_cached_tokens=num_cached_tokens,
        num_evicted_tokens=num_evicted,
        num_elsewhere_tokens=expected.num_held_tokens - num_matched,
        num_missing_tokens=num_lost - num_evicted,
        num_unannounced_tokens=max(num_cached_tokens - num_matched, 0),
        num_foreign_tokens=expected.num_foreign_tokens,
    )
