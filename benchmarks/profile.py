"""Where Router and Decode worker spend their time while they relay tokens: flame graphs, and a table of functions.

python -m benchmarks.profile --json FILE [--images DIR] [--seconds 10] [--streams 256]
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.flame_graph import FunctionTime, parse_stacks, rank_functions, render_flame_graph
from benchmarks.progress import LiveLine
from benchmarks.relay_load import Way
from benchmarks.relay_measure import Case, open_load, stream_jobs
from benchmarks.relay_stack import RelayStack
from benchmarks.report import Report, make_parser

_LOG = Path(".run/benchmark-profile.log")
_WAYS = (Way.GENERATE, Way.SESSION)
_SAMPLES_PER_S = 250
_WARM_UP_S = 1.0
_NUM_FUNCTIONS = 15


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One process under one load.

    Attributes:
        share: share of a core that the process used meanwhile.
        threads: the same by thread name; gRPC's threads are ``event_engine`` and one named ``python``.
        num_samples: samples taken while a thread held the interpreter.
        functions: those with the most time of their own.
        image: the flame graph's file name.
    """

    share: float
    threads: Mapping[str, float]
    num_samples: int
    functions: Sequence[FunctionTime]
    image: str


@dataclass(frozen=True, kw_only=True)
class Results:
    """Profiles by way and process."""

    num_streams: int
    seconds: float
    samples_per_s: int
    profiles: Mapping[str, Mapping[str, Profile]]


@dataclass(frozen=True)
class _Recording:
    """Collapsed stacks of one process, and what its threads used meanwhile, in shares of a core."""

    stacks: str
    threads: Mapping[str, float]


class ProfilerError(Exception):
    """The profiler can't be used here; the message says what to do."""


def main() -> None:
    """Run the command line."""
    parser = make_parser("profile", __doc__)
    parser.add_argument("--images", type=Path, default=Path("docs/images"), metavar="DIR", help="for flame graphs")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each recording (10)")
    parser.add_argument("--streams", type=int, default=256, help="at once (256)")
    arguments = parser.parse_args()
    report = Report("profile", packages=("uvloop", "py-spy"))
    arguments.images.mkdir(parents=True, exist_ok=True)
    try:
        results = uvloop.run(_run(arguments.images, arguments.seconds, arguments.streams))
    except ProfilerError as error:
        sys.exit(str(error))
    report.write(results, arguments.json)


async def _run(images: Path, seconds: float, num_streams: int) -> Results:
    program = _find_profiler()
    profiles: dict[str, Mapping[str, Profile]] = {}
    with LiveLine() as line:
        for way in _WAYS:
            case = Case(way=way, num_streams=num_streams, with_text=False)
            line.say(f"recording {case.name} for {seconds:g} s")
            async with RelayStack(_LOG, line.say) as stack, open_load(stack, stream_jobs(stack, case)):
                await asyncio.sleep(_WARM_UP_S)
                recordings = await asyncio.gather(*(_record(program, pid, seconds) for pid in stack.pids.values()))
            profiles[way] = {
                process: _write(images, process, case, recording)
                for process, recording in zip(stack.pids, recordings, strict=True)
            }
    return Results(num_streams=num_streams, seconds=seconds, samples_per_s=_SAMPLES_PER_S, profiles=profiles)


def _find_profiler() -> str:
    found = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if found is None:
        raise ProfilerError('py-spy is missing: pip install -c constraints.txt -e ".[dev]"')
    return found


async def _record(program: str, pid: int, seconds: float) -> _Recording:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "stacks"
        options = {"pid": pid, "duration": round(seconds), "rate": _SAMPLES_PER_S, "format": "raw", "output": path}
        before, began = _thread_cpu_s(pid), time.monotonic()
        # Waiting threads partly look busy to the profiler; a thread that holds the interpreter is busy.
        process = await asyncio.create_subprocess_exec(
            *(program, "record", "--gil", "--function", *(f"--{name}={value}" for name, value in options.items())),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        if process.returncode or not path.is_file():
            said = output.decode(errors="replace").strip()
            raise ProfilerError(
                f"py-spy could not record process {pid}; it must be allowed to trace it (root, CAP_SYS_PTRACE, or "
                f"kernel.yama.ptrace_scope=0). It said:\n{said}"
            )
        duration_s, after = time.monotonic() - began, _thread_cpu_s(pid)
        threads = {name: (cpu_s - before.get(name, 0.0)) / duration_s for name, cpu_s in after.items()}
        return _Recording(path.read_text(encoding="utf-8"), threads)


def _thread_cpu_s(pid: int) -> Mapping[str, float]:
    """CPU seconds so far, by thread name; threads with the same name are added up."""
    cpu_s: defaultdict[str, float] = defaultdict(float)
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = "event loop" if task.name == str(pid) else (task / "comm").read_text().strip()
        nanoseconds = int((task / "schedstat").read_text().split()[0])
        cpu_s[name] += nanoseconds / 1e9
    return cpu_s


def _write(images: Path, process: str, case: Case, recording: _Recording) -> Profile:
    stacks = parse_stacks(recording.stacks)
    name = f"profile-{process}-{case.way}.svg"
    (images / name).write_text(render_flame_graph(stacks, f"{process}: {case.name}"), encoding="utf-8")
    return Profile(
        share=sum(recording.threads.values()),
        threads=recording.threads,
        num_samples=sum(stacks.values()),
        functions=rank_functions(stacks)[:_NUM_FUNCTIONS],
        image=name,
    )


if __name__ == "__main__":
    main()
