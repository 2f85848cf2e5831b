"""The policy seam: the requests that wait, what is known of the ranks, and which request goes to which rank.

Objects that are made for each request are not frozen: freezing triples what they cost.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from quartet.api.reuse import ExpectedReuse
from quartet.discovery.base import Rank
from quartet.events.load import OnboardTime, StepTime

#: Tokens that a step computes at most, if the worker does not say.
DEFAULT_MAX_STEP_TOKENS = 2048

# Of ranks that have not reported theirs, or have no tiers below the device.
_NO_TIME = OnboardTime()


class LowerTokens(NamedTuple):
    """Tokens of a prompt that a rank has on tiers below the device, behind those that it has there.

    Attributes:
        num_host: these come first, some of them only in the host's memory.
        num_disk: these follow, some of them only on disk.
    """

    num_host: int
    num_disk: int


@dataclass(eq=False, kw_only=True)
class Pending:
    """A request (one choice of it) that waits for ranks.

    Not frozen: the queue sets ``num_cached_tokens`` in place, and freezing so many fields triples their price.

    Attributes:
        num_tokens: tokens to prefill: prompt and already generated ones.
        num_reserved_tokens: tokens that its decode rank must have room for: ``num_tokens`` and what it may
            generate soon (see ``router.config.AttemptConfig.reserve_tokens``).
        num_most_tokens: tokens of its longest possible sequence, which its decode rank must be able to hold when it is
            empty; at least ``num_reserved_tokens``.
        adapter: the adapter that it needs; empty: none.
        needs_media: what the rank that computes its prompt has to take of media; empty: nothing.
        sampling_fields: fields of sampling and output that its ranks have to honour.
        is_local: it is prefilled where it is decoded: no rank that only prefills takes the media that it needs, or a
            hand-off of its blocks was found to be impossible.
        is_remote: it is not prefilled where it is decoded.
        is_handed_in: another pool prefills it, so that its rank has nothing of the prompt to compute.
        avoid: ids of workers that just failed it; they are chosen only if no other worker will do.
        prefer_prefill: where its blocks are probably cached.
        priority: higher first. The queue gives 0 to each tenant's most urgent ones, whatever number the tenant gave.
        arrived_at: monotonic seconds.
        is_overtaken: requests of other tenants behind it have been served before it, of as much work as its own.
        binds_at_once: it takes room as soon as there is some, and is not kept for the best moment.
        session_key: requests of one conversation share it; empty: none.
        sequence_hashes: names of its full blocks, first to last; empty if nothing is known of what is cached.
        num_cached_tokens: how many of its leading tokens each rank has cached, on any tier; ranks that have none are
            left out.
        lower_tokens: the last so many of these lie below the device; ranks that have none there are left out.
    """

    num_tokens: int
    num_reserved_tokens: int
    num_most_tokens: int
    adapter: str = ""
    needs_media: frozenset[str] = frozenset()
    sampling_fields: frozenset[str] = frozenset()
    is_local: bool = False
    is_remote: bool = False
    is_handed_in: bool = False
    avoid: frozenset[str] = frozenset()
    prefer_prefill: Rank | None = None
    priority: int = 0
    arrived_at: float = 0.0
    is_overtaken: bool = False
    binds_at_once: bool = False
    session_key: str = field(default="", repr=False)
    sequence_hashes: Sequence[int] = field(default=(), repr=False)
    num_cached_tokens: Mapping[Rank, int] = field(default_factory=dict)
    lower_tokens: Mapping[Rank, LowerTokens] = field(default_factory=dict)

    def num_missing_tokens(self, rank: Rank) -> int:
        """Tokens to compute there; the last token is always computed."""
        if self.is_handed_in:
            return 1
        return max(self.num_tokens - self.num_cached_tokens.get(rank, 0), 1)

    def num_shared_tokens(self, other: Pending, block_size: int) -> int:
        """Leading tokens that both share, in full blocks: two chains of hashes are equal up to where they part."""
        ones, others = self.sequence_hashes, other.sequence_hashes
        num_blocks = min(len(ones), len(others))
        if not num_blocks or ones[0] != others[0]:
            return 0
        return block_size * bisect_left(range(num_blocks), True, key=lambda index: ones[index] != others[index])


@dataclass(kw_only=True, slots=True)
class Candidate:
    """What the router knows of one rank.

    Attributes:
        num_total_blocks: KV blocks of the rank, of ``block_size`` tokens.
        max_model_len: tokens of the longest sequence that it takes, prompt and output together.
        lacks: fields of sampling and output that it does not honour and other workers of its pool do.
        num_used_blocks: blocks in use or held, as last reported; blocks that are only cached are left out.
        num_promised_blocks: blocks that the router's own placements there may still take beyond those.
        num_requests: requests that run or wait there, the router's own unreported ones included.
        max_requests: as many may be there at most (see ``router.policy.room.max_requests``); 0: as many as have room.
        num_queued_tokens: prompt tokens that wait there, the router's own unreported ones included.
        adapters: adapters that it serves.
        media: what it takes of media.
        num_unbegun_tokens: prompt tokens that wait there and that no step has begun to compute.
        num_spare_tokens: so many prompt tokens that come now are in the next step, whatever is unbegun.
        step_ends_at: when the step that runs there should end, by the clock of ``Snapshot.now``; a time in the past: no
            step runs, or it should have ended.
        num_decoding: requests there that take one token each in every step.
        num_context_tokens: tokens that these have together.
        max_step_tokens: tokens that a step computes at most.
        step_time: how long its steps take.
        is_measured: ``step_time`` was measured there; else it is only good for comparing ranks with one another.
        onboard_time: how long blocks take from its tiers below the device; what is unknown there counts as no time.
    """

    rank: Rank
    num_total_blocks: int
    block_size: int
    max_model_len: int = sys.maxsize
    lacks: frozenset[str] = frozenset()
    num_used_blocks: int = 0
    num_promised_blocks: int = 0
    num_requests: int = 0
    max_requests: int = 0
    num_queued_tokens: int = 0
    adapters: frozenset[str] = frozenset()
    media: frozenset[str] = frozenset()
    num_unbegun_tokens: int = 0
    num_spare_tokens: int = 0
    step_ends_at: float = 0.0
    num_decoding: int = 0
    num_context_tokens: int = 0
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS
    step_time: StepTime = field(default_factory=StepTime)
    is_measured: bool = True
    onboard_time: OnboardTime = _NO_TIME

    @property
    def num_free_for_booking(self) -> int:
        """Blocks that a new request may count on."""
        return self.num_total_blocks - self.num_used_blocks - self.num_promised_blocks

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def serves(self, adapter: str) -> bool:
        """Whether requests for ``adapter`` can run here."""
        return not adapter or adapter in self.adapters

    def takes(self, pending: Pending) -> bool:
        """Whether its worker accepts ``pending``, however much of its memory is free. Media are another matter."""
        return (
            # The last token is in no cache.
            pending.num_most_tokens < self.max_model_len
            and not (self.lacks and self.lacks & pending.sampling_fields)
            and self.serves(pending.adapter)
        )


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The routers that place requests on the same ranks. Each learns of the others' placements from load reports.

    Routers that tell each other learn of them at once, and have a clock in common.

    Attributes:
        number: this router's number among them, from 0.
        num_routers: how many there are, this one included.
        ranks: the ranks that they share, in order; empty: those of the snapshot.
        tell_bookings: all of them tell each other what they place.
        clock_ahead_s: so much is the clock that they have in common ahead of that of ``Snapshot.now``.
    """

    number: int = 0
    num_routers: int = 1
    ranks: Sequence[Rank] = ()
    tell_bookings: bool = False
    clock_ahead_s: float = 0.0


@dataclass(slots=True)
class Snapshot:
    """The ranks of one pool that take requests at ``now``, in monotonic seconds."""

    prefill: Sequence[Candidate]
    decode: Sequence[Candidate]
    now: float = 0.0
    peers: Peers = Peers()


@dataclass(slots=True)
class Placement:
    """Where one request goes; ``prefill`` is ``None`` if the decode rank prefills itself.

    Attributes:
        num_cached_tokens: its leading tokens that should be cached where it is prefilled.
        cost: its expected cost where it is prefilled, as ``Policy.explain`` gives it; ``None``: the policy computes no
            cost.
        expected: what the router knew of its cached tokens, set by ``Admission``; ``None``: nothing.
    """

    prefill: Rank | None
    decode: Rank
    num_cached_tokens: int = 0
    cost: float | None = None
    expected: ExpectedReuse | None = None

    @property
    def prefills_at(self) -> Rank:
        """Where its prompt is computed."""
        return self.prefill or self.decode

    def num_missing_tokens(self, pending: Pending) -> int:
        """Tokens of ``pending``, which it places, to compute there; the last token is always computed."""
        if pending.is_handed_in:
            return 1
        return max(pending.num_tokens - self.num_cached_tokens, 1)


@dataclass(slots=True)
class Decision:
    """What a policy decides about the requests that wait.

    Attributes:
        placements: one entry for each request, in their order; ``None`` keeps it in the router's queue.
        poll_again_in_s: seconds after which the policy may place a kept request even if nothing else changes; ``None``:
            it will place none until something changes.
    """

    placements: Sequence[Placement | None]
    poll_again_in_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Option:
    """One rank, as a policy sees it for one request.

    Attributes:
        is_decode: the rank decodes, and may prefill itself; else it only prefills.
        num_cached_tokens: leading tokens of the request that are cached there.
        cost: what it would cost; ``None``: the policy computes no cost, or the request can't go there.
        cost_unit: the unit of ``cost``; empty if that is ``None``. Ranks that prefill and ranks that decode may have
            costs of different units.
        terms: what the policy decides by; each name ends with its unit.
        obstacle: why the request can't go there now; empty: it can.
    """

    rank: Rank
    is_decode: bool
    num_cached_tokens: int = 0
    cost: float | None = None
    cost_unit: str = ""
    terms: Mapping[str, float] = field(default_factory=dict)
    obstacle: str = ""


class Policy(Protocol):
    """Chooses ranks. Its only state is its random numbers and its turn, which a deep copy does not share."""

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        """Choose ranks for ``queued``, the requests that wait, in the order of the queue.

        A request is placed only if its decode rank has room for its ``num_reserved_tokens``, and none of its ranks
        has as many as it may have, beside the requests that this call placed there before.
        """
        ...

    @property
    def name(self) -> str:
        """The name that users know."""
        ...

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        """How each rank of ``snapshot`` suits ``pending``, if nothing else waits. Changes nothing."""
        ...
