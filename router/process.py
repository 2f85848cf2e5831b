"""A router process: makes, wires, runs and takes down every part."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from prometheus_client import CollectorRegistry

from quartet.discovery.create import create_registry
from quartet.errors import DrainingError
from quartet.events.curve import read_events_key
from quartet.events.kv import Tier
from quartet.rpc.server import RpcServer, StalledCalls
from quartet.streams.signed_start import SigningKeys
from quartet.telemetry.http import Probes, TelemetryServer
from quartet.telemetry.metrics import ProcessMetrics, RouterMetrics, monitor_event_loop_lag
from router.admission import Admission, FairShare
from router.config import RouterConfig
from router.context import RouterContext
from router.fleet import Fleet, read_chat_template
from router.generate import Pipeline
from router.kv_index.feed import KvJoins
from router.kv_index.index import PrefixIndex, keep_up
from router.media.encode import EncodeTools, EncodeWaits
from router.media.fetch import MediaFetcher
from router.media.queue import MediaQueue, MediaQueueConfig
from router.media.request import MediaTools
from router.policy.create import create_policy
from router.servicer import RouterServicer, router_service
from router.signing import Signer
from router.workers import WorkerTable

logger = logging.getLogger(__name__)

# After a drain timed out, running requests end with an error. It has this long to reach their clients.
_LAST_WORDS_S = 0.5


class RouterProcess:
    """One router, from the start to the end of ``run``."""

    def __init__(self, config: RouterConfig) -> None:
        """Open no port before ``run``. Raises ``ConfigError``: a file that the configuration names is invalid."""
        self._config = config
        self._registry = CollectorRegistry()
        self._metrics = RouterMetrics(self._registry)
        self._stalled = StalledCalls(config.stall_timeout_s)
        self._signing_keys = None if config.signing_keys_file is None else SigningKeys(config.signing_keys_file)
        self._events_key = None if config.events_key_file is None else read_events_key(config.events_key_file)
        template_file = config.custom_chat_template
        self._chat_template = None if template_file is None else read_chat_template(template_file)
        self._is_ready = False
        #: gRPC's ``host:port``, once ``run`` serves.
        self.address = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then drain and take everything down.

        Raises:
            ConfigError: the router can't start; the message names the setting.
        """
        config = self._config
        async with AsyncExitStack() as stack:
            probes = Probes(is_alive=lambda: True, is_ready=lambda: self._is_ready)
            telemetry = TelemetryServer(config.http_address, self._registry, probes)
            http_port = telemetry.start()
            stack.push_async_callback(telemetry.close)
            # New at each start, so workers' reports do not include what an earlier process of this router placed.
            router_id = f"router-{secrets.token_hex(8)}"
            table = WorkerTable(router_id, heartbeat_timeout_s=config.heartbeat_timeout_s)
            index = PrefixIndex()
            kv = KvJoins(index, count=lambda outcome: self._metrics.snapshots.labels(outcome).inc())
            self._metrics.watch_index(
                lambda: kv.num_live, lambda: index.num_blocks(Tier.DEVICE), lambda: index.num_predicted_blocks
            )
            fleet = Fleet(
                table,
                self._metrics,
                config.server.tls,
                events_key=self._events_key,
                kv=kv,
                chat_template=self._chat_template,
            )
            stack.push_async_callback(fleet.close)
            fetcher = MediaFetcher(config.media)
            stack.push_async_callback(fetcher.close)
            pipeline = self._pipeline(table, fleet, index, fetcher)
            servicer = RouterServicer(
                pipeline,
                table,
                fleet.texts,
                stalled=self._stalled,
                is_loopback=config.server.is_loopback,
                has_tls=config.server.tls is not None,
                trusted_gateways=config.trusted_gateways,
                session_limits=config.session,
            )
            server = RpcServer(config.server, [router_service(servicer)])
            self.address = f"{config.server.address.rpartition(':')[0]}:{await server.start()}"
            stack.push_async_callback(server.drain, 0)
            http_address = f"{config.http_address.rpartition(':')[0]}:{http_port}"
            async with self._background(fleet, index, server, stop, http_address):
                fleet.drain()
                await self._drain(server, servicer, pipeline)

    @asynccontextmanager
    async def _background(
        self, fleet: Fleet, index: PrefixIndex, server: RpcServer, stop: asyncio.Event, http_address: str
    ) -> AsyncIterator[None]:
        """Run discovery, probes and upkeep until ``stop`` is set, and then until the block ends."""
        registry = create_registry(self._config.discovery)
        tasks = [
            asyncio.create_task(fleet.watch(registry.watch()), name="discovery"),
            asyncio.create_task(fleet.tend(), name="tend"),
            asyncio.create_task(keep_up(index), name="index-upkeep"),
            asyncio.create_task(monitor_event_loop_lag(ProcessMetrics(self._registry)), name="lag"),
            asyncio.create_task(self._announce(fleet, server, http_address), name="announce"),
        ]
        stopping = asyncio.create_task(stop.wait(), name="stop")
        pending: set[asyncio.Task[object]] = {*tasks, stopping}
        try:
            while not stopping.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            await registry.close()

    async def _announce(self, fleet: Fleet, server: RpcServer, http_address: str) -> None:
        await fleet.is_synchronised.wait()
        await server.set_serving(None, True)
        self._is_ready = True
        logger.info("router serving on %s, metrics and probes on %s", self.address, http_address)

    async def _drain(self, server: RpcServer, servicer: RouterServicer, pipeline: Pipeline) -> None:
        self._is_ready = False
        logger.info("draining: %d requests run, at most %.1f s", pipeline.num_running, self._config.drain_timeout_s)
        servicer.close()
        draining = asyncio.create_task(server.drain(self._config.drain_timeout_s + _LAST_WORDS_S))
        await asyncio.wait([draining], timeout=self._config.drain_timeout_s)
        pipeline.abort_all(DrainingError("the router is going away", retry_delay_s=_LAST_WORDS_S))
        await draining

    def _pipeline(self, table: WorkerTable, fleet: Fleet, index: PrefixIndex, fetcher: MediaFetcher) -> Pipeline:
        config = self._config
        admission = Admission(
            table, create_policy(config.policy, random.Random()), config.admission, index, self._metrics
        )
        table.listen(admission.wake)
        encode = EncodeTools(
            table=table,
            index=index,
            hops=fleet,
            rng=random.Random(),
            waits=EncodeWaits(
                table,
                max_length=config.admission.max_queue_length,
                retry_delay_s=config.admission.retry_delay_s,
            ),
            timeout_s=config.attempts.encode_timeout_s,
            max_attempts=config.attempts.max_attempts,
        )
        keys, media_queue = self._signing_keys, self._media_queue(table)
        pipeline = Pipeline(
            RouterContext(
                router_id=table.router_id,
                table=table,
                texts=fleet.texts,
                admission=admission,
                hops=fleet,
                media=MediaTools(fetcher, encode, media_queue, config.media.max_size_bytes),
                metrics=self._metrics,
                config=config.attempts,
                max_timeout_s=config.max_request_timeout_s,
                signer=None if keys is None else Signer(keys, table, ttl_s=config.signed_start_ttl_s),
            )
        )
        self._metrics.watch_requests(
            lambda: admission.length + media_queue.length + encode.waits.length, lambda: pipeline.num_running
        )
        return pipeline

    def _media_queue(self, table: WorkerTable) -> MediaQueue:
        admission = self._config.admission
        bounds = MediaQueueConfig(
            max_bytes=self._config.media.max_held_bytes,
            max_length=admission.max_queue_length,
            timeout_s=admission.queue_timeout_s,
            retry_delay_s=admission.retry_delay_s,
        )
        queue = MediaQueue(
            bounds, FairShare(admission.tenant_weights), lambda pool: table.num_encode_tokens(pool, time.monotonic())
        )
        table.listen(queue.poll)
        return queue
