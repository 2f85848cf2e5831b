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


def test_a_tenant_in_two_queues_keeps_its_place_until_it_has_left_both() -> None:
    share = FairShare()
    share.serve("busy", 100)
    share.serve("busy", 100)
    share.waits("busy", 100)
    share.waits("late", 100)
    assert share.start("late") == 150.0
    share.waits("late", 1000)
    assert share.start("late") == 150.0
    share.waits_no_more("late")
    assert share.start("late") == 150.0
    share.waits_no_more("late")
    assert share.start("late") == 100.0


def test_the_present_stays_where_it_is_when_a_tenant_is_served_that_others_have_overtaken() -> None:
    share = FairShare()
    share.waits("busy", 100)
    share.waits("large", 100)
    for _ in range(4):  # what the large one needs is not free
        share.serve("busy", 100)
    share.serve("large", 100)
    assert share.start("next") == 300.0


class Line:
    """One request of each of several tenants waits; the first of those with the lowest start is served."""

    def __init__(self, share: FairShare) -> None:
        self.share = share
        self.waiting: dict[str, int] = {}
        self.others_work = 0  # between two requests of the tenant `victim`, in tokens
        self.num_served: Counter[str] = Counter()

    def come(self, tenant: str, num_tokens: int) -> None:
        self.waiting[tenant] = num_tokens
        self.share.waits(tenant, num_tokens)

    def serve(self) -> str:
        tenant = min(self.waiting, key=self.share.start)
        num_tokens = self.waiting.pop(tenant)
        self.share.serve(tenant, num_tokens)
        self.share.waits_no_more(tenant)
        self.others_work = 0 if tenant == "victim" else self.others_work + num_tokens
        self.num_served[tenant] += 1
        return tenant


@pytest.mark.parametrize("num_names", [1, 4, 20])
def test_a_fresh_name_for_each_request_gets_no_more_than_twice_as_many_tenants_as_wait(num_names: int) -> None:
    line = Line(FairShare())
    line.come("victim", 640)
    for number in range(1000):
        if "victim" not in line.waiting:
            line.come("victim", 640)
        for name in range(num_names + 1 - len(line.waiting)):
            line.come(f"fresh {number} {name}", 640)
        line.serve()
    assert line.num_served["victim"] == pytest.approx(1000 / (2 * num_names + 1), abs=5)


@given(data=st.data(), num_names=st.integers(1, 6), own=st.integers(1, 100))
def test_a_tenant_that_waits_is_served_after_a_bounded_number_of_requests_whatever_names_come(
    data: st.DataObject, num_names: int, own: int
) -> None:
    # Few draws: each is a whole pattern, and is repeated.
    pattern = data.draw(
        st.lists(
            st.tuples(st.sampled_from(["fresh", "old 0", "old 1", "last"]), st.sampled_from([own, 50, 100])), min_size=1
        )
    )
    line, num_others, last = Line(FairShare()), 0, "last"
    line.come("victim", own)
    for number in range(300):
        kind, num_tokens = pattern[number % len(pattern)]
        name = {"fresh": f"fresh {number}", "last": last}.get(kind, kind)
        if name not in line.waiting and len(line.waiting) <= num_names:
            line.come(name, num_tokens)
            last = name
        num_others = 0 if line.serve() == "victim" else num_others + 1
        if "victim" not in line.waiting:
            line.come("victim", own)
        # Each tenant's next start is at most a request ahead, and a request of 1 token needs a hundred of them.
        assert num_others <= 5 * (num_names + 1) * max(own / min(own, 50), 1) + 10


def test_guests_that_take_nothing_do_not_keep_a_tenant_waiting_for_ever() -> None:
    line = Line(FairShare())
    line.come("victim", 640)
    for number in range(1000):
        if "victim" not in line.waiting:
            line.come("victim", 640)
        if len(line.waiting) == 1:
            line.come(f"fresh {number}", 640)
        if (tenant := line.serve()) != "victim":
            line.share.charge(tenant, -640)
    assert line.num_served["victim"] >= 1000 / 20


def test_a_long_prompt_of_a_guest_keeps_the_next_guests_out_for_one_request_at_most() -> None:
    line = Line(FairShare())
    for number in range(10):
        line.come("flood", 640)
        line.serve()
        line.come(f"long {number}", 128_000)
        line.serve()
    line.come("flood", 640)
    line.come("guest", 640)
    assert "guest" in (line.serve(), line.serve())


def test_a_guest_that_took_less_than_was_guessed_does_not_keep_the_next_ones_out() -> None:
    line = Line(FairShare())
    line.come("flood", 1000)
    for number in range(100):
        if "flood" not in line.waiting:
            line.come("flood", 1000)
        line.come("light", 1000)
        assert "light" in (line.serve(), line.serve())
        line.share.charge("light", -990)
        if number % 10 == 0:
            line.come(f"guest {number}", 1000)
            assert line.serve() == f"guest {number}" or line.serve() == f"guest {number}"
            line.share.charge(f"guest {number}", -1000)


def test_tenants_without_debt_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "_MAX_TENANTS", 3)
    share = FairShare()
    share.serve("owing", 1000)
    share.serve("owing", 1000)
    for number in range(10):
        share.serve(f"other-{number}", 0)
    assert share.start("owing") == 2000
    assert len(share._ends) <= 4


def test_those_that_were_served_last_are_not_forgotten_while_they_owe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "_MAX_TENANTS", 2)
    share = FairShare()
    for tenant in "abcdefg":
        share.serve(tenant, 100)
    assert [share.start(tenant) for tenant in "abcdefg"] == [0.0] * 3 + [100.0] * 4


def test_names_that_come_once_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "_MAX_TENANTS", 3)
    line = Line(FairShare())
    for number in range(100):
        line.come(f"fresh {number}", 100)
        line.serve()
    assert len(line.share._ends) <= 20
    assert not line.share._num_queues
    assert not line.share._entries
