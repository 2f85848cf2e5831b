"""The engine seam: what a worker asks of an engine, and what it gets back, step by step.

Requests are plain data, so that an engine may move to a process of its own. One consumer reads its ``StepOutput`` and
routes each part to its request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from quartet.engine.sampling import OutputOptions, PromptLogprobs, Sampling, TokenLogprobs
from quartet.errors import ServingError
from quartet.events.kv import RankEvents, StoredBlocks, Tier
from quartet.events.load import RankCounts
from quartet.kvcache.block_hash import MediaSpan
from quartet.kvcache.block_pool import BlockCounts
from quartet.kvcache.layout import HandOff, KvLayout
from quartet.media.items import MediaFile
from quartet.transfer.base import BlockMemory, EmbeddingMemory, TransferWay

if TYPE_CHECKING:
    # Only a type here, and clients import this module.
    from prometheus_client import Metric


class RequestKind(StrEnum):
    """What an engine does with a request."""

    PREFILL = "prefill"  # compute the KV of all tokens, sample one token, hold the blocks
    DECODE = "decode"  # generate until a limit, from a prompt or a hand-off


class FinishReason(StrEnum):
    """Why a generation ended well. Engines report ``STOP_ID`` and ``LENGTH``; the others are found above engines."""

    STOP_ID = "stop_id"  # an end-of-sequence or stop id was sampled; it is the last token given out
    STOP_STRING = "stop_string"  # found where tokens become text
    LENGTH = "length"  # max_tokens or the model's longest sequence
    CANCELLED = "cancelled"  # the client asked for an early end; engines report it as a failure
    TOOL_CALLS = "tool_calls"  # as STOP_ID, and tool calls were found in the text


@dataclass(kw_only=True)
class Generation:
    """What to generate: everything that decides the tokens.

    Attributes:
        prompt_token_ids: at least one.
        generated_token_ids: tokens of earlier attempts that were already shown; they count as output for
            penalties, limits and usage.
        seed: unsigned 64 bit; noise of a token is a function of (seed, choice, its position in the sequence).
        choice: which of the request's parallel answers this is, from 0.
        data_parallel_rank: the attention-data-parallel rank that must serve it.
    """

    prompt_token_ids: Sequence[int] = field(repr=False)
    generated_token_ids: Sequence[int] = field(default=(), repr=False)
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    choice: int = 0
    adapter: str = ""
    cache_salt: str = field(default="", repr=False)
    data_parallel_rank: int = 0
    media: tuple[MediaSpan, ...] = ()
    output: OutputOptions = field(default_factory=OutputOptions)


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One unit of work.

    Attributes:
        id: drawn by the caller, unique in the life of the engine.
        hand_off: DECODE only: where the KV of ``prompt + generated`` without the last token can be pulled.
        priority: waiting requests with a higher one go first.
        media_blocks: blocks of ``Engine.embeddings`` with each item of ``generation.media``; the caller keeps them
            until the request ends. Empty: text only, or the media are in ``hand_off``'s KV: if that KV is lost, the
            request fails (``MediaLostError``).
        media_inputs: for an engine that ``reads_media``, each item's file or the state of its opaque hand-off; ``None``
            for items of ``media_blocks``, which has nothing for the others.
        traceparent: W3C trace context, for an engine that traces by itself; not checked; empty: no trace.
        session_key: requests of one conversation share it; empty: none.
        tenant, trust_domain: whose conversation it is; empty: nobody's in particular, and that of all such tenants.
    """

    id: int
    kind: RequestKind
    generation: Generation
    hand_off: HandOff | None = None
    priority: int = 0
    media_blocks: tuple[tuple[int, ...], ...] = ()
    media_inputs: tuple[MediaFile | bytes | None, ...] = field(default=(), repr=False)
    traceparent: str = ""
    session_key: str = field(default="", repr=False)
    tenant: str = ""
    trust_domain: str = ""


@dataclass(frozen=True)
class Started:
    """A request joined the running batch.

    Attributes:
        num_cached_tokens: tokens whose KV was in the cache.
        queue_s: seconds from ``submit`` until it was scheduled, without ``transfer_s`` and ``onboard_s``.
        transfer_s: seconds spent pulling blocks, 0 without a hand-off.
        transfer_bytes: bytes pulled.
        transfer_way: how they were moved; ``None``: nothing was, or the engine moved them by itself.
        num_prompt_tokens: of a prompt with media that the engine laid out itself, else 0.
        num_evicted_tokens: tokens after the cached ones whose KV was in the cache lately; 0 also where that is unknown.
        onboard_s: seconds in which cached blocks came from tiers below the device.
        queue_after_transfer_s: the part of ``queue_s`` that came after the pull; 0 also where that is unknown.
    """

    id: int
    num_cached_tokens: int
    queue_s: float
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    transfer_way: TransferWay | None = None
    num_prompt_tokens: int = 0
    num_evicted_tokens: int = 0
    onboard_s: float = 0.0
    queue_after_transfer_s: float = 0.0


@dataclass(frozen=True)
class Finished:
    """A generation ended well; its last tokens are in the same output."""

    id: int
    reason: FinishReason
    num_output_tokens: int  # generated_token_ids of the start included


@dataclass(frozen=True)
class Prefilled:
    """A prefill is complete; the engine holds its blocks until ``release(id)``.

    Attributes:
        token_id: the token sampled after the last one given.
        finished: set if that token ends the generation: no blocks are held then.
        block_ids: held blocks, in the order of the sequence; empty for an opaque hand-off or when finished.
        num_tokens: tokens whose KV the held blocks have.
        opaque: state of an engine that moves its own cache, else ``None``.
        laid_out: the generation with a prompt that the engine laid out itself, because of its media; the spans' media
            ids are zeros.
        num_evicted_tokens: as in ``Started``.
        onboard_s: as of ``Started``; neither ``queue_s`` nor ``compute_s`` has it.
    """

    id: int
    token_id: int
    num_cached_tokens: int
    queue_s: float
    compute_s: float
    finished: FinishReason | None = None
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    opaque: bytes | None = field(default=None, repr=False)
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    laid_out: Generation | None = field(default=None, repr=False)
    num_evicted_tokens: int = 0
    onboard_s: float = 0.0


@dataclass(frozen=True)
class Failed:
    """A request ended badly; after ``cancel`` with ``RequestCancelledError``. It holds no blocks any more."""

    id: int
    error: ServingError


@dataclass(frozen=True)
class StepOutput:
    """What one engine step produced for all its requests, in columns.

    ``token_ids`` is the concatenation over ``ids``: ``num_tokens[i]`` tokens for request ``ids[i]``, the first of which
    is output token number ``token_offsets[i]`` (counting from 0, ``generated_token_ids`` included). ``logprobs`` has an
    entry for each request that asked for them; ``prompt_logprobs`` has one for each prompt whose are complete, at the
    latest with its first token. Every request gets exactly one of ``finished``, ``prefilled`` and
    ``failed``; after that its id never appears again. An empty output says that ``stats`` changed for waiting prompts.

    Attributes:
        kv_events: blocks that can be shared now, or no longer, by data-parallel rank; ranks without a change are left
            out.
        kv_snapshot: all blocks that every rank can share after ``kv_events``, if ``request_kv_snapshot`` asked for it.
    """

    ids: Sequence[int] = ()
    num_tokens: Sequence[int] = ()
    token_offsets: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[StepLogprobs] = ()
    prompt_logprobs: Sequence[StepPromptLogprobs] = ()
    started: Sequence[Started] = ()
    finished: Sequence[Finished] = ()
    prefilled: Sequence[Prefilled] = ()
    failed: Sequence[Failed] = ()
    kv_events: Sequence[RankEvents] = ()
    kv_snapshot: Sequence[StoredBlocks] | None = None


@dataclass(frozen=True)
class StepLogprobs:
    """Log probabilities of one request's tokens of a step, one entry a token."""

    id: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class StepPromptLogprobs:
    """Log probabilities of one request's prompt, once."""

    id: int
    logprobs: PromptLogprobs


@dataclass(frozen=True)
class TierCounts:
    """A tier below the device.

    Attributes:
        blocks: by state, as ``quartet.kvcache.tiers`` has them.
        block_size_bytes: of one.
        num_stored: blocks that came to it from the tier above, ever.
        num_loaded: blocks that requests loaded from it, ever.
        num_dropped: blocks that should have come to it, and were lost: no room, or too much was on its way.
        num_failed: reads and writes that failed.
    """

    tier: Tier
    blocks: BlockCounts
    block_size_bytes: int
    num_stored: int = 0
    num_loaded: int = 0
    num_dropped: int = 0
    num_failed: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineStats(RankCounts):
    """A snapshot of one data-parallel rank. Where a step runs, what it computes is begun, and still queued.

    Attributes:
        step_ends_at: when the running step should end, or the one that was launched behind it, in monotonic seconds;
            0: none runs, or it is unknown.
        num_prompt_steps: steps begun, ever, that compute prompt tokens.
        num_preemptions: requests that gave their blocks up and were computed again.
        num_prompt_tokens: prompt tokens computed, ever, not counting cached ones.
        num_output_tokens: tokens sampled, ever.
        num_cached_tokens: prompt tokens found in the cache, ever.
        num_retained_blocks: blocks that sessions retain, in any state.
        tiers: below the device, the faster one first.
    """

    step_ends_at: float = 0.0
    num_prompt_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_retained_blocks: int = 0
    tiers: tuple[TierCounts, ...] = ()


@dataclass(frozen=True)
class Turn:
    """What one thread of an engine is doing: messages, scheduling, one step.

    Attributes:
        thread: which thread, where there are several.
        number: another one in each turn.
        expected_s: how long the turn's step should take; ``None``: unknown.
    """

    thread: int
    number: int
    expected_s: float | None


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do; callers ask for nothing else.

    Attributes:
        sampling_fields: names of the ``Sampling`` and ``OutputOptions`` fields that it honours.
        layout: of its blocks; ``None`` for an engine that moves its own cache.
        placeholder_id: the token that stands for media in prompts; ``None``: it takes text only.
        reads_media: it takes ``EngineRequest.media_inputs``; items of unknown size have one placeholder each.
        metrics: returns its own metrics; called at each scrape, on the thread of the scrape.
        unannounced_blocks: as in ``WorkerRecord``.
    """

    kinds: frozenset[RequestKind]
    sampling_fields: frozenset[str]
    model_fingerprint: str
    vocab_size: int
    max_model_len: int  # prompt and output together
    block_size: int
    num_blocks: int
    layout: KvLayout | None = None
    data_parallel_size: int = 1
    adapters: tuple[str, ...] = ()
    placeholder_id: int | None = None
    reads_media: bool = False
    metrics: Callable[[], Iterable[Metric]] | None = None
    unannounced_blocks: tuple[str, ...] = ()


class Engine(Protocol):
    """Computes requests. All methods are called on the event loop; only ``start`` and ``close`` wait."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """What it can do; valid after ``start``."""
        ...

    @property
    def memory(self) -> BlockMemory | None:
        """Its block pool as bytes, for transfers out; ``None`` for an engine that moves its own cache."""
        ...

    @property
    def embeddings(self) -> EmbeddingMemory | None:
        """Where it reads embeddings of media; ``None``: it takes none."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it has died; there are no more outputs."""
        ...

    async def start(self) -> None:
        """Load, warm up and begin stepping. Raises ``ServingError`` naming what is wrong."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue ``request``; every outcome, refusal included, arrives in ``outputs``.

        Raises:
            EngineError, WorkerUnavailableError: it died or was closed; there are no more outputs.
        """
        ...

    def cancel(self, id: int) -> None:
        """End a request; its ``failed``, or the end that it already had, still arrives. Unknown ids are ignored."""
        ...

    def release(self, id: int) -> None:
        """Free the blocks that a completed prefill holds. Unknown ids are ignored."""
        ...

    def request_kv_snapshot(self) -> None:
        """Have one of the next outputs carry a ``kv_snapshot``; it answers all requests made before it."""
        ...

    def outputs(self) -> AsyncIterator[StepOutput]:
        """The steps' outputs, in order, for one consumer. Ends after ``close``; raises ``EngineError`` when it died."""
        ...

    def stats(self) -> Sequence[EngineStats]:
        """The load of each data-parallel rank. Callable on any thread, also after ``close``; does not block."""
        ...

    def turns(self) -> Sequence[Turn]:
        """The turns of its threads; not of those that wait for work, nor of processes of its own."""
        ...

    async def close(self) -> None:
        """Stop stepping and free everything; requests still running fail. May be called twice."""
        ...
