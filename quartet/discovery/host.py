"""Facts of the own process that its record carries: where it runs, and which start this is."""

from __future__ import annotations

import secrets
from pathlib import Path

from quartet.discovery.base import HostIdentity

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_IPC_NAMESPACE = Path("/proc/self/ns/ipc")


def host_identity() -> HostIdentity:
    """This process's kernel boot and IPC namespace (Linux).

    Raises:
        OSError: /proc is not there.
    """
    return HostIdentity(boot_id=_BOOT_ID.read_text().strip(), ipc_namespace=str(_IPC_NAMESPACE.readlink()))


def new_epoch() -> int:
    """A random unsigned 64-bit number for this start of a worker."""
    return secrets.randbits(64)
