"""The block pool with tiers below it against a naive model that moves contents, in any order of calls.

The model writes down what lies in each block of the device, slot of the host and file: all tokens up to the block's
last one. Whatever the tables believe, a wrong copy, a slot given out too early or a block overwritten before it was
saved shows as wrong content.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TypeAlias

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quartet.errors import OutOfBlocksError
from quartet.events.kv import Tier
from quartet.kvcache.block_hash import ExtraKey, chain_digest
from quartet.kvcache.block_pool import BlockManager
from quartet.kvcache.retention import Retention, RetentionPlan, SessionId
from quartet.kvcache.sequence import Sequence
from quartet.kvcache.tiers import DiskWrite, LoadedBlock, LowerTiers, OffloadPolicy, TierBlock, TierPlan
from tests.kvcache.replica import TierReplica

NUM_BLOCKS, NUM_SLOTS, NUM_FILES = 6, 4, 6
BLOCK_SIZE = 2
#: Two branches of one sequence, and shorter parts of them: most requests meet what others left.
PROMPTS = st.builds(
    lambda num, total: [0] * num + [1] * (total - num), st.integers(2, 6), st.sampled_from([3, 7, 9, 9])
)
SALTS = st.sampled_from(["", "", "", "salt"])

Content: TypeAlias = tuple[ExtraKey, tuple[int, ...]]  # all tokens up to the last one of the block


@dataclass(eq=False)
class Loading:
    """A load that was begun; its blocks were ``found`` by ``seq``."""

    seq: Sequence
    loaded: list[LoadedBlock]
    targets: list[int]


class TiersMachine(RuleBasedStateMachine):
    @initialize(
        host=st.sampled_from(OffloadPolicy),
        disk=st.sampled_from([None, *OffloadPolicy]),
        batch=st.integers(1, 3),
    )
    def begin(self, host: OffloadPolicy, disk: OffloadPolicy | None, batch: int) -> None:
        self.plans = (
            TierPlan(num_blocks=NUM_SLOTS, policy=host, max_batch_size=batch),
            None if disk is None else TierPlan(num_blocks=NUM_FILES, policy=disk, max_batch_size=batch),
        )
        self.files: dict[bytes, Content | None] = {}  # ``None``: damaged
        self.start()

    def start(self) -> None:
        self.lower = LowerTiers(*self.plans)
        self.now_s = 0.0
        retention = Retention(RetentionPlan(ttl_s=10.0), NUM_BLOCKS, lambda: self.now_s)
        self.pool = BlockManager(NUM_BLOCKS, BLOCK_SIZE, lower=self.lower, retention=retention)
        self.replica = TierReplica()
        self.device: list[Content | None] = [None] * NUM_BLOCKS
        self.slots: list[Content | None] = [None] * NUM_SLOTS
        self.running: list[Sequence] = []
        self.loading: list[Loading] = []
        self.writing: list[tuple[DiskWrite, list[Content | None]]] = []

    @precondition(lambda self: self.files)
    @rule(is_certain=st.integers(0, 3))
    def restart(self, is_certain: int) -> None:
        """The process ends, in the middle of whatever it did; its files are there."""
        if is_certain:
            return
        known = {block.name.digest: block.name for block in self.lower.disk if not block.is_arriving}
        names = [known[digest] for digest in self.files if digest in known]
        self.files = {name.digest: self.files[name.digest] for name in names}
        self.start()
        self.delete(self.lower.restore(names))
        self.replica.apply(self.pool.take_events(), is_start=True)
        assert len(self.lower.disk) == len(names)

    @rule(token_ids=PROMPTS, salt=SALTS, loads=st.booleans())
    def arrive(self, token_ids: list[int], salt: str, loads: bool) -> None:
        self.admit(Sequence(token_ids, block_size=BLOCK_SIZE, extra_key=ExtraKey(cache_salt=salt)), loads=loads)

    @rule(prompts=st.lists(st.tuples(PROMPTS, SALTS), min_size=1, max_size=3), writes=st.booleans())
    def answer(self, prompts: list[tuple[list[int], str]], writes: bool) -> None:
        """Requests from their arrival to their end, one after the other; the disk may keep up with them."""
        for token_ids, salt in prompts:
            seq = Sequence(token_ids, block_size=BLOCK_SIZE, extra_key=ExtraKey(cache_salt=salt))
            self.admit(seq, loads=True)
            for load in [load for load in self.loading if load.seq is seq]:
                self.finish(load)
            if seq.block_table:
                self.compute_tokens(seq, len(seq))
                self.running.remove(seq)
                self.pool.free(seq)
            while writes and self.begin_writing():
                self.finish_writing(-1)

    def admit(self, seq: Sequence, *, loads: bool) -> None:
        try:
            num_cached = self.pool.allocate(seq, looks_below=True)
        except OutOfBlocksError:
            assert not seq.blocks_below
            return
        for index in range(num_cached // BLOCK_SIZE):
            assert self.device[seq.block_table[index]] == content_of(seq, index)
        found, seq.blocks_below = seq.blocks_below, ()
        for number, block in enumerate(found, num_cached // BLOCK_SIZE):
            is_damaged = block.tier is Tier.DISK and self.where(block) is None
            assert is_damaged or self.where(block) == content_of(seq, number)
        if found and loads:
            self.load(seq, found)
        else:
            self.lower.release(found)
            self.running.append(seq)

    def load(self, seq: Sequence, found: Items[TierBlock]) -> None:
        first = seq.num_computed_tokens // BLOCK_SIZE
        targets = seq.block_table[first : first + len(found)]
        self.save(targets, needed=[block for block in found if block.source is not None])
        loaded = self.lower.begin_load(found)
        assert [item.host.name.digest for item in loaded] == [block.name.digest for block in found[: len(loaded)]]
        self.loading.append(Loading(seq, loaded, targets))

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), fails=st.booleans())
    def end_load(self, data: st.DataObject, fails: bool) -> None:
        self.finish(data.draw(st.sampled_from(self.loading)), fails=fails)

    def finish(self, load: Loading, *, fails: bool = False) -> None:
        self.loading.remove(load)
        good = []
        for item in load.loaded:
            if item.disk is not None:
                content = self.files.get(item.disk.name.digest)
                self.slots[item.host.slot] = content
                good.append(content is not None and not (fails and item is load.loaded[-1]))
                if not good[-1]:
                    self.files.pop(item.disk.name.digest, None)
            else:
                good.append(True)
        num_good = good.index(False) if False in good else len(good)
        for item, target in zip(load.loaded[:num_good], load.targets, strict=False):
            self.device[target] = self.slots[item.host.slot]
        self.lower.end_load(load.loaded, good)
        load.seq.num_computed_tokens += num_good * BLOCK_SIZE
        self.pool.commit(load.seq)
        for index in range(load.seq.num_computed_tokens // BLOCK_SIZE):
            assert self.device[load.seq.block_table[index]] == content_of(load.seq, index)
        self.running.append(load.seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 9), others=st.integers(0, 2), is_late=st.booleans())
    def compute(self, data: st.DataObject, num_tokens: int, others: int, is_late: bool) -> None:
        self.compute_tokens(data.draw(st.sampled_from(self.running)), num_tokens, others=others, is_late=is_late)

    def compute_tokens(self, seq: Sequence, num_tokens: int, *, others: int = 0, is_late: bool = False) -> None:
        end = min(len(seq), seq.num_computed_tokens + num_tokens)
        written = seq.block_table[seq.num_computed_tokens // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
        self.save(written, others=others, loses=is_late)
        for index in range(seq.num_computed_tokens // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            is_full = end >= (index + 1) * BLOCK_SIZE
            self.device[seq.block_table[index]] = content_of(seq, index) if is_full else None
        seq.num_computed_tokens = end
        self.pool.commit(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), session=st.sampled_from(["", "1", "2"]), seconds=st.sampled_from([0, 6]))
    def end(self, data: st.DataObject, session: str, seconds: int) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.running.remove(running)
        self.now_s += seconds
        if session:
            self.pool.retain(running, SessionId("", "", session))
        self.pool.free(running)

    @rule()
    def begin_write(self) -> None:
        self.begin_writing()

    def begin_writing(self) -> bool:
        write = self.lower.writes()
        if write is None:
            return False
        self.delete(write.removed)
        self.writing.append((write, [self.slots[block.slot] for block in write.blocks]))
        return True

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        self.finish_writing(data.draw(st.integers(0, len(self.writing) - 1)), fails=data.draw(st.booleans()))

    def finish_writing(self, number: int, *, fails: bool = False) -> None:
        write, contents = self.writing.pop(number)
        good = [not (fails and block is write.blocks[-1]) for block in write.blocks]
        for block, content, is_good in zip(write.blocks, contents, good, strict=True):
            assert self.slots[block.slot] == content, "a slot changed while it was written"
            self.files.pop(block.name.digest, None)
            if is_good:
                self.files[block.name.digest] = content
        self.lower.end_write(write, good)

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        self.files[data.draw(st.sampled_from(sorted(self.files)))] = None

    def save(self, written: Items[int], *, others: int = 0, loses: bool = False, needed: Items[TierBlock] = ()) -> None:
        urgent, more = self.lower.saves(written, others)
        kept = [block for block in (*urgent, *more) if block not in needed and not (loses and block in urgent)]
        for block in (*needed, *kept):
            assert block.source is not None
            self.slots[block.slot] = self.device[block.source]
        self.lower.saved([*needed, *kept])
        self.lower.lose([block for block in urgent if block not in needed and block not in kept])
        assert not set(written) & self.lower.pending.keys()

    def delete(self, digests: Items[bytes]) -> None:
        for digest in digests:
            self.files.pop(digest, None)

    def where(self, block: TierBlock) -> Content | None:
        if block.tier is Tier.DISK:
            return self.files.get(block.name.digest)
        return self.slots[block.slot] if block.source is None else self.device[block.source]

    @invariant()
    def states_add_up(self) -> None:
        for counts in (self.pool.counts, *self.lower.counts.values()):
            assert counts.free + counts.cached + counts.held + counts.in_use == counts.total
            assert min(counts.free, counts.cached, counts.held, counts.in_use) >= 0
        host, disk = self.lower.host.counts, self.lower.disk.counts
        reading = {item.host for load in self.loading for item in load.loaded}
        leaving = {block for write, _ in self.writing for block in write.blocks}
        assert host.in_use == len(reading)
        assert host.held == len(leaving - reading)
        from_disk = {item.disk for load in self.loading for item in load.loaded if item.disk is not None}
        assert disk.in_use == len(from_disk) + len(leaving)
        assert (disk.held, disk.total) == (0, 0 if self.plans[1] is None else NUM_FILES)

    @invariant()
    def every_block_is_where_its_tier_says(self) -> None:
        for block in (block for block in self.lower.host if not block.is_arriving):
            assert self.where(block) is not None
            assert digest_of(self.where(block)) == block.name.digest
        for block in (block for block in self.lower.disk if not block.is_busy):
            assert block.name.digest in self.files
            content = self.files[block.name.digest]
            assert content is None or digest_of(content) == block.name.digest

    @invariant()
    def a_subscriber_to_the_events_knows_the_blocks_of_every_tier(self) -> None:
        self.replica.apply(self.pool.take_events())
        host = [block for block in self.lower.host if block.is_known]
        disk = [block for block in self.lower.disk if block.is_known]
        assert set(self.replica.tables[Tier.HOST]) == {block.name.sequence_hash for block in host}
        assert set(self.replica.tables[Tier.DISK]) == {block.name.sequence_hash for block in disk}
        named = {self.pool.sequence_hash(block) for block in range(NUM_BLOCKS)} - {None}
        assert set(self.replica.tables[Tier.DEVICE]) == named
        snapshot = {Tier.DEVICE: self.pool.stored_blocks(), **self.pool.stored_below()}
        for tier, table in self.replica.tables.items():
            assert snapshot.get(tier, {}) == table


def content_of(seq: Sequence, index: int) -> Content:
    return seq.extra_key, tuple(seq.token_ids[: (index + 1) * BLOCK_SIZE])


def digest_of(content: Content | None) -> bytes:
    assert content is not None
    extra_key, token_ids = content
    seq = Sequence([*token_ids, 0], block_size=BLOCK_SIZE, extra_key=extra_key)
    digest = extra_key.digest
    for index in range(len(token_ids) // BLOCK_SIZE):
        digest = chain_digest(digest, seq.block_content(index))
    return digest


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(stateful_step_count=50)
