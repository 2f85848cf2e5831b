"""Hosts of a network on this machine: network namespaces on one bridge, to which the tests' own processes belong too.

Each host has addresses, shared memory, a host name and a boot of its own, as far as a process there can see: what only
processes of one kernel can do must not pass for a way between two of these. It takes root and ``ip`` (iproute2).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest

# Reserved for tests of networks (RFC 2544), so it is no address of this machine.
_NETWORK = "198.18"
_TIMEOUT_S = 60.0

# The first line is seen by all that the host runs; the kernel gives it as the boot's id.
_ENTER = """
mount --bind "$0" /proc/sys/kernel/random/boot_id && hostname "$1" && shift && exec "$@"
"""


def lacks() -> str:
    """Why there can be no such network here; empty: there can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    missing = [program for program in ("ip", "ss", "unshare", "mount", "hostname") if shutil.which(program) is None]
    return f"no {missing[0]}: apt-get install iproute2 util-linux hostname" if missing else ""


def require_network() -> None:
    """Skip where there can be no such network; fail instead where ``QUARTET_REQUIRE_NETNS=1``."""
    if reason := lacks():
        if os.environ.get("QUARTET_REQUIRE_NETNS") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


class Network:
    """A bridge and its hosts, from ``with`` to its end; then nothing is left of it, nor of what ran there."""

    def __init__(self, directory: Path, *names: str) -> None:
        tag = secrets.token_hex(3)
        subnet = f"{_NETWORK}.{secrets.randbelow(256)}"
        self._bridge = f"qb{tag}"
        self._own_address = f"{subnet}.254"
        self.hosts = {
            name: Host(name, f"{subnet}.{number}", f"q{tag}{number}", directory / f"{name}.boot_id")
            for number, name in enumerate(names, 1)
        }

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self._own_address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for host in self.hosts.values():
                host.join(self._bridge)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.leave()
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._bridge)


class Host:
    """One host.

    Attributes:
        address: of its only interface beside loopback.
        command: what to put before a command to run it there.
    """

    def __init__(self, name: str, address: str, tag: str, boot_id: Path) -> None:
        self.address = address
        self._namespace = f"quartet-{tag}"
        self._link = tag
        boot_id.write_text(f"{uuid.uuid4()}\n")
        inside = ("ip", "netns", "exec", self._namespace, "unshare", "--ipc", "--uts", "--mount")
        self.command: Sequence[str] = (*inside, "sh", "-c", _ENTER, str(boot_id), name)

    def join(self, bridge: str) -> None:
        """Make it, with a cable to ``bridge``."""
        peer = f"{self._link}p"
        _ip("netns", "add", self._namespace)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", peer)
        _ip("link", "set", peer, "netns", self._namespace, "name", "eth0")
        _ip("link", "set", self._link, "master", bridge, "up")
        for arguments in (("address", "add", f"{self.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _ip("-n", self._namespace, *arguments)
        _ip("-n", self._namespace, "link", "set", "lo", "up")

    def leave(self) -> None:
        """Kill all that runs there, and remove it."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.kill_all()
            _ip("netns", "delete", self._namespace)

    def unplug(self) -> None:
        """Pull the cable: packets are lost, nothing is said to either side."""
        _ip("link", "set", self._link, "down")

    def plug(self) -> None:
        """Put it in again."""
        _ip("link", "set", self._link, "up")

    def kill_all(self) -> None:
        """SIGKILL to every process there."""
        while pids := [int(pid) for pid in _ip("netns", "pids", self._namespace).split()]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def listeners(self) -> set[tuple[str, int]]:
        """Addresses and ports on which TCP is listened for there. UDP is received on none, or it is an error."""
        assert self._sockets("-Hlun") == []
        pairs = (listener.rpartition(":") for listener in self._sockets("-Hltn"))
        return {(_plain(address), int(port)) for address, _, port in pairs}

    def _sockets(self, options: str) -> list[str]:
        listed = _run("ip", "netns", "exec", self._namespace, "ss", options)
        return [line.split()[3] for line in listed.splitlines()]


def _plain(address: str) -> str:
    """IPv4 as such, where a socket for IPv6 listens on it."""
    return address.removeprefix("[::ffff:").removesuffix("]") if "::ffff:" in address else address


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout
