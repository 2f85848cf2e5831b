"""The pools of a global router: their routers, what these say of their workers, and which pool a request is for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from quartet.api.fleet import WorkerState, WorkerStatus
from quartet.api.router_link import RouterLink, RouterSilentError, WorkerChanges
from quartet.api.text_cache import MAX_FILES_BYTES
from quartet.discovery.base import SPOKEN_VERSIONS, Rank, Registry, Role, WorkerKey, WorkerRecord
from quartet.discovery.create import create_registry
from quartet.errors import ModelUnavailableError, ServingError, WorkerUnavailableError
from quartet.rpc.channels import Dialer
from quartet.streams.worker_client import WorkerClient
from quartet.supervision import report_failure
from quartet.telemetry.metrics import CertificateMetrics, CertificateUse, PoolMetrics
from router.fleet import FetchedTexts, Fleet
from router.global_router.config import GlobalRouterConfig, PoolGroup
from router.global_router.grid import PoolChoice, PoolState, choose
from router.workers import PoolKey, WorkerTable

logger = logging.getLogger(__name__)

_FILES_TIMEOUT_S = 30.0
# Between two tries to reach a router that can't be reached.
_WATCH_AGAIN_S = 0.5
# Workers that change nothing are not reported: the table hears of them so often.
_TICK_S = 0.5
_RETRY_DELAY_S = 1.0
# Between two tries to get a model's text side, which grow: a request that needs it tries at once.
_PREFETCH_AGAIN_S, _MAX_PREFETCH_AGAIN_S = 0.5, 30.0
# What a pool must have for requests, by its kind.
_ROLE = {"agg": Role.DECODE, "decode": Role.DECODE, "prefill": Role.PREFILL}


@dataclass(frozen=True)
class Wish:
    """What decides about the pools of one request.

    Attributes:
        model: the model that it is for.
        num_tokens: of its prompt and what was generated.
        ttft_ms, itl_ms: its targets; ``None``: the middle of the grid.
    """

    model: PoolKey
    num_tokens: int
    ttft_ms: float | None
    itl_ms: float | None
    priority: int = 0


@dataclass(frozen=True)
class Chosen:
    """Where one request goes.

    Attributes:
        serving: the pool that answers.
        prefill: namespaces that prefill for it, the first that can; empty: the pool itself.
        choices: by the kind of pool, how it was chosen.
    """

    serving: Pool
    prefill: tuple[str, ...]
    choices: Mapping[str, PoolChoice]


class Pool:
    """One namespace with its routers, which get requests in turn.

    Attributes:
        num_relayed: requests that this router has there.
    """

    def __init__(self, namespace: str, links: Iterable[RouterLink] = ()) -> None:
        """Nothing is known of its workers yet."""
        self.namespace = namespace
        self.num_relayed = 0
        self._links = list(links)
        self._seen: dict[RouterLink, dict[str, WorkerStatus]] = {}
        self._turn = 0

    @property
    def links(self) -> Sequence[RouterLink]:
        """All its routers."""
        return self._links

    @property
    def is_reached(self) -> bool:
        """Whether any of its routers answers."""
        return bool(self._seen)

    @property
    def statuses(self) -> Iterable[WorkerStatus]:
        """Its workers as one of its routers sees them, each with the namespace before its id."""
        return next(iter(self._seen.values())).values() if self._seen else ()

    def next_link(self) -> RouterLink:
        """The router whose turn it is. Raises ``WorkerUnavailableError``: none answers."""
        links = [link for link in self._links if link in self._seen]
        if not links:
            raise WorkerUnavailableError(f"no router of {self.namespace} answers")
        self._turn += 1
        return links[self._turn % len(links)]

    def add(self, link: RouterLink) -> None:
        """It has one more router, which has not answered yet."""
        self._links.append(link)

    def remove(self, link: RouterLink) -> None:
        """``link``, which does not answer, is no router of it any more."""
        self._links.remove(link)

    def hears(self, link: RouterLink) -> bool:
        """Whether ``link`` answers."""
        return link in self._seen

    def saw(self, link: RouterLink, changes: WorkerChanges) -> None:
        """``link`` reported workers; here they get their names within all namespaces."""
        seen = self._seen.setdefault(link, {})
        if changes.is_complete:
            seen.clear()
        for worker_id in changes.removed:
            seen.pop(worker_name(self.namespace, worker_id), None)
        updated = [one for status in changes.updated if (one := named_within(self.namespace, status))]
        seen.update((status.record.worker_id, status) for status in updated)

    def lost(self, link: RouterLink) -> None:
        """``link`` no longer answers."""
        self._seen.pop(link, None)

    def state(self, model: PoolKey, role: Role) -> PoolState:
        """What a request for ``model`` would find; ``role``: of the workers that it needs."""
        if not self._links:
            return PoolState(obstacle="discovery lists no router of it")
        if not self.is_reached:
            return PoolState(obstacle="no router of it answers")
        records = [one for one in self.statuses if one.record.role is role and _pool_of(one) == model]
        ready = [one for one in records if one.state is WorkerState.READY and one.load is not None]
        if not ready:
            return PoolState(obstacle=f"no {role} worker of this model is ready")
        ranks = [rank for one in ready if one.load is not None for rank in one.load.ranks]
        reported = sum(rank.num_running + rank.num_waiting for rank in ranks)
        is_known = all(rank.max_running for rank in ranks)
        return PoolState(
            # Reports come late, and other routers send requests there, too.
            num_requests=max(reported, self.num_relayed),
            max_requests=sum(rank.max_running for rank in ranks) if is_known else 0,
        )


class Pools:
    """All pools. Keeps ``table`` up to date with their workers, each of which is named ``NAMESPACE.ID``."""

    def __init__(
        self,
        config: GlobalRouterConfig,
        table: WorkerTable,
        metrics: PoolMetrics,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Connect to no router before ``follow`` runs; needs a running event loop.

        ``sleep`` pauses between tries to get a model's texts, in seconds.

        Raises:
            ConfigError: a file of ``router.server.tls`` or of ``discovery`` can't be used.
        """
        self._dialer = Dialer(config.router.server.tls)
        self._table = table
        self._metrics = metrics
        self._metrics.expect(config.namespaces)
        self._config = config
        self._sleep = sleep
        self._groups: dict[str, PoolGroup] = {kind: config.group(kind) for kind in config.kinds}
        self._pools = {
            namespace: Pool(
                namespace, [RouterLink(one, self._dialer) for one in config.pool_routers.get(namespace, ())]
            )
            for namespace in config.namespaces
        }
        self._max_silence_s = config.router.heartbeat_timeout_s / 2
        self._registries: dict[str, Registry] = {
            namespace: create_registry(config.discovery_of(namespace)) for namespace in config.discovered
        }
        self._listed: dict[str, frozenset[str]] = {}
        self._prefetching: dict[PoolKey, asyncio.Task[None]] = {}
        self._entered: dict[str, dict[WorkerKey, WorkerRecord]] = {}
        # Routers that have not answered yet, and namespaces that discovery has not listed.
        self._unheard: set[object] = {
            *self._registries,
            *(link for pool in self._pools.values() for link in pool.links),
        }

    def watch_certificates(self, certificates: CertificateMetrics) -> None:
        """Have those shown with which routers and discovery are dialled."""
        certificates.watch(CertificateUse.DIAL, self._dialer.certificate_end)
        for registry in self._registries.values():
            certificates.watch(CertificateUse.ETCD, registry.certificate_end)

    @property
    def retries_refused(self) -> bool:
        """Whether a request that its pool refused for lack of room goes to the next one."""
        return self._config.enable_priority_retry

    @property
    def serving_kind(self) -> str:
        """The kind of pools that answer."""
        return self._config.kinds[-1]

    def namespaces(self, kind: str) -> Sequence[str]:
        """Of the pools of that kind, in the order of their numbers."""
        return self._groups[kind].namespaces

    def priorities(self, kind: str) -> Sequence[int]:
        """Of the pools of that kind; a lower number is faster."""
        return self._groups[kind].priorities

    def of(self, namespace: str) -> Pool:
        """The pool of that namespace."""
        return self._pools[namespace]

    def choose(self, wish: Wish, failed: Collection[str] = frozenset()) -> Chosen:
        """Choose a pool of each kind; none of the namespaces in ``failed`` answers.

        Raises:
            ModelUnavailableError: no pool can take the request; the message says why.
        """
        choices = {kind: self._choose(kind, wish, failed) for kind in self._groups}
        serving = choices[self.serving_kind]
        if serving.pool is None:
            names = self.namespaces(self.serving_kind)
            reasons = "; ".join(f"{names[option.pool]}: {option.why}" for option in serving.options)
            raise ModelUnavailableError(f"no pool can take the request ({reasons})", retry_delay_s=_RETRY_DELAY_S)
        return Chosen(
            serving=self._pools[self.namespaces(self.serving_kind)[serving.pool]],
            prefill=self._prefill_order(choices["prefill"]) if "prefill" in choices else (),
            choices=choices,
        )

    @contextmanager
    def relaying(self, pool: Pool) -> Iterator[None]:
        """Count a request that is there during the block."""
        self._metrics.requests.labels(pool.namespace).inc()
        pool.num_relayed += 1
        try:
            yield
        finally:
            pool.num_relayed -= 1

    def note_retry(self, pool: Pool) -> None:
        """A request of ``pool`` goes elsewhere, or is resumed."""
        self._metrics.retries.labels(pool.namespace).inc()

    def _choose(self, kind: str, wish: Wish, failed: Collection[str]) -> PoolChoice:
        group = self._groups[kind]
        targets = {
            "prefill": (wish.num_tokens, wish.ttft_ms),
            "decode": (wish.num_tokens, wish.itl_ms),
            "agg": (wish.ttft_ms, wish.itl_ms),
        }
        cell = group.grid.select(*targets[kind], wish.priority)
        states = [self._pools[name].state(wish.model, _ROLE[kind]) for name in group.namespaces]
        numbers = {number for number, name in enumerate(group.namespaces) if name in failed}
        return choose(cell, group.priorities, states, numbers if kind == self.serving_kind else ())

    def _prefill_order(self, choice: PoolChoice) -> tuple[str, ...]:
        """The chosen pool, then the others in their order: one may die while the request is on its way."""
        names = self.namespaces("prefill")
        chosen = [option.pool for option in choice.options if option.is_chosen]
        others = [option.pool for option in choice.options if not option.is_chosen]
        return tuple(names[pool] for pool in (*chosen, *others)) if chosen else ()

    # Following the pools' workers.

    async def follow(self) -> None:
        """Follow all routers of all pools until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for pool in self._pools.values():
                for link in pool.links:
                    self._begin_to_follow(tasks, pool, link)
            for namespace, registry in self._registries.items():
                tasks.create_task(self._discover(tasks, namespace, registry), name=f"routers of {namespace}")

    def _begin_to_follow(self, tasks: asyncio.TaskGroup, pool: Pool, link: RouterLink) -> None:
        tasks.create_task(self._follow(pool, link), name=f"router {link.address} of {pool.namespace}")

    async def _discover(self, tasks: asyncio.TaskGroup, namespace: str, registry: Registry) -> None:
        """Follow the routers that ``registry`` lists."""
        pool = self._pools[namespace]
        # A registry that is away must not keep the other pools waiting.
        asyncio.get_running_loop().call_later(2 * self._max_silence_s, self._heard, namespace)
        async for records in registry.watch_routers():
            listed = frozenset(one.grpc_address for one in records if one.contract_version in SPOKEN_VERSIONS)
            self._listed[namespace] = listed
            for address in sorted(listed - {link.address for link in pool.links}):
                logger.info("%s has a router at %s", namespace, address)
                link = RouterLink(address, self._dialer)
                pool.add(link)
                self._unheard.add(link)
                self._begin_to_follow(tasks, pool, link)
            self._heard(namespace)

    async def tend(self, fleet: Fleet) -> None:
        """Keep what the table knows fresh, and the texts of ``fleet``. Runs until cancelled."""
        while True:
            now = time.monotonic()
            for pool in self._pools.values():
                self._refresh(pool, now)
            self._table.forget_gone(now)
            self._table.tick(now)
            self._keep_texts(fleet, {model.key for model in self._table.pools(now)})
            fleet.show_states(now)
            await asyncio.sleep(_TICK_S)

    def _keep_texts(self, fleet: Fleet, models: Collection[PoolKey]) -> None:
        """Have the text sides of ``models`` before a request needs them, and no others."""
        fleet.texts.retain(models)
        for model in self._prefetching.keys() - models:
            self._prefetching.pop(model).cancel()
        for model in models:
            task = self._prefetching.get(model)
            if fleet.texts.known(model) is None and (task is None or task.done()):
                task = asyncio.create_task(self._prefetch(fleet.texts, model), name="prefetch-texts")
                task.add_done_callback(report_failure)
                self._prefetching[model] = task

    async def _prefetch(self, texts: FetchedTexts, model: PoolKey) -> None:
        """Try until the text side of ``model`` is here."""
        delay_s = _PREFETCH_AGAIN_S
        while True:
            await texts.prefetch(model)
            if texts.known(model) is not None:
                return
            await self._sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_PREFETCH_AGAIN_S)

    async def fetch_files(self, model: PoolKey, names: Collection[str]) -> Mapping[str, bytes]:
        """The named files of ``model`` from one of its workers. Raises ``ServingError`` if none gives them."""
        last: ServingError = WorkerUnavailableError("no worker of this model is known")
        for pool in self._pools.values():
            for status in tuple(pool.statuses):
                if _pool_of(status) != model or status.state is not WorkerState.READY:
                    continue
                channel = self._dialer.open(status.record.grpc_address)
                try:
                    return await WorkerClient(channel).model_files(
                        names,
                        model_fingerprint=model.fingerprint,
                        max_size_bytes=MAX_FILES_BYTES,
                        timeout_s=_FILES_TIMEOUT_S,
                    )
                except ServingError as error:
                    last = error
                finally:
                    await channel.close()
        raise last

    async def close(self) -> None:
        """End all requests and connections."""
        for task in self._prefetching.values():
            task.cancel()
        await asyncio.gather(
            *(registry.close() for registry in self._registries.values()),
            *(link.close() for pool in self._pools.values() for link in pool.links),
        )

    async def _follow(self, pool: Pool, link: RouterLink) -> None:
        """Follow one router until discovery no longer lists it and it no longer answers: either alone may pass."""
        was_logged = False
        while self._is_listed(pool, link):
            try:
                async for changes in link.watch_workers(max_silence_s=self._max_silence_s):
                    if not pool.hears(link):
                        logger.info("the router at %s of %s answers", link.address, pool.namespace)
                    pool.saw(link, changes)
                    was_logged = False
                    self._heard(link)
                    self._refresh(pool, time.monotonic())
            except (ServingError, ValueError) as error:  # it is lost, silent, or sends nonsense
                if not was_logged:
                    logger.warning("the router at %s of %s does not answer: %s", link.address, pool.namespace, error)
                was_logged = True
                pool.lost(link)  # first, so that what ran there finds another one
                if isinstance(error, RouterSilentError):
                    await link.reset()
            finally:
                pool.lost(link)
            self._heard(link)
            self._refresh(pool, time.monotonic())
            await asyncio.sleep(_WATCH_AGAIN_S)
        logger.info("the router at %s has left %s", link.address, pool.namespace)
        pool.remove(link)
        try:
            while not link.is_idle:  # noqa: ASYNC110 - it has no event; one that drains answers what it has
                await asyncio.sleep(_WATCH_AGAIN_S)
        finally:
            await link.close()

    def _is_listed(self, pool: Pool, link: RouterLink) -> bool:
        """Whether ``link`` is to be tried; those in the configuration always are."""
        listed = self._listed.get(pool.namespace)
        return listed is None or link.address in listed

    def _heard(self, source: object) -> None:
        """All workers are known once every registry and router has answered, or could not."""
        self._unheard.discard(source)
        if not self._unheard:
            self._table.is_synchronised = True

    def _refresh(self, pool: Pool, now: float) -> None:
        """Bring the table up to date with the workers of ``pool``."""
        statuses = {status.record.key: status for status in pool.statuses}
        entered = self._entered.setdefault(pool.namespace, {})
        for key in entered.keys() - statuses.keys():
            record = entered.pop(key)
            self._table.unlist(key)
            self._table.broken(key, record.epoch)
        for key, status in statuses.items():
            if entered.get(key) != status.record:
                entered[key] = status.record
                self._table.put(status.record, now)
            self._report(key, status, now)
        self._metrics.set_ready(pool.namespace, sum(one.state is WorkerState.READY for one in statuses.values()))

    def _report(self, key: WorkerKey, status: WorkerStatus, now: float) -> None:
        if status.load is None or status.state is WorkerState.JOINING:
            return
        self._table.connected(key, status.load, now)
        if status.state is WorkerState.SUSPECT:
            self._table.broken(key, status.record.epoch)


def worker_name(namespace: str, worker_id: str) -> str:
    """The name of a worker among those of all pools."""
    return f"{namespace}.{worker_id}"


def rank_within(namespace: str, rank: Rank) -> Rank:
    """``rank`` of a pool among those of all pools."""
    return Rank(worker_name(namespace, rank.worker_id), rank.data_parallel_rank)


def named_within(namespace: str, status: WorkerStatus) -> WorkerStatus | None:
    """``status`` with the worker's name among all pools; ``None``: that is longer than names may be."""
    name = worker_name(namespace, status.record.worker_id)
    try:
        record = replace(status.record, worker_id=name)
    except ValueError as error:
        logger.warning("worker %s is left out: %s", name, error)
        return None
    load = None if status.load is None else replace(status.load, worker_id=name)
    return replace(status, record=record, load=load)


def _pool_of(status: WorkerStatus) -> PoolKey:
    return PoolKey(status.record.model_name, status.record.model_fingerprint)
