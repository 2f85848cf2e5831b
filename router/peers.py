"""The other routers: this one announces itself, finds them in discovery, and tells them what it sends to workers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence

from quartet.discovery.base import CONTRACT_VERSION, SPOKEN_VERSIONS, Registration, Registry, RouterRecord, RouterWatch
from quartet.discovery.host import new_epoch
from quartet.errors import DiscoveryError
from quartet.events.bookings import BookedStart
from quartet.events.curve import EventsKey
from quartet.events.publisher import BookingsPublisher
from quartet.rpc.channels import ListenAddress
from router.config import RouterConfig
from router.fleet import Fleet
from router.workers import WorkerTable

logger = logging.getLogger(__name__)

# A registry that can't be reached has been tried for some seconds by then.
_ANNOUNCE_AGAIN_S = 1.0


class PeerBookings:
    """Publishes the starts of one turn of the event loop together."""

    def __init__(self, publisher: BookingsPublisher) -> None:
        """``publisher`` stays the caller's."""
        self._publisher = publisher
        self._starts: list[BookedStart] = []

    def note(self, start: BookedStart) -> None:
        """A start goes to a worker now."""
        if not self._starts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._starts.append(start)

    def _flush(self) -> None:
        starts, self._starts = self._starts, []
        self._publisher.publish(starts)


class Peering:
    """This router among the others: its name, its record in discovery, and what it tells and is told.

    Attributes:
        start_id: what workers know it by: new at each start, so their reports don't include what an earlier process of
            this router placed.
        routers: all that discovery lists, this one included; ``None``: it has listed none yet. Any thread may read it.
    """

    def __init__(self, config: RouterConfig, key: EventsKey | None) -> None:
        """Open the port that tells of bookings. Raises ``ConfigError``: it can't be opened."""
        self._config = config
        self._router_id = config.router_id or f"router-{secrets.token_hex(8)}"
        self._epoch = new_epoch()
        self.start_id = f"{self._router_id}-{self._epoch:x}" if config.router_id else self._router_id
        listening = ListenAddress.parse(config.events_address, "events_address")
        self._publisher = BookingsPublisher(listening.host, listening.port, router_id=self.start_id, key=key)
        self._bookings = PeerBookings(self._publisher)
        self._registration: Registration | None = None
        self._is_withdrawn = False
        self.routers: Sequence[RouterRecord] | None = None

    async def follow(self, watch: RouterWatch, fleet: Fleet, table: WorkerTable) -> None:
        """Be told by all other routers that discovery lists, in a version known here, until ``watch`` is closed.

        While there are some, tell them what ``table`` sends; without any, a start costs no more than before.
        """
        async for routers in watch:
            self.routers = routers
            others = [
                record
                for record in routers
                if record.router_id != self._router_id and record.contract_version in SPOKEN_VERSIONS
            ]
            on_sent = self._bookings.note if others else None
            if on_sent != table.on_sent:
                logger.info("other routers that are known: %d", len(others))
            table.on_sent = on_sent
            fleet.listen_to_routers(frozenset(record.events_address for record in others if record.events_address))

    async def announce(self, registry: Registry, *, grpc_port: int, http_port: int, metrics_port: int) -> None:
        """Keep this router's record in ``registry`` until cancelled, however long that is away.

        ``http_port`` is 0 where no HTTP is served.

        Raises:
            WorkerReplacedError: another process has this router's id.
        """
        record = self.record(grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port)
        while record is not None and self._registration is None and not self._is_withdrawn:
            try:
                self._registration = await registry.register(record)
            except DiscoveryError as error:
                logger.warning("router %s is not announced yet: %s", record.router_id, error)
                await asyncio.sleep(_ANNOUNCE_AGAIN_S)
        if self._registration is not None:
            if self._is_withdrawn:  # it was being registered then
                await self._registration.close()
            await self._registration.ended()
        await asyncio.Event().wait()

    async def withdraw(self) -> None:
        """Take the record out, so that clients go elsewhere; ends in bounded time."""
        self._is_withdrawn = True
        if self._registration is not None:
            await self._registration.close()

    def close(self) -> None:
        """Close the port."""
        self._publisher.close()

    def record(self, *, grpc_port: int, http_port: int, metrics_port: int) -> RouterRecord | None:
        """What is announced; ``None``: nobody could know what to dial."""
        config = self._config
        host = config.host_of(config.server.address)
        if not host:
            logger.info("not announced: server.address has no host that others can dial; advertise_host names one")
            return None
        http_host = config.host_of(f"{config.http.host}:{http_port}") if http_port else ""
        metrics_host, events_host = config.host_of(config.http_address), config.host_of(config.events_address)
        return RouterRecord(
            router_id=self._router_id,
            epoch=self._epoch,
            grpc_address=f"{host}:{grpc_port}",
            contract_version=CONTRACT_VERSION,
            http_address=f"{http_host}:{http_port}" if http_host else "",
            metrics_address=f"{metrics_host}:{metrics_port}" if metrics_host else "",
            events_address=f"tcp://{events_host}:{self._publisher.port}" if events_host else "",
            max_generates=config.calls.max_generates,
        )
