"""Shared and host memory, and whether block pools can be handed from process to process here."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

from cli.doctor.finding import Finding, ok, warning, wrong
from quartet.errors import TransferError
from quartet.transfer.base import PoolMemory
from quartet.transfer.shm import PoolOwner, SharedPool, ShmPools, ShmServer

MIB = 2**20
GIB = 2**30
_SHM = Path("/dev/shm")
_MEMINFO = Path("/proc/meminfo")
_INFINIBAND = Path("/sys/class/infiniband")
_MIN_SHM_BYTES = GIB
_MIN_AVAILABLE_BYTES = 2 * GIB
_PAGE = 4096
_MAP_TIMEOUT_S = 3.0


async def check_shared_memory() -> Sequence[Finding]:
    """``/dev/shm``, and the way pools go from worker to worker."""
    return [_dev_shm(), await _pools()]


async def check_memory() -> Sequence[Finding]:
    """Memory of the host and its group, and what may be locked of it."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [judge_memory(*read_memory()), judge_locked(soft, has_rdma=_has_rdma())]


def judge_shm(size_bytes: int, free_bytes: int) -> Finding:
    """Whether ``/dev/shm`` has room for the processes of one TensorRT-LLM or NCCL group."""
    told = f"{size(size_bytes)}, {size(free_bytes)} free"
    if size_bytes < _MIN_SHM_BYTES:
        advice = (
            "several GPUs (TensorRT-LLM's MPI ranks, NCCL) need more: --shm-size=8g or --ipc=host for the container"
        )
        return warning("/dev/shm", told, advice)
    if free_bytes < _MIN_SHM_BYTES // 4:
        return warning("/dev/shm", told, "see what lies there that no process uses any more: ls -l /dev/shm")
    return ok("/dev/shm", told)


def judge_memory(total_bytes: int, available_bytes: int, limit_bytes: int | None) -> Finding:
    """Whether there is memory to work with; ``limit_bytes``: what a control group leaves."""
    told = f"{size(available_bytes)} of {size(total_bytes)} available"
    if limit_bytes is not None:
        told += f"; this control group may use {size(limit_bytes)}"
    if min(available_bytes, limit_bytes or available_bytes) < _MIN_AVAILABLE_BYTES:
        return warning("memory", told, "a worker on the engine `torch` wants some 2 GiB beside its weights and pool")
    return ok("memory", told)


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
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (cgroup / name).read_text().strip()
        except OSError:
            continue
        # "max", or version 1's way to say the same: more than there is.
        bound = int(text) if text.isdigit() else None
        return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024, _below(bound, kib["MemTotal"] * 1024)
    return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024, None


def size(num_bytes: int) -> str:
    """In MiB or GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def _has_rdma() -> bool:
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def _below(bound: int | None, total: int) -> int | None:
    return bound if bound is not None and bound < total else None


def _dev_shm() -> Finding:
    try:
        stat = os.statvfs(_SHM)
    except OSError as error:
        return warning("/dev/shm", f"can't be read: {error.strerror}", "mount a tmpfs there: NCCL and MPI need it")
    return judge_shm(stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail)


async def _pools() -> Finding:
    """Hand a pool to ourselves the way that one worker hands it to another."""
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
