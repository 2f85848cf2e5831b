"""Which processes of ``quartet up`` serve: those of one of several hosts, and all of them as a file for probes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from quartet.discovery.base import Registry
from quartet.discovery.create import create_registry
from quartet.errors import ConfigError, DiscoveryError
from quartet.rpc.channels import TlsConfig, is_serving
from services.topology.child import Child
from services.topology.launch import LocalTopology
from services.topology.supervisor import SupervisorObserver
from services.topology.topology import ROUTER, Topology

_POLL_INTERVAL_S = 0.2


class HostShare:
    """Says when processes of one host serve, without the router, which may be on another one.

    It dials each process with that one's own identity.
    """

    def __init__(self, local: LocalTopology, topology: Topology, report: Callable[[str], None]) -> None:
        """``report`` gets what is missing, whenever that changes."""
        self._local = local
        self._topology = topology
        self._report = report

    async def wait_serving(self, name: str) -> None:
        """Wait until the process ``name`` serves. A router may wait for other hosts, and then it does so silently."""
        if name == ROUTER:
            await self._wait(self._missing_router, lambda _message: None)
        else:
            await self.wait_workers([name])

    async def wait_router(self) -> None:
        """Wait until this host's router serves: all roles that it needs have a worker, on any host."""
        await self._wait(self._missing_router, self._report)

    async def wait_workers(self, names: Collection[str]) -> None:
        """Wait until these workers have announced themselves and serve."""
        registry = create_registry(self._local.discovery)
        try:
            await self._wait(partial(self._missing_workers, registry, names), self._report)
        finally:
            await registry.close()

    async def _wait(self, missing: Callable[[], Awaitable[Sequence[str]]], report: Callable[[str], None]) -> None:
        reported: Sequence[str] = ()
        while names := await missing():
            if names != reported:
                report(f"waiting for {', '.join(names)}")
                reported = names
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _missing_router(self) -> Sequence[str]:
        if await is_serving(self._topology.router_addresses[0], self._identity(ROUTER)):
            return []
        return ["router, which waits for workers of all roles, on any host"]

    async def _missing_workers(self, registry: Registry, names: Collection[str]) -> Sequence[str]:
        try:
            known = {record.worker_id: record for record in await registry.workers()}
        except DiscoveryError:
            return ["etcd, which has the workers' addresses"]
        missing = []
        for name in sorted(names):
            if name not in known:
                missing.append(name)
            elif not await is_serving(known[name].grpc_address, self._identity(name)):
                missing.append(f"{name} (not serving)")
        return missing

    def _identity(self, name: str) -> TlsConfig | None:
        secrets = self._topology.secret_files
        return None if secrets is None else secrets.identity(name)


class ReadyFile:
    """A file that exists while all processes serve, for probes of containers. It is a ``SupervisorObserver``."""

    def __init__(self, path: Path | None, observer: SupervisorObserver) -> None:
        """``path`` ``None``: there is no file. What happens is passed on to ``observer``.

        Raises:
            ConfigError: the file can't be written, or one of before can't be removed.
        """
        self._path = path
        self._observer = observer
        self._waited_for: set[str] = set()
        if path is not None:
            try:
                path.touch()
                path.unlink()
            except OSError as error:
                raise ConfigError(f"--ready-file: cannot write {path}: {error.strerror}") from error

    def expect(self, names: Collection[str]) -> None:
        """There is no file until all of these serve."""
        self._waited_for.update(names)

    def serves(self, name: str) -> None:
        """The process ``name`` serves, for the first time or again."""
        self._waited_for.discard(name)
        if self._path is not None and not self._waited_for:
            self._complain_of(self._path.touch)

    def remove(self) -> None:
        """Remove the file, as at the end."""
        if self._path is not None:
            self._complain_of(partial(self._path.unlink, missing_ok=True))

    def log_line(self, process: str, line: str) -> None:
        """Pass it on."""
        self._observer.log_line(process, line)

    def progress(self, message: str) -> None:
        """Pass it on."""
        self._observer.progress(message)

    def died(self, child: Child) -> None:
        """Pass it on; there is no file until the process serves again."""
        self._waited_for.add(child.name)
        self.remove()
        self._observer.died(child)

    def _complain_of(self, change: Callable[[], None]) -> None:
        """A full disk ends no process."""
        try:
            change()
        except OSError as error:
            self._observer.progress(f"--ready-file: cannot change {self._path}: {error.strerror}")
