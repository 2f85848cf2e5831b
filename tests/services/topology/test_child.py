"""Child processes: their output is logged, and nothing outlives the process that started them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from services.topology.child import Child, ChildLimits, start_child

StartPython = Callable[[str], Awaitable[Child]]

TIMEOUT_S = 90.0


@pytest.fixture
def lines() -> asyncio.Queue[str]:
    """What the test's children said."""
    return asyncio.Queue()


@pytest.fixture
async def start_python(lines: asyncio.Queue[str]) -> AsyncIterator[StartPython]:
    """Starts a child that runs some Python."""
    children: list[Child] = []

    async def start(code: str) -> Child:
        command = [sys.executable, "-S", "-u", "-c", code]
        children.append(await start_child("some", command, {"GREETING": "hello"}, lines.put_nowait))
        return children[-1]

    yield start
    for child in children:
        child.send(signal.SIGKILL)
        await child.wait()


async def next_line(lines: asyncio.Queue[str]) -> str:
    async with asyncio.timeout(TIMEOUT_S):
        return await lines.get()


async def end_of(child: Child) -> int:
    async with asyncio.timeout(TIMEOUT_S):
        return await child.wait()


def wait_gone(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(descriptor, select.POLLIN)
        try:
            assert poll.poll(TIMEOUT_S * 1000), f"process {pid} still runs"
        finally:
            os.close(descriptor)


async def test_lines_of_both_streams_are_logged_with_what_the_environment_says(
    start_python: StartPython, lines: asyncio.Queue[str]
) -> None:
    child = await start_python(
        "import os, sys; print(os.environ['GREETING']); print('bad \\xff', file=sys.stderr); print('no end', end='')"
    )
    assert await end_of(child) == 0
    assert [lines.get_nowait() for _ in range(3)] == ["hello", "bad \xff", "no end"]
    assert child.describe_end() == "some ended with exit code 0\n    hello\n    bad \xff\n    no end"


async def test_a_line_without_end_is_logged_in_pieces(start_python: StartPython, lines: asyncio.Queue[str]) -> None:
    child = await start_python("import os\nfor _ in range(100): os.write(1, b'x' * 10_000)")
    await end_of(child)
    pieces = [lines.get_nowait() for _ in range(lines.qsize())]
    assert "".join(pieces) == "x" * 1_000_000
    assert max(map(len, pieces)) < 200_000


async def test_an_end_is_described(start_python: StartPython) -> None:
    failed = await start_python("raise SystemExit('no luck')")
    assert await end_of(failed) == 1
    assert failed.describe_end() == "some ended with exit code 1\n    no luck"

    killed = await start_python("import os; os.kill(os.getpid(), 9)")
    assert await end_of(killed) == -signal.SIGKILL
    assert killed.describe_end() == "some was killed by SIGKILL"
    assert not killed.is_running
    killed.send(signal.SIGTERM)


async def test_a_program_that_is_not_there_is_named(lines: asyncio.Queue[str]) -> None:
    child = await start_child("some", ["/no/such/program"], {}, lines.put_nowait)
    assert await end_of(child) != 0
    assert await next_line(lines) == "cannot run /no/such/program: No such file or directory"


async def test_a_child_is_out_of_the_terminals_reach(start_python: StartPython, lines: asyncio.Queue[str]) -> None:
    child = await start_python("import os; print(os.getsid(0), os.getpgid(0), os.isatty(0))")
    assert await next_line(lines) == f"{child.pid} {child.pid} False"


async def test_a_signal_reaches_what_the_child_started(start_python: StartPython, lines: asyncio.Queue[str]) -> None:
    child = await start_python(
        "import subprocess, sys\n"
        "below = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "print(below.pid)\n"
        "below.wait()"
    )
    pid = int(await next_line(lines))
    child.send(signal.SIGKILL)
    await end_of(child)
    wait_gone(pid)


async def test_processes_that_a_child_leaves_behind_can_be_killed(
    start_python: StartPython, lines: asyncio.Queue[str]
) -> None:
    child = await start_python(
        "import subprocess, sys\n"
        "below = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "print(below.pid)\n"
    )
    pid = int(await next_line(lines))
    assert await end_of(child) == 0, "its end is not that of another process that holds its output"
    os.kill(pid, 0)
    child.kill_rest()
    wait_gone(pid)
    child.kill_rest()


OUT_OF_REACH = (
    "import subprocess, sys, os\n"
    "below = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    "print(below.pid)\n"
)


@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), 9)"])
async def test_processes_that_left_the_childs_session_can_be_killed_too(
    start_python: StartPython, lines: asyncio.Queue[str], end: str
) -> None:
    other, child = await start_python(OUT_OF_REACH + "below.wait()"), await start_python(OUT_OF_REACH + end)
    pids = {int(await next_line(lines)), int(await next_line(lines))}
    await end_of(child)
    assert other.is_running
    [left] = [pid for pid in pids if _parent_of(pid) != other.pid]
    [others] = pids - {left}
    child.kill_rest()
    wait_gone(left)
    os.kill(others, 0)
    other.kill_rest()
    os.kill(others, 0)
    other.send(signal.SIGKILL)
    await end_of(other)
    other.kill_rest()
    wait_gone(others)


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_a_running_child_is_not_killed_as_a_leftover(
    start_python: StartPython, lines: asyncio.Queue[str]
) -> None:
    child = await start_python("import signal; print('up'); signal.pause()")
    await next_line(lines)
    child.kill_rest()
    child.send(signal.SIGTERM)
    assert await end_of(child) == -signal.SIGTERM


def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    parent_code = (
        "import asyncio, sys\n"
        "from services.topology.child import start_child\n"
        "async def main():\n"
        "    child = await start_child('some', ['sleep', '60'], {'PATH': '/usr/bin:/bin'}, print)\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, cwd=root) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_gone(pid)


async def test_a_limited_child_and_its_children_run_on_its_cpus_and_get_no_more_memory(
    lines: asyncio.Queue[str],
) -> None:
    cpu = min(os.sched_getaffinity(0))
    code = """
import mmap, os, subprocess, sys
print(sorted(os.sched_getaffinity(0)), flush=True)
subprocess.run([sys.executable, "-S", "-c", "import os; print(sorted(os.sched_getaffinity(0)), flush=True)"])
def fits(megabytes):
    try:
        return len(bytearray(megabytes << 20)) > 0
    except MemoryError:
        return False
print(fits(100), fits(400), flush=True)
mmap.mmap(-1, 400 << 20).close()  # what processes share is not limited
inner = "print(len(bytearray(400 << 20)))"
print(subprocess.run([sys.executable, "-S", "-c", inner], stderr=subprocess.PIPE).returncode, flush=True)
"""
    command = [sys.executable, "-S", "-u", "-c", code]
    limits = ChildLimits(cpus=(cpu,), memory_bytes=300 << 20)
    child = await start_child("some", command, {}, lines.put_nowait, limits)
    assert await end_of(child) == 0
    assert list(child.last_lines) == [f"[{cpu}]", f"[{cpu}]", "True False", "1"]
    assert child.describe_end().splitlines()[0] == "some ended with exit code 0"


async def test_the_end_of_a_child_with_too_little_memory_names_the_limit(lines: asyncio.Queue[str]) -> None:
    command = [sys.executable, "-S", "-c", "bytearray(400 << 20)"]
    child = await start_child("some", command, {}, lines.put_nowait, ChildLimits(memory_bytes=300_000_000))
    assert await end_of(child) == 1
    described = child.describe_end().splitlines()
    assert described[0] == "some ended with exit code 1; its memory was limited to 0.3 GB a process"
    assert described[-1].strip() == "MemoryError"
