"""Windows of one load: what each process spent on a token, and how much later tokens came because of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from benchmarks.paced_engine import PERIOD, STEP_S
from benchmarks.processes import CpuMeter, CpuUse
from benchmarks.progress import LiveLine
from benchmarks.relay_load import Clients, Job, Load, LoadFailedError, Way, Window
from benchmarks.relay_stack import DECODE, ROUTER, RelayStack

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    FiguresT = TypeVar("FiguresT", bound=DataclassInstance)

#: Tokens that a stream gets in a second.
TOKENS_PER_S = 1 / (STEP_S * PERIOD)
# Streams of one client process, for ways in which each stream costs the client a message a token.
_MAX_STREAMS_PER_CLIENT = 512
_QUIET_S, _QUIET_TIMEOUT_S = 0.1, 10.0
#: Between resuming a load after a rest and measuring it.
SETTLE_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One load of endless streams."""

    way: Way
    num_streams: int
    with_text: bool

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.way}, {self.num_streams} streams, {'text' if self.with_text else 'ids'}"


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How long and how often a load is measured.

    Attributes:
        warm_up_s: time after all streams are open and the first token flows.
        round_size: windows in a row; one round covers all loads.
    """

    warm_up_s: float
    window_s: float
    round_size: int
    num_rounds: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one window of a load, or each figure's median over several windows.

    Attributes:
        router_cpu_us_per_token: the router's CPU time over the tokens that reached the client.
        decode_cpu_us_per_token: CPU time over the tokens that the engine emitted, without the engine's own thread.
        decode_engine_cpu_us_per_token: the same of that thread.
        added_latency_ms_p50, added_latency_ms_p99: from when the engine emitted a token until the client had it.
        offered_tokens_per_s: tokens at the engine's full pace.
        made_tokens_per_s: tokens that the engine emitted; fewer if it could not keep its pace.
        tokens_per_s: tokens that reached the client.
        tokens_per_message: as they reached the client.
        router_share, decode_share, client_share: of a core; all client processes together.
        others_share: the same of everything else on the machine.
        opened_s: until all streams ran, before the engine made its first step.
    """

    router_cpu_us_per_token: float
    decode_cpu_us_per_token: float
    decode_engine_cpu_us_per_token: float
    added_latency_ms_p50: float
    added_latency_ms_p99: float
    offered_tokens_per_s: float
    made_tokens_per_s: float
    tokens_per_s: float
    tokens_per_message: float
    router_share: float
    decode_share: float
    client_share: float
    others_share: float
    opened_s: float


@dataclass(frozen=True, kw_only=True)
class IdleFigures:
    """What the processes use with no request anywhere: load reports, heartbeats, and the engine's empty steps."""

    router_share: float
    decode_share: float


@dataclass(frozen=True, kw_only=True)
class RequestFigures:
    """Figures of windows of a closed loop of one-token requests."""

    router_cpu_ms_per_request: float
    decode_cpu_ms_per_request: float
    requests_per_s: float
    router_share: float
    client_share: float
    others_share: float


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """One window: what the engine emitted and used, CPU time, and what the clients counted."""

    num_tokens: int
    engine_cpu_s: float
    use: CpuUse
    window: Window
    opened_s: float


class BareLoad(Protocol):
    """The same load through a relay that does nothing but gRPC; it rests between its windows."""

    async def window(self) -> None:
        """Measure one window."""


class Measurer:
    """Puts loads on one stack, one after the other."""

    def __init__(self, stack: RelayStack, line: LiveLine, windows: Windows) -> None:
        self._stack = stack
        self._line = line
        self.windows = windows

    async def idle(self) -> IdleFigures:
        """Measure one window without any load."""
        meter = CpuMeter(self._stack.pids)
        await asyncio.sleep(self.windows.window_s * self.windows.round_size)
        share = meter.read().share
        return IdleFigures(router_share=share[ROUTER], decode_share=share[DECODE])

    async def streams(self, case: Case, bare: BareLoad | None = None) -> list[Figures]:
        """Measure a round of windows of endless streams. ``bare`` has a window before each, while these get no token.

        Raises:
            LoadFailedError: the streams can't be opened, or some of them failed.
        """
        windows = await self._round(stream_jobs(self._stack, case), bare)
        return [_figures(counted, case.num_streams * TOKENS_PER_S) for counted in windows]

    async def requests(
        self,
        way: Way,
        num_clients: int,
        num_prompt_tokens: int,
        bare: BareLoad | None = None,
        *,
        is_chat: bool = False,
    ) -> list[RequestFigures]:
        """Measure a round of windows of one-token requests. ``bare`` has one before each, while these get no answer.

        Raises:
            LoadFailedError: the requests are not served, or some of them failed.
        """
        job = Job(
            router_address=self._stack.address(way),
            clock_path=str(self._stack.clock_path),
            way=way,
            load=Load.REQUESTS,
            count=num_clients,
            num_prompt_tokens=num_prompt_tokens,
            is_chat=is_chat,
        )
        return [_request_figures(counted) for counted in await self._round([job], bare)]

    async def _round(self, jobs: Sequence[Job], bare: BareLoad | None) -> list[_Counted]:
        clock, found = self._stack.clock, list[_Counted]()
        try:
            async with open_load(self._stack, jobs) as clients:
                await asyncio.sleep(self.windows.warm_up_s)
                for _ in range(self.windows.round_size):
                    if bare is not None:
                        clock.is_held = True
                        await bare.window()
                        clock.is_held = False
                        await asyncio.sleep(SETTLE_S)
                    found.append(await self._window(clients))
        finally:
            await self._await_quiet()
        return found

    async def _window(self, clients: Clients) -> _Counted:
        clock = self._stack.clock
        await clients.begin()
        num_tokens, engine_cpu_s = clock.num_tokens, clock.engine_cpu_s
        meter = CpuMeter({**self._stack.pids, **clients.pids})
        await asyncio.sleep(self.windows.window_s)
        use = meter.read()
        num_tokens, engine_cpu_s = clock.num_tokens - num_tokens, clock.engine_cpu_s - engine_cpu_s
        window = await clients.end()
        if not (num_tokens and window.num_tokens):
            raise LoadFailedError(f"the engine gave out {num_tokens} tokens, the client had {window.num_tokens}")
        return _Counted(
            num_tokens=num_tokens, engine_cpu_s=engine_cpu_s, use=use, window=window, opened_s=clients.opened_s
        )

    async def _await_quiet(self) -> None:
        """Wait until the engine emits nothing more, so that the next load begins with nothing of the last one."""
        deadline = time.monotonic() + _QUIET_TIMEOUT_S
        num_tokens = -1
        while num_tokens != self._stack.clock.num_tokens:
            if time.monotonic() > deadline:
                raise LoadFailedError("streams that were dropped go on")
            num_tokens = self._stack.clock.num_tokens
            await asyncio.sleep(_QUIET_S)


@asynccontextmanager
async def open_load(stack: RelayStack, jobs: Sequence[Job]) -> AsyncIterator[Clients]:
    """Open a load; of streams, all are open before the first token flows.

    Raises:
        LoadFailedError: the load can't be opened.
    """
    stack.clock.is_held = jobs[0].load is Load.STREAMS
    try:
        async with Clients(jobs) as clients:
            stack.clock.is_held = False
            yield clients
    finally:
        stack.clock.is_held = False


def stream_jobs(stack: RelayStack, case: Case) -> list[Job]:
    """The client processes of a load."""
    is_alone = case.way in (Way.SESSION, Way.PLACE_PER_CLIENT)
    num_clients = 1 if is_alone else -(-case.num_streams // _MAX_STREAMS_PER_CLIENT)
    count = case.num_streams // num_clients
    return [
        Job(
            router_address=stack.address(case.way),
            clock_path=str(stack.clock_path),
            way=case.way,
            count=count,
            first_seed=number * count,
            with_text=case.with_text,
        )
        for number in range(num_clients)
    ]


def medians(items: Sequence[FiguresT]) -> FiguresT:
    """Each figure's median over ``items``, at least one."""
    kind = type(items[0])
    return kind(**{item.name: median(getattr(figures, item.name) for figures in items) for item in fields(kind)})


def _figures(counted: _Counted, offered_tokens_per_s: float) -> Figures:
    use, window = counted.use, counted.window
    num_tokens = window.num_tokens * use.duration_s / window.duration_s
    return Figures(
        router_cpu_us_per_token=1e6 * use.cpu_s[ROUTER] / num_tokens,
        decode_cpu_us_per_token=1e6 * (use.cpu_s[DECODE] - counted.engine_cpu_s) / counted.num_tokens,
        decode_engine_cpu_us_per_token=1e6 * counted.engine_cpu_s / counted.num_tokens,
        added_latency_ms_p50=_quantile_ms(window.latencies_us, 0.5),
        added_latency_ms_p99=_quantile_ms(window.latencies_us, 0.99),
        offered_tokens_per_s=offered_tokens_per_s,
        made_tokens_per_s=counted.num_tokens / use.duration_s,
        tokens_per_s=window.num_tokens / window.duration_s,
        tokens_per_message=window.num_tokens / window.num_messages,
        router_share=use.share[ROUTER],
        decode_share=use.share[DECODE],
        client_share=_client_share(use),
        others_share=use.others_share,
        opened_s=counted.opened_s,
    )


def _request_figures(counted: _Counted) -> RequestFigures:
    use, window = counted.use, counted.window
    num_requests = window.num_requests * use.duration_s / window.duration_s
    return RequestFigures(
        router_cpu_ms_per_request=1e3 * use.cpu_s[ROUTER] / num_requests,
        decode_cpu_ms_per_request=1e3 * (use.cpu_s[DECODE] - counted.engine_cpu_s) / num_requests,
        requests_per_s=window.num_requests / window.duration_s,
        router_share=use.share[ROUTER],
        client_share=_client_share(use),
        others_share=use.others_share,
    )


def _quantile_ms(latencies_us: Sequence[int], share: float) -> float:
    return float(np.quantile(latencies_us, share, method="higher")) / 1e3


def _client_share(use: CpuUse) -> float:
    return sum(share for name, share in use.share.items() if name not in (ROUTER, DECODE))
