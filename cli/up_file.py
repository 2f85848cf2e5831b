"""The file of a running topology: its routers take over changed tenants, as they do of files of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from quartet.errors import ConfigError
from quartet.rpc.secret_file import file_signature
from services.topology.launch import LocalTopology
from services.topology.topology import Topology, take_tenants

_POLL_INTERVAL_S = 1.0


class TopologyFile:
    """A topology's file, which may change while the topology runs."""

    def __init__(self, path: Path, read: Callable[[], Topology]) -> None:
        """``read`` gives what the file at ``path`` says, checked, with the changes of the command line.

        It runs on a thread, and raises ``ConfigError``. Made before the file is read for the first time.
        """
        self._path = path
        self._read = read
        self._signature = self._seen = file_signature(path)

    async def follow(self, local: LocalTopology, used: Topology, report: Callable[[str], None]) -> None:
        """Look at the file once a second until cancelled; see ``poll``."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            used = await self.poll(local, used, report)

    async def poll(self, local: LocalTopology, used: Topology, report: Callable[[str], None]) -> Topology:
        """If the file has changed from ``used``, have the routers of ``local`` use its tenants; returns what is used.

        It must be as it was at the last poll: an editor may be about to write the rest. One that can't be used is
        reported, once for each content, and changes nothing.
        """
        signature, seen = file_signature(self._path), self._seen
        self._seen = signature
        if signature in (self._signature, None) or signature != seen:
            return used
        self._signature = signature
        try:
            found = await asyncio.to_thread(self._read)
            local.use_tenants(found)
        except (ConfigError, OSError) as error:
            report(f"{self._path} has changed, and is not used: {error}")
            return used
        taken, rest = take_tenants(used, found), take_tenants(found, used)
        if taken != take_tenants(used, used):
            report(f"{self._path} has changed: routers take over its tenants")
        if rest != take_tenants(used, used):
            report(f"{self._path}: what else has changed there takes a restart")
        return taken
