"""CPUs, open files and clocks."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cli.doctor.finding import Finding, ok, warning

_CGROUP = Path("/sys/fs/cgroup")
_MIN_CPUS = 2
_MIN_OPEN_FILES = 4096
_MAX_RESOLUTION_S = 1e-3
_CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 512  # more than any kernel's struct timex; zeroes ask for nothing but an answer


async def check_limits() -> Sequence[Finding]:
    """CPUs, open files and this host's clocks."""
    num_cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resolution_s = time.get_clock_info("monotonic").resolution
    return [
        judge_cpus(num_cpus, os.cpu_count() or num_cpus, read_cpu_quota()),
        judge_open_files(soft, hard),
        judge_monotonic(resolution_s),
        *judge_ntp(_clock_state()),
    ]


def judge_cpus(num_usable: int, num_present: int, quota: float | None) -> Finding:
    """Whether there are CPUs enough; ``quota``: those that a control group gives in sum."""
    told = f"{num_usable} of {num_present} usable"
    if quota is not None:
        told += f"; a quota of {quota:g}"
    if min(num_usable, quota or num_usable) < _MIN_CPUS:
        return warning("CPUs", told, "each worker and the router want a core of their own: streams will stutter")
    if quota is not None and quota < num_usable / 2:
        advice = "libraries start a thread for each CPU they see, and are then throttled: set engine.num_threads"
        return warning("CPUs", told, advice)
    return ok("CPUs", told)


def judge_open_files(soft: int, hard: int) -> Finding:
    """Whether a router can hold its clients' connections: each is an open file."""
    if soft == resource.RLIM_INFINITY or soft >= _MIN_OPEN_FILES:
        return ok("open files", "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft}")
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    advice = f"every client and worker takes one at a router: ulimit -n {_MIN_OPEN_FILES} (allowed here: {most})"
    return warning("open files", f"at most {soft}", advice)


def judge_monotonic(resolution_s: float) -> Finding:
    """Whether latencies can be measured."""
    if resolution_s > _MAX_RESOLUTION_S:
        return warning(
            "monotonic clock", f"ticks every {resolution_s * 1e3:g} ms", "latencies below that are not to be trusted"
        )
    return ok("monotonic clock", f"resolution {resolution_s * 1e9:g} ns")


def judge_ntp(state: int | None) -> Sequence[Finding]:
    """What the kernel's ``state`` says of the wall clock; ``None``: it does not tell."""
    if state is None:
        return []
    if state == _CLOCK_UNSYNCHRONISED:
        advice = (
            "fine on one host; with several, signed starts and logs need the same time: chrony or systemd-timesyncd"
        )
        return [warning("wall clock", "the kernel says that nothing keeps it in time", advice)]
    return [ok("wall clock", "kept in time (NTP or the like)")]


def read_cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """CPUs that the control group gives in sum; ``None``: no bound."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    # "max" in version 2, -1 in version 1.
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _clock_state() -> int | None:
    if sys.platform != "linux":
        return None
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return state if state >= 0 else None
