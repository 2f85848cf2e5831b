"""One router of a simulated fleet: its index, its queue, its policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from cli.replay.policies import ReplayCandidate
from cli.replay.worker import SimulatedWorker, WorkerState, measured, onboard_time
from quartet.discovery.base import Rank
from quartet.events.kv import KvEvent
from router.kv_index.feed import apply_events
from router.kv_index.index import PrefixIndex
from router.policy.base import Peers, Pending, Placement, Policy, Snapshot
from router.policy.room import max_requests

# Longer than any request waits for its first step.
_PREDICTION_LIFE_S = 600.0
_ALONE = Peers()


@dataclass(eq=False)
class ReplayedRequest:
    """A request in a router's queue, and after that one that it has sent."""

    number: int
    pending: Pending
    placement: Placement | None = None
    sent_at: float = 0.0
    num_missing_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _ToldRequest:
    """What another router told of a request that it sent; known here from ``known_at`` on."""

    known_at: float
    sent_at: float
    num_missing_tokens: int
    num_reserved_blocks: int


class _Account:
    """What a router knows of its own requests at one rank."""

    def __init__(self) -> None:
        self.num_unanswered_tokens = 0
        self.num_prompt_blocks = 0
        self.unreported: deque[ReplayedRequest] = deque()
        self._num_reserved: dict[int, int] = {}  # blocks, by request that decodes there or will
        self._prefilling: set[int] = set()  # requests whose prompt is computed there, to be decoded elsewhere
        self._promised: tuple[Mapping[int, int] | None, int] = (None, 0)
        self._others: tuple[Mapping[int, int] | None, int] = (None, 0)

    def reserve(self, number: int, num_blocks: int) -> None:
        """A request was sent there; it may take ``num_blocks``."""
        self._num_reserved[number] = num_blocks
        self._promised = (None, 0)

    def release(self, number: int) -> None:
        """It has ended."""
        del self._num_reserved[number]
        self._promised = (None, 0)

    def begin_prefill(self, number: int) -> None:
        """A request was sent there only to be prefilled."""
        self._prefilling.add(number)

    def end_prefill(self, number: int) -> None:
        """It has its first token; no-op for a request that is decoded there."""
        self._prefilling.discard(number)

    def num_requests(self, known: Mapping[int, int]) -> int:
        """Requests there: the router's own as they are now, and all others of the ``known`` ones, which it reports."""
        if self._others[0] is not known:
            own = self._num_reserved.keys() | self._prefilling
            self._others = (known, sum([number not in own for number in known]))
        return len(self._num_reserved) + len(self._prefilling) + self._others[1]

    def num_promised_blocks(self, num_held: Mapping[int, int]) -> int:
        """Blocks that the requests may still take, beyond the ``num_held`` that each of them has."""
        if self._promised[0] is not num_held:
            left = [num_blocks - num_held.get(number, 0) for number, num_blocks in self._num_reserved.items()]
            self._promised = (num_held, sum([num_blocks for num_blocks in left if num_blocks > 0]))
        return self._promised[1]


class FleetRouter:
    """Knows the fleet as it was ``load_age_s`` ago, and what it sent since."""

    def __init__(
        self,
        policy: Policy,
        workers: Mapping[Rank, SimulatedWorker],
        *,
        num_prefill: int,
        load_age_s: float = 0.0,
        bookings_age_s: float | None = None,
        peers: Peers = _ALONE,
    ) -> None:
        """The first ``num_prefill`` of ``workers`` only prefill; all blocks are of one size. Its index is empty."""
        self.poll_at = inf
        self._policy = policy
        self._workers = workers
        self._block_size = next(iter(workers.values())).settings.block_size
        self._step_time = {rank: measured(worker.settings.timing) for rank, worker in workers.items()}
        self._onboard_time = {rank: onboard_time(worker.settings) for rank, worker in workers.items()}
        self._prefill_ranks, self._decode_ranks = list(workers)[:num_prefill], list(workers)[num_prefill:]
        self._max_requests = {
            rank: max_requests(worker.settings.max_num_seqs, is_fed=num_prefill > 0 and number >= num_prefill)
            for number, (rank, worker) in enumerate(workers.items())
        }
        self._load_age_s = load_age_s
        self._learns_late = {
            rank: load_age_s > 0 or worker.settings.reports_by_step for rank, worker in workers.items()
        }
        self._bookings_age_s = bookings_age_s
        self._told = {rank: deque[_ToldRequest]() for rank in workers}
        self._peers = peers
        self._index = PrefixIndex()
        self._queue: list[ReplayedRequest] = []
        self._accounts = {rank: _Account() for rank in workers}
        self._reports = {rank: deque[tuple[float, WorkerState]]() for rank in workers}
        self._known = {rank: (0.0, worker.state()) for rank, worker in workers.items()}

    def arrive(self, replayed: ReplayedRequest) -> None:
        """Queue a request."""
        self._queue.append(replayed)

    def on_events(self, rank: Rank, events: Sequence[KvEvent]) -> None:
        """A worker's cache has changed."""
        apply_events(self._index, rank, events)

    def report(self, rank: Rank, now: float) -> None:
        """A worker's state has changed. The router knows it from ``load_age_s`` later, if the worker reports it."""
        worker = self._workers[rank]
        reports = worker.changed_at == now or worker.is_idle or not worker.settings.reports_by_step
        if reports and self._learns_late[rank]:
            self._reports[rank].append((now, worker.state()))

    @property
    def next_report_at(self) -> float:
        """When the router next learns a worker's state; ``inf``: it knows all."""
        return min([reports[0][0] for reports in self._reports.values() if reports], default=inf) + self._load_age_s

    def hear(self, replayed: ReplayedRequest, now: float) -> None:
        """Another router has sent a request. This one knows it from ``bookings_age_s`` later, or only by reports."""
        if self._bookings_age_s is None:
            return
        placement = replayed.placement
        assert placement is not None, "it was sent"
        num_blocks = self._num_blocks(replayed.pending.num_reserved_tokens) if placement.prefill is None else 0
        told = _ToldRequest(now + self._bookings_age_s, now, replayed.num_missing_tokens, num_blocks)
        self._told[placement.prefills_at].append(told)

    def first_token(self, replayed: ReplayedRequest) -> None:
        """A request that was sent has its first token."""
        assert replayed.placement is not None, "it was sent"
        account = self._accounts[replayed.placement.prefills_at]
        account.num_unanswered_tokens -= replayed.num_missing_tokens
        account.end_prefill(replayed.number)

    def ended(self, replayed: ReplayedRequest) -> None:
        """A request that was sent has its last token."""
        assert replayed.placement is not None, "it was sent"
        account = self._accounts[replayed.placement.decode]
        account.num_prompt_blocks -= self._num_blocks(replayed.pending.num_tokens)
        account.release(replayed.number)

    def pump(self, now: float) -> list[ReplayedRequest]:
        """Let the policy assign queued requests; return those to send."""
        self.poll_at = inf
        if not self._queue:
            return []
        for replayed in self._queue:
            replayed.pending = self._looked_up(replayed.pending)
        snapshot = Snapshot(
            prefill=[self._candidate(rank, now) for rank in self._prefill_ranks],
            decode=[self._candidate(rank, now) for rank in self._decode_ranks],
            now=now,
            peers=self._peers,
        )
        decision = self._policy.assign([replayed.pending for replayed in self._queue], snapshot)
        sent, kept = list[ReplayedRequest](), list[ReplayedRequest]()
        for replayed, placement in zip(self._queue, decision.placements, strict=True):
            if placement is None:
                kept.append(replayed)
            else:
                self._book(replayed, placement, now)
                sent.append(replayed)
        self._queue = kept
        if kept and decision.poll_again_in_s is not None:
            self.poll_at = now + decision.poll_again_in_s
        return sent

    def _book(self, replayed: ReplayedRequest, placement: Placement, now: float) -> None:
        rank = placement.prefills_at
        pending = replayed.pending
        replayed.placement, replayed.sent_at = placement, now
        replayed.num_missing_tokens = pending.num_tokens - placement.num_cached_tokens
        self._index.predict(rank, pending.sequence_hashes, now + _PREDICTION_LIFE_S)
        self._accounts[rank].num_unanswered_tokens += replayed.num_missing_tokens
        if self._learns_late[rank]:
            self._accounts[rank].unreported.append(replayed)
        if placement.prefill is not None:
            self._accounts[rank].begin_prefill(replayed.number)
        decode = self._accounts[placement.decode]
        decode.num_prompt_blocks += self._num_blocks(pending.num_tokens)
        decode.reserve(replayed.number, self._num_blocks(pending.num_reserved_tokens))

    def _candidate(self, rank: Rank, now: float) -> ReplayCandidate:
        state, account, engine = self._latest(rank, now), self._accounts[rank], self._workers[rank].settings
        step_ends_at, num_context_tokens = state.step_at(now - self._load_age_s)
        told = [item for item in self._told[rank] if item.known_at <= now]
        num_told_blocks = sum([item.num_reserved_blocks for item in told])
        num_unreported_tokens = sum([item.num_missing_tokens for item in account.unreported])
        num_unreported_tokens += sum([item.num_missing_tokens for item in told])
        return ReplayCandidate(
            rank=rank,
            num_total_blocks=engine.num_blocks,
            block_size=engine.block_size,
            num_used_blocks=state.num_used_blocks,
            num_promised_blocks=account.num_promised_blocks(state.num_blocks) + num_told_blocks,
            num_requests=account.num_requests(state.num_blocks) + len(told),
            max_requests=self._max_requests[rank],
            num_queued_tokens=state.num_queued_tokens + num_unreported_tokens,
            num_unbegun_tokens=state.num_unbegun_tokens + num_unreported_tokens,
            num_spare_tokens=max(state.num_spare_tokens - num_unreported_tokens, 0),
            step_ends_at=step_ends_at,
            num_decoding=state.num_decoding,
            num_context_tokens=num_context_tokens,
            max_step_tokens=engine.max_num_batched_tokens,
            step_time=self._step_time[rank],
            onboard_time=self._onboard_time[rank],
            num_unanswered_tokens=account.num_unanswered_tokens,
            num_prompt_blocks=account.num_prompt_blocks,
        )

    def _latest(self, rank: Rank, now: float) -> WorkerState:
        if not self._learns_late[rank]:
            return self._workers[rank].state()
        reports, account = self._reports[rank], self._accounts[rank]
        while reports and reports[0][0] <= now - self._load_age_s:
            self._known[rank] = reports.popleft()
        reported_at, state = self._known[rank]
        while account.unreported and account.unreported[0].sent_at <= reported_at:
            account.unreported.popleft()
        while self._told[rank] and self._told[rank][0].sent_at <= reported_at:
            self._told[rank].popleft()
        return state

    def _looked_up(self, pending: Pending) -> Pending:
        """``pending`` with what the index knows now."""
        matches, block_size = self._index.match(pending.sequence_hashes), self._block_size
        return replace(
            pending, num_cached_tokens=matches.num_tokens(block_size), lower_tokens=matches.lower_tokens(block_size)
        )

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
