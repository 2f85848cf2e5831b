"""What became of tokens that might have been found cached adds up, whatever routers and engines say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.api.reuse import ExpectedReuse, Reuse, reuse_of

TOKENS = st.integers(0, 5_000)


@given(held=TOKENS, matched=TOKENS, cached=TOKENS, evicted=TOKENS)
def test_the_parts_add_up(held: int, matched: int, cached: int, evicted: int) -> None:
    reuse = reuse_of(ExpectedReuse(max(held, matched), matched), cached, evicted)
    assert reuse.num_held_tokens + reuse.num_unannounced_tokens == (
        reuse.num_cached_tokens + reuse.num_evicted_tokens + reuse.num_elsewhere_tokens + reuse.num_missing_tokens
    )
    assert min(vars_of(reuse).values()) >= 0


@pytest.mark.parametrize(
    ("held", "matched", "cached", "evicted", "parts"),
    [
        (96, 96, 96, 0, {}),
        (96, 32, 32, 0, {"elsewhere": 64}),
        (96, 96, 32, 64, {"evicted": 64}),
        (96, 96, 32, 16, {"evicted": 16, "missing": 48}),
        (96, 96, 32, 640, {"evicted": 64}),  # more was evicted than the router hoped for
        (0, 0, 48, 0, {"unannounced": 48}),
        (96, 32, 64, 0, {"elsewhere": 64, "unannounced": 32}),
    ],
)
def test_each_part_has_its_cause(held: int, matched: int, cached: int, evicted: int, parts: dict[str, int]) -> None:
    reuse = vars_of(reuse_of(ExpectedReuse(held, matched), cached, evicted))
    causes = ("evicted", "elsewhere", "missing", "unannounced")
    assert {name: reuse[f"num_{name}_tokens"] for name in causes} == dict.fromkeys(causes, 0) | parts


def vars_of(reuse: Reuse) -> dict[str, int]:
    return {name: getattr(reuse, name) for name in Reuse.__slots__}
