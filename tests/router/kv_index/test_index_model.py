"""The prefix index against sets of hashes, in any order of calls, holes in chains included.

For every rank and kind of block the reported count must end at a block that is there, before one that is not, and
not stop before the first gap. For a chain without gaps that leaves one number: the right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quartet.discovery.base import Rank
from quartet.events.kv import Tier
from router.kv_index.index import Match, PrefixIndex
from router.kv_index.walk import walk

NUM_BLOCKS = 100  # of a chain: more than one jump of a walk
PLACES = [Rank("a"), Rank("a", 1), Rank("b"), Rank("c")]
#: Where chains leave each other.
FORKS = {(): 0, (0,): 5, (1,): 64, (0, 0): 40, (0, 1): 80}


def chain(path: tuple[int, ...]) -> list[int]:
    """Hashes of the chain that takes this turn at each fork that it comes by."""
    hashes: list[int] = []
    taken: tuple[int, ...] = ()
    for position in range(NUM_BLOCKS):
        if FORKS.get(taken) == position:
            taken = path[: len(taken) + 1]
        hashes.append((int("1" + "".join(map(str, taken)), 2) << 50) + position)
    return hashes


CHAINS = [chain(path) for path in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0), (1, 1)]]

ranks = st.sampled_from(PLACES)
chains = st.sampled_from(CHAINS)
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK])
lengths = st.integers(0, NUM_BLOCKS)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.now = 0
        self.held: dict[Rank, dict[Tier, set[int]]] = {rank: {tier: set() for tier in Tier} for rank in PLACES}
        self.predicted: dict[Rank, dict[int, int]] = {rank: {} for rank in PLACES}
        self.swept = True

    @rule(rank=ranks, chain=chains, length=lengths, tier=tiers)
    def store_what_is_missing(self, rank: Rank, chain: list[int], length: int, tier: Tier) -> None:
        """As workers do, so that nothing has a gap."""
        first = leading(chain, self.held[rank][tier])
        self.store(rank, chain, first, max(first, length), tier)

    @rule(rank=ranks, chain=chains, first=lengths, last=lengths, tier=tiers)
    def store_anything(self, rank: Rank, chain: list[int], first: int, last: int, tier: Tier) -> None:
        self.store(rank, chain, first, last, tier)

    def store(self, rank: Rank, chain: list[int], first: int, last: int, tier: Tier) -> None:
        parent = chain[first - 1] if first else None
        known = parent is None or any(parent in held for held in self.held[rank].values())
        assert self.index.store(rank, parent, chain[first:last], tier) == known
        self.held[rank][tier].update(chain[first:last])
        if tier is Tier.DEVICE:
            for block in chain[first:last]:
                self.predicted[rank].pop(block, None)

    @rule(rank=ranks, chain=chains, length=lengths, tier=tiers)
    def evict_the_end(self, rank: Rank, chain: list[int], length: int, tier: Tier) -> None:
        """All that follows a block, on any chain."""
        if length == NUM_BLOCKS:
            return
        after = {block for other in CHAINS if other[length] == chain[length] for block in other[length:]}
        self.remove(rank, sorted(after, reverse=True), tier)

    @rule(rank=ranks, chain=chains, first=lengths, last=lengths, tier=tiers)
    def remove_anything(self, rank: Rank, chain: list[int], first: int, last: int, tier: Tier) -> None:
        self.remove(rank, chain[first:last], tier)

    def remove(self, rank: Rank, blocks: list[int], tier: Tier) -> None:
        self.index.remove(rank, blocks, tier)
        self.held[rank][tier].difference_update(blocks)

    @rule(rank=ranks)
    def clear(self, rank: Rank) -> None:
        self.index.clear(rank)
        self.held[rank] = {tier: set() for tier in Tier}
        self.predicted[rank] = {}
        self.swept = False

    @rule(max_entries=st.integers(1, 400))
    def sweep_a_piece(self, max_entries: int) -> None:
        self.swept = not self.index.sweep(max_entries)

    @precondition(lambda self: not self.swept)
    @rule(max_entries=st.integers(50, 400))
    def sweep_all(self, max_entries: int) -> None:
        while self.index.sweep(max_entries):
            pass
        self.swept = True

    @rule(rank=ranks, chain=chains, length=lengths, lasts=st.integers(0, 4))
    def predict(self, rank: Rank, chain: list[int], length: int, lasts: int) -> None:
        prompt = chain[:length]
        held = self.held[rank][Tier.DEVICE]
        # Where the chain has a hole, `match` may find another one of its ends: it looks for all ranks at once.
        groups = walk(lambda block, _default: int(block in held), prompt, 0, 1) if prompt else []
        first = groups[0][0] if groups else 0
        self.index.predict(rank, prompt, self.now + lasts)
        for block in prompt[first:]:
            self.predicted[rank][block] = max(self.predicted[rank].get(block, 0), self.now + lasts)

    @rule(elapsed=st.integers(0, 3))
    def expire(self, elapsed: int) -> None:
        self.now += elapsed
        self.index.expire(self.now)
        for rank, ends in self.predicted.items():
            self.predicted[rank] = {block: end for block, end in ends.items() if end > self.now}

    @rule(chain=chains, length=lengths)
    def match_a_part(self, chain: list[int], length: int) -> None:
        self.check(chain[:length])

    @invariant()
    def every_chain_matches(self) -> None:
        self.check(*CHAINS)

    def check(self, *prompts: list[int]) -> None:
        levels = {rank: list(self.levels(rank)) for rank in PLACES}
        for prompt in prompts:
            self.check_prompt(prompt, levels)

    def check_prompt(self, prompt: list[int], levels: Mapping[Rank, list[set[int]]]) -> None:
        matches = self.index.match(prompt)
        for rank in PLACES:
            match = matches.get(rank)
            assert match is None or match.num_blocks > 0
            for count, blocks in zip(reaches(match or Match()), levels[rank], strict=True):
                assert count >= leading(prompt, blocks)
                assert count == 0 or prompt[count - 1] in blocks
                assert count == len(prompt) or prompt[count] not in blocks
        lower = matches.lower_tokens(10)
        assert lower == {
            rank: (10 * match.num_host_blocks, 10 * match.num_disk_blocks)
            for rank, match in matches.items()
            if match.num_host_blocks or match.num_disk_blocks
        }
        in_order = [match.num_blocks for match in matches.values()]
        assert in_order == sorted(in_order, reverse=True)
        assert len(in_order) == len(matches) == len(set(matches))

    def levels(self, rank: Rank) -> Iterator[set[int]]:
        """What is on the device, what is there or predicted, what is in host memory too, and what on disk."""
        held = self.held[rank]
        parts = [held[Tier.DEVICE], set(self.predicted[rank]), held[Tier.HOST], held[Tier.DISK]]
        for num_parts in range(1, len(parts) + 1):
            yield reduce(set.union, parts[:num_parts], set())

    @precondition(lambda self: self.swept)
    @invariant()
    def nothing_is_kept_that_nobody_has(self) -> None:
        for tier in Tier:
            assert self.index.num_blocks(tier) == len(set().union(*(held[tier] for held in self.held.values())))
        assert self.index.num_predicted_blocks == len(set().union(*self.predicted.values()))


def leading(prompt: list[int], blocks: set[int]) -> int:
    return next((index for index, block in enumerate(prompt) if block not in blocks), len(prompt))


def reaches(match: Match) -> Iterator[int]:
    """Where each kind of block ends."""
    yield match.num_device_blocks
    yield match.num_device_blocks + match.num_predicted_blocks
    yield match.num_blocks - match.num_disk_blocks
    yield match.num_blocks


TestPrefixIndex = IndexMachine.TestCase
TestPrefixIndex.settings = settings(stateful_step_count=30)
