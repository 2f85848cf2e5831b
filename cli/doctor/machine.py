"""Checks of the host: CPUs, open files, clocks, memory, and whether processes can share block pools."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cli.doctor.finding import Finding, ok, warning, wrong
from quartet.errors import TransferError
from quartet.telemetry.provenance import count_usable_cores
from quartet.transfer.base import PoolMemory
from quartet.transfer.life_line import PoolOwner
from quartet.transfer.shm import SharedPool, ShmPools, ShmServer

_CGROUP = Path("/sys/fs/cgroup")
_MIN_CPUS = 2
_MIN_OPEN_FILES = 4096
_MAX_RESOLUTION_S = 1e-3
_CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 512  # more than any kernel's struct timex; all zeroes only read the clock's state
MIB = 2**20
GIB = 2**30
_SHM = Path("/dev/shm")
_MEMINFO = Path("/proc/meminfo")
_INFINIBAND = Path("/sys/class/infiniband")
_MIN_SHM_BYTES = GIB
_MIN_AVAILABLE_BYTES = 2 * GIB
_PAGE = 4096
_MAP_TIMEOUT_S = 3.0


async def check_limits() -> Sequence[Finding]:
    """CPUs, open files and this host's clocks."""
    num_cpus = count_usable_cores()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resolution_s = time.get_clock_info("monotonic").resolution
    return [
        judge_cpus(num_cpus, os.cpu_count() or num_cpus, read_cpu_quota()),
        judge_open_files(soft, hard),
        judge_monotonic(resolution_s),
        *judge_ntp(_clock_state()),
    ]


def judge_cpus(num_usable: int, num_present: int, quota: float | None) -> Finding:
    """Whether there are enough CPUs; ``quota``: CPUs' worth of time that a control group allows."""
    found = f"{num_usable} of {num_present} usable"
    if quota is not None:
        found += f"; a quota of {quota:g}"
    if min(num_usable, quota or num_usable) < _MIN_CPUS:
        return warning("CPUs", found, "each worker and the router want a core of their own: streams will stutter")
    if quota is not None and quota < num_usable / 2:
        advice = "libraries start a thread for each CPU they see, and are then throttled: set engine.num_threads"
        return warning("CPUs", found, advice)
    return ok("CPUs", found)


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
        found = f"ticks every {resolution_s * 1e3:g} ms"
        return warning("monotonic clock", found, "latencies below that are not to be trusted")
    return ok("monotonic clock", f"resolution {resolution_s * 1e9:g} ns")


def judge_ntp(state: int | None) -> Sequence[Finding]:
    """What the ``state`` of adjtimex(2) says of the wall clock; ``None``: the kernel does not report it."""
    if state is None:
        return []
    if state == _CLOCK_UNSYNCHRONISED:
        advice = (
            "fine on one host; with several, signed starts and logs need the same time: chrony or systemd-timesyncd"
        )
        return [warning("wall clock", "the kernel says that nothing keeps it in time", advice)]
    return [ok("wall clock", "kept in time (NTP or the like)")]


def read_cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """CPUs' worth of time that the control group allows; ``None``: no bound."""
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


async def check_shared_memory() -> Sequence[Finding]:
    """``/dev/shm``, and the way in which workers share pools."""
    return [_dev_shm(), await _pools()]


async def check_memory() -> Sequence[Finding]:
    """Memory of the host and its control group, and how much of it may be locked."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [judge_memory(*read_memory()), judge_locked(soft, has_rdma=_has_rdma())]


def judge_shm(size_bytes: int, free_bytes: int) -> Finding:
    """Whether ``/dev/shm`` has room for the processes of one TensorRT-LLM or NCCL group."""
    found = f"{size(size_bytes)}, {size(free_bytes)} free"
    if size_bytes < _MIN_SHM_BYTES:
        advice = (
            "several GPUs (TensorRT-LLM's MPI ranks, NCCL) need more: --shm-size=8g or --ipc=host for the container"
        )
        return warning("/dev/shm", found, advice)
    if free_bytes < _MIN_SHM_BYTES // 4:
        return warning("/dev/shm", found, "see what lies there that no process uses any more: ls -l /dev/shm")
    return ok("/dev/shm", found)


def judge_memory(total_bytes: int, available_bytes: int, limit_bytes: int | None) -> Finding:
    """Whether there is enough memory; ``limit_bytes``: what the control group allows."""
    found = f"{size(available_bytes)} of {size(total_bytes)} available"
    if limit_bytes is not None:
        found += f"; this control group may use {size(limit_bytes)}"
    if min(available_bytes, limit_bytes or available_bytes) < _MIN_AVAILABLE_BYTES:
        return warning("memory", found, "a worker on the engine `torch` wants some 2 GiB beside its weights and pool")
    return ok("memory", found)


def judge_locked(limit_bytes: int, *, has_rdma: bool) -> Finding:
    """Whether enough memory may be locked: RDMA registers pools, which counts as locking."""
    if limit_bytes == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    if has_rdma:
        advice = (
            "UCX and NIXL can't register pools over RDMA: ulimit -l unlimited, or --ulimit memlock=-1 for the container"
        )
        return warning("locked memory", f"at most {size(limit_bytes)}, with an RDMA device here", advice)
    return ok("locked memory", f"at most {size(limit_bytes)}; only RDMA needs more, and no device for it is here")


def read_memory(meminfo: Path = _MEMINFO, cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int, int | None]:
    """Bytes that the host has, that are available, and that the control group allows (``None``: no bound)."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    total, available = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError):
            text = (cgroup / name).read_text().strip()
            # "max", or in version 1 a number above the host's memory, means no bound.
            return total, available, int(text) if text.isdigit() and int(text) < total else None
    return total, available, None


def size(num_bytes: int) -> str:
    """``num_bytes`` in MiB or GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def _clock_state() -> int | None:
    if sys.platform != "linux":
        return None
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return state if state >= 0 else None


def _has_rdma() -> bool:
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def _dev_shm() -> Finding:
    try:
        stat = os.statvfs(_SHM)
    except OSError as error:
        return warning("/dev/shm", f"can't be read: {error.strerror}", "mount a tmpfs there: NCCL and MPI need it")
    return judge_shm(stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail)


async def _pools() -> Finding:
    """Open a pool of our own in the way in which a worker opens another's."""
    owner = PoolOwner("doctor", 1)
    pools = ShmPools()
    try:
        memory = PoolMemory(1, _PAGE)
    except OSError as error:
        return _without_pools(f"no sealed memfd: {error.strerror}")
    server = ShmServer(memory)
    try:
        await server.start()
        memory.piece(0)[:7] = b"quartet"
        shared = SharedPool(server.socket_path, server.token, _PAGE)
        is_same = bytes((await pools.open(owner, shared, timeout_s=_MAP_TIMEOUT_S))[:7]) == b"quartet"
    except (OSError, TransferError) as error:
        return _without_pools(str(error))
    finally:
        pools.close()
        await server.close()
        memory.close()
    if not is_same:
        return wrong("pools by memfd", "the bytes read are not those written", "report it, with the kernel's version")
    return ok("pools by memfd", "a sealed memfd passes over a Unix socket: workers of one host share pools")


def _without_pools(reason: str) -> Finding:
    advice = "KV goes over gRPC instead, which is slower; a seccomp profile or a sandbox may forbid memfd_create"
    return warning("pools by memfd", reason, advice)
