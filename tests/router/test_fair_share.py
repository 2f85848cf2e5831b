"""Fair shares among tenants."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import fair_queue
from router.fair_queue import FairShare
from router.tenants import TenantConfig, Tenants


def make_share(**weights: float) -> FairShare:
    return FairShare(Tenants({tenant: TenantConfig(weight=weight) for tenant, weight in weights.items()}))


def serve(share: FairShare, queues: Mapping[str, deque[int]], num_tokens: int) -> Counter[str]:
    """Serve the tenant with the earliest start until so many tokens are served; ``queues`` has requests' sizes."""
    served: Counter[str] = Counter()
    while served.total() < num_tokens and any(queues.values()):
        tenant = min((name for name, queue in queues.items() if queue), key=share.start)
        size = queues[tenant].popleft()
        share.serve(tenant, size)
        served[tenant] += size
    return served


def test_a_tenant_that_floods_does_not_delay_other_tenants() -> None:
    share = FairShare()
    queues = {"flood": deque([100] * 1000), "small": deque[int]()}
    serve(share, queues, 5000)
    queues["small"].append(100)
    # The start of the request that was served last is the present: at most that one stands before.
    assert serve(share, queues, 200)["small"] == 100


@given(
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(0.25, 4), min_size=2, max_size=3),
    sizes=st.lists(st.integers(1, 100), min_size=10, max_size=50),
)
def test_while_all_wait_each_gets_its_weight(weights: dict[str, float], sizes: list[int]) -> None:
    share = make_share(**weights)
    queues = {tenant: deque(sizes * 20) for tenant in weights}
    served = serve(share, queues, len(weights) * 20 * sum(sizes) // 4)
    shares = [served[tenant] / weight for tenant, weight in weights.items()]
    # Bounded by one request of each of two tenants (theorem 1 of the paper).
    assert max(shares) - min(shares) <= 2 * max(sizes) / min(weights.values())


@given(
    guesses=st.lists(st.integers(1, 100), min_size=10, max_size=50),
    excess=st.lists(st.integers(-100, 400), min_size=10, max_size=50),
)
def test_each_gets_its_share_of_what_was_really_used_not_of_what_was_guessed(
    guesses: list[int], excess: list[int]
) -> None:
    share = FairShare()
    used: Counter[str] = Counter()
    for guess, more in list(zip(guesses, excess, strict=False)) * 20:
        tenant = min("ab", key=share.start)
        # The guesses at a's requests are wrong, those at b's are right.
        extra = max(more, -guess) if tenant == "a" else 0
        share.serve(tenant, guess)
        share.charge(tenant, extra)
        used[tenant] += guess + extra
    assert abs(used["a"] - used["b"]) <= 2 * (max(guesses) + max(0, *excess))


def test_an_idle_tenant_saves_up_no_share() -> None:
    share = FairShare()
    share.serve("idle", 10)
    queues = {"idle": deque[int](), "busy": deque([10] * 100)}
    serve(share, queues, 800)
    queues["idle"].extend([10] * 100)
    served = serve(share, queues, 100)
    assert abs(served["idle"] - served["busy"]) <= 20


def test_what_was_charged_too_much_is_given_back() -> None:
    share = make_share(a=2.0)
    share.serve("a", 100)
    share.serve("a", 1000)
    share.charge("a", -1000)
    assert share.start("a") == 50.0
    share.charge("unknown", -5)
    assert share.start("unknown") == 50.0


def test_what_was_charged_too_little_is_charged_by_weight() -> None:
    share = make_share(a=2.0)
    share.serve("a", 100)
    share.charge("a", 100)
    assert share.start("a") == 100.0


def test_tenants_without_debt_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "_MAX_TENANTS", 3)
    share = FairShare()
    share.serve("owing", 1000)
    share.serve("owing", 1000)
    for number in range(10):
        share.serve(f"other-{number}", 0)
    assert share.start("owing") == 2000
    assert len(share._ends) <= 4
