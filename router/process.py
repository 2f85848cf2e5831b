"""A router process: makes, wires, runs and takes down every part."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from quartet.discovery.create import create_registry
from quartet.errors import DrainingError, WorkerReplacedError
from quartet.events.curve import read_events_key
from quartet.events.kv import Tier
from quartet.rpc.message_limits import MessageLimits
from quartet.rpc.server import RpcServer, StalledCalls
from quartet.streams.signed_start import SigningKeys
from quartet.supervision import LoopWatch, Supervisor
from quartet.telemetry.http import Probes, TelemetryServer
from quartet.telemetry.metrics import (
    CertificateMetrics,
    CertificateUse,
    ProcessMetrics,
    ReloadedFile,
    ReloadMetrics,
    RouterMetrics,
    monitor_event_loop_lag,
)
from quartet.telemetry.targets import ListTargets, Target
from quartet.telemetry.tracing import Tracer, open_tracer
from quartet.telemetry.vllm_names import show_router_as_vllm
from router.admission import Admission
from router.attempts import attempt_causes
from router.config import RouterConfig
from router.context import RouterContext
from router.fair_queue import FairShare
from router.fleet import Fleet, read_chat_template
from router.generate import Pipeline
from router.guides import GrammarChecks
from router.http.server import HttpServer
from router.intake import Intake
from router.kv_index.feed import KvJoins
from router.kv_index.index import PrefixIndex, keep_up
from router.media.encode import EncodeTools, EncodeWaits
from router.media.encode_queue import EncodeQueue
from router.media.fetch import MediaFetcher
from router.media.queue import MediaQueue, MediaQueueConfig
from router.media.request import MediaTools
from router.observed import ObservedModels, RequiredRoles, adapter_figures, scrape_targets
from router.peers import Peering
from router.policy.create import create_policy
from router.prefill_for import PrefillFor
from router.prefill_pools import PrefillPools
from router.prepare import max_message_bytes
from router.prompt_memory import PromptMemory
from router.rate_limits import RateLimits
from router.readiness import Readiness
from router.reload import ConfigFile
from router.servicer import FILE_FIELDS, NUMBER_FIELDS, RouterServicer, router_service
from router.signing import Signer
from router.tenants import TenantNames, Tenants, UnannouncedSalts
from router.thread_queue import TokenizeQueue
from router.untaken import UntakenBudgets
from router.usage_log import UsageLog
from router.workers import PoolKey, WorkerTable

logger = logging.getLogger(__name__)

# After a drain timed out, running requests end with an error. It has this long to reach their clients.
_LAST_WORDS_S = 0.5

# Connections of clients are spread over so many: see ``RpcServer``.
_NUM_LISTENERS = 4


class RouterProcess:
    """One router, from the start to the end of ``run``."""

    #: What it is called in traces, after ``quartet-``.
    traced_as = "router"

    def __init__(self, config: RouterConfig, on_failure: Callable[[], None] = lambda: None) -> None:
        """Open no port before ``run``; ``on_failure`` is called if it can't go on, before it drains.

        Raises:
            ConfigError: a file that the configuration names is invalid.
        """
        self._config = config
        self._on_failure = on_failure
        self._registry = CollectorRegistry()
        self._metrics = RouterMetrics(self._registry)
        self._certificates = CertificateMetrics(self._registry)
        self._reloads = ReloadMetrics(self._registry)
        self._metrics.expect_causes(attempt_causes())
        self._stalled = StalledCalls(config.stall_timeout_s)
        self._signing_keys: SigningKeys | None = None
        if config.signing_keys_file is not None:
            count = self._reloads.counter(ReloadedFile.SIGNING_KEYS)
            self._signing_keys = SigningKeys(config.signing_keys_file, count=count)
        self._events_key = None if config.events_key_file is None else read_events_key(config.events_key_file)
        template_file = config.custom_chat_template
        self._chat_template = None if template_file is None else read_chat_template(template_file)
        self._usage = usage = None if config.usage_log is None else UsageLog(config.usage_log)
        if usage is not None:
            self._metrics.watch_usage(lambda: usage.num_lost)
        self._tenants = Tenants(config.tenants)
        if self._tenants.has_domains and not config.knows_callers:
            logger.warning(
                "trust domains do not protect tenants from clients of this host: each client may name any tenant"
            )
        self._names = TenantNames(config.trusted_gateways, config.identity_tenants, self._tenants)
        self._loop_watch = LoopWatch()
        self._readiness: Readiness | None = None
        self._tracer: Tracer | None = None
        self._is_leaving = False
        self._openai_port = 0  # of HTTP, once it is served
        #: gRPC's ``host:port``, once ``run`` serves.
        self.address = ""

    async def run(self, stop: asyncio.Event, config_file: ConfigFile[Any] | None = None) -> None:
        """Serve until ``stop`` is set, then drain and take everything down. ``config_file`` may change meanwhile.

        It drains also when one of its background tasks has ended, and then raises that.

        Raises:
            ConfigError: the router can't start; the message names the setting.
            TaskEndedError: a background task has ended.
        """
        config = self._config
        async with AsyncExitStack() as stack:
            if self._usage is not None:
                stack.push_async_callback(asyncio.to_thread, self._usage.close)
            peering = Peering(config, self._events_key)
            stack.callback(peering.close)
            self._open_tracer(stack, peering.start_id)
            table = WorkerTable(peering.start_id, heartbeat_timeout_s=config.heartbeat_timeout_s)
            targets = partial(self._targets, table, peering)
            telemetry = TelemetryServer(config.http_address, self._registry, self._probes(), targets)
            http_port = telemetry.start()
            stack.push_async_callback(telemetry.close)
            index = PrefixIndex()
            kv = KvJoins(
                index,
                count=lambda outcome: self._metrics.snapshots.labels(outcome).inc(),
                on_gap=self._metrics.kv_gaps.inc,
            )
            self._metrics.watch_index(
                lambda: kv.num_live, lambda: index.num_blocks(Tier.DEVICE), lambda: index.num_predicted_blocks
            )
            fleet = self._fleet(table, kv)
            stack.push_async_callback(fleet.close)
            fetcher = MediaFetcher(config.media, share=FairShare(self._tenants))
            stack.push_async_callback(fetcher.close)
            tokenizing = TokenizeQueue(config.tokenizing, FairShare(self._tenants))
            stack.callback(tokenizing.close)
            grammars = GrammarChecks(FairShare(self._tenants))
            stack.callback(grammars.close)
            pipeline = self._pipeline(table, fleet, index, fetcher, tokenizing, grammars)
            stack.push_async_callback(pipeline.context.prefill_pools.close)
            prefills = self._prefills_for_others(pipeline, table, index)
            self._watch_requests(pipeline, prefills)
            servicer = self._servicer(pipeline, table, fleet, prefills)
            server = self._server(servicer, table, fleet)
            self._watch_certificates(fleet, server, pipeline.context.prefill_pools)
            grpc_port = await server.start()
            self.address = f"{config.server.address.rpartition(':')[0]}:{grpc_port}"
            stack.push_async_callback(server.drain, 0)
            http = await self._start_http(pipeline, targets)
            if http is not None:
                stack.push_async_callback(http.drain, 0)
            http_address = f"{config.http_address.rpartition(':')[0]}:{http_port}"
            readiness = self._readiness = Readiness(table, config.required_roles)
            async with Supervisor(self._fail, expected=(WorkerReplacedError,)) as tasks:
                ports = {"grpc_port": grpc_port, "http_port": self._openai_port, "metrics_port": http_port}
                self._follow_workers(tasks, stack, table, fleet, peering, ports, pipeline.context.prefill_pools)
                tasks.start("index-upkeep", keep_up(index))
                tasks.start("lag", monitor_event_loop_lag(ProcessMetrics(self._registry)))
                tasks.start("loop-watch", self._loop_watch.run())
                self._tend(tasks, http, config_file)
                tasks.start("readiness", self._report_readiness(readiness, server, http_address))
                await tasks.run_until(stop)
                fleet.drain()
                await asyncio.gather(peering.withdraw(), self._drain(server, servicer, pipeline, http))

    def _open_tracer(self, stack: AsyncExitStack, router_id: str) -> None:
        config = self._config
        namespace, instance = config.server.namespace, config.router_id or router_id
        self._tracer = open_tracer(
            config.tracing, os.environ, role=self.traced_as, namespace=namespace, instance=instance
        )
        if self._tracer is not None:
            stack.push_async_callback(self._tracer.close)

    def _watch_certificates(self, fleet: Fleet, server: RpcServer, prefill_pools: PrefillPools) -> None:
        self._certificates.watch(CertificateUse.GRPC, server.certificate_end)
        self._certificates.watch(CertificateUse.DIAL, fleet.certificate_end)
        prefill_pools.watch_certificates(self._certificates)

    def _follow_workers(
        self,
        tasks: Supervisor,
        stack: AsyncExitStack,
        table: WorkerTable,
        fleet: Fleet,
        peering: Peering,
        ports: Mapping[str, int],
        prefill_pools: PrefillPools,
    ) -> None:
        """Start what keeps the table up to date, and tells other routers and clients of this one."""
        registry = create_registry(self._config.discovery)
        self._certificates.watch(CertificateUse.ETCD, registry.certificate_end)
        stack.push_async_callback(registry.close)
        tasks.start("discovery", fleet.watch(registry.watch()))
        tasks.start("peers", peering.follow(registry.watch_routers(), fleet, table))
        tasks.start("registration", peering.announce(registry, **ports))
        tasks.start("tend", fleet.tend())
        if prefill_pools.has_discovered:
            tasks.start("prefill-pools", prefill_pools.follow())

    def _targets(self, table: WorkerTable, peering: Peering, is_near: bool) -> Sequence[Target]:
        """What Prometheus is told of: nothing before discovery has listed it. Any thread may ask."""
        if peering.routers is None:
            return ()
        namespace, host = self._config.discovery.namespace, self._config.host_of(self._config.server.address)
        statuses = table.statuses(time.monotonic())
        return scrape_targets(statuses, peering.routers, namespace, host=host, is_near=is_near)

    async def _start_http(self, pipeline: Pipeline, targets: ListTargets) -> HttpServer | None:
        config = self._config
        if not config.http.port:
            return None
        server = HttpServer(
            config.http,
            pipeline,
            self._registry,
            namespace=config.server.namespace,
            stall_timeout_s=config.stall_timeout_s,
            is_ready=self._probes().is_ready,
            targets=targets,
            reloads=self._reloads,
        )
        self._certificates.watch(CertificateUse.HTTP, server.certificate_end)
        port = self._openai_port = await server.start()
        scheme = "http" if config.http.tls is None else "https"
        logger.info("OpenAI's API listens on %s://%s:%d/v1", scheme, config.http.host, port)
        return server

    async def _report_readiness(self, readiness: Readiness, server: RpcServer, http_address: str) -> None:
        async def report(is_ready: bool) -> None:
            await server.set_serving(None, is_ready)
            if is_ready:
                logger.info("router serving on %s, metrics and probes on %s", self.address, http_address)

        await readiness.follow(report)

    def _probes(self) -> Probes:
        return Probes(
            is_alive=lambda: not self._loop_watch.is_dead,
            is_ready=lambda: (
                self._readiness is not None
                and self._readiness.is_ready
                and not self._is_leaving
                and not self._loop_watch.is_blocked
            ),
        )

    def _tend(self, tasks: Supervisor, http: HttpServer | None, config_file: ConfigFile[Any] | None) -> None:
        if http is not None:
            tasks.start("http", http.tend())
        if config_file is not None:
            count = self._reloads.counter(ReloadedFile.CONFIG)
            tasks.start("reload", config_file.follow(self._use, count))

    def _use(self, config: RouterConfig) -> None:
        """Take over the tenants of a changed configuration."""
        self._tenants.replace(config.tenants)
        self._names.replace(config.trusted_gateways, config.identity_tenants)

    def _fail(self) -> None:
        self._is_leaving = True
        self._on_failure()

    async def _drain(
        self, server: RpcServer, servicer: RouterServicer, pipeline: Pipeline, http: HttpServer | None
    ) -> None:
        self._is_leaving = True
        logger.info("draining: %d requests run, at most %.1f s", pipeline.num_running, self._config.drain_timeout_s)
        servicer.close()
        grace_s = self._config.drain_timeout_s + _LAST_WORDS_S
        draining = [asyncio.create_task(server.drain(grace_s))]
        if http is not None:
            draining.append(asyncio.create_task(http.drain(grace_s)))
        await asyncio.wait(draining, timeout=self._config.drain_timeout_s)
        pipeline.abort_all(DrainingError("the router is going away", retry_delay_s=_LAST_WORDS_S))
        await asyncio.gather(*draining)

    def _fleet(self, table: WorkerTable, kv: KvJoins) -> Fleet:
        return Fleet(
            table,
            self._metrics,
            self._config.server.tls,
            events_key=self._events_key,
            kv=kv,
            chat_template=self._chat_template,
            on_worker=UnannouncedSalts().note if self._tenants.has_domains else None,
        )

    def _servicer(
        self, pipeline: Pipeline, table: WorkerTable, fleet: Fleet, prefills: PrefillFor | None = None
    ) -> RouterServicer:
        config = self._config
        return RouterServicer(
            pipeline,
            table,
            fleet.texts,
            stalled=self._stalled,
            is_loopback=config.server.is_loopback,
            has_tls=config.server.tls is not None,
            namespace=config.server.namespace,
            prefills=prefills,
            names=self._names,
            session_limits=config.session,
            call_limits=config.calls,
        )

    def _server(self, servicer: RouterServicer, table: WorkerTable, fleet: Fleet) -> RpcServer:
        limits = MessageLimits(
            max_bytes=lambda: max_message_bytes(table.pools(time.monotonic()), fleet.texts.known),
            file_fields=FILE_FIELDS,
            number_fields=NUMBER_FIELDS,
        )
        return RpcServer(
            self._config.server,
            [router_service(servicer)],
            limits=limits,
            num_listeners=_NUM_LISTENERS,
            count_reload=self._reloads.counter(ReloadedFile.GRPC_CERTIFICATE),
        )

    def _pipeline(
        self,
        table: WorkerTable,
        fleet: Fleet,
        index: PrefixIndex,
        fetcher: MediaFetcher,
        tokenizing: TokenizeQueue,
        grammars: GrammarChecks,
    ) -> Pipeline:
        config, tenants = self._config, self._tenants
        admission = Admission(
            table, create_policy(config.policy, random.Random()), config.admission, index, self._metrics, tenants
        )
        table.listen(admission.wake)
        encode = self._encode_tools(table, fleet, index)
        keys, media_queue = self._signing_keys, self._media_queue(table, tenants)
        return self._make_pipeline(
            RouterContext(
                router_id=table.router_id,
                table=table,
                texts=fleet.texts,
                intake=Intake(FairShare(self._tenants)),
                admission=admission,
                hops=fleet,
                media=MediaTools(fetcher, encode, media_queue, config.media),
                tokenizing=tokenizing,
                grammars=grammars,
                metrics=self._metrics,
                config=config.attempts,
                max_timeout_s=config.max_request_timeout_s,
                untaken=self._untaken_budgets(table),
                signer=None if keys is None else Signer(keys, table, ttl_s=config.signed_start_ttl_s),
                tenants=self._tenants,
                limits=RateLimits(
                    self._tenants, count=lambda setting: self._metrics.rate_limited.labels(setting).inc()
                ),
                usage=self._usage,
                prompts=PromptMemory(config.admission, self._tenants),
                prefill_pools=PrefillPools(config.prefill_pools, config.server.tls, config.discovery),
                tracer=self._tracer,
            )
        )

    def _watch_requests(self, pipeline: Pipeline, prefills: PrefillFor | None) -> None:
        media, admission, models = pipeline.context.media, pipeline.context.admission, ObservedModels()
        encode, required = media.encode, RequiredRoles(self._config.required_roles)

        def num_queued() -> int:
            num_prefills = 0 if prefills is None else prefills.num_queued
            return admission.length + media.queue.length + encode.waits.length + encode.queue.length + num_prefills

        self._metrics.watch_requests(
            num_queued, lambda: pipeline.num_running + (0 if prefills is None else prefills.num_running)
        )
        self._metrics.watch_queues(
            lambda: {
                "room": max(admission.usage, 0.0 if prefills is None else prefills.queue_usage),
                "media": media.queue.usage,
                "encode": max(encode.waits.usage, encode.queue.usage),
                "prompts": pipeline.context.prompts.usage,
            }
        )
        self._metrics.watch_missing_roles(lambda: required.read(pipeline.context.table.statuses(time.monotonic())))
        show_router_as_vllm(
            self._registry,
            self._metrics,
            lambda: models.read(pipeline.context.table.statuses(time.monotonic()), admission.num_waiting),
            lambda: adapter_figures(
                pipeline.context.table.statuses(time.monotonic()),
                admission.waiting_adapters(),
                self._metrics.running_adapters(),
            ),
        )

    def _prefills_for_others(self, pipeline: Pipeline, table: WorkerTable, index: PrefixIndex) -> PrefillFor | None:
        """What prefills for routers of other namespaces; ``None``: nothing does."""
        policy = create_policy(self._config.policy, random.Random())
        return PrefillFor(pipeline.context, policy, self._config.admission, index)

    def _make_pipeline(self, context: RouterContext) -> Pipeline:
        return Pipeline(context)

    def _encode_tools(self, table: WorkerTable, fleet: Fleet, index: PrefixIndex) -> EncodeTools:
        admission, attempts = self._config.admission, self._config.attempts
        max_length, retry_delay_s = admission.max_queue_length, admission.retry_delay_s
        share = FairShare(self._tenants)
        return EncodeTools(
            table=table,
            index=index,
            hops=fleet,
            waits=EncodeWaits(table, max_length=max_length, retry_delay_s=retry_delay_s),
            queue=EncodeQueue(table, index, share, random.Random(), max_length=max_length, retry_delay_s=retry_delay_s),
            timeout_s=attempts.encode_timeout_s,
            max_attempts=attempts.max_attempts,
            max_lost_workers=attempts.max_lost_workers,
        )

    def _untaken_budgets(self, table: WorkerTable) -> UntakenBudgets[PoolKey]:
        # If callers are not known, any may name any tenant: all are one caller.
        admission, knows_callers = self._config.admission, self._config.knows_callers
        return UntakenBudgets(
            lambda pool: table.decode_capacity(pool, time.monotonic()),
            share=admission.untaken_share,
            max_waiting=admission.max_queue_length,
            timeout_s=admission.queue_timeout_s,
            caller=lambda tenant: self._tenants.identity(tenant) if knows_callers else "",
        )

    def _media_queue(self, table: WorkerTable, tenants: Tenants) -> MediaQueue:
        admission = self._config.admission
        bounds = MediaQueueConfig(
            max_bytes=self._config.media.max_held_bytes,
            max_length=admission.max_queue_length,
            timeout_s=admission.queue_timeout_s,
            retry_delay_s=admission.retry_delay_s,
        )
        queue = MediaQueue(bounds, FairShare(tenants), lambda pool: table.num_encode_tokens(pool, time.monotonic()))
        table.listen(queue.poll)
        return queue
