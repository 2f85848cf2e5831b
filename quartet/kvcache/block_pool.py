"""The block pool: which sequence uses which KV block, and which full blocks can be shared instead of computed.

A block is *free* (empty), *cached* (its content is known, but it is not used), *held* (kept for a hand-off only) or
*in use* (by a running sequence); the four always add up to the pool.

A full block whose KV is computed gets a name: (parent's name, token ids and media), where the first block's parent is
the digest of the extra key. Names are compared by identity and content, never by a hash alone, so that a crafted
collision shares nothing. Two sequences that compute the same content at the same time share the name and each keep
their own copy of the block; later blocks of both go on from that one name, and when the block that bears it is given
up, a copy that is still used takes over. So a block that is used or held keeps all names before it alive, and the
least recently used cached block is always a leaf: blocks of a sequence are given back last one first. What sessions
retain (``quartet.kvcache.retention``) is evicted after what nobody retains.

Pure code without locks: all calls come from the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from quartet.errors import OutOfBlocksError
from quartet.events.kv import Cleared, Contents, KvEvent, Removed, Stored, Tier
from quartet.kvcache.block_hash import NO_EXTRA_KEY, ExtraKey, chain_digest
from quartet.kvcache.retention import Retention, SessionId
from quartet.kvcache.sequence import Sequence

if TYPE_CHECKING:
    from quartet.kvcache.tiers import LowerTiers


@dataclass(frozen=True)
class BlockCounts:
    """How many blocks are in which state; ``free + cached + held + in_use == total``."""

    free: int
    cached: int
    held: int
    in_use: int
    total: int


class BlockManager:
    """Hands out the blocks of one pool, shares equal prefixes, evicts the least recently used leaf."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        has_events: bool = False,
        tells_contents: bool = False,
        lower: LowerTiers | None = None,
        retention: Retention | None = None,
    ) -> None:
        """Manage blocks ``0 .. num_blocks - 1`` of ``block_size`` tokens each, all free.

        Args:
            num_blocks: of the pool.
            block_size: tokens of a block.
            has_events: take note of what can be shared, for ``take_events`` and ``stored_blocks``.
            tells_contents: events say what stored blocks hold, too.
            lower: the tiers to which evicted blocks go. Its events are among those of this pool, then.
            retention: keeps blocks of sessions longer than others; ``None``: the pool has no sessions.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        # Least recently used first; without those that the retention has put aside, which are cached, too.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_users = [0] * num_blocks
        self._num_holders = [0] * num_blocks
        self._num_held = 0
        self._num_in_use = 0
        self._held: dict[int, list[int]] = {}
        self._names: list[_Name | None] = [None] * num_blocks  # of a block's content; copies have it too
        self._by_key: dict[_Key, _Name] = {}
        self._copies: dict[_Name, set[int]] = {}
        self._lower = lower
        self._retention = retention
        self._log = lower.log if lower is not None else EventLog() if has_events else None
        # Public names of the blocks that were evicted last, oldest first; empty without events.
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self._tells_contents = tells_contents

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in which state, now."""
        num_cached = self.num_available - len(self._free)
        return BlockCounts(len(self._free), num_cached, self._num_held, self._num_in_use, self.num_blocks)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free and cached ones."""
        num_aside = 0 if self._retention is None else self._retention.num_aside
        return len(self._free) + len(self._cached) + num_aside

    @property
    def num_retained(self) -> int:
        """Blocks that sessions retain, in any state; those whose time has passed count until that is noticed."""
        return 0 if self._retention is None else self._retention.num_retained

    def sequence_hash(self, block_id: int) -> int | None:
        """The public name of a block that can be shared; ``None`` for one that cannot."""
        name = self._names[block_id]
        return name.sequence_hash if name is not None and name.block_id == block_id else None

    def allocate(self, seq: Sequence, *, shares: bool = True, looks_below: bool = False) -> int:
        """Give ``seq``, which has none, blocks for all its tokens, sharing its longest cached prefix.

        Args:
            seq: gets ``block_table``, and ``blocks_below`` if there are any.
            shares: false if it is to compute all its tokens itself.
            looks_below: find what lower tiers have of the blocks that follow, and keep that for ``seq``.

        Returns:
            Number of cached tokens: a multiple of the block size, and less than the tokens, because the last one
            must be computed to have logits.

        Raises:
            OutOfBlocksError: too few available blocks; nothing was changed.
        """
        assert not seq.block_table, "the sequence already has blocks"
        shared = self._cached_prefix(seq) if shares else []
        # Sharing a cached block, which no sequence uses yet, spends an available block too.
        num_spent = len(self._cached.keys() & shared)
        if self._retention is not None:
            num_spent += self._retention.num_aside_among(shared)
        self._check_available(seq.num_blocks - len(shared), self.num_available - num_spent)
        if self._lower is not None:
            # Before anything is evicted: what ``seq`` can use must not make room for what it displaces.
            self._look_below(self._lower, seq, shared, looks_below=looks_below)
        for block_id in shared:
            self._use(block_id)
        seq.block_table = shared + self._take(seq.num_blocks - len(shared))
        seq.num_named_blocks = len(shared)
        seq.num_computed_tokens = len(shared) * self.block_size
        return seq.num_computed_tokens

    def num_cached_tokens(self, seq: Sequence) -> int:
        """Tokens of ``seq`` that ``allocate`` would not have to compute, as things stand."""
        return len(self._cached_prefix(seq)) * self.block_size

    def num_evicted_tokens(self, seq: Sequence) -> int:
        """Tokens of ``seq`` that follow those that it shares, and whose blocks were evicted lately.

        As many evicted blocks are remembered as the pool has; none without ``has_events``.
        """
        first = index = seq.num_named_blocks
        if not self._evicted:
            return 0
        end = (len(seq) - 1) // self.block_size
        if index < end and seq.sequence_hash(index) in self._evicted:
            seq.sequence_hash(end - 1)  # all of them at once
        while index < end and seq.sequence_hash(index) in self._evicted:
            index += 1
        return (index - first) * self.block_size

    def awaits_load(self, seq: Sequence) -> bool:
        """Whether the block after the cached prefix of ``seq`` is being loaded from a lower tier."""
        if self._lower is None:
            return False
        shared = self._cached_prefix(seq)
        if len(shared) == (len(seq) - 1) // self.block_size:
            return False
        return self._lower.is_loading(chain_digest(self._digest_before(seq, shared), seq.block_content(len(shared))))

    def extend(self, seq: Sequence, num_tokens: int = 1) -> None:
        """Make room for ``num_tokens`` more tokens than ``seq`` has; the caller appends them afterwards.

        Raises:
            OutOfBlocksError: too few available blocks; nothing was changed.
        """
        num_new = -(-(len(seq) + num_tokens) // self.block_size) - len(seq.block_table)
        self._check_available(num_new, self.num_available)
        if num_new > 0:
            seq.block_table += self._take(num_new)

    def commit(self, seq: Sequence, num_tokens: int | None = None) -> None:
        """Name every full block whose KV is computed, so that others can share it.

        ``num_tokens`` says how many tokens count as computed where the sequence does not say so yet: a step that
        writes the KV of all its tokens before any is read lets them be shared from its start.

        Where an equal block already bears the name, ``seq`` keeps its own block as a copy, which is not shared.
        """
        first = seq.num_named_blocks
        end = (seq.num_computed_tokens if num_tokens is None else num_tokens) // self.block_size
        if end <= first:  # mostly: it decodes
            return
        seq.sequence_hash(end - 1)  # all of them at once
        parent = self._names[seq.block_table[first - 1]] if first else seq.extra_key.digest
        for index in range(first, end):
            assert parent is not None, "a block is named before the ones before it"
            parent = self._name(seq, index, parent)
        seq.num_named_blocks = end

    def retain(self, seq: Sequence, session: SessionId) -> None:
        """Evict what is named of ``seq`` after other blocks, as long as ``session`` lives: a request of it ends.

        Call it before ``free`` or ``hold``. Of more blocks than may be retained, the first ones are. Without a
        retention nothing happens.
        """
        if self._retention is None or not seq.num_named_blocks:
            return
        tail = self._names[seq.block_table[seq.num_named_blocks - 1]]
        assert tail is not None, "it is named"
        self._retention.retain(session, tail)

    def free(self, seq: Sequence) -> None:
        """Take back all blocks of ``seq``; shareable ones stay cached. May be called twice."""
        # Last one first: then the least recently used cached block never has a cached child.
        num_users, num_holders = self._num_users, self._num_holders
        for block_id in reversed(seq.block_table):
            num_users[block_id] -= 1
            if num_users[block_id]:
                continue
            self._num_in_use -= 1
            if num_holders[block_id]:
                self._num_held += 1
            else:
                self._retire(block_id)
        seq.block_table = []
        seq.num_named_blocks = 0
        seq.num_computed_tokens = 0

    def hold(self, seq: Sequence, holder: int) -> tuple[int, ...]:
        """Keep the computed blocks of ``seq`` until ``release(holder)`` and empty ``seq``; its others are freed.

        Held full blocks can be shared like any other. ``holder`` is unique among those that hold.

        Returns:
            The held blocks, in the order of the sequence, a partly filled last one included.
        """
        assert holder not in self._held, "this holder already holds blocks"
        held = seq.block_table[: -(-seq.num_computed_tokens // self.block_size)]
        for block_id in held:
            self._num_holders[block_id] += 1
        self._held[holder] = held
        self.free(seq)
        return tuple(held)

    def release(self, holder: int) -> None:
        """Let go of what ``holder`` holds; shareable blocks stay cached. Unknown holders are ignored."""
        for block_id in reversed(self._held.pop(holder, [])):
            self._num_holders[block_id] -= 1
            if not self._num_holders[block_id] and not self._num_users[block_id]:
                self._num_held -= 1
                self._retire(block_id)

    def take_events(self) -> list[KvEvent]:
        """What became or ceased to be shareable since the last call, in order; nothing without ``has_events``.

        A copy of what can be shared already is no event, nor is a copy that takes the name over.
        """
        return self._log.take() if self._log is not None else []

    def stored_blocks(self) -> dict[int, int | None]:
        """The public name of every block that can be shared, and that of the block before it, parents first.

        ``None`` stands before a sequence's first block. Empty without ``has_events``.
        """
        return self._log.parent_hashes() if self._log is not None else {}

    def stored_below(self) -> dict[Tier, dict[int, int | None]]:
        """The same of each lower tier that has blocks."""
        if self._lower is None:
            return {}
        return {tier: table for tier, table in self._lower.log.tables().items() if tier is not Tier.DEVICE}

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that say the same as the first blocks of ``seq``, without the block of its last token."""
        shared: list[int] = []
        parent: _Name | bytes = seq.extra_key.digest
        for index in range((len(seq) - 1) // self.block_size):
            name = self._by_key.get((parent, seq.block_content(index)))
            if name is None:
                break
            shared.append(name.block_id)
            parent = name
        return shared

    def _look_below(self, lower: LowerTiers, seq: Sequence, shared: list[int], *, looks_below: bool) -> None:
        for block_id in shared:
            name = self._names[block_id]
            assert name is not None, "a shared block has a name"
            name.num_uses += 1
        num_full = (len(seq) - 1) // self.block_size
        if looks_below and lower.has_blocks and len(shared) < num_full:
            contents = (seq.block_content(index) for index in range(len(shared), num_full))
            seq.blocks_below = lower.find(self._digest_before(seq, shared), contents)

    def _digest_before(self, seq: Sequence, shared: list[int]) -> bytes:
        """Digest of the last of the blocks that ``seq`` shares, or what stands for it before a first block."""
        name = self._names[shared[-1]] if shared else None
        return seq.extra_key.digest if name is None else _digest(name)

    def _check_available(self, num_wanted: int, num_available: int) -> None:
        if num_wanted > num_available:
            raise OutOfBlocksError(f"need {num_wanted} blocks, {num_available} of {self.num_blocks} are available")

    def _name(self, seq: Sequence, index: int, parent: _Name | bytes) -> _Name:
        """Name block ``index`` of ``seq``, or make it a copy of the one that bears its name."""
        block_id = seq.block_table[index]
        key = (parent, seq.block_content(index))
        name = self._by_key.get(key)
        if name is None:
            name = self._by_key[key] = _Name(key, seq.sequence_hash(index), block_id)
            if self._log is not None:
                parent_hash = parent.sequence_hash if isinstance(parent, _Name) else None
                if self._tells_contents:
                    self._log.store(name.sequence_hash, parent_hash, content=key[1], extra_key=seq.extra_key)
                else:
                    self._log.store(name.sequence_hash, parent_hash)
        elif not (self._num_users[name.block_id] or self._num_holders[name.block_id]):
            # That block may be evicted: if it kept the name, this sequence's later blocks would outlive their parent.
            self._take_cached(name.block_id)
            self._make_free(name.block_id)
            name.block_id = block_id
        else:
            self._copies.setdefault(name, set()).add(block_id)
        self._names[block_id] = name
        return name

    def _take(self, num_blocks: int) -> list[int]:
        """So many empty blocks, now in use; the least recently used cached ones where no more are free."""
        num_free = min(num_blocks, len(self._free))
        taken = self._free[len(self._free) - num_free :]
        del self._free[len(self._free) - num_free :]
        taken.reverse()
        if num_free < num_blocks:
            taken += self._evict(num_blocks - num_free)
        for block_id in taken:
            self._num_users[block_id] = 1
        self._num_in_use += num_blocks
        return taken

    def _evict(self, num_blocks: int) -> list[int]:
        """Empty the least recently used cached blocks, retained ones last; lower tiers may take them."""
        evicted: list[tuple[int, _Name]] = []
        if self._retention is not None:
            self._retention.expire()
        for _ in range(num_blocks):
            if self._retention is None:
                block_id, _ = self._cached.popitem(last=False)
            else:
                block_id = self._retention.next_victim(self._cached, self._names)
            name = self._names[block_id]
            assert name is not None, "a cached block has a name"
            del self._by_key[name.key]
            self._names[block_id] = None
            evicted.append((block_id, name))
        if self._lower is not None:
            self._lower.take([_to_evicted(block_id, name) for block_id, name in evicted])
        if self._log is not None:
            for _, name in evicted:
                self._log.remove(name.sequence_hash)
                self._evicted.pop(name.sequence_hash, None)  # it is the last one now
                self._evicted[name.sequence_hash] = None
            while len(self._evicted) > self.num_blocks:
                self._evicted.popitem(last=False)
        return [block_id for block_id, _ in evicted]

    def _use(self, block_id: int) -> None:
        if not self._num_users[block_id]:
            self._num_in_use += 1
            if self._num_holders[block_id]:
                self._num_held -= 1
            else:
                self._take_cached(block_id)
        self._num_users[block_id] += 1

    def _take_cached(self, block_id: int) -> None:
        """A cached block is one no more."""
        if block_id in self._cached:
            del self._cached[block_id]
        else:
            assert self._retention is not None, "only a retention puts blocks aside"
            self._retention.take_back(block_id)

    def _retire(self, block_id: int) -> None:
        """Put away a block that is neither used nor held any more."""
        name = self._names[block_id]
        if name is None:
            self._make_free(block_id)
        elif name in self._copies:
            self._retire_copy(block_id, name)
        else:
            self._cached[block_id] = None

    def _retire_copy(self, block_id: int, name: _Name) -> None:
        """Free one of several equal blocks; another, which is still used or held, bears the name from now on."""
        copies = self._copies[name]
        if name.block_id == block_id:
            name.block_id = copies.pop()
        else:
            copies.remove(block_id)
        if not copies:
            del self._copies[name]
        self._make_free(block_id)

    def _make_free(self, block_id: int) -> None:
        self._names[block_id] = None
        self._free.append(block_id)


class EventLog:
    """Notes the names that come to a cache, go and move: as few events since the last ``take``, and as a table a tier.

    Events carry the names' hashes. Several blocks or names may have one hash, as a salted and a plain block of equal
    tokens in TensorRT-LLM, or names whose XXH3 collides by intent: the hash is there while any of them is.
    """

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        # By tier; lists, because hashing an enum's member costs more than all else here.
        self._parents: list[dict[int, int | None]] = [{} for _ in Tier]
        self._num_more: list[dict[int, int]] = [{} for _ in Tier]  # of a hash: names beyond the first
        # What is being added to: hashes of the last event, if it is of this kind, and its tier.
        self._stored: list[int] | None = None
        self._removed: list[int] | None = None
        self._tier = Tier.DEVICE
        self._contents: list[bytes] | None = None

    def num_blocks(self, tier: Tier) -> int:
        """Hashes that are there."""
        return len(self._parents[tier])

    def store(
        self,
        sequence_hash: int,
        parent_hash: int | None,
        tier: Tier = Tier.DEVICE,
        *,
        content: bytes | None = None,
        extra_key: ExtraKey = NO_EXTRA_KEY,
    ) -> None:
        """A name came, or came to that tier; its block follows the one with ``parent_hash``.

        ``content`` is what the block says, as ``Contents`` has it, with the extra key of its sequence; ``None``: it is
        not told.
        """
        parents = self._parents[tier]
        if sequence_hash in parents:
            num_more = self._num_more[tier]
            num_more[sequence_hash] = num_more.get(sequence_hash, 0) + 1
            return
        parents[sequence_hash] = parent_hash
        contents = self._contents
        if (
            self._stored is not None
            and self._stored[-1] == parent_hash
            and self._tier is tier
            and (contents is None) is (content is None)
        ):
            self._stored.append(sequence_hash)
            if contents is not None and content is not None:
                contents.append(content)
            return
        self._stored, self._removed, self._tier = [sequence_hash], None, tier
        self._contents = None if content is None else [content]
        told = None if self._contents is None else Contents(self._contents, extra_key.adapter, extra_key.cache_salt)
        self._events.append(Stored(parent_hash, self._stored, tier, told))

    def remove(self, sequence_hash: int, tier: Tier = Tier.DEVICE) -> None:
        """A name that is there went."""
        num_more = self._num_more[tier]
        if sequence_hash in num_more:
            num_more[sequence_hash] -= 1
            if not num_more[sequence_hash]:
                del num_more[sequence_hash]
            return
        del self._parents[tier][sequence_hash]
        if self._removed is not None and self._tier is tier:
            self._removed.append(sequence_hash)
            return
        self._stored, self._removed, self._tier = None, [sequence_hash], tier
        self._events.append(Removed(self._removed, tier))

    def move(self, sequence_hash: int, old: Tier, new: Tier) -> None:
        """A name that is there moved to another tier: stored there first, then removed, as other blocks follow it."""
        self.store(sequence_hash, self._parents[old][sequence_hash], new)
        self.remove(sequence_hash, old)

    def clear(self) -> None:
        """No name is known to be there any more."""
        if not self._events and not any(self._parents):
            return
        self._parents = [{} for _ in Tier]
        self._num_more = [{} for _ in Tier]
        # Events that were not taken yet are of no use now.
        self._events, self._stored, self._removed = [Cleared()], None, None

    def take(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        self._stored = self._removed = None
        return events

    def parent_hashes(self) -> dict[int, int | None]:
        """Of every hash on the device the one before it; parents come first where no name ever moved."""
        return self._parents[Tier.DEVICE].copy()

    def tables(self) -> dict[Tier, dict[int, int | None]]:
        """Of every hash that is there the one before it, by tier; parents come first."""
        return {tier: parents_first(self._parents[tier]) for tier in Tier if self._parents[tier]}


def parents_first(table: dict[int, int | None]) -> dict[int, int | None]:
    """``table`` with each hash after the one before it: chains move to another tier from their end on."""
    ordered: dict[int, int | None] = {}
    for sequence_hash in table:
        chain: list[int] = []
        step: int | None = sequence_hash
        while step is not None and step in table and step not in ordered:
            chain.append(step)
            step = table[step]
        for link in reversed(chain):
            ordered[link] = table[link]
    return ordered


@dataclass(eq=False, slots=True)
class _Name:
    """What a block says, and the block that bears the name. Equal to itself only, so it can never be recycled."""

    key: _Key
    sequence_hash: int
    block_id: int
    num_uses: int = 1  # counted for lower tiers only
    digest: bytes | None = None  # once a lower tier needed it

    @property
    def parent(self) -> _Name | None:
        """The name before it; ``None``: it is of a first block."""
        parent = self.key[0]
        return parent if isinstance(parent, _Name) else None


_Key: TypeAlias = tuple[_Name | bytes, bytes]


@dataclass(frozen=True, slots=True)
class EvictedBlock:
    """A block that left the device's pool; its content stays in ``block_id`` until a step or a transfer writes there.

    Attributes:
        digest: its chain digest.
        parent_digest: of the block before it.
        sequence_hash: its public name.
        parent_hash: of the block before it; ``None``: it is a first one.
        num_uses: how often it was computed or loaded, or shared, while it was there.
    """

    block_id: int
    digest: bytes
    parent_digest: bytes
    sequence_hash: int
    parent_hash: int | None
    num_uses: int = 1


def _to_evicted(block_id: int, name: _Name) -> EvictedBlock:
    parent = name.key[0]
    return EvictedBlock(
        block_id,
        _digest(name),
        parent if isinstance(parent, bytes) else _digest(parent),
        name.sequence_hash,
        None if isinstance(parent, bytes) else parent.sequence_hash,
        name.num_uses,
    )


def _digest(name: _Name) -> bytes:
    """The chain digest of what ``name`` stands for, worked out once."""
    unknown: list[_Name] = []
    step: _Name | bytes = name
    while isinstance(step, _Name) and step.digest is None:
        unknown.append(step)
        step = step.key[0]
    digest = step if isinstance(step, bytes) else step.digest
    assert digest is not None, "it is known here"
    for link in reversed(unknown):
        digest = link.digest = chain_digest(digest, link.key[1])
    return digest
