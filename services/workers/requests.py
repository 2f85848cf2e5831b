"""The request book of a worker: its running requests, and what its load reports to routers about them.

``RequestBook`` is what the dispatchers of all roles have in common: counting, draining, waiting until idle, one metric
and one log line for each request's end. ``CountedStarts`` and ``CountedPlacements`` report to routers which of their
starts the worker's load shows already. A router counts the others itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from quartet.engine.base import EngineStats, StepOutput, Turn
from quartet.errors import DrainingError, ServingError
from quartet.events.load import PlacementProgress
from quartet.kvcache.layout import HandOff, Payload
from quartet.streams.messages import RequestContext
from quartet.telemetry.logging import FinishedRequest, log_request
from quartet.telemetry.metrics import WorkerMetrics
from quartet.telemetry.tracing import Tracer, ids_of
from services.workers.request_trace import WorkerTrace

logger = logging.getLogger(__name__)

# Bound of the routers remembered. A router that is forgotten only keeps its own bookings in full a little longer.
_MAX_ROUTERS = 1024

# After this long a live router has received many times that its last start is counted in.
_FORGET_AFTER_S = 600.0

# Loads come once a second or more often, and some are lost.
_REPEAT_FOR_S = 3.5

# Under load they come 20 times a second. To repeat everything each time would cost router and worker more than the
# starts themselves: what is older than this comes only with every recapitulation.
_FRESH_S = 0.2

_RECAP_INTERVAL_S = 0.5

# Routers find out about the rest by their own clock. 10,000 numbers and counts are 50 kB of a load.
_MAX_REPEATED = 10_000


class Computing(Protocol):
    """An engine, as far as a worker depends on it."""

    @property
    def is_alive(self) -> bool:
        """False once it has died; there are no more outputs."""
        ...

    def outputs(self) -> AsyncIterator[StepOutput]:
        """Its outputs, in order, for one consumer. Ends when it is closed; raises ``EngineError`` when it died."""
        ...

    def turns(self) -> Sequence[Turn]:
        """The turns of its threads that do not wait for work."""
        ...


class HandOffSource(Protocol):
    """Offers results until another worker has pulled them (``quartet.transfer.source.TransferSource``)."""

    def offer(self, holder: int, block_ids: tuple[int, ...], payload: Payload) -> HandOff:
        """Hold ``holder``'s blocks under a ticket."""
        ...

    def withdraw(self, holder: int) -> None:
        """End ``holder``'s hand-off; nothing happens if it has none."""
        ...


@dataclass(frozen=True)
class Progress:
    """Steps done since the start, and work in flight, which must bring more steps."""

    num_steps: int
    num_in_flight: int


@dataclass(eq=False, kw_only=True)
class BookedRequest:
    """A request between its start and its end.

    Attributes:
        num_prompt_tokens: for the log; ``None``: the request has no prompt.
        arrived_at: in monotonic seconds.
        ends_with: why the worker itself ends it early; ``None``: it does not.
        trace: makes its spans; ``None``: it makes none.
    """

    context: RequestContext
    num_prompt_tokens: int | None
    arrived_at: float
    ends_with: ServingError | None = None
    trace: WorkerTrace | None = None


RequestT = TypeVar("RequestT", bound=BookedRequest)


class RequestBook(ABC, Generic[RequestT]):
    """The running requests of one worker, by an id that is drawn here. Lives on the event loop.

    A dispatcher derives from it: it takes requests from streams and brings results back to them.

    Attributes:
        starts: by router, the numbers of its starts that arrived, and up to which ``stats`` counts all of them in.
        placements: by router, what became of the starts that it placed for clients lately.
    """

    def __init__(self, metrics: WorkerMetrics, tracer: Tracer | None = None) -> None:
        """Begin empty; ``metrics`` counts the requests that end, ``tracer`` traces them (``None``: nothing does)."""
        self._metrics = metrics
        self._tracer = tracer
        self._running: dict[int, RequestT] = {}
        self._ids = itertools.count(1)
        self.starts = CountedStarts()
        self.placements = CountedPlacements()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        """Requests that have not ended yet."""
        return len(self._running)

    @property
    @abstractmethod
    def progress(self) -> Progress:
        """What health watches: work in flight without a new step means that the worker is stuck."""

    @abstractmethod
    def stats(self) -> Sequence[EngineStats]:
        """The load now, one entry for each data-parallel rank. May be called on any thread, and does not block."""

    @abstractmethod
    def route(self, step: StepOutput) -> None:
        """Bring one step's outputs to their streams."""

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs; False if one still does after ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self, error: ServingError) -> int:
        """End all requests early, with ``error``. Returns how many there are."""
        num_running = len(self._running)
        for id, request in list(self._running.items()):
            request.ends_with = error
            self._stop(id)
        return num_running

    @abstractmethod
    def _stop(self, id: int) -> None:
        """End a running request early; ``_finish`` follows."""

    def _check_draining(self) -> None:
        if self._is_draining:
            raise DrainingError("this worker is draining and takes nothing new", retry_delay_s=1.0)

    def _begin(self, id: int, request: RequestT) -> None:
        self._running[id] = request
        self._idle.clear()

    def _finish(self, id: int, outcome: str, error: ServingError | None = None) -> RequestT | None:
        """Remove, count, log and trace a request, which failed with ``error``; ``None``: it does not run."""
        request = self._running.pop(id, None)
        if request is None:
            return None
        if not self._running:
            self._idle.set()
        self._metrics.requests.labels(outcome).inc()
        trace_id, span_id = ids_of(request.context.traceparent)
        log_request(
            logger,
            FinishedRequest(
                request_id=request.context.request_id,
                outcome=outcome,
                trace_id=trace_id,
                span_id=span_id,
                tenant=request.context.tenant,
                num_prompt_tokens=request.num_prompt_tokens,
                total_s=time.monotonic() - request.arrived_at,
            ),
        )
        if request.trace is not None:
            request.trace.end(outcome, error)
        return request


def named(context: RequestContext) -> RequestContext:
    """``context``, with a new request id if it came without one."""
    return context if context.request_id else replace(context, request_id=secrets.token_hex(16))


@dataclass
class _Router:
    highest: int = 0
    received_at: float = 0.0
    outstanding: set[int] = field(default_factory=set)


class CountedStarts:
    """Watermarks by router: the load counts in all starts up to this number.

    Numbers rise, but some never arrive: a broken stream loses starts. So the watermark is the highest number that
    arrived, held back by those that arrived and are not counted in yet.

    Every load carries the watermarks, and a router that restarts has a new name. So a router is left out after ten
    quiet minutes, unless one of its starts is not counted in yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know no router; ``clock`` gives seconds."""
        self._clock = clock
        self._routers: OrderedDict[str, _Router] = OrderedDict()

    def arrive(self, router_id: str, number: int) -> None:
        """A start arrived and may still be refused; it holds the watermark back until ``count_in``.

        Starts without a router or without a number are ignored.
        """
        if not (router_id and number):
            return
        router = self._routers.setdefault(router_id, _Router())
        self._routers.move_to_end(router_id)
        router.received_at = self._clock()
        router.highest = max(router.highest, number)
        router.outstanding.add(number)
        if len(self._routers) > _MAX_ROUTERS:
            self._routers.popitem(last=False)

    def count_in(self, router_id: str, number: int) -> None:
        """The load shows that start, or it has ended. May be called twice."""
        router = self._routers.get(router_id)
        if router is not None:
            router.received_at = self._clock()
            router.outstanding.discard(number)

    def watermarks(self) -> dict[str, int]:
        """By router, the last number up to which every start is counted in."""
        oldest = self._clock() - _FORGET_AFTER_S
        for router_id, router in list(self._routers.items()):
            if router.received_at < oldest and not router.outstanding:
                del self._routers[router_id]
        return {
            router_id: min(router.outstanding, default=router.highest + 1) - 1
            for router_id, router in self._routers.items()
        }

    def arrivals(self) -> dict[str, int]:
        """By router, the highest number that arrived: its tokens are in the load."""
        return {router_id: router.highest for router_id, router in self._routers.items()}


@dataclass(eq=False)
class _News:
    router_id: str
    number: int
    num_output_tokens: int = 0
    first_sent_at: float = math.inf


class CountedPlacements:
    """Numbers of the starts that routers placed for clients: those counted in, and those that ended after how much.

    Such starts arrive in any order, or never, so there is no watermark: loads repeat each number for some seconds.
    These begin with the first load that has it: a worker that was stopped for longer still reports what ended before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know of none; ``clock`` gives seconds."""
        self._clock = clock
        self._recap_at = -_RECAP_INTERVAL_S
        self._recap_given_at: float | None = None
        self._started: deque[_News] = deque()
        self._ended: deque[_News] = deque()
        self._given: list[_News] = []  # by the last ``news``, for the first time

    def start(self, router_id: str, number: int) -> None:
        """The next load counts it in."""
        self._add(self._started, _News(router_id, number))

    def end(self, router_id: str, number: int, num_output_tokens: int) -> None:
        """The next load no longer counts it; it may never have been counted in.

        It has ``num_output_tokens`` output tokens, those of earlier attempts included.
        """
        self._add(self._ended, _News(router_id, number, num_output_tokens))

    def progress(self) -> dict[str, PlacementProgress]:
        """All that was first sent in the last seconds, or not yet, by router. Does not change what ``news`` returns."""
        return self._since(self._clock() - _REPEAT_FOR_S)

    def news(self) -> dict[str, PlacementProgress]:
        """For the next load, by router; call ``sent`` once that load is sent. Each number comes three times or more."""
        now = self._clock()
        is_recap = now - self._recap_at >= _RECAP_INTERVAL_S
        self._recap_given_at = now if is_recap else None
        self._given = [*_unsent(self._started), *_unsent(self._ended)]
        return self._since(now - (_REPEAT_FOR_S if is_recap else _FRESH_S))

    def sent(self) -> None:
        """The load with the last ``news`` was sent. Some loads are made and not sent."""
        if self._recap_given_at is not None:
            self._recap_at = self._recap_given_at
        now = self._clock()
        for one in self._given:
            one.first_sent_at = now
        self._given = []

    def _since(self, since: float) -> dict[str, PlacementProgress]:
        if not (self._started or self._ended):
            return {}
        started, ended = _by_router(self._started, since), _by_router(self._ended, since)
        return {
            router_id: PlacementProgress(
                tuple([one.number for one in started.get(router_id, ())]),
                tuple([one.number for one in ended.get(router_id, ())]),
                tuple([one.num_output_tokens for one in ended.get(router_id, ())]),
            )
            for router_id in {**started, **ended}
        }

    def _add(self, news: deque[_News], one: _News) -> None:
        if not (one.router_id and one.number):
            return
        news.append(one)
        since = self._clock() - _REPEAT_FOR_S
        while len(news) > _MAX_REPEATED or news[0].first_sent_at <= since:
            news.popleft()


def _unsent(news: deque[_News]) -> Iterator[_News]:
    return itertools.takewhile(lambda one: one.first_sent_at == math.inf, reversed(news))


def _by_router(news: deque[_News], since: float) -> dict[str, list[_News]]:
    by_router: dict[str, list[_News]] = {}
    for one in reversed(news):
        if one.first_sent_at <= since:
            break
        by_router.setdefault(one.router_id, []).append(one)
    return by_router
