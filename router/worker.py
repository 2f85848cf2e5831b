"""One worker's life as the router sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quartet.discovery.base import WorkerRecord
from quartet.discovery.place import Place
from quartet.events.load import RankLoad, WorkerLoad
from quartet.events.step_time import StepTime
from quartet.rpc.fleet import WorkerState, WorkerStatus
from router.book import WorkerBook
from router.encode_choice import EncodeCandidate
from router.policy.base import DEFAULT_MAX_STEP_TOKENS, Candidate

# Heartbeats come once a second. Where they don't, as the events can't be heard, workers are asked now and then.
_QUIET_S = 3.0


@dataclass(frozen=True, order=True)
class PoolKey:
    """Workers of one pool can stand in for each other; pools are never mixed."""

    model_name: str
    fingerprint: str


@dataclass
class KnownWorker:
    """What is known of one epoch of a worker.

    Attributes:
        pool: the pool that it belongs to.
        known_at: when it was first heard of, monotonic seconds like all times here.
        is_listed: discovery has its record.
        is_connected: it answered since its stream last broke.
        has_joined: it ever answered.
        cut_at: when the connection to it was lost; ``None``: it was heard since.
    """

    record: WorkerRecord
    known_at: float
    book: WorkerBook = field(init=False)
    pool: PoolKey = field(init=False)
    load: WorkerLoad | None = None
    load_at: float | None = None
    is_listed: bool = True
    is_connected: bool = False
    has_joined: bool = False
    cut_at: float | None = None

    def __post_init__(self) -> None:
        self._is_quiet = False
        self.book = WorkerBook(self.record.data_parallel_size, max(self.record.block_size, 1), epoch=self.record.epoch)
        self.describe(self.record)

    def describe(self, record: WorkerRecord) -> None:
        """Discovery has ``record`` of this life of it."""
        self.record = record
        # Here, as every snapshot of its pool asks for them.
        self.pool = PoolKey(record.model_name, record.model_fingerprint)
        self._places = [Place(record.worker_id, rank) for rank in range(record.data_parallel_size)]
        self._adapters, self._media = frozenset(record.adapters), frozenset(record.media)
        # What each place was shown as, and from what: most pumps find most places as they were.
        self._candidates = [self._candidate(rank) for rank in range(record.data_parallel_size)]
        self._shown_load: WorkerLoad | None = None
        self._shown_booked = [(0, 0, 0)] * record.data_parallel_size

    def look(self, now: float) -> None:
        """Time has passed: what reports that no longer come said of waiting prompts is over by now."""
        is_quiet = self.silence_s(now) > _QUIET_S
        if is_quiet is not self._is_quiet:
            self._is_quiet, self._shown_load = is_quiet, None

    def silence_s(self, now: float) -> float:
        """Seconds since it was last heard."""
        return now - (self.known_at if self.load_at is None else self.load_at)

    def state(self, now: float, heartbeat_timeout_s: float) -> WorkerState:
        """Whether requests are placed here."""
        if self.load is not None and self.load.is_draining:
            return WorkerState.DRAINING
        if not self.has_joined:
            return WorkerState.JOINING
        is_well = self.load is None or self.load.is_healthy
        is_reached = self.is_connected and self.cut_at is None
        if is_reached and is_well and self.silence_s(now) <= heartbeat_timeout_s:
            return WorkerState.READY
        return WorkerState.SUSPECT

    def status(self, now: float, heartbeat_timeout_s: float) -> WorkerStatus:
        """It as told to whoever looks."""
        return WorkerStatus(
            record=self.record,
            state=self.state(now, heartbeat_timeout_s),
            load=self.load,
            load_age_s=None if self.load_at is None else now - self.load_at,
            num_requests=self.book.num_requests,
        )

    def candidates(self) -> Sequence[Candidate]:
        """Its places, for a policy; the same ones again until something changes."""
        for rank in range(self.record.data_parallel_size):
            account = self.book.account(rank)
            booked = (account.num_promised_blocks, account.num_unreported_tokens, account.num_placed_tokens)
            if self._shown_load is not self.load or self._shown_booked[rank] != booked:
                self._shown_booked[rank] = booked
                self._candidates[rank] = self._candidate(rank)
        self._shown_load = self.load
        return self._candidates

    def encode_candidate(self) -> EncodeCandidate:
        """It as one that encodes."""
        load = self._rank_load(0)
        num_reported = 0 if self._is_quiet else load.num_running + load.num_waiting
        return EncodeCandidate(self._places[0], num_reported + self.book.account(0).num_unreported_tokens)

    def num_total_blocks(self, rank: int) -> int:
        """Blocks of one place: as last reported, else as announced."""
        return self._rank_load(rank).num_total_blocks or self.record.num_blocks

    @property
    def num_place_tokens(self) -> int:
        """Tokens whose KV its largest place holds."""
        return max(map(self.num_total_blocks, range(self.record.data_parallel_size))) * self.record.block_size

    def _rank_load(self, rank: int) -> RankLoad:
        if self.load is None or rank >= len(self.load.ranks):
            return RankLoad()
        return self.load.ranks[rank]

    def _candidate(self, rank: int) -> Candidate:
        load, account = self._rank_load(rank), self.book.account(rank)
        num_queued_tokens = 0 if self._is_quiet else load.num_queued_prefill_tokens
        num_unbegun_tokens = 0 if self._is_quiet else load.num_unbegun_prefill_tokens
        return Candidate(
            place=self._places[rank],
            num_total_blocks=self.num_total_blocks(rank),
            block_size=max(self.record.block_size, 1),
            num_used_blocks=load.num_used_blocks,
            num_promised_blocks=account.num_promised_blocks,
            num_queued_tokens=num_queued_tokens + account.num_unreported_tokens + account.num_placed_tokens,
            adapters=self._adapters,
            media=self._media,
            num_unbegun_tokens=num_unbegun_tokens + account.num_unreported_tokens,
            step_ends_at=(self.load_at or 0.0) + load.step_ends_in_s,
            num_decoding=load.num_decoding,
            num_context_tokens=load.num_context_tokens,
            max_step_tokens=load.max_step_tokens or DEFAULT_MAX_STEP_TOKENS,
            step_time=load.step_time or StepTime(),
            is_measured=load.step_time is not None,
        )
