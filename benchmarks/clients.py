"""What a token costs a client over Session, by the client's language: the Python and the Go client take turns.

One Decode worker runs an engine that only keeps a pace, one token every 20 ms on each stream, and a router makes text
of them. Each client, as a user has it, reads all answers on one session. In each round each of them has a window.

    python -m benchmarks.clients --json FILE [--short]
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.children import Child, start_program
from benchmarks.clients_python import COMMAND as PYTHON_COMMAND
from benchmarks.processes import CpuMeter
from benchmarks.progress import LiveLine
from benchmarks.relay_stack import ROUTER, RelayStack
from benchmarks.report import Report, make_parser

_ROOT = Path(__file__).resolve().parent.parent
_LOG = Path(".run/benchmark-clients.log")
_GO_PROGRAM = _ROOT / ".run/benchmark-clients-go"
_GO = _ROOT / "tools/go.sh"
_BUILD_TIMEOUT_S = 300.0
_CLIENT = "client"
#: Numbers of streams that are measured.
STREAMS = (256, 1024)
_WARM_UP_S = 2.0
_QUIET_S = 0.1


class ClientFailedError(Exception):
    """Requests of a client failed; the message says which client, and how."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """One client's window.

    Attributes:
        client_cpu_us_per_token, router_cpu_us_per_token: CPU time of the process over the tokens that the client had.
        made_tokens_per_s: what the engine gave out.
        tokens_per_s: what the client's reader had.
        client_share: of a core.
        others_share: of a core, all but client, router and worker.
    """

    client_cpu_us_per_token: float
    router_cpu_us_per_token: float
    made_tokens_per_s: float
    tokens_per_s: float
    client_share: float
    others_share: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """One number of streams.

    Attributes:
        times: CPU time a token of the client in Python over that of the one in Go: median over the rounds.
        windows: by client, ``python`` and ``go``, round after round.
    """

    num_streams: int
    times: float
    windows: Mapping[str, Sequence[Window]]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured."""

    go: str
    window_s: float
    loads: Sequence[Load]


def main() -> None:
    """Run the command line."""
    parser = make_parser("clients", __doc__ or "")
    parser.add_argument("--short", action="store_true", help="two rounds of two seconds: a minute")
    arguments = parser.parse_args()
    report = Report("clients", packages=("uvloop",), revision=arguments.commit)
    num_rounds, window_s = (2, 2.0) if arguments.short else (7, 5.0)
    report.write(uvloop.run(measure(STREAMS, num_rounds, window_s)), arguments.json)


async def measure(streams: Sequence[int], num_rounds: int, window_s: float) -> Results:
    """Have each number of streams.

    Raises:
        ClientFailedError: requests of a client failed.
        CalledProcessError: Go can't build its client; standard error says why.
    """
    _run_go("build", "-o", str(_GO_PROGRAM), "./benchmarks/clients_go")
    commands = {"python": PYTHON_COMMAND, "go": [str(_GO_PROGRAM)]}
    loads = []
    with LiveLine() as line:
        async with RelayStack(_LOG, line.say) as stack:
            for num_streams in streams:
                windows: dict[str, list[Window]] = {name: [] for name in commands}
                for _ in range(num_rounds):
                    for name, command in commands.items():
                        windows[name].append(await _window(stack, name, command, num_streams, window_s))
                        line.say(f"{num_streams} streams, {name}: {windows[name][-1]}")
                times = [
                    python.client_cpu_us_per_token / go.client_cpu_us_per_token
                    for python, go in zip(windows["python"], windows["go"], strict=True)
                ]
                loads.append(Load(num_streams=num_streams, times=median(times), windows=windows))
    return Results(go=_run_go("env", "GOVERSION").strip(), window_s=window_s, loads=loads)


async def _window(stack: RelayStack, name: str, command: Sequence[str], num_streams: int, window_s: float) -> Window:
    clock = stack.clock
    clock.is_held = True  # until all streams are open
    try:
        job = {"address": stack.router_address, "num_streams": num_streams}
        async with start_program(command, job, name=name) as child:
            _check(await child.read(), name)
            clock.is_held = False
            await asyncio.sleep(_WARM_UP_S)
            num_made, num_before = clock.num_tokens, await _num_tokens(child, name)
            meter = CpuMeter({**stack.pids, _CLIENT: child.pid})
            await asyncio.sleep(window_s)
            use = meter.read()
            num_tokens = await _num_tokens(child, name) - num_before
            num_made = clock.num_tokens - num_made
    finally:
        clock.is_held = False
        await _await_quiet(stack)
    return Window(
        client_cpu_us_per_token=1e6 * use.cpu_s[_CLIENT] / num_tokens,
        router_cpu_us_per_token=1e6 * use.cpu_s[ROUTER] / num_tokens,
        made_tokens_per_s=num_made / use.duration_s,
        tokens_per_s=num_tokens / use.duration_s,
        client_share=use.share[_CLIENT],
        others_share=use.others_share,
    )


async def _num_tokens(child: Child, name: str) -> int:
    """Tokens that the client's reader has had. Raises ``ClientFailedError``."""
    counted = await child.ask("count")
    _check(counted, name)
    return int(counted["num_tokens"])


def _check(counted: Mapping[str, Any], name: str) -> None:
    if counted["error"]:
        raise ClientFailedError(f"{name}: {counted['error']}")


async def _await_quiet(stack: RelayStack) -> None:
    """Wait until the engine emits nothing more of the client that has gone. Raises ``TimeoutError``."""
    async with asyncio.timeout(60.0):
        num_tokens = -1
        while num_tokens != stack.clock.num_tokens:
            num_tokens = stack.clock.num_tokens
            await asyncio.sleep(_QUIET_S)


def _run_go(*arguments: str) -> str:
    command = [str(_GO), *arguments]
    return subprocess.run(
        command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, timeout=_BUILD_TIMEOUT_S, check=True
    ).stdout


if __name__ == "__main__":
    main()
