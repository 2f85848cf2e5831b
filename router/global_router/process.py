"""A global router's process: a router whose workers are other routers' pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

from quartet.discovery.create import create_registry
from quartet.supervision import Supervisor
from quartet.telemetry.metrics import CertificateUse, PoolMetrics
from router.context import RouterContext
from router.fleet import Fleet
from router.generate import Pipeline
from router.global_router.config import GlobalRouterConfig
from router.global_router.pipeline import RelayPipeline
from router.global_router.pools import Pools
from router.kv_index.feed import KvJoins
from router.kv_index.index import PrefixIndex
from router.peers import Peering
from router.prefill_pools import PrefillPools
from router.process import RouterProcess
from router.workers import WorkerTable


class GlobalRouterProcess(RouterProcess):
    """One global router, from the start to the end of ``run``."""

    traced_as = "global-router"

    def __init__(self, config: GlobalRouterConfig, on_failure: Callable[[], None] = lambda: None) -> None:
        """Open no port before ``run``; see ``RouterProcess``.

        Raises:
            ConfigError: a file that the configuration names is invalid.
        """
        super().__init__(config.router, on_failure)
        self._global = config
        self._pool_metrics = PoolMetrics(self._registry)
        self._pools: Pools | None = None
        #: Runs requests, once ``run`` serves.
        self.pipeline: RelayPipeline | None = None

    def _fleet(self, table: WorkerTable, _kv: KvJoins) -> Fleet:
        pools = self._pools = Pools(self._global, table, self._pool_metrics)
        pools.watch_certificates(self._certificates)
        # It has no workers of its own: its requests go to pools, and their routers know the workers.
        return Fleet(
            table,
            self._metrics,
            self._config.server.tls,
            events_key=self._events_key,
            chat_template=self._chat_template,
            fetch_files=pools.fetch_files,
        )

    def _prefills_for_others(self, _pipeline: Pipeline, _table: WorkerTable, _index: PrefixIndex) -> None:
        """It has no workers."""

    def _make_pipeline(self, context: RouterContext) -> Pipeline:
        self.pipeline = RelayPipeline(context, self._known_pools, self._global)
        return self.pipeline

    def _follow_workers(
        self,
        tasks: Supervisor,
        stack: AsyncExitStack,
        _table: WorkerTable,
        fleet: Fleet,
        peering: Peering,
        ports: Mapping[str, int],
        _prefill_pools: PrefillPools,
    ) -> None:
        if self._global.discovery is not None:  # clients find it in its own namespace, and no pool takes it for its own
            registry = create_registry(self._global.discovery_of(self._config.server.namespace))
            self._certificates.watch(CertificateUse.ETCD, registry.certificate_end)
            stack.push_async_callback(registry.close)
            tasks.start("registration", peering.announce(registry, **ports))
        pools = self._known_pools
        stack.push_async_callback(pools.close)
        tasks.start("pools", pools.follow())
        tasks.start("tend", pools.tend(fleet))

    @property
    def _known_pools(self) -> Pools:
        assert self._pools is not None, "the fleet is made first"
        return self._pools
