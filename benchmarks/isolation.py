"""Isolation: how much later does one tenant get its first tokens while another one attacks?

One Prefill, one Decode and the Router run on the mock engine. A tenant asks at a steady rate, by Poisson, with prompts
of 128 tokens. Beside it another tenant attacks in one of the ways of ``isolation_attack``. Then a fresh fleet has the
same load beside a harmless process that burns as much CPU as the attacker's client did, so that only what the attack
does to the servers counts. The ratio is p99 of the time to the first token, attacked over burnt. How long threads that
were ready had to wait for a core shows how much of that is the machine's.

An attack takes about a minute and a half. It is written to the file as soon as it is measured, with its own command,
commit and machine, and the file keeps those of other commands: several may share the attacks.

    python -m benchmarks.isolation --json FILE [--only ATTACK ...] [--seconds 25]
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import grpc

from benchmarks.children import Child, start_child
from benchmarks.isolation_attack import ATTACKER, MAX_MODEL_LEN, Attack
from benchmarks.processes import CoreMeter, CoreUse, process_cpu_s
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.stack import Stack
from quartet.api.convert.request import to_generate_start
from quartet.client.request import make_start
from quartet.config import build, write_secret_file
from quartet.engine.sampling import Sampling
from quartet.rpc.channels import create_channel
from quartet.telemetry.provenance import write_report
from quartet.v1 import router_pb2, router_pb2_grpc
from services.topology.topology import Topology

_DIRECTORY = Path(".run")
_RATE_PER_S = 24.0
_NUM_PROMPT_TOKENS, _NUM_TOKENS = 128, 2
_FIRST_TOKEN_ID, _END_TOKEN_ID = 16, 2048
# An attack has begun to work by then.
_SETTLE_S = 2.0
_TIMEOUT_S = 60.0
# Of the requests, one in so many is among the slowest.
_SLOWEST_PART = 20
_ENDED = "quartet_router_requests_total"
_STDOUT = "-"
# With which the attacker comes by HTTP.
_KEY = secrets.token_hex(16)
_LONGEST_STALL = "quartet_process_event_loop_longest_stall_seconds"
#: p99 under attack may be this many times what it is beside a harmless process.
BAR = 3.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one tenant saw.

    Attributes:
        requests: that it made.
        failed: those that ended badly, by status.
        other_share: cores that the process beside it used.
        cores: how the processes got along with the machine's cores: ``router``, the workers, ``tenant``, which is this
            process, and ``other``, the one beside it. Empty where the system is not Linux.
        router_stall_ms: the longest time for which the router's event loop ran no timer, in its thread's CPU time.
        ended: choices of both tenants that ended, by outcome, as the router counts them.
        waiting: of the requests, how many had no answer when the last one was made.
        overtaken: requests of the other tenant by Generate that were answered from then on until the last of those.
        slowest_ms: where the twentieth of the requests whose first token came last were until then, on average, by
            stage: ``line``, on the way to the router and back, gRPC's line of calls included; ``begin``, on its event
            loop; ``queue``, waiting for room in its queue; ``prefill``, the way to the worker and back included.
    """

    requests: int
    failed: Mapping[str, int]
    ttft_ms_p50: float
    ttft_ms_p99: float
    other_share: float
    cores: Mapping[str, CoreUse]
    router_stall_ms: float
    ended: Mapping[str, int]
    waiting: int
    overtaken: int
    slowest_ms: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One attack.

    Attributes:
        ratio: of p99, attacked over burnt.
    """

    attacked: Window
    burnt: Window
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """The setting, and outcomes by attack."""

    rate_per_s: float = _RATE_PER_S
    prompt_tokens: int = _NUM_PROMPT_TOKENS
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)


class Measurements:
    """The file of all attacks: the newest command's report, and in each outcome as ``run`` that of its own command."""

    def __init__(self, report: Report, destination: str) -> None:
        """Go on with the file ``destination``, if there is one; ``-``: standard output, once, by ``close``."""
        self._report = report
        self._destination = destination
        self._others: dict[str, Mapping[str, Any]] = {}
        self.own: dict[str, Outcome] = {}
        if destination != _STDOUT and Path(destination).exists():
            before = json.loads(Path(destination).read_text(encoding="utf-8"))
            self._others = {name: {"run": _about(before), **one} for name, one in before["outcomes"].items()}

    def add(self, attack: str, outcome: Outcome) -> None:
        """An attack was measured: it takes the place of an earlier command's."""
        self.own[attack] = outcome
        if self._destination != _STDOUT:
            self._write()

    def close(self) -> None:
        """All were measured."""
        self._write()

    def _write(self) -> None:
        report = self._report.finish(Results())
        own = {name: {"run": _about(report), **asdict(outcome)} for name, outcome in self.own.items()}
        every = {**self._others, **own}
        outcomes = {attack.value: every[attack] for attack in Attack if attack in every}
        write_report({**report, "outcomes": outcomes}, self._destination)


def _about(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The command, commit, machine and so on."""
    results = {one.name for one in fields(Results)}
    return {name: value for name, value in report.items() if name not in results}


def main() -> None:
    """Run the command line; the exit code is 1 where an attack cost more than ``BAR``, or made a request fail."""
    parser = make_parser("isolation", __doc__ or "")
    attacks = [attack for attack in Attack if attack is not Attack.NOTHING]
    parser.add_argument(
        "--only", nargs="+", choices=attacks, default=attacks, metavar="ATTACK", help=", ".join(attacks)
    )
    parser.add_argument("--seconds", type=float, default=25.0, help="of each window; default %(default)g")
    parser.add_argument(
        "--max-message-bytes", type=int, metavar="N", help="the router's server.max_receive_message_bytes"
    )
    arguments = parser.parse_args()
    measurements = Measurements(Report("isolation", revision=arguments.commit), arguments.json)
    directory = _DIRECTORY / f"benchmark-isolation-{os.getpid()}"  # one each, for several at a time
    one = partial(measure, directory=directory, max_message_bytes=arguments.max_message_bytes)
    asyncio.run(_run(arguments.only, arguments.seconds, one, measurements))
    measurements.close()
    sys.exit(any(one.ratio > BAR or one.attacked.failed for one in measurements.own.values()))


async def _run(
    attacks: Sequence[str], duration_s: float, one: Callable[..., Awaitable[Window]], measurements: Measurements
) -> None:
    with LiveLine() as live:
        for attack in attacks:
            # A fleet each: an attack may leave something behind.
            with live.showing(partial(_progress, attack)):
                attacked = await one(Attack(attack), duration_s)
                burnt = await one(Attack.NOTHING, duration_s, share=attacked.other_share)
            ratio = attacked.ttft_ms_p99 / burnt.ttft_ms_p99
            measurements.add(attack, Outcome(attacked=attacked, burnt=burnt, ratio=round(ratio, 2)))
            live.say(
                f"{attack}: p99 {attacked.ttft_ms_p99:.0f} ms, burnt {burnt.ttft_ms_p99:.0f} ms, {ratio:.1f} times; "
                f"{attacked.requests} requests, failed {dict(attacked.failed) or 'none'}; "
                f"router's loop stalled for {attacked.router_stall_ms:.0f} ms at most, "
                f"attacker's client {attacked.other_share:.2f} cores"
            )


async def measure(
    attack: Attack, duration_s: float, *, directory: Path, share: float = 0.0, max_message_bytes: int | None = None
) -> Window:
    """What one tenant sees of a fleet of its own beside ``attack``; ``NOTHING`` burns ``share`` of a core.

    The fleet's log and keys are in ``directory``, in which no other fleet may run. ``max_message_bytes``: the router's
    ``server.max_receive_message_bytes``; ``None``: its default.
    """
    topology = _topology(directory, max_message_bytes)
    async with Stack(topology, directory / "benchmark-isolation.log", _silent) as stack:
        return await _window(stack, attack, duration_s, share)


async def _window(stack: Stack, attack: Attack, duration_s: float, share: float) -> Window:
    addresses = {"router": stack.router_address, "http": stack.http_address, "key": _KEY}
    job = {"attack": attack.value, **addresses, "share": share}
    async with create_channel(stack.router_address, None) as channel:
        victim = _Victim(router_pb2_grpc.RouterServiceStub(channel))
        await victim.run(1.0)  # what a first request sets up is not counted
        victim.clear()
        async with start_child("benchmarks.isolation_attack", job) as child:
            await child.read()
            await asyncio.sleep(_SETTLE_S)
            servers = {name: pid for name, pid in stack.pids.items() if name in ("router", *stack.worker_addresses)}
            meter = CoreMeter({**servers, "tenant": os.getpid(), "other": child.pid})
            cpu_s, began = process_cpu_s(child.pid), time.monotonic()
            backlog = _Backlog(victim, child)
            await victim.run(duration_s, backlog.note)
            cores = meter.read()
            overtaken = await backlog.overtaken()
            share = (process_cpu_s(child.pid) - cpu_s) / (time.monotonic() - began)
    metrics = (await stack.metrics())["router"]
    ended = {outcome: int(count) for outcome, count in metrics.by_label(_ENDED, "outcome").items() if count}
    return Window(
        **victim.times(),
        other_share=round(share, 3),
        cores=cores,
        router_stall_ms=round(1e3 * metrics.total(_LONGEST_STALL), 1),
        ended=ended,
        waiting=backlog.num_waiting,
        overtaken=overtaken,
    )


class _Backlog:
    """What the victim has waiting when it has asked for the last time, and what the other tenant gets meanwhile."""

    def __init__(self, victim: _Victim, child: Child) -> None:
        self._victim = victim
        self._child = child
        self._num_before = 0
        self.num_waiting = 0

    async def note(self) -> None:
        """The last request was made."""
        self.num_waiting = self._victim.num_waiting
        self._num_before = await self._child.ask("count")

    async def overtaken(self) -> int:
        """The last one was answered."""
        num_after: int = await self._child.ask("count")
        return num_after - self._num_before


class _Victim:
    """The tenant that only asks; what a failed request took is counted until its failure."""

    def __init__(self, stub: router_pb2_grpc.RouterServiceAsyncStub) -> None:
        self._stub = stub
        self._rng = random.Random(0)
        self.num_waiting = 0  # for their answers
        self.clear()

    def clear(self) -> None:
        """Forget what was measured."""
        self._ttft_s: list[float] = []
        self._stages: list[tuple[float, Mapping[str, float]]] = []
        self._failed: Counter[str] = Counter()

    async def run(self, duration_s: float, on_asked: Callable[[], Awaitable[None]] | None = None) -> None:
        """Ask for ``duration_s`` seconds, call ``on_asked``, and wait for all answers."""
        ends_at = time.monotonic() + duration_s
        async with asyncio.TaskGroup() as group:
            due = time.monotonic()
            while (due := due + self._rng.expovariate(_RATE_PER_S)) < ends_at:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._ask())
                self.num_waiting += 1
            if on_asked is not None:
                await on_asked()

    def times(self) -> dict[str, Any]:
        """What was measured, by the names of ``Window``."""
        times_ms = sorted(1e3 * seconds for seconds in self._ttft_s)
        return {
            "requests": len(times_ms),
            "failed": dict(self._failed),
            "ttft_ms_p50": round(times_ms[len(times_ms) // 2], 2),
            "ttft_ms_p99": round(times_ms[int(0.99 * len(times_ms))], 2),
            "slowest_ms": self._slowest_ms(),
        }

    def _slowest_ms(self) -> dict[str, float]:
        ranked = sorted(self._stages, key=lambda one: -one[0])
        slowest = [stages for _ttft_s, stages in ranked[: -(-len(ranked) // _SLOWEST_PART)]]
        names = slowest[0] if slowest else ()
        return {name: round(1e3 * fmean(stages[name] for stages in slowest), 1) for name in names}

    async def _ask(self) -> None:
        token_ids = self._rng.choices(range(_FIRST_TOKEN_ID, _END_TOKEN_ID), k=_NUM_PROMPT_TOKENS)
        sampling = Sampling(max_tokens=_NUM_TOKENS, ignore_eos=True)
        message = to_generate_start(make_start(token_ids=token_ids, sampling=sampling, omit_text=True))
        message.tenant = "victim"
        began = time.monotonic()
        first_s: float | None = None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                call = self._stub.Generate()
                await call.write(router_pb2.GenerateRequest(start=message))
                await call.done_writing()
                async for part in call:
                    if first_s is None and part.HasField("delta"):
                        first_s = time.monotonic() - began
                    elif first_s is not None and part.HasField("finished"):
                        self._stages.append((first_s, _stages(first_s, part.finished.time)))
        except grpc.aio.AioRpcError as error:
            self._failed[error.code().name] += 1
        except TimeoutError:
            self._failed["no answer"] += 1
        self.num_waiting -= 1
        self._ttft_s.append(time.monotonic() - began if first_s is None else first_s)


def _stages(first_s: float, spent: router_pb2.TimeBreakdown) -> dict[str, float]:
    """Where a request was until its first token came after ``first_s`` seconds, in seconds, as ``slowest_ms`` says."""
    in_router_s, queue_s, prefill_s = (
        part.ToTimedelta().total_seconds() for part in (spent.first_token, spent.router_queue, spent.prefill)
    )
    stages = {"line": first_s - in_router_s, "begin": in_router_s - queue_s - prefill_s}
    return {**stages, "queue": queue_s, "prefill": prefill_s}


def _progress(attack: str, elapsed_s: float, _interval_s: float) -> str:
    return f"{attack}: {elapsed_s:.0f} s"


def _silent(_message: str) -> None:
    """Show no progress of its start."""


def _topology(directory: Path, max_message_bytes: int | None) -> Topology:
    directory.mkdir(parents=True, exist_ok=True)
    keys = directory / "benchmark-isolation.keys"
    keys.unlink(missing_ok=True)
    write_secret_file(keys, f"{ATTACKER} {_KEY}\n".encode())
    server = {} if max_message_bytes is None else {"max_receive_message_bytes": max_message_bytes}
    overrides = {"policy": {"local_prefill_max_tokens": 0}, "http": {"keys_file": str(keys.absolute())}}
    settings = {
        "namespace": "isolation",
        "engine": {"kind": "mock", "num_blocks": 2048, "max_model_len": MAX_MODEL_LEN, "mock": {"speed_up": 2.0}},
        "router": {
            "port": 0,
            "http_port": 1,  # a free one
            "overrides": {**overrides, "server": server},
        },
        "workers": [{"role": "prefill"}, {"role": "decode"}],
        "drain_timeout_s": 0.2,
    }
    return build(Topology, settings)


if __name__ == "__main__":
    main()
