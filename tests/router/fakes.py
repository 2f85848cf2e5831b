"""A fleet without processes: hops that fail as planned, and tokens that are a function of seed, choice and position."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from prometheus_client import CollectorRegistry

from quartet.api.answer import Answer
from quartet.api.request import (
    Accepted,
    AnswerPart,
    AskedStart,
    ChoiceFinished,
    ChoicePlacement,
    Placed,
    Relayed,
    Resume,
)
from quartet.discovery.base import Rank
from quartet.engine.base import FinishReason
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import RequestCancelledError, ServingError
from quartet.kvcache.layout import HandOff, OpaquePayload
from quartet.streams.messages import DecodeFinished, DecodeSink, DecodeStarted, EncodeStart, PrefillOutcome, WorkerStart
from quartet.streams.signed_start import SigningKey
from quartet.telemetry.metrics import RouterMetrics
from quartet.telemetry.tracing import Tracer
from quartet.text.model_text import ModelText
from router.admission import Admission
from router.config import AdmissionConfig, AttemptConfig, TokenizeConfig
from router.context import RouterContext
from router.fair_queue import FairShare
from router.generate import Pipeline
from router.intake import Intake
from router.kv_index.index import PrefixIndex
from router.media.config import MediaConfig
from router.media.encode import EncodeTools, EncodeWaits, KnownSizes
from router.media.encode_queue import EncodeQueue
from router.media.queue import MediaQueue, MediaQueueConfig
from router.media.request import MediaTools
from router.policy.base import Policy
from router.prompt_memory import PromptMemory
from router.rate_limits import RateLimits
from router.signing import Signer
from router.tenants import TenantConfig, Tenants
from router.thread_queue import TokenizeQueue
from router.untaken import UntakenBudgets
from router.usage_log import UsageLog
from router.workers import PoolKey, WorkerTable
from tests.router.media_fakes import FakeEncode, FakeMedia, LaidOut, expanded, reported_prompt
from tests.router.noting_policy import NotingPolicy
from tests.router.records import make_load, make_record
from tests.text.builders import EOS, byte_level_tokenizer

TIMEOUT_S = 30.0
MEDIA_CONFIG = MediaConfig(
    max_file_size_mb=(64 << 20) / 1e6,
    max_items=64,
    max_held_bytes=1 << 30,
    allowed_schemes=("http", "https"),
    allowed_hosts=("*",),
)
LOCAL_PREFILL_MAX_TOKENS = 4

_TOKENIZER = byte_level_tokenizer()
_ALPHABET = [_TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abcdefghijklmnop"]
EOS_ID = _TOKENIZER.token_to_id(EOS)
MODEL_TEXT = ModelText(_TOKENIZER, None, (EOS_ID,), _TOKENIZER.vocab_size)


def token_at(seed: int, choice: int, position: int) -> int:
    """The token that the fake model samples."""
    return _ALPHABET[zlib.crc32(f"{seed}/{choice}/{position}".encode()) % len(_ALPHABET)]


def expected_tokens(seed: int, choice: int, num_prompt: int, num_output: int) -> list[int]:
    """The undisturbed output."""
    return [token_at(seed, choice, num_prompt + i) for i in range(num_output)]


def text_of(token_ids: list[int]) -> str:
    return _TOKENIZER.decode(token_ids)


@dataclass
class Plan:
    """How one hop goes; a plan without anything goes well.

    Attributes:
        fail_after: tokens after which ``error`` comes; 0: at once, before it is started.
        hang_after: tokens after which nothing comes any more.
        overlap: tokens that are sent again at the beginning.
        has_hole: leaves out its first token.
        num_lost: tokens that it loses before it ends well.
        num_extra: tokens that it counts too many at its end; negative: too few.
        gate: a prefill waits for it first.
        laid_out: what it says of the prompt, whatever came.
        num_cached_tokens: what a decode says of its cache.
        num_unreported: tokens that its log probabilities of the prompt lack.
    """

    error: ServingError | None = None
    fail_after: int = 0
    hang_after: int | None = None
    overlap: int = 0
    has_hole: bool = False
    num_lost: int = 0
    num_extra: int = 0
    gate: asyncio.Event | None = None
    laid_out: LaidOut | None = None
    num_cached_tokens: int = 3
    num_unreported: int = 0


@dataclass
class Call:
    """What was started where."""

    kind: str
    rank: Rank
    start: Any


@dataclass
class FakeHops:
    """Hops to workers that follow ``plans``, one a start; then everything goes well.

    Attributes:
        calls: everything that was started.
        num_open: calls that neither ended nor were cancelled.
        held: hand-offs that were not taken, dropped or ended, those of embeddings included.
        kept: those that are renewed.
        tokens_per_step: tokens of each progress.
        eos_at: output position at which the model ends.
    """

    plans: defaultdict[str, deque[Plan]] = field(default_factory=lambda: defaultdict(deque))
    calls: list[Call] = field(default_factory=list)
    num_open: int = 0
    held: set[bytes] = field(default_factory=set)
    kept: set[bytes] = field(default_factory=set)
    tokens_per_step: int = 1
    eos_at: int | None = None
    max_sequence_tokens: int = 1001
    called: asyncio.Event = field(default_factory=asyncio.Event)
    hung: asyncio.Event = field(default_factory=asyncio.Event)
    keeping: asyncio.Event = field(default_factory=asyncio.Event)

    def plan(self, kind: str, *plans: Plan) -> None:
        self.plans[kind].extend(plans)

    def encode(self, rank: Rank, start: EncodeStart, on_encoded: Callable[[HandOff], None]) -> FakeEncode:
        rank, start, plan = self._note("encode", rank, start)
        return FakeEncode(self, rank, start, plan, on_encoded)

    def prefill(self, rank: Rank, start: WorkerStart) -> FakePrefill:
        return FakePrefill(self, *self._note("prefill", rank, start))

    def decode(self, rank: Rank, start: WorkerStart, sink: DecodeSink) -> FakeDecode:
        rank, start, plan = self._note("decode", rank, start)
        return FakeDecode(self, rank, start, sink, plan)

    def renew(self, hand_off: HandOff) -> FakeKept:
        assert hand_off.hand_off_id in self.held
        self.kept.add(hand_off.hand_off_id)
        self.keeping.set()
        return FakeKept(self, hand_off.hand_off_id)

    def drop(self, hand_off: HandOff) -> None:
        self.held.discard(hand_off.hand_off_id)

    def pull(self, start: WorkerStart) -> None:
        """A worker takes over what ``start`` leads to."""
        for source in (start.hand_off, *(item.source for item in start.media)):
            if isinstance(source, HandOff):
                assert source.hand_off_id in self.held
                assert source.hand_off_id not in self.kept, "the router keeps it still"
                self.held.discard(source.hand_off_id)

    def sample(self, start: WorkerStart, num_generated: int) -> int:
        generation = start.generation
        if num_generated == self.eos_at:
            return EOS_ID
        return token_at(generation.seed, generation.choice, len(expanded(start)[0]) + num_generated)

    def finish_reason(self, start: WorkerStart, token_ids: list[int]) -> FinishReason | None:
        sampling = start.generation.sampling
        # Like an engine whose files name no end-of-sequence id: it knows those that a start names.
        if token_ids[-1] in sampling.stop_token_ids and len(token_ids) > sampling.min_tokens:
            return FinishReason.STOP_ID
        max_tokens = sampling.max_tokens or self.max_sequence_tokens - len(expanded(start)[0])
        return FinishReason.LENGTH if len(token_ids) >= max_tokens else None

    def _note(self, kind: str, rank: Rank, start: Any) -> tuple[Rank, Any, Plan]:
        self.calls.append(Call(kind, rank, start))
        self.called.set()
        return rank, start, self.plans[kind].popleft() if self.plans[kind] else Plan()


@dataclass
class FakeKept:
    hops: FakeHops
    hand_off_id: bytes

    def stop(self) -> None:
        self.hops.kept.discard(self.hand_off_id)


class FakePrefill:
    def __init__(self, hops: FakeHops, rank: Rank, start: WorkerStart, plan: Plan) -> None:
        self._hops, self._place, self._start, self._plan = hops, rank, start, plan

    async def outcome(self) -> PrefillOutcome:
        self._hops.num_open += 1
        try:
            await asyncio.sleep(0)
            if self._plan.hang_after is not None:
                self._hops.hung.set()
                await asyncio.Event().wait()
            if self._plan.gate is not None:
                self._hops.hung.set()
                await self._plan.gate.wait()
            if self._plan.error is not None:
                raise self._plan.error
            return self._succeed()
        finally:
            self._hops.num_open -= 1

    def _succeed(self) -> PrefillOutcome:
        self._hops.pull(self._start)
        prompt, media, is_reported = reported_prompt(self._start, self._plan.laid_out)
        generated = list(self._start.generation.generated_token_ids)
        token_id = self._hops.sample(self._start, len(generated))
        reason = self._hops.finish_reason(self._start, [*generated, token_id])
        hand_off = None
        if reason is None:
            hand_off = HandOff(
                hand_off_id=random.randbytes(16),
                secret=bytes(16),
                worker_id=self._place.worker_id,
                epoch=1,
                address="127.0.0.1:1",
                time_to_live=timedelta(seconds=30),
                payload=OpaquePayload("fake", b""),
            )
            self._hops.held.add(hand_off.hand_off_id)
        return PrefillOutcome(
            token_id=token_id,
            logprobs=TokenLogprobs(token_id, -1.0) if self._start.generation.output.logprobs is not None else None,
            finish_reason=reason,
            hand_off=hand_off,
            num_cached_tokens=2,
            queue_s=0.01,
            compute_s=0.02,
            prompt_token_ids=prompt if is_reported else (),
            media=media if is_reported else (),
            prompt_logprobs=prompt_logprobs(self._start, self._plan.num_unreported),
            sent_at_unix_ns=time.time_ns() if self._start.context.sent_at_unix_ns else 0,
        )


def prompt_logprobs(start: WorkerStart, num_left_out: int = 0) -> PromptLogprobs | None:
    """What a worker reports of the prompt, if it is asked: position ``i`` has ``-i``, each alternative half of it."""
    generation, num_top = start.generation, start.generation.output.num_prompt_logprobs
    if num_top is None or start.hand_off is not None or generation.generated_token_ids:
        return None
    token_ids = generation.prompt_token_ids[1 + num_left_out :]
    return PromptLogprobs(
        logprobs=[-1.0 - i for i in range(len(token_ids))],
        top_token_ids=[token_id for token_id in token_ids for _ in range(num_top)],
        top_logprobs=[-0.5 * (1 + i) for i in range(len(token_ids)) for _ in range(num_top)],
    )


class FakeDecode:
    """Gives its tokens to the sink, a step a turn of the event loop, from when its end is first waited for."""

    def __init__(self, hops: FakeHops, rank: Rank, start: WorkerStart, sink: DecodeSink, plan: Plan) -> None:
        self.received_at: float | None = None
        self.first_sent_at_unix_ns = 0
        self._stopped_by: Exception = RequestCancelledError("cancelled")
        self._hops, self._start, self._sink, self._plan = hops, start, sink, plan
        self._token_ids = list(start.generation.generated_token_ids)
        self._num_given = 0
        self._is_over = False
        self._wake = asyncio.Event()
        self._hops.num_open += 1

    def cancel(self) -> None:
        if not self._is_over:
            self._end()
            self._wake.set()

    def stop(self, error: Exception) -> None:
        self._stopped_by = error
        self.cancel()

    async def outcome(self) -> DecodeFinished | None:
        while not self._is_over:
            await asyncio.sleep(0)
            if self._plan.error is not None and self._num_given >= self._plan.fail_after:
                self._end()
                raise self._plan.error
            if self._plan.hang_after is not None and self._num_given >= self._plan.hang_after:
                self._hops.hung.set()
                await self._wake.wait()
                raise self._stopped_by
            reason, is_enough = self._step()
            if reason is not None:
                self._end()
                return DecodeFinished(reason=reason, num_output_tokens=len(self._token_ids) + self._plan.num_extra)
            if is_enough:
                return None
        raise self._stopped_by

    def _take_hand_off(self) -> DecodeStarted:
        self._hops.pull(self._start)
        prompt, _, is_reported = reported_prompt(self._start)
        return DecodeStarted(
            num_cached_tokens=self._plan.num_cached_tokens,
            queue_s=0.03,
            transfer_s=0.004,
            transfer_bytes=1,
            num_prompt_tokens=len(prompt) if is_reported else 0,
        )

    def _step(self) -> tuple[FinishReason | None, bool]:
        if self._num_given == 0:
            self._sink.started(self._take_hand_off())
            report = prompt_logprobs(self._start, self._plan.num_unreported)
            if report is not None:
                self._sink.take_prompt_logprobs(report)
        first = len(self._token_ids)
        reason = None
        while reason is None and len(self._token_ids) < first + self._hops.tokens_per_step:
            self._token_ids.append(self._hops.sample(self._start, len(self._token_ids)))
            reason = self._hops.finish_reason(self._start, self._token_ids)
        offset = max(first - self._plan.overlap, 0)
        if self._plan.has_hole and self._num_given == 0:
            offset = first + 1
        self._num_given += len(self._token_ids) - first
        token_ids = self._token_ids[offset : len(self._token_ids) - (self._plan.num_lost if reason else 0)]
        wants_logprobs = self._start.generation.output.logprobs is not None
        logprobs = [TokenLogprobs(token_id, -1.0) for token_id in token_ids] if wants_logprobs else []
        self.received_at = time.monotonic()
        if not first and self._start.context.sent_at_unix_ns:
            self.first_sent_at_unix_ns = time.time_ns()
        return reason, not self._sink.take(offset, token_ids, logprobs, self.received_at)

    def _end(self) -> None:
        self._is_over = True
        self._hops.num_open -= 1


@dataclass
class FakeTexts:
    """Gives the same text side for every model; waits for ``gate`` first."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    text: ModelText = MODEL_TEXT

    def __post_init__(self) -> None:
        self.gate.set()

    async def model_text(self, pool: PoolKey) -> ModelText:
        self.asked.set()
        await self.gate.wait()
        return self.text


class OneKey:
    """A key in memory."""

    signing_key = SigningKey(key_id="test", secret=bytes(32))

    def find(self, key_id: str) -> SigningKey | None:
        return self.signing_key if key_id == self.signing_key.key_id else None


class Fleet:
    """A pipeline over fake hops to workers of the given ids."""

    def __init__(
        self,
        *worker_ids: str,
        attempts: AttemptConfig | None = None,
        admission: AdmissionConfig | None = None,
        policy: Policy | None = None,
        max_timeout_s: float = 60.0,
        tenants: Mapping[str, TenantConfig] | None = None,
        hops: FakeHops | None = None,
        tracer: Tracer | None = None,
        usage: UsageLog | None = None,
        **record: object,
    ) -> None:
        self.table = WorkerTable("router-a", heartbeat_timeout_s=10**9)
        self.table.is_synchronised = True
        self.hops, self.texts = hops or FakeHops(), FakeTexts()
        self.now = 0.0  # the time in which placements lie untaken
        self.registry = CollectorRegistry()
        metrics = RouterMetrics(self.registry)
        self.policy = NotingPolicy(LOCAL_PREFILL_MAX_TOKENS, random.Random(0))
        self.index = PrefixIndex()
        known_tenants = Tenants(tenants)
        self.admission = Admission(
            self.table,
            policy or self.policy,
            admission or AdmissionConfig(),
            self.index,
            metrics,
            known_tenants,
        )
        self.table.listen(self.admission.wake)
        self.pauses: list[float] = []
        self.on_pause: Callable[[], None] = lambda: None
        config = attempts or AttemptConfig()
        self.media, self.sizes = FakeMedia(), KnownSizes()
        self.media_queue = self._media_queue()
        self.prompts = PromptMemory(admission, known_tenants)
        self.encode_waits = EncodeWaits(self.table, max_length=8, retry_delay_s=1.0)
        self.encode_queue = EncodeQueue(
            self.table, self.index, FairShare(known_tenants), random.Random(0), max_length=100, retry_delay_s=1.0
        )
        self.pipeline = Pipeline(
            RouterContext(
                router_id="router-a",
                table=self.table,
                texts=self.texts,
                intake=Intake(FairShare()),
                admission=self.admission,
                hops=self.hops,
                media=MediaTools(self.media, self._encode_tools(config), self.media_queue, MEDIA_CONFIG),
                tokenizing=TokenizeQueue(TokenizeConfig(), FairShare()),
                metrics=metrics,
                config=config,
                max_timeout_s=max_timeout_s,
                tenants=known_tenants,
                prompts=self.prompts,
                usage=usage,
                limits=RateLimits(known_tenants, clock=lambda: self.now),
                untaken=UntakenBudgets(
                    lambda pool: self.table.decode_capacity(pool, 0.0),
                    share=(admission or AdmissionConfig()).untaken_share,
                    max_waiting=(admission or AdmissionConfig()).max_queue_length,
                    timeout_s=TIMEOUT_S,
                    poll_interval_s=TIMEOUT_S,
                    clock=lambda: self.now,
                ),
                signer=Signer(OneKey(), self.table, ttl_s=20.0, clock=lambda: 0.0),
                sleep=self._sleep,
                tracer=tracer,
            )
        )
        for worker_id in worker_ids:
            self.join(worker_id, **record)

    def _media_queue(self) -> MediaQueue:
        bounds = MediaQueueConfig(
            max_bytes=MEDIA_CONFIG.max_held_bytes, max_length=1000, timeout_s=60.0, retry_delay_s=1.0
        )
        return MediaQueue(bounds, FairShare(), lambda pool: self.table.num_encode_tokens(pool, 0.0))

    @property
    def num_awaiting_encode(self) -> int:
        """Requests that wait for an encode worker, before or after their media are fetched."""
        return self.encode_waits.length + self.encode_queue.length

    def generate(
        self,
        start: AskedStart,
        *,
        resume: Resume | None = None,
        traceparent: str = "",
        relayed: Relayed | None = None,
    ) -> Request:
        return Request(self.pipeline, start, resume=resume, traceparent=traceparent, relayed=relayed)

    def join(self, worker_id: str, **changes: object) -> None:
        record = make_record(worker_id, **changes)
        self.table.put(record, 0.0)
        self.table.connected(record.key, make_load(record), 0.0)

    def break_worker(self, worker_id: str) -> None:
        for status in self.table.statuses(0.0):
            if status.record.worker_id == worker_id:
                self.table.broken(status.record.key, status.record.epoch)

    def assert_nothing_left(self) -> None:
        """Nothing is booked, queued, running or held any more."""
        assert self.hops.num_open == 0
        assert self.hops.held == self.hops.kept == set()
        assert self.admission.length == self.media_queue.length == self.num_awaiting_encode == 0
        assert self.media_queue.num_bytes == self.prompts.num_bytes == 0
        assert self.pipeline.num_running == 0
        for status in self.table.statuses(0.0):
            assert status.num_requests == 0
        for pool in self.table.pools(0.0):
            snapshot = self.table.snapshot(pool.key, 0.0)
            for candidate in (*snapshot.prefill, *snapshot.decode):
                assert (candidate.num_promised_blocks, candidate.num_queued_tokens) == (0, 0)

    def _encode_tools(self, config: AttemptConfig) -> EncodeTools:
        return EncodeTools(
            table=self.table,
            index=self.index,
            hops=self.hops,
            waits=self.encode_waits,
            queue=self.encode_queue,
            timeout_s=config.encode_timeout_s,
            max_attempts=config.max_attempts,
            sleep=self._sleep,
            sizes=self.sizes,
        )

    async def _sleep(self, duration_s: float) -> None:
        self.pauses.append(duration_s)
        self.on_pause()
        await asyncio.sleep(0)


@dataclass
class Collected:
    """A whole answer, checked for order while it came."""

    accepted: Accepted | None = None
    placements: dict[int, ChoicePlacement] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finished: dict[int, ChoiceFinished] = field(default_factory=dict)

    def add(self, part: AnswerPart) -> None:
        if isinstance(part, Accepted):
            assert self.accepted is None
            self.accepted = part
            self.placements = {placement.choice: placement for placement in part.choices}
            assert list(self.placements) == sorted(self.placements)
            return
        assert self.accepted is not None, "something came before accepted"
        if isinstance(part, Placed):
            assert self.placements.setdefault(part.placement.choice, part.placement) is part.placement, "told twice"
            return
        assert part.choice not in self.finished, "something came after the end"
        if isinstance(part, ChoiceFinished):
            self.finished[part.choice] = part
            return
        assert part.choice in self.placements, "a delta came before its choice's placement"
        token_ids = self.token_ids.setdefault(part.choice, [])
        assert part.token_offset == len(token_ids)
        token_ids.extend(part.token_ids)
        self.texts[part.choice] = self.texts.get(part.choice, "") + part.text
        self.logprobs.setdefault(part.choice, []).extend(part.logprobs)


class Request:
    """One request of a pipeline, and its answer."""

    def __init__(
        self,
        pipeline: Pipeline,
        start: AskedStart,
        *,
        resume: Resume | None,
        traceparent: str,
        relayed: Relayed | None,
    ) -> None:
        self._answer = Answer()
        self._run = pipeline.generate(start, self._answer, resume=resume, traceparent=traceparent, relayed=relayed)
        self.cancel = self._run.cancel
        self.abort = self._run.abort

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """The answer, as a handler reads it: who stops reading drops the request."""
        try:
            async for part in self._answer.parts():
                yield part
        finally:
            await self._run.drop()


async def collect(run: Request, into: Collected | None = None) -> Collected:
    """Read the whole answer."""
    collected = Collected() if into is None else into
    async with asyncio.timeout(TIMEOUT_S), aclosing(run.parts()) as parts:
        async for part in parts:
            collected.add(part)
    return collected
