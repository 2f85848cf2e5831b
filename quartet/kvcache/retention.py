"""Retention: blocks of conversations whose next request is awaited, which the block pool evicts after all others.

A *session* is the requests with one session key of one tenant. Where one of them ends, its named blocks are *retained*
until the session's time to live has passed since its last request ended. A session keeps only its *tails*: the last
retained name of each of its branches. A name is retained as long as a tail or a retained name follows it, so no block
outlives the one before it, and what sessions have in common is retained until the last of them lets go.

Retained blocks take a bounded share of the pool. Beyond it the tenant that weighs most gives up, from the end of its
oldest tail on. The same happens where nothing else is left to evict: retention never keeps a block from whoever needs
it.

The pool's idle blocks stay in the order of their last use. One that is retained is set aside when it would be evicted,
once for each time that it is used. If it lapses there, it is the next to go: by its last use it was due. So every step
here undoes or follows one of a request's end, and there are no timers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

# Branches of a session that are retained: answers of one prompt, side questions, what a summary has replaced.
_MAX_TAILS = 8


@dataclass(frozen=True, slots=True)
class SessionId:
    """Whose conversation it is, and which: equal keys of two tenants name two sessions."""

    trust_domain: str
    tenant: str
    key: str


@dataclass(frozen=True, kw_only=True)
class RetentionPlan:
    """How long and how much a pool retains.

    Attributes:
        ttl_s: a session's time to live after its last request, in seconds; above 0.
        share: retained blocks over all blocks of the pool, at most; those in use count.
    """

    ttl_s: float
    share: float = 0.5


class BlockName(Protocol):
    """The name of a block, as the pool has it; equal to itself only."""

    block_id: int

    @property
    def parent(self) -> BlockName | None:
        """The name of the block before it; ``None``: it is a first one."""
        ...


class Retention:
    """What one pool retains, and for whom. The pool says which blocks are idle."""

    def __init__(self, plan: RetentionPlan, num_blocks: int, clock: Callable[[], float]) -> None:
        """Nothing is retained. ``num_blocks``: of the pool; ``clock`` gives seconds."""
        self._max_blocks = int(plan.share * num_blocks)
        self._ttl_s, self._clock = plan.ttl_s, clock
        self._max_tails = num_blocks
        self._retained: dict[BlockName, _Retained] = {}
        self._sessions: OrderedDict[SessionId, _Session] = OrderedDict()  # the next one to expire first
        self._tenants: dict[tuple[str, str], _Tenant] = {}
        self._scales = _Scales()
        self._num_tails = 0
        # Idle blocks that left the pool's order: still retained; and lapsed since, the next to be evicted first.
        self._aside: dict[int, None] = {}
        self._lapsed: OrderedDict[int, None] = OrderedDict()

    @property
    def num_retained(self) -> int:
        """Retained blocks, in use or not."""
        return len(self._retained)

    @property
    def num_aside(self) -> int:
        """Idle blocks that are not in the pool's order."""
        return len(self._aside) + len(self._lapsed)

    def num_aside_among(self, block_ids: Iterable[int]) -> int:
        """How many of ``block_ids`` are such blocks."""
        return sum(block_id in self._aside or block_id in self._lapsed for block_id in block_ids)

    def take_back(self, block_id: int) -> None:
        """A block that is aside is idle no more."""
        if block_id in self._aside:
            del self._aside[block_id]
        else:
            del self._lapsed[block_id]

    def retain(self, id: SessionId, tail: BlockName) -> None:
        """A request of session ``id`` ends: retain ``tail`` and all names before it, whose blocks are all in use."""
        self.expire()
        session = self._sessions.get(id)
        if session is None:
            session = self._begin(id)
        session.expires_at = self._clock() + self._ttl_s
        self._sessions.move_to_end(id)
        self._add_tail(session, tail)
        while self.num_retained > self._max_blocks or self._num_tails > self._max_tails:
            self._give_up()

    def expire(self) -> None:
        """Let go of what sessions retain whose time has passed."""
        now = self._clock()
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.expires_at > now:
                return
            for tail in list(session.tails):
                self._release(session, tail)

    def next_victim(self, idle: OrderedDict[int, None], names: Sequence[BlockName | None]) -> int:
        """The block to evict next, which is idle no more.

        Args:
            idle: the pool's idle blocks but those aside, least recently used first. Loses the victim, and retained
                blocks before it.
            names: of the pool's blocks.
        """
        while not self._lapsed:
            if not idle:
                self._give_up()  # only retained ones are left
                continue
            block_id, _ = idle.popitem(last=False)
            if names[block_id] not in self._retained:
                return block_id
            self._aside[block_id] = None
        return self._lapsed.popitem(last=False)[0]

    def _begin(self, id: SessionId) -> _Session:
        owner = (id.trust_domain, id.tenant)
        tenant = self._tenants.get(owner)
        if tenant is None:
            tenant = self._tenants[owner] = _Tenant(owner)
        session = self._sessions[id] = _Session(id, tenant)
        return session

    def _add_tail(self, session: _Session, tail: BlockName) -> None:
        if tail in session.tails:
            session.remove(tail)
            session.add(tail)
            return
        num_new = 0
        name: BlockName | None = tail
        while name is not None and name not in self._retained:
            self._retained[name] = _Retained(session.tenant)
            num_new += 1
            name = name.parent
        if name is not None and name in session.tails:
            # The turn before ended there; now this one follows.
            session.remove(name)
            self._num_tails -= 1
            num_new -= 1
        elif name is not None:
            self._retained[name].num_followers += 1
        session.add(tail)
        self._num_tails += 1
        self._weigh(session.tenant, num_new + 1)
        if len(session.tails) > _MAX_TAILS:
            self._release(session, next(iter(session.tails)))

    def _release(self, session: _Session, tail: BlockName) -> None:
        """Let go of ``tail``, and of the names before it as far as nothing else follows them."""
        session.remove(tail)
        self._num_tails -= 1
        name: BlockName | None = tail
        while name is not None:
            retained = self._retained[name]
            retained.num_followers -= 1
            if retained.num_followers:
                break
            self._let_go(name)
            name = name.parent
        if not session.tails:
            del self._sessions[session.id]
        self._weigh(session.tenant, -1)

    def _give_up(self) -> None:
        """Have the tenant that weighs most let go of one block, or of a tail that others follow."""
        session, tail = next(iter(self._scales.heaviest.tails))
        parent = tail.parent
        if self._retained[tail].num_followers > 1 or parent is None or parent in session.tails:
            self._release(session, tail)
            return
        self._let_go(tail)
        session.remove(tail)
        session.add(parent, is_oldest=True)

    def _let_go(self, name: BlockName) -> None:
        retained = self._retained.pop(name)
        self._weigh(retained.payer, -1)
        if name.block_id in self._aside:
            del self._aside[name.block_id]
            self._lapsed[name.block_id] = None

    def _weigh(self, tenant: _Tenant, change: int) -> None:
        self._scales.weigh(tenant, change)
        if not tenant.weight:
            del self._tenants[tenant.owner]


@dataclass(slots=True)
class _Retained:
    """A retained name: who pays for it, and how many tails are there or retained names follow it."""

    payer: _Tenant  # the first one that retained it
    num_followers: int = 1


@dataclass(eq=False, slots=True)
class _Tenant:
    """Weighs a unit for each block that it pays for and for each of its sessions' tails, oldest first."""

    owner: tuple[str, str]
    weight: int = 0
    tails: OrderedDict[tuple[_Session, BlockName], None] = field(default_factory=OrderedDict)


@dataclass(eq=False, slots=True)
class _Session:
    id: SessionId
    tenant: _Tenant
    expires_at: float = 0.0
    tails: OrderedDict[BlockName, None] = field(default_factory=OrderedDict)  # oldest first

    def add(self, tail: BlockName, *, is_oldest: bool = False) -> None:
        self.tails[tail] = None
        self.tenant.tails[self, tail] = None
        if is_oldest:
            self.tails.move_to_end(tail, last=False)
            self.tenant.tails.move_to_end((self, tail), last=False)

    def remove(self, tail: BlockName) -> None:
        del self.tails[tail], self.tenant.tails[self, tail]


class _Scales:
    """Finds the heaviest of the tenants that have tails; a step costs what weights change by."""

    def __init__(self) -> None:
        self._by_weight: dict[int, dict[_Tenant, None]] = {}
        self._most = 0

    @property
    def heaviest(self) -> _Tenant:
        """There must be one."""
        while self._most not in self._by_weight:
            self._most -= 1
        return next(iter(self._by_weight[self._most]))

    def weigh(self, tenant: _Tenant, change: int) -> None:
        """``tenant`` weighs so much more now, or has its first tail, or none any more."""
        equals = self._by_weight.get(tenant.weight, {})
        equals.pop(tenant, None)
        if not equals:
            self._by_weight.pop(tenant.weight, None)
        tenant.weight += change
        if tenant.tails:
            self._by_weight.setdefault(tenant.weight, {})[tenant] = None
            self._most = max(self._most, tenant.weight)
