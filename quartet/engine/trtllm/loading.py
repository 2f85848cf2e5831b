"""Loads an LLM and the objects that belong to it, and closes them all again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet.engine.base import RequestKind
from quartet.engine.trtllm.arguments import LlmArguments, build_objects
from quartet.engine.trtllm.book import RequestBook
from quartet.engine.trtllm.feeds import Feeds, LlmRankStats
from quartet.engine.trtllm.hand_off import CacheIdentity
from quartet.engine.trtllm.inputs import InputBuilder, create_input_builder
from quartet.engine.trtllm.kv_events import UNANNOUNCED_BLOCKS
from quartet.engine.trtllm.logits import LogitsProcessors
from quartet.engine.trtllm.metrics import ResultMetrics
from quartet.engine.trtllm.model_facts import ModelFacts
from quartet.engine.trtllm.package import NAMING_LINE, Package
from quartet.engine.trtllm.watchdog import shut_down
from quartet.errors import ConfigError
from quartet.events.kv import RankEvents

if TYPE_CHECKING:
    from quartet.engine.settings import EngineSpec

logger = logging.getLogger(__name__)

# Tokens of a usual request, if one step takes more.
_USUAL_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class LoadedLlm:
    """A loaded LLM, with the objects that make its inputs and read its figures.

    Attributes:
        has_reported: set when ``feeds`` have something new.
        processors: change the logits of every request.
        num_pool_blocks: KV blocks of a rank as the LLM says once it is loaded; ``None``: this release does not.
    """

    llm: Any
    package: Package
    arguments: LlmArguments
    facts: ModelFacts
    inputs: InputBuilder
    book: RequestBook
    feeds: Feeds
    metrics: ResultMetrics | None
    has_reported: threading.Event
    processors: LogitsProcessors
    num_pool_blocks: int | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the engine has ended by itself."""
        executor = self.llm._executor
        if executor is None or executor.is_shutdown():
            return True
        check_health = getattr(self.llm, "_check_health", None)  # not every 1.2 has it
        return check_health is not None and not check_health()

    @property
    def cache(self) -> CacheIdentity:
        """What must be the same in an engine that goes on with this engine's prompts."""
        transceiver = self.arguments.values.get("cache_transceiver_config")
        return CacheIdentity.of_arguments(
            self.facts.fingerprint,
            self.arguments.block_size,
            transceiver if isinstance(transceiver, Mapping) else None,
        )

    @property
    def unannounced_blocks(self) -> tuple[str, ...]:
        """As in ``WorkerRecord``. What the release may leave open counts as not announced."""
        cache = getattr(getattr(self.llm, "args", None), "kv_cache_config", None)
        # Not only True: another value leaves the choice to the release, and to the model.
        may_be_v2 = getattr(cache, "use_kv_cache_manager_v2", False) is not False
        if self.package.line < NAMING_LINE or may_be_v2:
            return UNANNOUNCED_BLOCKS
        has_ids = self.package.takes_media_ids and self.inputs.knows_sizes
        return ("adapter",) if has_ids or not self.inputs.reads_media else ("adapter", "media")

    def wait_for_figures(self, timeout_s: float) -> list[RankEvents]:
        """Block until the size of the cache is known, ``timeout_s`` at most; return the KV events of that time."""
        events: list[RankEvents] = []
        deadline = time.monotonic() + (timeout_s if self.arguments.has_stats or self.arguments.has_events else 0.0)
        while (left_s := deadline - time.monotonic()) > 0:
            self.has_reported.clear()
            events += self.feeds.take_kv_events()
            if self.feeds.figures(0).num_blocks is not None:
                break
            self.has_reported.wait(left_s)
        return events

    def num_blocks(self) -> int:
        """KV blocks of a rank; a guess if TensorRT-LLM doesn't say."""
        for known in (self.feeds.figures(0).num_blocks, self.num_pool_blocks):
            if known is not None:
                return known
        return guess_num_blocks(self.arguments, self.facts.max_model_len)


def pool_blocks_of(llm: Any, block_size: int) -> int | None:
    """KV blocks of ``block_size`` tokens of a rank, as a loaded LLM says; ``None``: this release has no word for it."""
    capacity_of = getattr(llm, "get_kv_cache_capacity", None)
    if capacity_of is None:
        return None
    try:
        capacity = capacity_of()
        num_tokens = int(capacity["maxNumBlocks"]) * int(capacity["tokensPerBlock"])
    except Exception as error:  # noqa: BLE001 - the engine works without this figure, for which there is a guess
        logger.warning("the size of the KV cache can't be read: %r", error)
        return None
    if num_tokens < block_size:
        logger.warning("the size of the KV cache can't be: %r", capacity)
        return None
    return num_tokens // block_size


def guess_num_blocks(arguments: LlmArguments, max_model_len: int) -> int:
    """Guess the KV blocks of a rank, where TensorRT-LLM says nothing of them: 1.2 without statistics and events.

    Routers fill these blocks, and refuse requests that never fit. So the guess has room for the longest request, and
    for a full batch of requests of usual length. Room for a full batch of the longest requests would fit any number of
    requests, which would then queue here instead of with the router. A request of usual length is one that a single
    step computes. The guess never exceeds ``kv_cache_config.max_tokens``, if given: the pool is at most so large.
    """
    usual_tokens = min(arguments.max_num_tokens or _USUAL_TOKENS, _USUAL_TOKENS, max_model_len)
    num_tokens = max(max_model_len, (arguments.max_batch_size or 1) * usual_tokens)
    cache = arguments.values.get("kv_cache_config")
    max_tokens = cache.get("max_tokens") if isinstance(cache, Mapping) else None
    if isinstance(max_tokens, int):
        num_tokens = min(num_tokens, max_tokens)
    return -(-num_tokens // arguments.block_size)


def _check_tokenizer(arguments: LlmArguments, inputs: InputBuilder) -> None:
    if inputs.reads_media and arguments.values.get("skip_tokenizer_init"):
        raise ConfigError("skip_tokenizer_init: must be false, as this model takes media, which go with text")


@contextmanager
def loaded_llm(
    spec: EngineSpec, kind: RequestKind, arguments: LlmArguments, on_feeds: Callable[[], None]
) -> Iterator[LoadedLlm]:
    """Load an LLM as ``arguments`` say, and close it at the end of the ``with`` block. Blocks while it loads.

    ``on_feeds`` is called on the feeds' threads when the LLM has reported something of its cache or its steps.
    """
    facts = ModelFacts.read(spec.model_path, arguments)
    with ExitStack() as stack:
        # Report what is wrong with the model's media before loading the weights.
        inputs = create_input_builder(spec, facts.fingerprint)
        stack.callback(inputs.close)
        _check_tokenizer(arguments, inputs)
        for warning in arguments.warnings:
            logger.warning("%s", warning)
        processors = LogitsProcessors(spec.engine.logits_processors)
        keywords = build_objects(arguments)
        package = Package()
        inputs.names_media = package.takes_media_ids and arguments.has_events
        llm = package.LLM(**keywords)
        stack.callback(shut_down, llm)
        book = RequestBook(
            num_ranks=arguments.num_ranks,
            block_size=arguments.block_size,
            max_step_tokens=arguments.max_num_tokens,
            max_running=arguments.max_batch_size,
        )
        has_reported = threading.Event()
        media_ids = frozenset() if inputs.placeholder_id is None else frozenset({inputs.placeholder_id})

        def take_record(record: LlmRankStats) -> None:
            book.observe(record)
            has_reported.set()

        def take_change() -> None:
            has_reported.set()
            on_feeds()

        feeds = Feeds(
            llm,
            block_size=arguments.block_size,
            num_ranks=arguments.num_ranks,
            wants_events=arguments.has_events,
            wants_stats=arguments.has_stats,
            on_change=take_change,
            on_record=take_record,
            media_token_ids=media_ids,
            vocab_size=facts.vocab_size,
            names_private=package.line >= NAMING_LINE,
        )
        stack.callback(feeds.close)
        metrics = None
        if arguments.has_perf_metrics or arguments.has_stats:
            metrics = ResultMetrics(Path(spec.model_path).name, lambda: feeds.latest_record)
            stack.callback(metrics.close)
        yield LoadedLlm(
            llm=llm,
            package=package,
            arguments=arguments,
            facts=facts,
            inputs=inputs,
            book=book,
            feeds=feeds,
            metrics=metrics,
            has_reported=has_reported,
            processors=processors,
            num_pool_blocks=pool_blocks_of(llm, arguments.block_size),
        )
