"""A walk is right about each rank, also if chains have gaps."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from router.kv_index.walk import Group, Walker, walk

NUM_RANKS = 4
#: Runs of blocks that the same ranks have; long ones make the walk jump.
RUNS = st.lists(st.tuples(st.integers(0, 2**NUM_RANKS - 1), st.integers(1, 30)), min_size=1, max_size=12)


@given(runs=RUNS, ranks=st.integers(0, 2**NUM_RANKS - 1), data=st.data())
def test_each_rank_is_in_one_group_that_ends_where_it_lacks_a_block(
    runs: list[tuple[int, int]], ranks: int, data: st.DataObject
) -> None:
    masks = [mask for mask, length in runs for _ in range(length)]
    start = data.draw(st.integers(0, len(masks) - 1))
    check(walk(lambda block, _: masks[block], range(len(masks)), start, ranks), masks, start, ranks)


def test_a_rank_that_ends_below_a_gap_is_not_said_to_have_the_block_in_the_gap() -> None:
    # Of the ranks with block 4, the first also has block 6. Nobody has block 8.
    masks = [0b00, 0b00, 0b00, 0b00, 0b11, 0b00, 0b01, 0b00, 0b00, 0b00]
    assert walk(lambda block, _: masks[block], range(len(masks)), 4, 0b111) == [(5, 0b10), (7, 0b01)]


def test_every_pattern_of_gaps_of_two_ranks_in_six_blocks() -> None:
    for masks in product(range(4), repeat=6):
        check(walk(lambda block, _, masks=masks: masks[block], range(6), 0, 0b11), list(masks), 0, 0b11)


@given(walks=st.lists(st.tuples(RUNS, st.integers(0, 2**NUM_RANKS - 1)), min_size=2, max_size=5))
def test_a_walker_that_remembers_earlier_walks_finds_the_current_blocks(
    walks: list[tuple[list[tuple[int, int]], int]],
) -> None:
    masks: list[int] = []
    walker = Walker(lambda block, _: masks[block])
    for runs, ranks in walks:
        masks[:] = [mask for mask, length in runs for _ in range(length)]
        check(walker.walk(range(len(masks)), ranks), masks, 0, ranks)


def test_a_walker_probes_first_where_ranks_dropped_out_in_the_last_walk() -> None:
    probes: list[int] = []

    def mask_of(block: int, _: int) -> int:
        probes.append(block)
        return 0b11 if block < 40 else 0b10

    walker = Walker(mask_of)
    assert walker.walk(range(64), 0b11) == [(40, 0b01), (64, 0b10)]
    assert len(probes) > 6
    probes.clear()
    assert walker.walk(range(60), 0b11) == [(40, 0b01), (60, 0b10)]
    assert probes == [0, 39, 40, 40, 59]
    assert walker.walk(range(40), 0b11) == [(40, 0b11)]


def check(groups: list[Group], masks: list[int], start: int, ranks: int) -> None:
    assert [depth for depth, _ in groups] == sorted(depth for depth, _ in groups)
    assert sum(mask.bit_count() for _, mask in groups) == (masks[start] & ranks).bit_count()
    for number in range(NUM_RANKS):
        depths = [depth for depth, mask in groups if mask >> number & 1]
        assert bool(depths) == bool(masks[start] & ranks & 1 << number)
        for depth in depths:
            assert masks[depth - 1] >> number & 1
            assert depth == len(masks) or not masks[depth] >> number & 1
            first_gap = next((i for i in range(start, len(masks)) if not masks[i] >> number & 1), len(masks))
            assert depth >= first_gap


@given(depths=st.lists(st.integers(0, 300), min_size=1, max_size=20), num_blocks=st.integers(1, 300))
def test_without_gaps_each_depth_is_exact_and_few_blocks_are_probed(depths: list[int], num_blocks: int) -> None:
    masks = [sum(1 << number for number, depth in enumerate(depths) if depth > block) for block in range(num_blocks)]
    probes: list[int] = []

    def mask_of(block: int, _: int) -> int:
        probes.append(block)
        return masks[block]

    groups = walk(mask_of, range(num_blocks), 0, 2 ** len(depths) - 1)
    found = {number: depth for depth, mask in groups for number in range(len(depths)) if mask >> number & 1}
    assert found == {number: min(depth, num_blocks) for number, depth in enumerate(depths) if depth}
    num_drops = len({min(depth, num_blocks) for depth in depths})
    assert len(probes) <= 1 + -(-(num_blocks - 1) // 64) + 6 * num_drops
