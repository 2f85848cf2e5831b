"""A consolidator process: all parts are made, wired, run and closed here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial

from prometheus_client import CollectorRegistry

from quartet.errors import ConfigError
from quartet.events.curve import read_events_key
from quartet.events.vllm import VllmBatch
from quartet.events.vllm_listener import VllmListener
from quartet.events.vllm_publisher import VllmPublisher
from quartet.kvcache.consolidate import ChangedRank, Consolidator, LeftOut
from quartet.supervision import LoopWatch, Supervisor
from quartet.telemetry.consolidator_metrics import ConsolidatorFigures, SourceFigures, watch_consolidator
from quartet.telemetry.http import Probes, TelemetryServer
from quartet.telemetry.metrics import ProcessMetrics, monitor_event_loop_lag
from services.consolidator.config import ConsolidatorConfig, SourceConfig

logger = logging.getLogger(__name__)


class ConsolidatorProcess:
    """One consolidator, from ``run`` to its end."""

    def __init__(self, config: ConsolidatorConfig, on_failure: Callable[[], None] = lambda: None) -> None:
        """Nothing is opened before ``run``; ``on_failure`` is called if it can't go on, before it closes everything."""
        self._config = config
        self._on_failure = on_failure
        self._registry = CollectorRegistry()
        self._consolidator = Consolidator(config.max_source_blocks, config.max_source_ranks)
        self._publisher: VllmPublisher | None = None
        self._listeners: dict[str, VllmListener] = {}
        self._loop_watch = LoopWatch()
        self._is_ready = False

    async def run(self, stop: asyncio.Event) -> None:
        """Consolidate until ``stop`` is set, then close everything.

        Raises:
            ConfigError: it can't start; the message says why.
            TaskEndedError: a background task has ended.
        """
        config = self._config
        async with AsyncExitStack() as stack:
            probes = Probes(is_alive=lambda: not self._loop_watch.is_dead, is_ready=lambda: self._is_ready)
            telemetry = TelemetryServer(config.http_address, self._registry, probes)
            http_port = telemetry.start()
            stack.push_async_callback(telemetry.close)
            publisher = self._publisher = self._make_publisher()
            stack.callback(publisher.close)
            for source in config.sources:
                listener = self._listeners[source.title] = self._listen(source)
                stack.callback(listener.close)
            watch_consolidator(self._registry, self._figures)
            async with Supervisor(self._fail) as tasks:
                tasks.start("lag", monitor_event_loop_lag(ProcessMetrics(self._registry)))
                tasks.start("loop-watch", self._loop_watch.run())
                self._is_ready = True
                host = config.output.listening.host
                replays = f", replays on port {publisher.replay_port}" if publisher.replay_port else ""
                logger.info("publishes on tcp://%s:%d%s; HTTP on port %d", host, publisher.port, replays, http_port)
                await tasks.run_until(stop)
                self._is_ready = False

    def _make_publisher(self) -> VllmPublisher:
        output, key_file = self._config.output, self._config.events_key_file
        address = output.listening
        return VllmPublisher(
            address.host,
            address.port,
            setting="output.address",
            replay_port=output.replay_port,
            topic=output.topic,
            form=output.form,
            key=None if key_file is None else read_events_key(key_file),
        )

    def _listen(self, source: SourceConfig) -> VllmListener:
        name = source.title
        try:
            return VllmListener(
                name,
                source.endpoint,
                partial(self._apply, name),
                partial(self._drop, name),
                replay_endpoint=source.replay_endpoint or None,
                topic=source.topic,
                key=None if source.events_key_file is None else read_events_key(source.events_key_file),
                replay_timeout_s=self._config.replay_timeout_s,
            )
        except ValueError as error:
            raise ConfigError(f"sources: {name}: {error}") from error

    def _apply(self, source: str, batch: VllmBatch) -> None:
        self._publish(self._consolidator.apply(source, batch))

    def _drop(self, source: str) -> None:
        self._publish(self._consolidator.drop(source))

    def _publish(self, changed: list[ChangedRank]) -> None:
        assert self._publisher is not None, "it is made before any source is listened to"
        for rank in changed:
            self._publisher.publish(rank.events, rank.data_parallel_rank)

    def _fail(self) -> None:
        self._is_ready = False
        self._on_failure()

    def _figures(self) -> ConsolidatorFigures:
        num_batches = 0 if self._publisher is None else self._publisher.num_batches
        return ConsolidatorFigures(
            sources=self._source_figures(), num_blocks=self._consolidator.num_blocks(), num_batches=num_batches
        )

    def _source_figures(self) -> Iterator[SourceFigures]:
        for name, listener in self._listeners.items():
            feed = listener.feed
            yield SourceFigures(
                name=name,
                is_connected=listener.is_connected,
                num_blocks=self._consolidator.num_blocks(name),
                num_gaps=feed.num_gaps,
                num_restarts=feed.num_restarts,
                num_drops=feed.num_drops,
                num_replays=listener.num_replays,
                num_malformed=listener.num_malformed,
                left_out={reason.value: self._consolidator.left_out[name, reason] for reason in LeftOut},
            )
