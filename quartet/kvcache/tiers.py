"""The tiers below the device: which block lies where, what goes down, and what comes back. Pure, as the block pool.

Blocks that the device's pool evicts go to *slots* in host memory, and the coldest of those to disk. A block is named by
its chain digest here, so that crafted collisions of public hashes share nothing. What comes back is copied: the lower
tier keeps the block, and has nothing to do when the device evicts it again.

In each tier a block is *cached* (idle), *in use* (a load reads it, or its content is on its way in) or *held* (it is
being written to the next tier); with the free ones they add up to the tier. Only cached blocks are evicted, the least
recently used first.

An evicted block has its slot at once and is copied later: before a step or a transfer writes to the device's block,
where its content is until then. The caller moves the bytes: ``saves`` and ``writes`` say which, ``find`` and
``begin_load`` what a request can use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from quartet.events.kv import Tier
from quartet.kvcache.block_hash import chain_digest
from quartet.kvcache.block_pool import BlockCounts, EventLog, EvictedBlock

# Of blocks that went through a tier, the counts of so many times its blocks are remembered.
_NUM_COUNTED = 8
# Threads that load, or write, of a tier that bounds no transfers.
_NUM_THREADS = 4
# Of the coldest blocks of the host, at most so many, and at most a quarter, are written to disk before they must go.
_MAX_CLEAN_BLOCKS = 256


class OffloadPolicy(StrEnum):
    """Which of the blocks that leave a tier go to the next one."""

    PASS_ALL = "pass_all"  # all, also those that are there already
    PRESENCE = "presence"  # those that are not there
    PRESENCE_LFU = "presence_lfu"  # of those, the ones that were used more than ``min_lfu_count`` times


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """The size of a tier, and what comes to it from the tier above.

    Attributes:
        max_concurrent_transfers: batches on their way down at a time; what comes to the host when there are as many is
            lost. ``None``: to the host, all that steps and transfers overwrite, and four at a time of all else.
        max_batch_size: blocks of one.
    """

    num_blocks: int
    policy: OffloadPolicy = OffloadPolicy.PRESENCE
    min_lfu_count: int = 1
    max_concurrent_transfers: int | None = None
    max_batch_size: int = 16

    @property
    def num_threads(self) -> int:
        """Batches on their way at a time that nobody waits for, or that are on their way up."""
        return _NUM_THREADS if self.max_concurrent_transfers is None else self.max_concurrent_transfers


@dataclass(frozen=True, slots=True)
class BlockName:
    """What names a block outside the device's pool, as in ``EvictedBlock``."""

    digest: bytes
    parent_digest: bytes
    sequence_hash: int
    parent_hash: int | None


@dataclass(eq=False, slots=True)
class TierBlock:
    """A block of one tier.

    Attributes:
        slot: where it lies in its tier, from 0.
        source: the device's block that has the content, which was not copied yet; ``None``: it is in the slot, or on
            its way there.
        is_whole: the slot has the content, too.
        num_readers: loads that read it, or are about to.
        is_arriving: its content comes from the next tier.
        is_stuck: what reads it, or brings it, takes so long that nobody waits for it.
        is_leaving: it is being written to the next tier.
        is_known: events have said that it is here.
        was_written: on the host: it was written to disk, or came from there.
    """

    name: BlockName
    tier: Tier
    slot: int
    source: int | None = None
    is_whole: bool = False
    num_readers: int = 0
    is_arriving: bool = False
    is_stuck: bool = False
    is_leaving: bool = False
    is_known: bool = False
    was_written: bool = False

    @property
    def is_in_use(self) -> bool:
        """Whether a load has to do with it."""
        return self.num_readers > 0 or self.is_arriving

    @property
    def is_busy(self) -> bool:
        """Whether it must stay where it is."""
        return self.is_in_use or self.is_leaving


@dataclass(frozen=True)
class LoadedBlock:
    """A block on its way to the device: from ``host``; from ``disk`` through ``host``, if that is given."""

    host: TierBlock
    disk: TierBlock | None = None


@dataclass(frozen=True)
class DiskWrite:
    """Blocks to write from their slots of the host to disk, after files of the blocks ``removed`` are deleted."""

    blocks: Sequence[TierBlock]
    removed: Sequence[bytes]


@dataclass
class TierTotals:
    """What a tier has counted since the start: blocks that came down to it, that were read from it, and that were lost.

    Attributes:
        num_dropped: blocks that should have come here, and there was no room, or too much was on its way.
        num_failed: reads or writes that failed.
    """

    num_stored: int = 0
    num_loaded: int = 0
    num_dropped: int = 0
    num_failed: int = 0


class TierTable:
    """The blocks of one tier by digest."""

    def __init__(self, tier: Tier, num_blocks: int, on_drop: Callable[[TierBlock], None]) -> None:
        """All slots are free; ``on_drop`` is called with each block that leaves the tier."""
        self.tier = tier
        self.num_blocks = num_blocks
        self.totals = TierTotals()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._unused: OrderedDict[bytes, TierBlock] = OrderedDict()  # least recently used first, held ones too
        self._in_use: dict[bytes, TierBlock] = {}
        self._leaving: dict[bytes, TierBlock] = {}
        self._on_drop = on_drop

    def __len__(self) -> int:
        return len(self._unused) + len(self._in_use)

    def __iter__(self) -> Iterator[TierBlock]:
        yield from self._unused.values()
        yield from self._in_use.values()

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in which state, now."""
        num_held = self._num_held
        return BlockCounts(len(self._free), len(self._unused) - num_held, num_held, len(self._in_use), self.num_blocks)

    @property
    def num_available(self) -> int:
        """Slots that a new block could have."""
        return len(self._free) + len(self._unused) - self._num_held

    def coldest(self, num_slots: int) -> list[TierBlock]:
        """Blocks whose slots are the next to be given away, after free ones and those of held blocks; of so many."""
        num_blocks = max(0, num_slots - len(self._free) - len(self._leaving))
        return list(islice((block for block in self._unused.values() if not block.is_leaving), num_blocks))

    def get(self, digest: bytes) -> TierBlock | None:
        """The block of that name, arriving ones included."""
        return self._unused.get(digest) or self._in_use.get(digest)

    def touch(self, digest: bytes) -> TierBlock | None:
        """``get``; it is the most recently used one now."""
        if digest in self._unused:
            self._unused.move_to_end(digest)
        return self.get(digest)

    def reserve(self, name: BlockName) -> TierBlock | None:
        """A slot for a block that is not here, empty or the least recently used one's; ``None``: all must stay."""
        if not self._free:
            coldest = next((block for block in self._unused.values() if not block.is_leaving), None)
            if coldest is None:
                return None
            self.drop(coldest)
        block = self._unused[name.digest] = TierBlock(name, self.tier, self._free.pop())
        return block

    def drop(self, block: TierBlock) -> None:
        """Empty its slot."""
        for blocks in (self._unused, self._in_use, self._leaving):
            blocks.pop(block.name.digest, None)
        self._free.append(block.slot)
        self._on_drop(block)

    def settle(self, block: TierBlock) -> None:
        """Its state may have changed. Once it is not in use any more, it is the most recently used one."""
        digest = block.name.digest
        if block.is_leaving:
            self._leaving[digest] = block
        else:
            self._leaving.pop(digest, None)
        if block.is_in_use:
            self._unused.pop(digest, None)
            self._in_use[digest] = block
        elif self._in_use.pop(digest, None) is not None:
            self._unused[digest] = block

    @property
    def _num_held(self) -> int:
        return sum(not block.is_in_use for block in self._leaving.values())


class LowerTiers:
    """Host memory and disk below one device's pool.

    Attributes:
        log: notes what becomes of blocks on every tier; the device's pool writes there, too.
        pending: blocks whose content is still in the device's block that is the key.
    """

    def __init__(self, host: TierPlan, disk: TierPlan | None = None) -> None:
        """All tiers are empty; without ``disk`` there is the host's only."""
        self.log = EventLog()
        self.pending: dict[int, TierBlock] = {}
        self.host = TierTable(Tier.HOST, host.num_blocks, self._leave_host)
        self.disk = TierTable(Tier.DISK, 0 if disk is None else disk.num_blocks, self._leave_disk)
        self.host_plan, self.disk_plan = host, disk
        plans = [plan for plan in (host, disk) if plan is not None]
        self._counts_uses = any(plan.policy is OffloadPolicy.PRESENCE_LFU for plan in plans)
        self._num_counted = _NUM_COUNTED * sum(plan.num_blocks for plan in plans)
        self._num_uses: OrderedDict[bytes, int] = OrderedDict()
        self._removed: list[bytes] = []
        self._being_removed: set[bytes] = set()  # files that writes under way delete
        self._num_clean = max(1, min(_MAX_CLEAN_BLOCKS, host.num_blocks // 4))
        self._has_news = False

    @property
    def has_blocks(self) -> bool:
        """Whether there is anything to find."""
        return bool(len(self.host) or len(self.disk))

    @property
    def counts(self) -> dict[Tier, BlockCounts]:
        """How many blocks of each tier are in which state, now."""
        counts = {Tier.HOST: self.host.counts}
        return counts if self.disk_plan is None else {**counts, Tier.DISK: self.disk.counts}

    def restore(self, names: Iterable[BlockName]) -> list[bytes]:
        """These blocks are on disk, the least recently used first; returns those for which there is no room."""
        for name in names:
            self.disk.reserve(name)
        # The log follows chains, so that they are few events.
        for block in _parents_first(list(self.disk)):
            self._announce(block)
        removed, self._removed = self._removed, []
        return removed

    def take(self, evicted: Sequence[EvictedBlock]) -> None:
        """The device evicted these, in this order: each is stored here before it is removed there, or lost.

        If there is no room for all, those that were evicted last stay: they come before the others in their sequences.
        """
        rewrites = self.host_plan.policy is OffloadPolicy.PASS_ALL
        # Those that are here stay, whatever else comes.
        num_room = self.host.num_available - sum(self.host.touch(block.digest) is not None for block in evicted)
        wanted = {block.digest for block in evicted if self._is_wanted(block)}
        new = [block for block in evicted if block.digest in wanted and self.host.get(block.digest) is None]
        lost = {block.digest for block in new[: max(0, len(new) - max(0, num_room))]}
        self.host.totals.num_dropped += len(lost)
        stored: list[TierBlock] = []
        for block in evicted:
            found = self.host.touch(block.digest)
            if found is None and block.digest in wanted and block.digest not in lost:
                found = self.host.reserve(_name(block))
                assert found is not None, "there is room"
                stored.append(found)
            elif found is None or found.is_busy or not rewrites:
                continue
            if found.source is None:
                found.source = block.block_id
                self.pending[block.block_id] = found
        for found in reversed(stored):
            self._announce(found)
        self._has_news = True

    def saves(self, written: Iterable[int], max_others: int) -> tuple[list[TierBlock], list[TierBlock]]:
        """Blocks to copy from their ``source`` now: those whose source is in ``written``, and ``max_others`` others.

        ``written``: blocks of the device that the next step or transfer writes to. All that are not ``saved`` before
        it begins have to be ``lose``-d.
        """
        urgent = [self.pending[block_id] for block_id in dict.fromkeys(written) if block_id in self.pending]
        known = set(map(id, urgent))
        others = (block for block in self.pending.values() if id(block) not in known)
        return urgent, list(islice(others, max_others))

    def evicted_last(self, blocks: Sequence[TierBlock], num_blocks: int) -> Sequence[TierBlock]:
        """Of pending ``blocks``, those that the device evicted last, so many."""
        if num_blocks >= len(blocks):
            return blocks
        asked = set(map(id, blocks))
        return list(islice((block for block in reversed(self.pending.values()) if id(block) in asked), num_blocks))

    def saved(self, blocks: Iterable[TierBlock]) -> None:
        """They are copied, or copied before anything that is begun from now on reads slots or writes sources."""
        for block in blocks:
            assert block.source is not None, "its content is on the device"
            del self.pending[block.source]
            block.source, block.is_whole = None, True
            self.host.totals.num_stored += 1
        self._has_news = True

    def lose(self, blocks: Iterable[TierBlock]) -> None:
        """There is no time to copy them: what the host had before stays."""
        for block in blocks:
            assert not block.is_busy, "what is to be loaded is saved"
            if block.is_whole and block.source is not None:
                del self.pending[block.source]
                block.source = None
                continue
            self.host.totals.num_dropped += 1
            self.host.drop(block)

    def find(self, digest: bytes, contents: Iterable[bytes]) -> list[TierBlock]:
        """The longest run of blocks with ``contents`` that follow the block ``digest``, each from its fastest tier.

        They stay until they were given to ``begin_load`` or ``release``.
        """
        found = list(self._run(digest, contents))
        for block in found:
            block.num_readers += 1
            self._count(block.name.digest, 1)
            self._table(block).settle(block)
        return found

    def num_found(self, digest: bytes, contents: Iterable[bytes]) -> int:
        """How many ``find`` would find, now."""
        return sum(1 for _ in self._run(digest, contents))

    def is_loading(self, digest: bytes) -> bool:
        """Whether a load reads that block, and is worth waiting for."""
        block = self.host.get(digest) or self.disk.get(digest)  # one on the host may just be on its way to disk, too
        return block is not None and not block.is_stuck and (block.num_readers > 0 or block.is_arriving)

    def release(self, blocks: Sequence[TierBlock]) -> None:
        """What was found, and is not loaded or was."""
        for block in reversed(blocks):  # the first of a sequence is the most recently used one
            block.num_readers -= 1
            self._table(block).settle(block)
        self._has_news = True

    def begin_load(self, found: Sequence[TierBlock]) -> list[LoadedBlock]:
        """As many of the first of ``found`` as can be loaded; releases the others. Those on disk need a slot here."""
        loaded: list[LoadedBlock] = []
        for block in found:
            if block.tier is Tier.HOST:
                loaded.append(LoadedBlock(block))
                continue
            if self.host.get(block.name.digest) is not None:
                break  # it came meanwhile, or is on its way
            host = self.host.reserve(block.name)
            if host is None:
                break
            host.is_arriving = host.was_written = True
            self.host.settle(host)
            loaded.append(LoadedBlock(host, block))
        self.release(found[len(loaded) :])
        return loaded

    def give_up(self, loaded: Sequence[LoadedBlock]) -> None:
        """Nobody waits for these any more. They stay where they are until ``end_load``."""
        for item in loaded:
            item.host.is_stuck = True

    def end_load(self, loaded: Sequence[LoadedBlock], is_good: Sequence[bool]) -> None:
        """The bytes of each came, or did not: then the block is gone."""
        for item, came in zip(reversed(loaded), reversed(is_good), strict=True):
            host, disk = item.host, item.disk
            host.is_stuck = False
            self._table(disk or host).totals.num_loaded += came
            self._table(disk or host).totals.num_failed += not came
            if disk is None:
                host.num_readers -= 1
                self.host.settle(host)
                continue
            host.is_arriving, host.is_whole = False, came
            self.host.settle(host)
            disk.num_readers -= 1
            self.disk.settle(disk)
            if not came:
                self.host.drop(host)
                if not disk.is_busy:
                    self.disk.drop(disk)
        for item, came in zip(loaded, is_good, strict=True):
            if came:
                self._announce(item.host)
        self._has_news = True

    def writes(self) -> DiskWrite | None:
        """A batch to write to disk now, of the host's coldest blocks; ``None``: none has to."""
        if self.disk_plan is None or not self._has_news:
            return None
        batch: list[TierBlock] = []
        for block in self.host.coldest(self._num_clean):
            if len(batch) == self.disk_plan.max_batch_size:
                break
            if block.source is not None or block.name.digest in self._being_removed:
                continue
            if not self._is_wanted_on_disk(block):
                continue
            file = self.disk.get(block.name.digest) or self.disk.reserve(block.name)
            if file is None:
                break
            if not file.is_busy:
                file.is_arriving = True
                self.disk.settle(file)
                batch.append(block)
        self._has_news = bool(batch)
        if not batch and not self._removed:
            return None
        for block in batch:
            block.is_leaving = block.was_written = True
            self.host.settle(block)
        removed, self._removed = self._removed, []
        self._being_removed.update(removed)
        return DiskWrite(batch, removed)

    def end_write(self, write: DiskWrite, is_good: Sequence[bool]) -> None:
        """Each block was written, or was not: then it is on the host only."""
        self._being_removed.difference_update(write.removed)
        for block, is_written in zip(reversed(write.blocks), reversed(is_good), strict=True):
            block.is_leaving = False
            self.host.settle(block)
            file = self.disk.get(block.name.digest)
            assert file is not None, "its place is kept"
            file.is_arriving = False
            self.disk.settle(file)
            if is_written:
                self.disk.totals.num_stored += 1
                self._announce(file)
            else:
                self.disk.totals.num_failed += 1
                self.disk.drop(file)
        self._has_news = True

    def _run(self, digest: bytes, contents: Iterable[bytes]) -> Iterator[TierBlock]:
        for content in contents:
            digest = chain_digest(digest, content)
            block = self.host.get(digest) or self.disk.get(digest)
            if block is None or block.is_arriving:
                return
            yield block

    def _announce(self, block: TierBlock) -> None:
        if not block.is_known:
            block.is_known = True
            self.log.store(block.name.sequence_hash, block.name.parent_hash, block.tier)

    def _leave_host(self, block: TierBlock) -> None:
        if block.source is not None:
            del self.pending[block.source]
        self._retract(block)

    def _leave_disk(self, block: TierBlock) -> None:
        self._removed.append(block.name.digest)
        self._retract(block)

    def _retract(self, block: TierBlock) -> None:
        if block.is_known:
            self.log.remove(block.name.sequence_hash, block.tier)

    def _is_wanted(self, block: EvictedBlock) -> bool:
        num_uses = self._count(block.digest, block.num_uses)
        return self.host_plan.policy is not OffloadPolicy.PRESENCE_LFU or num_uses > self.host_plan.min_lfu_count

    def _is_wanted_on_disk(self, block: TierBlock) -> bool:
        assert self.disk_plan is not None, "there is a disk"
        if self.disk_plan.policy is OffloadPolicy.PASS_ALL:
            return not block.was_written
        if self.disk.get(block.name.digest) is not None:
            return False
        is_counted = self.disk_plan.policy is OffloadPolicy.PRESENCE_LFU
        return not is_counted or self._num_uses.get(block.name.digest, 0) > self.disk_plan.min_lfu_count

    def _count(self, digest: bytes, num_uses: int) -> int:
        """The block was used so many times more; returns how often in all, as far as it is remembered."""
        if not self._counts_uses:
            return num_uses
        num_uses += self._num_uses.pop(digest, 0)
        self._num_uses[digest] = num_uses
        if len(self._num_uses) > self._num_counted:
            self._num_uses.popitem(last=False)
        return num_uses

    def _table(self, block: TierBlock) -> TierTable:
        return self.host if block.tier is Tier.HOST else self.disk


def _name(block: EvictedBlock) -> BlockName:
    return BlockName(block.digest, block.parent_digest, block.sequence_hash, block.parent_hash)


def _parents_first(blocks: Sequence[TierBlock]) -> list[TierBlock]:
    """``blocks``, each after the one before it in its sequence, if that is there, and at once where possible."""
    left = {block.name.digest: block for block in blocks}
    ordered: list[TierBlock] = []
    for block in blocks:
        chain: list[TierBlock] = []
        digest = block.name.digest
        while digest in left:
            chain.append(left.pop(digest))
            digest = chain[-1].name.parent_digest
        ordered += reversed(chain)
    return ordered
