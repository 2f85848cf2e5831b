"""What Dynamo's cost function makes of ranks, worked out by hand: ``scale * prefill + decode``, in blocks of 10."""

from __future__ import annotations

import random

import pytest

from cli.replay.policies import DynamoPolicy, ReplayCandidate
from quartet.discovery.base import Rank
from router.policy.base import Pending, Snapshot

A, B = Rank("a"), Rank("b")


def candidate(rank: Rank, *, unanswered: int = 0, prompt_blocks: int = 0, used: int = 0) -> ReplayCandidate:
    return ReplayCandidate(
        rank=rank,
        num_total_blocks=100,
        block_size=10,
        num_used_blocks=used,
        num_unanswered_tokens=unanswered,
        num_prompt_blocks=prompt_blocks,
    )


def pending(num_tokens: int, cached: dict[Rank, int] | None = None, hashes: tuple[int, ...] = ()) -> Pending:
    return Pending(
        num_tokens=num_tokens,
        num_reserved_tokens=num_tokens,
        num_most_tokens=num_tokens,
        sequence_hashes=hashes,
        num_cached_tokens=cached or {},
    )


def policy(scale: float, seed: int = 0) -> DynamoPolicy:
    return DynamoPolicy(scale, random.Random(seed))


@pytest.mark.parametrize(
    ("scale", "request_", "rank", "prefill", "decode"),
    [
        # 45 tokens are 4.5 blocks to prefill and 5 to decode.
        (1.0, pending(45), candidate(A), 4.5, 5),
        (2.0, pending(45), candidate(A), 9.0, 5),
        # 30 tokens of others have no first token yet, whose prompts take 7 blocks.
        (1.0, pending(45), candidate(A, unanswered=30, prompt_blocks=7), 7.5, 12),
        # 2 of the blocks are cached: they are not prefilled, but decoded.
        (1.0, pending(45, {A: 20}), candidate(A, unanswered=30, prompt_blocks=7), 5.5, 12),
        (16.0, pending(45, {A: 20}), candidate(A, unanswered=30, prompt_blocks=7), 88.0, 12),
        # What is cached elsewhere is of no use; nor is part of a block.
        (1.0, pending(45, {B: 20}), candidate(A), 4.5, 5),
        (1.0, pending(45, {A: 29}), candidate(A), 2.5, 5),
        # It prefills no less than nothing, and blocks that others use count only as prompts.
        (1.0, pending(40, {A: 50}), candidate(A, used=90), 0.0, 4),
    ],
)
def test_a_rank_costs_what_it_prefills_and_the_prompts_that_it_holds(
    scale: float, request_: Pending, rank: ReplayCandidate, prefill: float, decode: float
) -> None:
    snapshot = Snapshot([], [rank])
    [option] = policy(scale).explain(request_, snapshot)
    assert option.terms == {"prefill_blocks": pytest.approx(prefill), "decode_blocks": decode}
    assert option.cost == pytest.approx(prefill + decode)
    assert (option.cost_unit, option.is_decode, option.obstacle) == ("blocks", True, "")
    assert option.num_cached_tokens == request_.num_cached_tokens.get(A, 0)
    [placement] = policy(scale).assign([request_], snapshot).placements
    assert placement is not None
    assert (placement.prefill, placement.decode, placement.cost) == (None, A, pytest.approx(prefill + decode))


@pytest.mark.parametrize(
    ("scale", "expected", "cost"),
    [
        # At a: (4.5 - 4) + (8 + 5). At b: 4.5 + 5.
        (1.0, B, 9.5),
        # At a: 16 (4.5 - 4) + (8 + 5). At b: 16 * 4.5 + 5.
        (16.0, A, 21.0),
    ],
)
def test_the_scale_says_how_much_load_a_cache_hit_outweighs(scale: float, expected: Rank, cost: float) -> None:
    snapshot = Snapshot([], [candidate(A, prompt_blocks=8), candidate(B)])
    [placement] = policy(scale).assign([pending(45, {A: 40})], snapshot).placements
    assert placement is not None
    assert (placement.decode, placement.cost) == (expected, pytest.approx(cost))
    assert placement.num_cached_tokens == (40 if expected == A else 0)


def test_requests_assigned_at_once_count_as_sent_and_share_what_they_have_in_common() -> None:
    hashes = (1, 2, 3, 4)
    waiting = [pending(45, {A: 10}, hashes), pending(45, {}, hashes), pending(10)]
    snapshot = Snapshot([], [candidate(A), candidate(B, prompt_blocks=30)])
    first, second, third = policy(1.0).assign(waiting, snapshot).placements
    # 3.5 + 5 at a; b: 4.5 + 35.
    assert first is not None and (first.decode, first.cost, first.num_cached_tokens) == (A, pytest.approx(8.5), 10)
    # 3.5 of the first are still to prefill, and 0.5 of this one; two prompts of 5 blocks.
    assert second is not None and (second.decode, second.cost, second.num_cached_tokens) == (A, pytest.approx(14.0), 40)
    # 3.5 + 0.5 + 1, and 5 + 5 + 1; b: 1 + 31.
    assert third is not None and (third.decode, third.cost, third.num_cached_tokens) == (A, pytest.approx(16.0), 0)


def test_equal_ranks_are_taken_at_random_and_full_ones_too() -> None:
    snapshot = Snapshot([], [candidate(A, used=100), candidate(B, used=100)])
    taken = [policy(1.0, seed).assign([pending(45)], snapshot).placements[0] for seed in range(40)]
    assert {placement.decode for placement in taken if placement is not None} == {A, B}
    assert None not in taken


def test_ranks_that_only_prefill_are_left_idle() -> None:
    snapshot = Snapshot([candidate(A)], [candidate(B, prompt_blocks=50)])
    [placement] = policy(1.0).assign([pending(45)], snapshot).placements
    assert placement is not None and (placement.prefill, placement.decode) == (None, B)
    idle, used = policy(1.0).explain(pending(45), snapshot)
    assert (idle.rank, idle.is_decode, idle.cost, idle.obstacle) == (
        A,
        False,
        None,
        "only ranks that decode are used",
    )
    assert (used.rank, used.cost) == (B, pytest.approx(59.5))


def test_the_policy_that_replays_compare_with_explains_itself_too() -> None:
    snapshot = Snapshot([candidate(Rank("p"))], [candidate(Rank("d0"), unanswered=50), candidate(Rank("d1"))])
    request = pending(100, {Rank("d1"): 40})
    dynamo = policy(2.0)
    options = {option.rank.worker_id: option for option in dynamo.explain(request, snapshot)}
    assert options["p"].obstacle
    assert options["d1"].terms == {"prefill_blocks": 12.0, "decode_blocks": 10.0}
    [placement] = dynamo.assign([request], snapshot).placements
    assert placement is not None
    assert (placement.decode, placement.cost) == (Rank("d1"), options["d1"].cost)
