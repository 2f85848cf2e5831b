"""Topologies on GPUs, and the row ``first_step`` of ``gpu_hand_off``: when Decode goes on with a prompt handed to it.

All are real processes: workers, router, and discovery by files. Weights are random, prompts are random token ids that
share no prefix, and every prompt is prefilled by the Prefill worker where there is one.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.disagg_client import Answered, make_start, random_prompt, send
from benchmarks.progress import LiveLine
from benchmarks.stack import Stack, run_by
from benchmarks.traced_worker import TRACE_VARIABLE, Traced, read_traces
from quartet.config import build
from quartet.discovery.base import Role
from quartet.rpc.channels import create_channel
from quartet.v1 import router_pb2_grpc
from services.topology.topology import Topology

_LOGS = Path(".run")
_START_TIMEOUT_S = 300.0
_TRACED = "benchmarks.traced_worker"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Workers of one topology.

    Attributes:
        name: in the log's name and in the namespace.
        workers: role and device of each.
        engine: settings of all.
        num_blocks: KV blocks of a worker's pool, by role.
    """

    name: str
    workers: Sequence[tuple[Role, str]]
    engine: Mapping[str, Any]
    num_blocks: Mapping[Role, int]

    def settings(self, model_path: Path, records: Path, environment: Mapping[str, str]) -> Mapping[str, object]:
        """The topology's."""
        quiet = {"log": {"level": "warning"}}
        return {
            "namespace": f"benchmark-{self.name}",
            "model": {"path": str(model_path), "name": "random"},
            "engine": dict(self.engine),
            "discovery": {"kind": "file", "file": {"directory": str(records)}},
            "router": {"overrides": {**quiet, "policy": {"local_prefill_max_tokens": 0}}},
            "workers": [
                {
                    "role": role.value,
                    "overrides": {**quiet, "engine": {"device": device, "num_blocks": self.num_blocks[role]}},
                }
                for role, device in self.workers
            ],
            "environment": dict(environment),
            "drain_timeout_s": 0.5,
            "start_timeout_s": _START_TIMEOUT_S,
        }


@asynccontextmanager
async def serving(
    fleet: Fleet, model_path: Path, line: LiveLine, *, traces: Path | None = None
) -> AsyncIterator[Stack]:
    """Run ``fleet``; with ``traces`` its workers write there what they compute."""
    environment = {} if traces is None else {TRACE_VARIABLE: str(traces)}
    with tempfile.TemporaryDirectory() as records:
        topology = build(Topology, fleet.settings(model_path, Path(records), environment))
        log = _LOGS / f"benchmark-gpu-{fleet.name}.log"
        adapt = (lambda plan: plan) if traces is None else run_by(_TRACED)
        async with Stack(topology, log, line.say, adapt=adapt) as stack:
            yield stack


async def bytes_by_way(stack: Stack) -> Mapping[str, float]:
    """Bytes of blocks that the workers have pulled so far, by the way that they took."""
    found: Counter[str] = Counter()
    for metrics in (await stack.metrics()).values():
        found.update(metrics.by_label("quartet_worker_transfer_bytes_total", "way"))
    return {way: size_bytes for way, size_bytes in found.items() if size_bytes}


@dataclass(frozen=True, kw_only=True)
class FirstStepPlan:
    """Prompts, one after the other.

    Attributes:
        num_warm_up: requests that are not counted.
    """

    num_prompt_tokens: int
    num_requests: int
    num_warm_up: int


@dataclass(frozen=True, kw_only=True)
class FirstStepRow:
    """The row ``first_step``: medians, in milliseconds.

    Attributes:
        way: by which the blocks moved.
        wait_ms: from the end of the prefill's last step to the beginning of the first decode step; of each request.
        wait_ms_p50, wait_ms_p99: p99 of few requests is about the slowest.
        until_submit_ms: the part of it until the decode worker's engine had the request.
        transfer_ms: moving blocks, as the decode worker says; it may begin earlier than the prefill ends.
        transfer_gb_per_s: bytes moved over that time.
        first_step_ms: length of the first decode step.
        prefill_ms: from the beginning of the prefill's first step to the end of its last.
    """

    num_prompt_tokens: int
    way: str
    wait_ms: Sequence[float]
    wait_ms_p50: float
    wait_ms_p99: float
    until_submit_ms: float
    transfer_ms: float
    transfer_gb_per_s: float
    first_step_ms: float
    prefill_ms: float


async def measure_first_step(
    plan: FirstStepPlan, fleet: Fleet, model_path: Path, block_bytes_per_token: float, line: LiveLine
) -> FirstStepRow:
    """Ask for two tokens, one request at a time. Raises ``RuntimeError``: a prompt was not handed off."""
    rng, answered = random.Random(0), dict[str, Answered]()
    with tempfile.TemporaryDirectory() as folder:
        async with (
            serving(fleet, model_path, line, traces=Path(folder)) as stack,
            create_channel(stack.router_address, None) as channel,
        ):
            stub = router_pb2_grpc.RouterServiceStub(channel)
            for number in line.rounds("prefill's end to first step", plan.num_warm_up + plan.num_requests):
                prompt = random_prompt(rng, plan.num_prompt_tokens)
                got = await send(stub, make_start(prompt, seed=number))
                if number >= plan.num_warm_up:
                    answered[str(number)] = got
            way = ", ".join(await bytes_by_way(stack))
        found = [read_request(read_traces(Path(folder)), key) for key in answered]
    row = summarize_first_steps(plan, found, list(answered.values()), way, block_bytes_per_token)
    line.say(
        f"first step: {row.wait_ms_p50:.2f} ms after the prefill's end, p99 {row.wait_ms_p99:.2f}; "
        f"transfer by {row.way} {row.transfer_ms:.2f} ms, {row.transfer_gb_per_s:.1f} GB/s"
    )
    return row


@dataclass(frozen=True, kw_only=True)
class TracedRequest:
    """When one request was computed, in monotonic seconds."""

    prefill_began_at: float
    prefill_ended_at: float
    submitted_at: float
    step_began_at: float
    step_ended_at: float


def read_request(traces: Sequence[Traced], key: str) -> TracedRequest:
    """What ``traces`` say of the request with this key. Raises ``RuntimeError``: it was not handed off."""
    own = [traced for traced in traces if key in traced.num_tokens]
    prefills = [traced for traced in own if traced.role is Role.PREFILL and traced.what == "step"]
    submits = [traced for traced in own if traced.role is Role.DECODE and traced.what == "submit"]
    steps = [traced for traced in own if traced.role is Role.DECODE and traced.what == "step"]
    if not prefills or not submits or not steps or steps[0].num_tokens[key] != 1:
        raise RuntimeError(f"request {key} was not prefilled by one worker and decoded by the other")
    return TracedRequest(
        prefill_began_at=prefills[0].began_at,
        prefill_ended_at=max(traced.ended_at for traced in prefills),
        submitted_at=submits[0].began_at,
        step_began_at=steps[0].began_at,
        step_ended_at=steps[0].ended_at,
    )


def summarize_first_steps(
    plan: FirstStepPlan,
    found: Sequence[TracedRequest],
    answered: Sequence[Answered],
    way: str,
    bytes_per_token: float,
) -> FirstStepRow:
    """The figures of at least two requests that were handed off."""
    waits = [1e3 * (one.step_began_at - one.prefill_ended_at) for one in found]
    transfer_ms = median(one.transfer_ms or 0.0 for one in answered)
    return FirstStepRow(
        num_prompt_tokens=plan.num_prompt_tokens,
        way=way,
        wait_ms=waits,
        wait_ms_p50=median(waits),
        wait_ms_p99=quantiles(waits, n=100, method="inclusive")[98],
        until_submit_ms=1e3 * median(one.submitted_at - one.prefill_ended_at for one in found),
        transfer_ms=transfer_ms,
        transfer_gb_per_s=plan.num_prompt_tokens * bytes_per_token / (transfer_ms or 1e-9) / 1e6,
        first_step_ms=1e3 * median(one.step_ended_at - one.step_began_at for one in found),
        prefill_ms=1e3 * median(one.prefill_ended_at - one.prefill_began_at for one in found),
    )
