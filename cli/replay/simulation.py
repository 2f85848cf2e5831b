"""Replays a trace on a fleet under a policy, in virtual time: from one event to the next."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from heapq import heappop, heappush
from math import inf

from cli.replay.fleet_router import FleetRouter, ReplayedRequest
from cli.replay.policies import MakePolicy
from cli.replay.results import Objectives, PolicyResult, Recorder, Timeline
from cli.replay.worker import OUTPUT_TOKEN_ID, EngineSettings, Progress, SimulatedWorker
from cli.traces.format import BLOCK_SIZE, TraceRequest
from quartet.discovery.base import Rank
from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.sampling import Sampling
from quartet.errors import InvalidRequestError
from quartet.kvcache.block_hash import chain_hash, hash_bytes, pack_token_ids, sequence_hashes
from quartet.kvcache.layout import BlocksPayload, HandOff, KvLayout
from quartet.kvcache.sequence import KnownBlocks
from quartet.kvcache.sequence import Sequence as TokenSequence
from router.policy.base import Peers, Pending

# Output tokens that a router reserves room for.
_RESERVED_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """What a trace is replayed on.

    Attributes:
        num_workers: workers that decode, and prefill what other workers don't.
        num_prefill_workers: workers that only prefill.
        engine: of every worker.
        prefill_engine: of those that only prefill, in place of ``engine``; all blocks are of one size.
        transfer_gb_per_s, transfer_latency_s: how fast blocks move from one worker to another.
        num_routers: routers; they get the requests in turn.
        load_age_s: age of the load reports that routers know.
        bookings_age_s: age of what routers tell each other of the requests that they send; ``None``: nothing is told.
    """

    num_workers: int = 8
    num_prefill_workers: int = 0
    transfer_gb_per_s: float = 50.0
    transfer_latency_s: float = 0.002
    num_routers: int = 1
    load_age_s: float = 0.0
    bookings_age_s: float | None = None
    engine: EngineSettings = field(default_factory=EngineSettings)
    prefill_engine: EngineSettings | None = None
    objectives: Objectives = field(default_factory=Objectives)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Ends a replay once more than ``most_late`` requests have waited longer than ``ttft_s`` for their first token."""

    ttft_s: float
    most_late: int


class GivenUpError(Exception):
    """A replay was ended by its ``patience`` at ``at_s``, when ``num_late`` requests, too many, had waited too long."""

    def __init__(self, patience: Patience, num_late: int, at_s: float) -> None:
        super().__init__(f"{num_late} requests waited longer than {patience.ttft_s:g} s for their first token")
        self.patience = patience
        self.num_late = num_late
        self.at_s = at_s


class Simulation:
    """One replay."""

    def __init__(
        self, requests: Sequence[TraceRequest], make_policy: MakePolicy, settings: FleetSettings, seed: int = 0
    ) -> None:
        """``seed``: of the policies' random choices."""
        self._requests = requests
        self._settings = settings
        prefill = [Rank(f"prefill-{number:03}") for number in range(settings.num_prefill_workers)]
        decode = [Rank(f"decode-{number:03}") for number in range(settings.num_workers)]
        prefill_engine = settings.prefill_engine or settings.engine
        self._workers = {
            **{rank: SimulatedWorker(rank, prefill_engine) for rank in prefill},
            **{rank: SimulatedWorker(rank, settings.engine) for rank in decode},
        }
        self._has_tiers = any(worker.tiers is not None for worker in self._workers.values())
        self._routers = [
            FleetRouter(
                make_policy(random.Random(seed * 1_000_003 + number)),
                self._workers,
                num_prefill=len(prefill),
                load_age_s=settings.load_age_s,
                bookings_age_s=settings.bookings_age_s,
                peers=Peers(
                    number=number,
                    num_routers=settings.num_routers,
                    tell_bookings=settings.bookings_age_s is not None,
                ),
            )
            for number in range(settings.num_routers)
        ]
        self._recorder = Recorder()
        self._sent: dict[int, tuple[ReplayedRequest, FleetRouter, Timeline]] = {}
        self._pulls: list[tuple[float, int]] = []  # a heap: when each ends, and its request
        self._prompts = Prompts(requests, settings.engine.block_size)
        self._known_blocks: dict[int, KnownBlocks] = {}
        self._timelines: dict[int, Timeline] = {}
        self._touched: set[Rank] = set()
        self._num_ended = 0
        self._late: Sequence[_LateRequests] = ()

    def run(
        self,
        on_progress: Callable[[int], None] = lambda _num_ended: None,
        patience: Sequence[Patience] = (),
    ) -> PolicyResult:
        """Replay to the last token. ``on_progress`` gets the number of ended requests, now and then.

        Raises:
            GivenUpError: one of ``patience`` ended the replay. An overloaded fleet is slow to replay.
        """
        self._late = [_LateRequests(item) for item in patience]
        began = time.process_time()
        was_enabled = gc.isenabled()
        gc.disable()  # a replay leaves no cycles, and searching for some takes a quarter of its time
        try:
            self._replay(on_progress)
        finally:
            if was_enabled:
                gc.enable()
        on_progress(self._num_ended)
        num_prefilling = self._settings.num_prefill_workers
        workers = list(self._workers.values())
        result = self._recorder.result(
            [worker.num_computed_tokens for worker in workers[: num_prefilling or None]],
            self._settings.objectives,
            time.process_time() - began,
        )
        lower = [worker.tiers.lower for worker in workers if worker.tiers is not None]
        num_prompt_blocks = max(self._recorder.num_prompt_tokens, 1) / self._settings.engine.block_size
        return replace(
            result,
            host_ratio=sum(tiers.host.totals.num_loaded for tiers in lower) / num_prompt_blocks,
            disk_ratio=sum(tiers.disk.totals.num_loaded for tiers in lower) / num_prompt_blocks,
            blocks_dropped=sum(tiers.host.totals.num_dropped for tiers in lower),
            prefill_busy=_busy_share(workers[:num_prefilling], result.duration_s),
            decode_busy=_busy_share(workers[num_prefilling:], result.duration_s),
        )

    def _replay(self, on_progress: Callable[[int], None]) -> None:
        num_begun = num_reported = 0
        while self._num_ended < len(self._requests):
            now = self._next_time(num_begun)
            for late in self._late:
                late.check(now)
            self._advance(now)
            while num_begun < len(self._requests) and self._requests[num_begun].arrival_s <= now:
                self._arrive(num_begun)
                num_begun += 1
            for router in self._routers:
                for replayed in router.pump(now):
                    self._send(replayed, router, now)
            self._begin(now)
            if self._num_ended >= num_reported + 64:
                num_reported = self._num_ended
                on_progress(num_reported)

    def _next_time(self, num_begun: int) -> float:
        """When something happens next; ``num_begun`` requests have arrived."""
        now = min(worker.next_at for worker in self._workers.values())
        now = min(now, *(router.poll_at for router in self._routers))
        if self._has_tiers:
            now = min(now, *(worker.tiers.next_at for worker in self._workers.values() if worker.tiers is not None))
        if self._pulls:
            now = min(now, self._pulls[0][0])
        if num_begun < len(self._requests):
            now = min(now, self._requests[num_begun].arrival_s)
        if now == inf:  # the workers are idle, and routers do not know it yet
            now = min(router.next_report_at for router in self._routers)
        assert now < inf, "requests wait, and nothing is to come"
        return now

    def _advance(self, now: float) -> None:
        for rank, worker in self._workers.items():
            progress = worker.advance(now)
            if progress is not None:
                self._touched.add(rank)
                self._take(progress, now)
            if worker.end_tiers(now):
                self._touched.add(rank)
        while self._pulls and self._pulls[0][0] <= now:
            self._end_pull(heappop(self._pulls)[1], now)

    def _take(self, progress: Progress, now: float) -> None:
        for running in progress.tokens:
            replayed, router, timeline = self._sent[running.id]
            if timeline.num_tokens == 0:
                timeline.num_cached_tokens = running.num_cached_tokens
                for late in self._late:
                    late.answered(running.id)
                router.first_token(replayed)
            self._recorder.took(timeline, progress.ends)
        for running in progress.prefilled:
            self._decode(running.id, now)
        for running in progress.finished:
            replayed, router, timeline = self._sent.pop(running.id)
            router.ended(replayed)
            self._recorder.ended(timeline)
            del self._known_blocks[running.id]
            self._num_ended += 1

    def _arrive(self, number: int) -> None:
        request = self._requests[number]
        num_most_tokens = request.num_input_tokens + request.num_output_tokens - 1
        if num_most_tokens > self._settings.engine.num_pool_tokens:
            self._recorder.num_refused += 1
            self._num_ended += 1
            return
        blocks = self._prompts.blocks(request)
        num_reserved = request.num_input_tokens + min(request.num_output_tokens, _RESERVED_TOKENS)
        pending = Pending(
            num_tokens=request.num_input_tokens,
            num_reserved_tokens=min(num_reserved, num_most_tokens),
            num_most_tokens=num_most_tokens,
            arrived_at=request.arrival_s,
            session_key=request.session,
            sequence_hashes=blocks.hashes,
        )
        for late in self._late:
            late.arrived(number, request.arrival_s)
        self._timelines[number] = Timeline(request.arrival_s, request.num_input_tokens, bool(request.session))
        self._known_blocks[number] = blocks
        self._routers[number % len(self._routers)].arrive(ReplayedRequest(number, pending))

    def _send(self, replayed: ReplayedRequest, router: FleetRouter, now: float) -> None:
        assert replayed.placement is not None, "it was just placed"
        number = replayed.number
        timeline = self._timelines.pop(number)
        self._sent[number] = (replayed, router, timeline)
        placement = replayed.placement
        kind = RequestKind.DECODE if placement.prefill is None else RequestKind.PREFILL
        self._submit(placement.prefills_at, number, kind, now)
        for other in self._routers:
            if other is not router:
                other.hear(replayed, now)

    def _decode(self, number: int, now: float) -> None:
        """Continue a request that was prefilled elsewhere, from its first token."""
        placement = self._sent[number][0].placement
        assert placement is not None, "it was sent"
        self._submit(placement.decode, number, RequestKind.DECODE, now, (OUTPUT_TOKEN_ID,))

    def _submit(self, rank: Rank, number: int, kind: RequestKind, now: float, generated: tuple[int, ...] = ()) -> None:
        request = self._requests[number]
        token_ids = self._prompts.token_ids(request)
        generation = Generation(
            prompt_token_ids=token_ids,
            generated_token_ids=generated,
            sampling=Sampling(max_tokens=request.num_output_tokens, ignore_eos=True),
        )
        hand_off = _hand_off(request.num_input_tokens) if generated else None
        seq = TokenSequence(
            [*token_ids, *generated], block_size=self._settings.engine.block_size, known=self._known_blocks[number]
        )
        self._workers[rank].submit(
            EngineRequest(id=number, kind=kind, generation=generation, hand_off=hand_off, session_key=request.session),
            seq,
            now,
        )
        self._touched.add(rank)

    def _end_pull(self, number: int, now: float) -> None:
        placement = self._sent[number][0].placement
        assert placement is not None and placement.prefill is not None, (
            "only requests that were prefilled elsewhere pull blocks"
        )
        self._workers[placement.decode].end_pull(number, now)
        self._workers[placement.prefill].release(number)
        self._touched.update((placement.prefill, placement.decode))

    def _transfer_s(self, num_blocks: int) -> float:
        engine = self._settings.engine
        num_bytes = num_blocks * engine.block_size * engine.kv_bytes_per_token
        return self._settings.transfer_latency_s + num_bytes / (self._settings.transfer_gb_per_s * 1e9)

    def _begin(self, now: float) -> None:
        for rank in self._touched:
            worker = self._workers[rank]
            for pull in worker.begin(now):
                heappush(self._pulls, (now + self._transfer_s(len(pull.copies)), pull.id))
            events = worker.take_events()
            for router in self._routers:
                router.on_events(rank, events)
                router.report(rank, now)
        self._touched.clear()


class _LateRequests:
    """Counts requests that wait longer than they may, while they wait."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._waiting: dict[int, float] = {}  # arrivals of requests that are not late yet, in order
        self._num_late = 0

    def arrived(self, number: int, arrival_s: float) -> None:
        """A request begins to wait."""
        self._waiting[number] = arrival_s

    def answered(self, number: int) -> None:
        """A request has its first token; ``check`` was called for this time."""
        self._waiting.pop(number, None)

    def check(self, now: float) -> None:
        """Count those that are late at ``now``. Raises ``GivenUpError``."""
        patience = self._patience
        while self._waiting:
            number, arrival_s = next(iter(self._waiting.items()))
            if arrival_s + patience.ttft_s >= now:
                return
            del self._waiting[number]
            self._num_late += 1
            if self._num_late > patience.most_late:
                raise GivenUpError(patience, self._num_late, now)


class Prompts:
    """The token ids and block hashes of a trace's prompts, equal where, and only where, the trace says so.

    A block that many requests begin with is hashed once.
    """

    def __init__(self, requests: Sequence[TraceRequest], block_size: int) -> None:
        """For KV blocks of ``block_size`` tokens.

        Raises:
            InvalidRequestError: field ``hash_ids``: a request has too few of them for its tokens.
        """
        for number, request in enumerate(requests, 1):
            if len(request.hash_ids) * BLOCK_SIZE < request.num_input_tokens:
                raise InvalidRequestError(
                    f"request {number} has {len(request.hash_ids)} hash_ids for {request.num_input_tokens} tokens: "
                    f"it needs one for each {BLOCK_SIZE}",
                    field="hash_ids",
                )
        self._block_size = block_size
        # KV blocks in one block of the trace, all with the same tokens; 0: it does not divide into whole ones.
        self._num_blocks_each = 0 if BLOCK_SIZE % block_size else BLOCK_SIZE // block_size
        self._token_ids: dict[int, int] = {}  # by hash id, which may be any number
        self._contents: dict[int, tuple[bytes, int]] = {}  # by hash id: a KV block's content, and its hash
        self._hashes: dict[tuple[int | None, int], tuple[int, ...]] = {}  # by the parent's hash and hash id

    def token_ids(self, request: TraceRequest) -> list[int]:
        """The prompt."""
        token_ids: list[int] = []
        for hash_id in request.hash_ids:
            token_ids += [self._token_id(hash_id)] * BLOCK_SIZE
        del token_ids[request.num_input_tokens :]
        return token_ids

    def blocks(self, request: TraceRequest) -> KnownBlocks:
        """The hashes of the prompt's full KV blocks, and their contents where these are known without hashing anew."""
        if not self._num_blocks_each:
            return KnownBlocks((), sequence_hashes(self.token_ids(request), self._block_size))
        contents: list[bytes] = []
        hashes: list[int] = []
        parent: int | None = None
        for hash_id in request.hash_ids:
            content, _ = self._content(hash_id)
            contents += [content] * self._num_blocks_each
            named = self._hashes.get((parent, hash_id))
            if named is None:
                named = self._hashes[parent, hash_id] = self._name(parent, hash_id)
            hashes += named
            parent = named[-1]
        num_full = request.num_input_tokens // self._block_size
        del contents[num_full:], hashes[num_full:]
        return KnownBlocks(contents, hashes)

    def _token_id(self, hash_id: int) -> int:
        return self._token_ids.setdefault(hash_id, len(self._token_ids))

    def _content(self, hash_id: int) -> tuple[bytes, int]:
        known = self._contents.get(hash_id)
        if known is None:
            content = pack_token_ids([self._token_id(hash_id)] * self._block_size)
            known = self._contents[hash_id] = (content, hash_bytes(content))
        return known

    def _name(self, parent: int | None, hash_id: int) -> tuple[int, ...]:
        _, block_hash = self._content(hash_id)
        hashes: list[int] = []
        for _ in range(self._num_blocks_each):
            parent = chain_hash(parent, block_hash)
            hashes.append(parent)
        return tuple(hashes)


def _busy_share(workers: Sequence[SimulatedWorker], duration_s: float) -> float:
    return sum(worker.busy_s for worker in workers) / (len(workers) * duration_s) if workers and duration_s else 0.0


def _hand_off(num_tokens: int) -> HandOff:
    """A hand-off of blocks that no network moves: the scheduler reads only the number of tokens."""
    layout = KvLayout(
        model_fingerprint="", dtype="uint8", num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE
    )
    return HandOff(
        hand_off_id=b"",
        secret=b"",
        worker_id="",
        epoch=0,
        address="",
        time_to_live=timedelta(0),
        payload=BlocksPayload(layout, num_tokens),
    )
