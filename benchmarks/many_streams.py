"""Thousands of streams opened at once on one Router: is any refused or lost, and how much memory does each take?

All are open together, and the client follows each to its end: every token must come once, in order.

    python -m benchmarks.many_streams --json FILE [--streams 2000] [--short]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from benchmarks.paced_engine import STEP_S
from benchmarks.progress import LiveLine
from benchmarks.relay_load import Job, Load, Outcome, Way, run_burst
from benchmarks.relay_stack import DECODE, ROUTER, RelayStack
from benchmarks.report import Report, make_parser

_LOG = Path(".run/benchmark-many-streams.log")
_NUM_STREAMS = 2_000
# A token every 200 ms: so slow that only the number of streams loads the Router and the client.
_PERIOD = 100
# So many that the first streams still run when the last ones are accepted.
_NUM_TOKENS, _NUM_TOKENS_SHORT = 100, 30
# These make the Router create everything that it creates only once, before its memory is measured.
_NUM_FIRST_STREAMS, _NUM_FIRST_TOKENS = 16, 4
_SAMPLE_INTERVAL_S = 0.05
_KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Resident memory of one process, in bytes.

    Attributes:
        before: with nothing open.
        peak: the most while the streams ran.
        per_stream: the difference, divided by the number of streams open at once.
    """

    before: int
    peak: int
    per_stream: float


@dataclass(frozen=True, kw_only=True)
class Burst:
    """One way to open the streams.

    Attributes:
        num_refused_or_lost: requests that did not end well with all their tokens.
    """

    num_streams: int
    num_refused_or_lost: int
    outcome: Outcome
    router: Memory
    decode: Memory


@dataclass(frozen=True, kw_only=True)
class Results:
    """By way: ``generate``, ``session`` (all on one), ``sessions_8`` (spread over eight)."""

    num_tokens: int
    token_interval_ms: float
    bursts: Mapping[str, Burst]


# By the names in the results: the way, and the sessions over which it spreads the streams.
_WAYS = {"generate": (Way.GENERATE, 1), "session": (Way.SESSION, 1), "sessions_8": (Way.SESSION, 8)}


def main() -> None:
    """Run the command line; the exit code is 1 where a request was refused or lost."""
    parser = make_parser("many_streams", __doc__)
    parser.add_argument("--streams", type=int, default=_NUM_STREAMS, help=f"opened at once ({_NUM_STREAMS})")
    parser.add_argument("--short", action="store_true", help=f"{_NUM_TOKENS_SHORT} tokens each, not {_NUM_TOKENS}")
    arguments = parser.parse_args()
    report = Report("many_streams", packages=("uvloop",), revision=arguments.commit)
    results = uvloop.run(run(arguments.streams, _NUM_TOKENS_SHORT if arguments.short else _NUM_TOKENS))
    report.write(results, arguments.json)
    sys.exit(any(burst.num_refused_or_lost for burst in results.bursts.values()))


async def run(num_streams: int, num_tokens: int) -> Results:
    """Open ``num_streams`` at once, each way, with ``num_tokens`` each; returns the figures of all ways."""
    bursts: dict[str, Burst] = {}
    with LiveLine() as line:
        for name, (way, num_sessions) in _WAYS.items():
            line.say(f"{name}: opening {num_streams} at once")
            # Each way gets its own stack: memory left over from one burst would hide what the next one takes.
            async with RelayStack(_LOG, line.say, period=_PERIOD) as stack:
                job = Job(
                    router_address=stack.router_address,
                    clock_path=str(stack.clock_path),
                    way=way,
                    load=Load.BURST,
                    count=num_streams,
                    num_opening=num_streams,
                    num_sessions=num_sessions,
                    num_output_tokens=num_tokens,
                    with_text=True,
                )
                burst = bursts[name] = await _measure(stack, job)
            line.say(
                f"  {burst.outcome.num_complete} complete, all accepted after {burst.outcome.accepted_s:.1f} s; "
                f"router {burst.router.per_stream / _KIB:.1f} KiB a stream, decode {burst.decode.per_stream / _KIB:.1f}"
            )
    return Results(num_tokens=num_tokens, token_interval_ms=STEP_S * _PERIOD * 1e3, bursts=bursts)


async def _measure(stack: RelayStack, job: Job) -> Burst:
    await run_burst(replace(job, count=_NUM_FIRST_STREAMS, num_output_tokens=_NUM_FIRST_TOKENS))
    before = _memory_bytes(stack)
    peak = dict(before)
    sampling = asyncio.create_task(_sample(stack, peak))
    outcome = await run_burst(job)
    sampling.cancel()
    router, decode = (_compare(before[name], peak[name], outcome.max_open) for name in (ROUTER, DECODE))
    num_lost = job.count - outcome.num_complete
    return Burst(num_streams=job.count, num_refused_or_lost=num_lost, outcome=outcome, router=router, decode=decode)


async def _sample(stack: RelayStack, peak: dict[str, int]) -> None:
    """Keep the most memory that each process had. Runs until cancelled."""
    while True:
        for name, size_bytes in _memory_bytes(stack).items():
            peak[name] = max(peak[name], size_bytes)
        await asyncio.sleep(_SAMPLE_INTERVAL_S)


def _memory_bytes(stack: RelayStack) -> dict[str, int]:
    return {name: _resident_bytes(pid) for name, pid in stack.pids.items()}


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * _KIB
    raise RuntimeError(f"process {pid} has no memory: it has ended")


def _compare(before: int, peak: int, num_open: int) -> Memory:
    return Memory(before=before, peak=peak, per_stream=(peak - before) / max(1, num_open))


if __name__ == "__main__":
    main()
