"""One router before a simulated fleet: its index, its queue, its policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from cli.replay.worker import SimulatedWorker
from quartet.discovery.place import Place
from quartet.kvcache.events import Cleared, KvEvent, Removed, Stored
from router.policy.base import Candidate, Pending, Placement, Policy, Snapshot
from router.prefix_index import PrefixIndex

# Long after any request has been begun somewhere.
_PREDICTION_LIFE_S = 600.0


@dataclass(eq=False)
class Waiting:
    """A request in a router's queue, and then one that it has sent."""

    number: int
    pending: Pending
    placement: Placement | None = None
    sent_at: float = 0.0
    num_missing_tokens: int = 0


class _Account:
    """What a router knows of its own requests at one place."""

    def __init__(self) -> None:
        self.num_unanswered_tokens = 0
        self.num_prompt_blocks = 0
        self.unreported: deque[Waiting] = deque()


class FleetRouter:
    """Sees the fleet as it was ``load_age_s`` ago; what it sent since, it remembers."""

    def __init__(
        self,
        policy: Policy,
        workers: Mapping[Place, SimulatedWorker],
        *,
        num_prefill: int,
        block_size: int,
        load_age_s: float = 0.0,
    ) -> None:
        """All caches are empty; the first ``num_prefill`` of ``workers`` only prefill."""
        self.look_at = inf
        self._policy = policy
        self._workers = workers
        self._prefill_places, self._decode_places = list(workers)[:num_prefill], list(workers)[num_prefill:]
        self._block_size = block_size
        self._load_age_s = load_age_s
        self._index = PrefixIndex()
        self._waiting: list[Waiting] = []
        self._accounts = {place: _Account() for place in workers}
        self._reports: dict[Place, deque[tuple[float, Candidate]]] = {place: deque() for place in workers}
        self._known: dict[Place, tuple[float, Candidate]] = {
            place: (0.0, worker.candidate(0.0)) for place, worker in workers.items()
        }

    def arrive(self, waiting: Waiting) -> None:
        """Queue a request."""
        self._waiting.append(waiting)

    def hear(self, place: Place, events: Sequence[KvEvent]) -> None:
        """A worker's cache has changed."""
        for event in events:
            match event:
                case Stored(parent_hash, sequence_hashes, tier):
                    self._index.store(place, parent_hash, sequence_hashes, tier)
                case Removed(sequence_hashes, tier):
                    self._index.remove(place, sequence_hashes, tier)
                case Cleared():
                    self._index.clear(place)

    def report(self, place: Place, now: float) -> None:
        """The worker's state has changed: it will be known when it has aged."""
        if self._load_age_s:
            self._reports[place].append((now, self._workers[place].candidate(now)))

    def first_token(self, waiting: Waiting) -> None:
        """A request that was sent has its first token."""
        assert waiting.placement is not None, "it was sent"
        self._accounts[waiting.placement.prefills_at].num_unanswered_tokens -= waiting.num_missing_tokens

    def ended(self, waiting: Waiting) -> None:
        """A request that was sent has its last token."""
        assert waiting.placement is not None, "it was sent"
        self._accounts[waiting.placement.decode].num_prompt_blocks -= self._num_prompt_blocks(waiting.pending)

    def pump(self, now: float) -> list[Waiting]:
        """Let the policy place whom it will; these are to be sent."""
        self.look_at = inf
        if not self._waiting:
            return []
        for waiting in self._waiting:
            waiting.pending = replace(waiting.pending, num_cached_tokens=self._num_cached_tokens(waiting.pending))
        snapshot = Snapshot(
            prefill=[self._candidate(place, now) for place in self._prefill_places],
            decode=[self._candidate(place, now) for place in self._decode_places],
            now=now,
        )
        decision = self._policy.assign([waiting.pending for waiting in self._waiting], snapshot)
        sent, kept = list[Waiting](), list[Waiting]()
        for waiting, placement in zip(self._waiting, decision.placements, strict=True):
            if placement is None:
                kept.append(waiting)
            else:
                self._book(waiting, placement, now)
                sent.append(waiting)
        self._waiting = kept
        if kept and decision.look_again_in_s is not None:
            self.look_at = now + decision.look_again_in_s
        return sent

    def _book(self, waiting: Waiting, placement: Placement, now: float) -> None:
        place = placement.prefills_at
        pending = waiting.pending
        waiting.placement, waiting.sent_at = placement, now
        waiting.num_missing_tokens = pending.num_tokens - placement.num_cached_tokens
        self._index.predict(place, pending.sequence_hashes, now + _PREDICTION_LIFE_S)
        self._accounts[place].num_unanswered_tokens += waiting.num_missing_tokens
        self._accounts[place].unreported.append(waiting)
        self._accounts[placement.decode].num_prompt_blocks += self._num_prompt_blocks(pending)

    def _candidate(self, place: Place, now: float) -> Candidate:
        reported_at, candidate = self._latest(place, now)
        account = self._accounts[place]
        while account.unreported and account.unreported[0].sent_at <= reported_at:
            account.unreported.popleft()
        unreported = account.unreported if self._load_age_s else ()
        num_unreported_tokens = sum(item.num_missing_tokens for item in unreported)
        return replace(
            candidate,
            num_queued_tokens=candidate.num_queued_tokens + num_unreported_tokens,
            step_ends_in_s=max(candidate.step_ends_in_s - (now - reported_at), 0.0),
            num_unbegun_tokens=candidate.num_unbegun_tokens + num_unreported_tokens,
            num_promised_blocks=sum(candidate.num_blocks(item.pending.num_reserved_tokens) for item in unreported),
            num_unanswered_tokens=account.num_unanswered_tokens,
            num_prompt_blocks=account.num_prompt_blocks,
        )

    def _latest(self, place: Place, now: float) -> tuple[float, Candidate]:
        if not self._load_age_s:
            return now, self._workers[place].candidate(now)
        reports = self._reports[place]
        while reports and reports[0][0] <= now - self._load_age_s:
            self._known[place] = reports.popleft()
        return self._known[place]

    def _num_cached_tokens(self, pending: Pending) -> dict[Place, int]:
        matches = self._index.match(pending.sequence_hashes)
        return {place: match.num_blocks * self._block_size for place, match in matches.items()}

    def _num_prompt_blocks(self, pending: Pending) -> int:
        return -(-pending.num_tokens // self._block_size)
