"""One phase of load on a stack: what the clients saw, what the processes counted, what it cost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from benchmarks.closed_loop import ClosedLoop, LoadFigures, Workload
from benchmarks.evidence import Evidence, collect_evidence
from benchmarks.processes import CpuMeter, CpuUse
from benchmarks.progress import LiveLine
from benchmarks.stack import Stack

_ROUTER, _PREFILL, _DECODE, _CLIENT = "router", "prefill-0", "decode-0", "client"
# Workers refresh their engines' figures once a second.
_SETTLE_S = 2.5
_SAMPLE_INTERVAL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Extremes:
    """The largest values seen at the samples taken every two seconds.

    Attributes:
        queued_requests: that waited in the router.
        decode_blocks: in use at the decode worker.
        prefill_held_blocks: held at the prefill worker for hand-offs.
    """

    queued_requests: int = 0
    decode_blocks: int = 0
    prefill_held_blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What one phase gave."""

    load: LoadFigures
    evidence: Evidence
    extremes: Extremes
    cpu: CpuUse


class PhaseRunner:
    """Runs phases one after the other, each from an idle stack to an idle stack."""

    def __init__(self, stack: Stack, line: LiveLine, workload: Workload, *, ramp_s: float) -> None:
        """``workload``'s seed is the first phase's; every later one has a new one."""
        self._stack = stack
        self._line = line
        self._workload = workload
        self._ramp_s = ramp_s

    async def run(self, name: str, concurrency: int, duration_s: float) -> Phase:
        """Load the stack with ``concurrency`` clients for the ramp and ``duration_s``."""
        self._workload = replace(self._workload, seed=self._workload.seed + 1)
        loop = ClosedLoop(self._stack.router_address, self._workload)
        before = await self._stack.metrics()
        meter = CpuMeter({**self._stack.pids, _CLIENT: os.getpid()})
        async with self._watched(name, concurrency, loop) as sampler:
            load = await loop.run(concurrency, ramp_s=self._ramp_s, duration_s=duration_s)
            cpu = meter.read()
        await asyncio.sleep(_SETTLE_S)
        after = await self._stack.metrics()
        grown = {process: after[process].since(before[process]) for process in before}
        evidence = collect_evidence(
            grown[_ROUTER], grown[_PREFILL], grown[_DECODE], prompt_tokens_sent=load.prompt_tokens_sent
        )
        self._line.say(_summary(name, load, evidence))
        return Phase(load=load, evidence=evidence, extremes=sampler.extremes, cpu=cpu)

    @asynccontextmanager
    async def _watched(self, name: str, concurrency: int, loop: ClosedLoop) -> AsyncIterator[_Sampler]:
        """Show and sample while the load runs."""
        shown = _Shown(f"{name}, {concurrency} clients", loop)
        sampler = _Sampler(self._stack)
        tasks = [asyncio.create_task(self._line.follow(shown.describe)), asyncio.create_task(sampler.run())]
        try:
            yield sampler
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Sampler:
    def __init__(self, stack: Stack) -> None:
        self.extremes = Extremes()
        self._stack = stack

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_INTERVAL_S)
            found = await self._stack.metrics()
            blocks = "quartet_worker_blocks"
            self.extremes = _max(
                self.extremes,
                Extremes(
                    queued_requests=round(found[_ROUTER].total("quartet_router_queued_requests")),
                    decode_blocks=round(found[_DECODE].total(blocks, state="used")),
                    prefill_held_blocks=round(found[_PREFILL].total(blocks, state="held")),
                ),
            )


@dataclass
class _Shown:
    name: str
    loop: ClosedLoop
    num_tokens: int = 0

    def describe(self, elapsed_s: float, interval_s: float) -> str:
        rate = (self.loop.num_tokens - self.num_tokens) / interval_s
        self.num_tokens = self.loop.num_tokens
        errors = ", ".join(f"{count} {status}" for status, count in self.loop.errors.items()) or "none"
        return (
            f"{self.name}: {elapsed_s:5.1f} s  {rate:7.1f} tok/s  {self.loop.num_in_flight} in flight  errors: {errors}"
        )


def _max(one: Extremes, other: Extremes) -> Extremes:
    return Extremes(
        queued_requests=max(one.queued_requests, other.queued_requests),
        decode_blocks=max(one.decode_blocks, other.decode_blocks),
        prefill_held_blocks=max(one.prefill_held_blocks, other.prefill_held_blocks),
    )


def _summary(name: str, load: LoadFigures, evidence: Evidence) -> str:
    return (
        f"{name}: {load.concurrency} clients, {load.tokens_per_s:.1f} tok/s, {load.requests_finished} finished, "
        f"errors {dict(load.errors) or 'none'}, {evidence.requests_waited} waited, "
        f"{evidence.preemptions} preemptions, {evidence.hand_offs_expired} expired, "
        f"{evidence.prompts_prefilled_twice} prefilled twice"
    )
