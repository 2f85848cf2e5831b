"""Every policy places requests with media where they can be computed, and knows nothing else of them."""

from __future__ import annotations

from dataclasses import replace

from quartet.discovery.base import Rank
from router.policy.base import Candidate, Pending, Snapshot
from router.policy.room import with_way
from tests.router.policy.test_policies import candidate, each_policy, pending, route

NEEDS = frozenset({"hand_off"})


def taking(name: str, **fields: int) -> Candidate:
    return replace(candidate(name, **fields), media=NEEDS)


def needy(snapshot: Snapshot, num_tokens: int = 100, **fields: bool) -> Pending:
    return with_way(replace(pending(num_tokens), needs_media=NEEDS, **fields), snapshot)


@each_policy
def test_a_request_is_prefilled_only_where_its_media_are_taken(make_policy) -> None:
    snapshot = Snapshot([candidate("p0"), taking("p1", queued=9_000), candidate("p2")], [candidate("d")])
    for num_tokens in (2, 100):
        [placement] = make_policy().assign([needy(snapshot, num_tokens)], snapshot).placements
        assert route(placement) == ("p1", "d")


@each_policy
def test_without_a_prefill_rank_that_takes_its_media_a_request_goes_to_a_decode_rank_that_does(make_policy) -> None:
    snapshot = Snapshot([candidate("p")], [candidate("d0"), taking("d1", used=80), candidate("d2")])
    [placement] = make_policy().assign([needy(snapshot)], snapshot).placements
    assert route(placement) == (None, "d1")


@each_policy
def test_a_request_goes_to_a_decode_rank_if_the_prefill_rank_that_takes_its_media_is_too_small(make_policy) -> None:
    snapshot = Snapshot([taking("p", total=9)], [candidate("d0"), taking("d1", used=80), candidate("d2")])
    [placement] = make_policy().assign([needy(snapshot)], snapshot).placements
    assert route(placement) == (None, "d1")


@each_policy
def test_a_request_whose_media_no_rank_takes_waits_and_does_not_block_others(make_policy) -> None:
    snapshot = Snapshot([candidate("p")], [candidate("d")])
    waiting = [needy(snapshot), pending()]
    kept, placed = make_policy().assign(waiting, snapshot).placements
    assert kept is None
    assert route(placed) == ("p", "d")


@each_policy
def test_a_request_that_must_not_be_prefilled_where_it_is_decoded_is_not(make_policy) -> None:
    snapshot = Snapshot([taking("p", queued=9_000)], [taking("d")])
    [placement] = make_policy().assign([needy(snapshot, 2, is_remote=True)], snapshot).placements
    assert route(placement) == ("p", "d")
    alone = Snapshot([], [taking("d")])
    assert make_policy().assign([needy(alone, is_remote=True)], alone).placements == [None]


@each_policy
def test_the_obstacle_of_each_rank_names_the_media_that_it_does_not_take(make_policy) -> None:
    snapshot = Snapshot([candidate("p0"), taking("p1")], [candidate("d")])
    options = {option.rank: option for option in make_policy().explain(needy(snapshot), snapshot)}
    assert options[Rank("p0")].obstacle == "does not take media as hand_off"
    assert not options[Rank("p1")].obstacle and not options[Rank("d")].obstacle
    local = Snapshot([candidate("p0")], [candidate("d0"), taking("d1")])
    options = {option.rank: option for option in make_policy().explain(needy(local), local)}
    assert options[Rank("d0")].obstacle == "does not take media as hand_off"
    assert not options[Rank("d1")].obstacle


def test_a_request_of_text_needs_no_way_for_media() -> None:
    text = pending()
    assert with_way(text, Snapshot([], [])) is text
