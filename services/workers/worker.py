"""A worker's life: it serves, reports load and health, and drains without losing a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quartet.discovery.base import Registration, Registry, WorkerRecord
from quartet.engine.base import Turn
from quartet.errors import DiscoveryError, DrainingError
from quartet.events.kv import KvSnapshot
from quartet.events.load import PlacementProgress, TransferTotal, WorkerLoad
from quartet.events.publisher import PromptQueue
from quartet.rpc.server import RpcServer
from quartet.streams.convert.workers import rank_load
from quartet.streams.worker_client import DrainOutcome
from quartet.supervision import AwakeClock
from quartet.transfer.base import FetchResult
from quartet.transfer.source import TransferSource
from services.workers.kv_events import KvEvents
from services.workers.requests import Computing, RequestBook

logger = logging.getLogger(__name__)

_HAND_OFF_POLL_INTERVAL_S = 0.02

# A draining worker lets its requests end by themselves for so long before it looks for others that can go on with them.
# What is left then has long to go: to compute its tokens again elsewhere costs little beside that.
_MOVE_AFTER_S = 2.0

# After the last requests are cancelled, wait this long for their terminal outputs to reach their readers.
_LAST_OUTPUTS_S = 1.0

# And so long for others to fetch what was handed off just before, unless it can't be computed elsewhere.
_LAST_PULLS_S = 1.0

# A step that lasts for so many times its forecast, and for so many seconds, hangs. Where a machine is overloaded, or
# meets a size for the first time, steps take a few times longer than they should, and no more than seconds.
_HANGS_AFTER_FORECASTS = 5.0
_HANGS_AFTER_S = 6.0


class Pacer(Protocol):
    """Sends the load when it is due (``quartet.events.publisher.LoadPacer``)."""

    def poke(self) -> None:
        """The load may have changed."""
        ...


class TransferTotals:
    """What a worker has pulled since it started, by way."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._by_way: dict[str, TransferTotal] = {}

    @property
    def by_way(self) -> tuple[TransferTotal, ...]:
        """As ``WorkerLoad.transfers``."""
        return tuple(self._by_way.values())

    def add(self, result: FetchResult) -> None:
        """Count a fetch; one of no blocks tells nothing of ways."""
        if not result.size_bytes:
            return
        known = self._by_way.pop(result.way, TransferTotal(result.way, 0, 0.0))  # the way used last comes last
        self._by_way[result.way] = TransferTotal(
            result.way, known.size_bytes + result.size_bytes, known.duration_s + result.duration_s
        )


class Worker:
    """The state of one worker process, and its two ends: ``drain`` and the engine's death."""

    def __init__(
        self,
        record: WorkerRecord,
        engine: Computing,
        requests: RequestBook[Any],
        source: TransferSource,
        server: RpcServer,
        kv_events: KvEvents,
        *,
        drain_timeout_s: float,
        stall_timeout_s: float,
        poll_interval_s: float = 1.0,
        transfers: TransferTotals | None = None,
    ) -> None:
        """All parts are started; nothing is announced yet.

        Health is checked every ``poll_interval_s``; ``transfers`` counts what the parts pull.
        """
        self.record = record
        self._engine = engine
        self._requests = requests
        self._source = source
        self._server = server
        self._kv_events = kv_events
        self._drain_timeout_s = drain_timeout_s
        self._progress = ProgressWatch(stall_timeout_s)
        self._turns = TurnWatch(stall_timeout_s)
        self._poll_interval_s = poll_interval_s
        self._transfers = transfers or TransferTotals()
        self._started_at = time.monotonic()
        self._registration: Registration | None = None
        self._registry: Registry | None = None
        self._pacer: Pacer | None = None
        self._is_healthy = True
        self._draining: asyncio.Task[DrainOutcome] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it takes new requests."""
        return self.is_alive and self._is_healthy and self._draining is None and self._registration is not None

    @property
    def is_alive(self) -> bool:
        """Whether the engine lives; if not, only a restart helps."""
        return self._engine.is_alive

    async def announce(self, registration: Registration, registry: Registry | None = None) -> None:
        """The worker is registered: set its health to SERVING, unless it is stuck.

        ``registry`` lists the workers that could go on with its requests; ``None``: there are none.
        """
        self._registration, self._registry = registration, registry
        await self._server.set_serving(None, self._is_healthy)

    async def consume(self, pacer: Pacer) -> None:
        """Bring the engine's outputs to their streams until the engine is closed. Raises ``EngineError`` if it dies."""
        self._pacer = pacer
        try:
            async for step in self._engine.outputs():
                self._requests.route(step)
                # Before the load is sampled: the load names the last batch of events before it.
                self._kv_events.take(step)
                pacer.poke()
        finally:
            self._kv_events.close()

    def poke(self) -> None:
        """The load may have changed without an output of the engine."""
        if self._pacer is not None:
            self._pacer.poke()

    async def watch_health(self) -> None:
        """Update health from progress, at every interval. Runs until cancelled."""
        # A worker that was stopped, or got no CPU, finds nothing moved when it goes on.
        clock = AwakeClock(2 * self._poll_interval_s)
        while True:
            progress, now = self._requests.progress, clock.now()
            is_moving = self._progress.is_moving(
                num_steps=progress.num_steps, num_in_flight=progress.num_in_flight, now=now
            )
            is_turning = self._turns.is_moving(self._engine.turns(), now)
            await self._set_healthy(self._engine.is_alive and is_moving and is_turning)
            await asyncio.sleep(self._poll_interval_s)

    def prompt_queues(self) -> list[PromptQueue]:
        """The part of the load that the pacer compares after every step, by rank."""
        return [
            PromptQueue(rank.num_queued_prefill_tokens, rank.num_unbegun_prefill_tokens, rank.num_prompt_steps)
            for rank in self._requests.stats()
        ]

    def sample_load(self) -> WorkerLoad:
        """The load now, for a caller that asks for it."""
        return self._load(self._requests.placements.progress())

    async def kv_snapshot(self) -> KvSnapshot:
        """All blocks that can be shared at one moment, with the number of the last batch of events before it."""
        return await self._kv_events.snapshot()

    def next_load(self) -> WorkerLoad:
        """The load now, to publish; call ``load_sent`` once it is sent."""
        return self._load(self._requests.placements.news())

    def load_sent(self) -> None:
        """The last ``next_load`` was sent."""
        self._requests.placements.sent()

    def _load(self, placements: Mapping[str, PlacementProgress]) -> WorkerLoad:
        now = time.monotonic()
        return WorkerLoad(
            worker_id=self.record.worker_id,
            epoch=self.record.epoch,
            ranks=tuple([rank_load(stats, now) for stats in self._requests.stats()]),
            router_progress=self._requests.starts.watermarks(),
            router_arrivals=self._requests.starts.arrivals(),
            placements=placements,
            is_draining=self._draining is not None,
            is_healthy=self._is_healthy,
            transfers=self._transfers.by_way,
        )

    @property
    def uptime_s(self) -> float:
        """Seconds since it started."""
        return time.monotonic() - self._started_at

    async def drain(self, timeout_s: float | None = None) -> DrainOutcome:
        """Leave discovery, refuse new requests, let others end in ``timeout_s``, and cut the rest. Later calls join.

        Where another worker can go on with its requests, they are cut much sooner. Who asked for a request that is cut
        gets ``DrainingError`` after all its tokens, and asks elsewhere for the next ones.
        """
        if self._draining is None:
            limit_s = self._drain_timeout_s if timeout_s is None else min(timeout_s, self._drain_timeout_s)
            self._draining = asyncio.create_task(self._drain(limit_s), name="drain")
            self.poke()
        return await asyncio.shield(self._draining)

    async def _drain(self, timeout_s: float) -> DrainOutcome:
        deadline = time.monotonic() + timeout_s
        num_running = self._requests.num_running
        logger.info("draining: %d requests run, at most %.1f s", num_running, timeout_s)
        self._requests.drain()
        await self._server.set_not_serving_for_good()
        if self._registration is not None:
            await self._registration.close()
        num_cancelled = await self._end_requests(deadline)
        # Decode workers still fetch what was prefilled here; there is no other copy.
        await self._wait_hand_offs(deadline)
        return DrainOutcome(num_completed=max(num_running - num_cancelled, 0), num_cancelled=num_cancelled)

    async def _end_requests(self, deadline: float) -> int:
        """Wait until none runs, or cut those that still do, and return how many these were."""
        while not await self._requests.wait_idle(min(_MOVE_AFTER_S, deadline - time.monotonic())):
            if time.monotonic() < deadline and not await self._has_stand_in():
                continue
            num_cut = self._requests.end_all(DrainingError("this worker is draining and ends what it runs"))
            logger.info("draining: %d requests must go on elsewhere", num_cut)
            await self._requests.wait_idle(_LAST_OUTPUTS_S)
            return num_cut
        return 0

    async def _wait_hand_offs(self, deadline: float) -> None:
        ask_at = time.monotonic() + _LAST_PULLS_S
        while self._num_handed_off and (now := time.monotonic()) < deadline:
            if now >= ask_at:
                if await self._has_stand_in():
                    return
                ask_at = now + _LAST_PULLS_S
            await asyncio.sleep(_HAND_OFF_POLL_INTERVAL_S)

    @property
    def _num_handed_off(self) -> int:
        counts = self._source.counts
        return counts.held + counts.pulling

    async def _has_stand_in(self) -> bool:
        """Whether another worker is registered that can go on with this one's requests."""
        if self._registry is None:
            return False
        try:
            others = await self._registry.workers()
        except DiscoveryError as error:
            logger.info("draining: it is not known whether there are other workers: %s", error)
            return False
        return any(_can_replace(other, self.record) for other in others)

    async def _set_healthy(self, is_healthy: bool) -> None:
        if is_healthy == self._is_healthy:
            return
        self._is_healthy = is_healthy
        self.poke()
        logger.warning("health: %s", "moving again" if is_healthy else "work is in flight and nothing moves")
        if self._draining is None and self._registration is not None:
            await self._server.set_serving(None, is_healthy)


def _can_replace(other: WorkerRecord, record: WorkerRecord) -> bool:
    """Whether ``other`` can go on with whatever the worker of ``record`` runs, for each router that sends it there."""
    return (
        other.epoch != record.epoch
        and _pool(other) == _pool(record)
        and other.max_media_tokens >= record.max_media_tokens
        and _longest(other) >= _longest(record)
        and all(set(kept) >= set(needed) for kept, needed in zip(_abilities(other), _abilities(record), strict=True))
    )


def _pool(record: WorkerRecord) -> tuple[str, ...]:
    # A router uses only versions that it speaks. All that use this worker speak this one's.
    return record.role, record.model_name, record.model_fingerprint, record.contract_version


def _longest(record: WorkerRecord) -> int:
    """Tokens of the longest request. For what runs beside it there may be less room: it waits in a router's queue."""
    return min(record.max_model_len, record.num_blocks * record.block_size)


def _abilities(record: WorkerRecord) -> tuple[tuple[str, ...], ...]:
    return record.adapters, record.media, record.sampling_fields


@dataclass
class ProgressWatch:
    """A worker with work in flight and no step for ``stall_timeout_s`` seconds is stuck.

    Pure: the caller gives the time.
    """

    stall_timeout_s: float
    _num_steps: int = -1
    _moved_at: float = 0.0

    def is_moving(self, *, num_steps: int, num_in_flight: int, now: float) -> bool:
        """Check once: False while work is in flight and no step was done for too long."""
        if num_steps != self._num_steps or num_in_flight == 0:
            self._num_steps = num_steps
            self._moved_at = now
        return now - self._moved_at <= self.stall_timeout_s


@dataclass
class TurnWatch:
    """An engine's thread that is in one turn for much longer than the turn should take hangs.

    ``ProgressWatch`` can't notice that as soon: requests that wait for others, such as for blocks that another worker
    is to fetch, may wait for long and take no step. A turn waits for no other process.

    Pure: the caller gives the time.
    """

    stall_timeout_s: float  # also where nothing is known of a turn's time
    _began_at: dict[tuple[int, int], float] = field(default_factory=dict)

    def is_moving(self, turns: Sequence[Turn], now: float) -> bool:
        """Check once: False while a thread hangs."""
        began_at, self._began_at = self._began_at, {}
        is_moving = True
        for turn in turns:
            key = turn.thread, turn.number
            self._began_at[key] = began_at.get(key, now)
            is_moving &= now - self._began_at[key] <= self._limit_s(turn)
        return is_moving

    def _limit_s(self, turn: Turn) -> float:
        if turn.expected_s is None:
            return self.stall_timeout_s
        return min(self.stall_timeout_s, max(_HANGS_AFTER_S, _HANGS_AFTER_FORECASTS * turn.expected_s))
