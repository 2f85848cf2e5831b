"""Where Router and Decode worker spend their time while they relay tokens: flame graphs, and a table of functions.

The graphs are after Brendan Gregg's: a still SVG without script, as a page can show it.

python -m benchmarks.profile --json FILE [--images DIR] [--seconds 10] [--streams 256]
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from zlib import crc32

import uvloop

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
_WIDTH, _ROW_HEIGHT, _HEAD_HEIGHT, _MARGIN = 1200, 17, 40, 10
_FONT = 'font-family="Verdana, sans-serif" font-size="11"'
_CHARACTER_WIDTH = 6.6
# Narrower frames would be mere lines; their time is in the frame below.
_MIN_SHARE = 0.003


@dataclass(frozen=True)
class FunctionTime:
    """One function's share of all samples.

    Attributes:
        self_share: share of the samples with it on top of the stack.
        total_share: share of the samples with it anywhere in the stack.
    """

    function: str
    self_share: float
    total_share: float


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
    report = Report("profile", packages=("uvloop", "py-spy"), revision=arguments.commit)
    arguments.images.mkdir(parents=True, exist_ok=True)
    try:
        results = uvloop.run(_run(arguments.images, arguments.seconds, arguments.streams))
    except ProfilerError as error:
        sys.exit(str(error))
    report.write(results, arguments.json)


def parse_stacks(text: str) -> Mapping[Sequence[str], int]:
    """Samples by stack, outermost function first, from lines ``outer;inner 12``.

    Raises:
        ValueError: a line has another form.
    """
    stacks: Counter[Sequence[str]] = Counter()
    for line in filter(None, text.splitlines()):
        frames, _, count = line.rpartition(" ")
        stacks[tuple(frames.split(";"))] += int(count)
    return stacks


def rank_functions(stacks: Mapping[Sequence[str], int]) -> list[FunctionTime]:
    """All functions, the one with the most time of its own first. Recursion counts once."""
    num_samples = sum(stacks.values())
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for stack, count in stacks.items():
        own[stack[-1]] += count
        for function in set(stack):
            total[function] += count
    functions = [FunctionTime(name, own[name] / num_samples, total[name] / num_samples) for name in total]
    return sorted(functions, key=lambda item: (-item.self_share, item.function))


def render_flame_graph(stacks: Mapping[Sequence[str], int], title: str) -> str:
    """An SVG: each function stands on its caller, as wide as its share of the samples."""
    root = _Frame()
    for stack, count in sorted(stacks.items()):
        _add(root, stack, count)
    height = _HEAD_HEIGHT + _ROW_HEIGHT * _depth(root, root.count) + _MARGIN
    bars = "".join(_draw(root, root.count, 0.0, 0, height))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_FONT}>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="{_WIDTH / 2:.0f}" y="24" text-anchor="middle" font-size="15">{escape(title)}</text>\n'
        f"{bars}</svg>\n"
    )


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
        # Waiting threads partly count as busy in the profiler; a thread that holds the interpreter is busy.
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


@dataclass
class _Frame:
    count: int = 0
    callees: dict[str, _Frame] = field(default_factory=dict)


def _add(root: _Frame, stack: Sequence[str], count: int) -> None:
    frame = root
    frame.count += count
    for function in stack:
        frame = frame.callees.setdefault(function, _Frame())
        frame.count += count


def _depth(frame: _Frame, num_samples: int) -> int:
    return max((1 + _depth(callee, num_samples) for callee in _wide(frame, num_samples).values()), default=0)


def _wide(frame: _Frame, num_samples: int) -> dict[str, _Frame]:
    return {name: callee for name, callee in frame.callees.items() if callee.count >= _MIN_SHARE * num_samples}


def _draw(frame: _Frame, num_samples: int, x: float, level: int, height: int) -> Iterable[str]:
    scale = (_WIDTH - 2 * _MARGIN) / num_samples
    y = height - _MARGIN - _ROW_HEIGHT * (level + 1)
    for name, callee in _wide(frame, num_samples).items():
        width = callee.count * scale
        label = name[: int((width - 6) / _CHARACTER_WIDTH)] if width > 6 + 3 * _CHARACTER_WIDTH else ""
        tip = f"{name}: {callee.count / num_samples:.1%}"
        yield (
            f'<g><title>{escape(tip)}</title><rect x="{_MARGIN + x:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{_ROW_HEIGHT - 1}" fill="{_colour(name)}"/>'
            f'<text x="{_MARGIN + x + 3:.1f}" y="{y + 12}">{escape(label)}</text></g>\n'
        )
        yield from _draw(callee, num_samples, x, level + 1, height)
        x += width


def _colour(name: str) -> str:
    """A warm colour, the same for a function in every picture."""
    number = crc32(name.encode())
    return f"rgb({205 + number % 50},{80 + number // 50 % 130},{number // 6500 % 55})"


if __name__ == "__main__":
    main()
