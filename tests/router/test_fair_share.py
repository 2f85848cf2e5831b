"""Fair shares among tenants."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.errors import ConfigError
from router import admission
from router.admission import FairShare
from router.config import check_weights


def serve(share: FairShare, queue: list[tuple[float, str, int]], num_tokens: int) -> Counter[str]:
    """Serve the earliest starts of ``queue`` until so many tokens are served."""
    served: Counter[str] = Counter()
    while queue and served.total() < num_tokens:
        start, tenant, size = queue.pop(queue.index(min(queue)))
        share.served(start)
        served[tenant] += size
    return served


def ask(share: FairShare, tenant: str, size: int) -> tuple[float, str, int]:
    return share.start(tenant, size), tenant, size


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    share = FairShare({})
    starts = [share.start("a", size) for size in (500, 1, 30)]
    assert starts == sorted(starts)


def test_a_tenant_that_floods_does_not_delay_other_tenants() -> None:
    share = FairShare({})
    queue = [ask(share, "flood", 100) for _ in range(1000)]
    serve(share, queue, 5000)
    queue.append(ask(share, "small", 100))
    # The start of the request that was served last is the present: at most that one stands before.
    assert serve(share, queue, 200)["small"] == 100


@given(
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(0.25, 4), min_size=2, max_size=3),
    sizes=st.lists(st.integers(1, 100), min_size=10, max_size=50),
)
def test_while_all_wait_each_gets_its_weight(weights: dict[str, float], sizes: list[int]) -> None:
    share = FairShare(weights)
    queue = [ask(share, tenant, size) for size in sizes for tenant in weights for _ in range(20)]
    offered = Counter[str]()
    for _, tenant, size in queue:
        offered[tenant] += size
    served = serve(share, queue, min(offered.values()) // 4)
    shares = [served[tenant] / weight for tenant, weight in weights.items()]
    # Bounded by one request of each of two tenants (theorem 1 of the paper).
    assert max(shares) - min(shares) <= 2 * max(sizes) / min(weights.values())


def test_an_idle_tenant_saves_up_no_share() -> None:
    share = FairShare({})
    share.start("idle", 10)
    queue = [ask(share, "busy", 10) for _ in range(100)]
    serve(share, queue, 800)
    queue += [ask(share, "idle", 10) for _ in range(100)]
    served = serve(share, queue, 100)
    assert abs(served["idle"] - served["busy"]) <= 20


def test_a_request_that_is_not_served_does_not_count_against_its_tenant() -> None:
    share = FairShare({"a": 2.0})
    share.start("a", 100)
    share.start("a", 1000)
    share.give_back("a", 1000)
    assert share.start("a", 1) == 50.0
    share.give_back("unknown", 5)


def test_tenants_without_debt_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MAX_TENANTS", 3)
    share = FairShare({})
    for number in range(10):
        share.served(share.start(f"tenant-{number}", 1) + 1.0)
    owing = share.start("owing", 1000)
    for number in range(10):
        share.start(f"other-{number}", 0)
    assert share.start("owing", 1) == owing + 1000


def test_impossible_weights_are_refused_by_name() -> None:
    check_weights({"a": 0.5})
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"tenant_weights\.a: must be above 0"):
            check_weights({"a": bad})
