"""Prefills for routers of other namespaces: a queue of its own, over the workers that only prefill.

The policy sees these workers as it sees others that compute the prompts that they decode: it weighs what is cached
there and what waits there, and the room that the prompt takes until its blocks are pulled.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import dataclass, replace

from quartet.api.convert.prefill import PrefilledFor, UnreadPrefill
from quartet.discovery.base import Rank, Role, WorkerKey
from quartet.engine.sampling import check_fields, check_output_fields
from quartet.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    PromptTooLongError,
    RequestTimeoutError,
    ServingError,
    UnsupportedFieldError,
    WorkerUnavailableError,
)
from quartet.kvcache.block_hash import NO_EXTRA_KEY, ExtraKey, sequence_hashes
from quartet.streams.messages import PrefillOutcome, RequestContext, WorkerStart
from quartet.telemetry.logging import FinishedRequest, log_request
from quartet.telemetry.tracing import ids_of
from router.admission import Admission, QueuedRequest
from router.attempts import Hop, HopFailedError, RetryHints
from router.book import Booking, Reservation, numbering
from router.config import AdmissionConfig
from router.context import RouterContext
from router.guides import LLGUIDANCE_FIELDS
from router.kv_index.index import PrefixIndex
from router.lost_workers import LostWorkers
from router.policy.base import Pending, Placement, Policy, Snapshot
from router.prompt_memory import HeldPrompt, prefill_bytes
from router.request_log import outcome_of
from router.request_trace import ChoiceTrace, PrefillTrace
from router.tenants import MAX_SALT_LENGTH
from router.workers import Pool, PoolKey, WorkerTable

logger = logging.getLogger(__name__)


class PrefillTable:
    """The prefill workers of a table, in the place of those that decode; see ``router.admission.RankTable``."""

    def __init__(self, table: WorkerTable) -> None:
        """Show ``table``."""
        self._table = table

    def snapshot(self, pool: PoolKey, now: float) -> Snapshot:
        """The ranks of ``pool`` that prefill."""
        whole = self._table.snapshot(pool, now)
        return replace(whole, prefill=(), decode=whole.prefill)

    def block_size(self, pool: PoolKey, now: float) -> int:
        """As of the table."""
        return self._table.block_size(pool, now)

    def has_ready_decode(self, pool: PoolKey, now: float) -> bool:
        """Whether any prefill worker of ``pool`` is ready."""
        return any(known.key == pool and known.num_ready_prefill for known in self._table.pools(now))

    def is_of(self, rank: Rank, pool: PoolKey) -> bool:
        """As of the table."""
        return self._table.is_of(rank, pool)

    def reserve(self, placement: Placement, pending: Pending, *, waited_s: float = 0.0) -> Reservation:
        """Reserve room at a prefill worker."""
        booking = self._table.reserve_prefill(placement, pending)
        return Reservation(placement, None, booking, waited_s=waited_s)


class PrefillFor:
    """Runs prefills whose decoding is in another namespace.

    Attributes:
        num_running: prefills between their arrival and their end. Any thread may read it.
    """

    def __init__(self, context: RouterContext, policy: Policy, config: AdmissionConfig, index: PrefixIndex) -> None:
        """They wait for the prefill workers of ``context.table`` in a queue with limits of its own.

        ``policy`` places these alone. Tenants pay for them in the share of the router's own requests.
        """
        self._context = context
        self._table = context.table
        ranks, share = PrefillTable(context.table), context.admission.share
        self._admission = Admission(ranks, policy, config, index, context.metrics, share=share)
        self._table.listen(self._admission.wake)
        self.num_running = 0

    @property
    def queue_usage(self) -> float:
        """The share of the queue that is taken, as ``Admission.usage``."""
        return self._admission.usage

    @property
    def num_queued(self) -> int:
        """Prefills that wait for room. Any thread may read it."""
        return self._admission.length

    async def run(self, asked: UnreadPrefill) -> PrefilledFor:
        """Prefill at the worker that the policy names, or, if that fails, at another.

        What refuses it comes first, then it counts among the prompts that wait, then it waits for its tenant's turn,
        and only then it is read. One line is logged at its end.

        Raises:
            ModelNotFoundError: no worker has the very same model.
            PromptTooLongError: no worker could hold it.
            InvalidRequestError, UnsupportedFieldError: it is malformed, or the model can't honour a field.
            QueueFullError: too many prompts wait, or no room came up in time.
            RequestTimeoutError: its time is over, which is at most what this router gives any request.
            ServingError: it can't be placed, or all attempts failed.
        """
        began = time.monotonic()
        line = FinishedRequest(
            request_id=asked.request_id,
            outcome="prefilled",
            path="prefill_for",
            tenant=asked.tenant,
            num_prompt_tokens=asked.num_tokens,
        )
        self.num_running += 1
        try:
            prefilled = await self._run_in_time(asked, self._pool(asked), line)
            line.model, line.prefill_worker = asked.model_name, prefilled.rank.worker_id
            line.num_cached_tokens = prefilled.outcome.num_cached_tokens
            line.prefill_queue_s = prefilled.outcome.queue_s
            return prefilled
        except BaseException as error:
            line.outcome = outcome_of(error)
            raise
        finally:
            self.num_running -= 1
            line.total_s = time.monotonic() - began
            log_request(logger, line)

    async def _run_in_time(self, asked: UnreadPrefill, pool: Pool, line: FinishedRequest) -> PrefilledFor:
        began = time.monotonic()
        most_s = self._context.max_timeout_s
        timeout_s = min(most_s if asked.timeout_s is None else asked.timeout_s, most_s)
        deadline, prompts, held = time.monotonic() + timeout_s, self._context.prompts, None
        trace: PrefillTrace | None = None
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                held = prompts.hold(asked.tenant, asked.priority, prefill_bytes(asked.num_tokens), timeout)
                del timeout  # it knows this task, whose error may know this frame
                await self._context.intake.enter(asked.tenant, asked.num_tokens)
                start = asked.read()
                trace = self._begin_trace(start.context, began)
                line.trace_id, line.span_id = ids_of(start.context.traceparent)
                await self._check(start, pool)
                choice = None if trace is None else trace.choice
                return await self._run(_Prefill(start, pool, deadline, held, choice))
        except TimeoutError as error:
            if held is not None and held.is_refused:
                raise prompts.full_error() from error
            raise RequestTimeoutError("the prompt was not prefilled in time") from error
        finally:
            if held is not None:
                held.leave()
            if trace is not None:
                trace.end(sys.exception())

    def _begin_trace(self, context: RequestContext, arrived_at: float) -> PrefillTrace | None:
        """Have it traced, if it is sampled; ``context`` names its span then."""
        if self._context.tracer is None:
            return None
        trace = self._context.tracer.begin("prefill for", context.traceparent, context.request_id)
        context.traceparent = trace.traceparent
        return PrefillTrace(trace, context, arrived_at) if trace.is_sampled else None

    def _pool(self, asked: UnreadPrefill) -> Pool:
        """The pool that prefills it; refuses what can be refused unread. Raises as ``run``."""
        key, now = PoolKey(asked.model_name, asked.model_fingerprint), time.monotonic()
        pool = next((one for one in self._table.pools(now) if one.key == key), None)
        if pool is None:
            raise ModelNotFoundError("no worker here has this model", field="model_fingerprint")
        if asked.num_tokens >= pool.max_model_len:
            message = (
                f"{asked.num_tokens} tokens leave no room for an answer: it and the prompt may have"
                f" {pool.max_model_len}"
            )
            raise PromptTooLongError(message, field="start.generation.prompt_token_ids")
        ranks = self._table.snapshot(key, now).prefill
        if ranks and all(rank.num_blocks(asked.num_tokens) > rank.num_total_blocks for rank in ranks):
            message = f"no rank that prefills has room for {asked.num_tokens} tokens"
            raise PromptTooLongError(message, field="start.generation.prompt_token_ids")
        if asked.num_salt_characters > MAX_SALT_LENGTH:
            message = f"cache_salt is longer than {MAX_SALT_LENGTH} characters"
            raise InvalidRequestError(message, field="start.generation.cache_salt")
        if asked.adapter and asked.adapter not in pool.adapters:
            raise UnsupportedFieldError("this model has no such adapter", field="start.generation.adapter")
        return pool

    async def _check(self, start: WorkerStart, pool: Pool) -> None:
        """Refuse what its model can't honour, before any worker gets it. Raises as ``run``."""
        generation, context = start.generation, self._context
        check_fields(generation.sampling, pool.sampling_fields, "this model")
        check_output_fields(generation.output, pool.sampling_fields, "this model")
        generation.output.check_prompt(len(generation.prompt_token_ids), has_media=False)
        guided = generation.sampling.guided
        if guided is not None and pool.sampling_fields >= LLGUIDANCE_FIELDS:
            await context.grammars.check(guided, await context.texts.model_text(pool.key), start.context.tenant)

    async def _run(self, prefill: _Prefill) -> PrefilledFor:
        context = self._context
        hints, lost = RetryHints(), LostWorkers(self._table, context.config.max_lost_workers)
        queued, num_begun = self._queued(prefill), 0
        while True:
            waiting = replace(queued, is_retry=num_begun > 0, avoid=hints.avoided)
            if prefill.trace is not None:
                prefill.trace.wait("queue", prefill.start.context.attempt, queued.num_tokens)
            reservation = await self._admission.admit(waiting)
            if prefill.trace is not None:
                prefill.trace.prefill_placed(reservation.placement)
            prefill.held.leave()  # what was placed is bounded by the workers' room
            num_begun += 1
            rank = reservation.placement.decode
            try:
                return PrefilledFor(outcome=await self._prefill(prefill, rank, reservation.decode), rank=rank)
            except ServingError as error:
                if prefill.trace is not None:
                    prefill.trace.failed(error)
                pause_s = hints.note(HopFailedError(Hop.PREFILL, error), reservation.placement)
                if hints.num_failures >= context.config.max_attempts:
                    raise
                lost.note(error, WorkerKey(Role.PREFILL, rank.worker_id), reservation.decode.epoch)
            finally:
                reservation.release()
                self._admission.wake()
            await context.sleep(pause_s)

    def _queued(self, prefill: _Prefill) -> QueuedRequest:
        """What waits for room; each attempt waits with a copy, so the tenant pays once."""
        generation, context, pool = prefill.start.generation, prefill.start.context, prefill.pool
        num_tokens = len(generation.prompt_token_ids) + len(generation.generated_token_ids)
        standing = self._admission.standing(
            pool.key,
            priority=context.priority,
            tenant=context.tenant,
            num_tokens=num_tokens,
            deadline=prefill.deadline,
        )
        return QueuedRequest(
            standing=standing,
            num_tokens=num_tokens,
            num_reserved_tokens=num_tokens,
            num_most_tokens=num_tokens,
            adapter=generation.adapter,
            sampling_fields=generation.sampling.changed_fields | generation.output.fields,
            arrived_at=time.monotonic(),
            session_key=context.session_key,
            held=prefill.held,
            sequence_hashes=_sequence_hashes(prefill.start, pool),
        )

    async def _prefill(self, prefill: _Prefill, rank: Rank, booking: Booking) -> PrefillOutcome:
        start, config, trace = prefill.start, self._context.config, prefill.trace
        if trace is not None:
            trace.hop("prefill hop", rank.worker_id)
        most = self._context.tenants.config(start.context.tenant).max_priority
        context = replace(
            start.context,
            timeout_s=max(prefill.deadline - time.monotonic(), 0.0),
            priority=min(start.context.priority, most),
            router_id=numbering(self._context.router_id, booking.epoch),
            router_request_number=booking.send(),
            traceparent=start.context.traceparent if trace is None else trace.traceparent,
            sent_at_unix_ns=start.context.sent_at_unix_ns if trace is None else trace.sent_at_unix_ns,
        )
        generation = replace(start.generation, data_parallel_rank=rank.data_parallel_rank)
        try:
            async with asyncio.timeout(config.prefill_timeout_s):
                return await self._context.hops.prefill(
                    rank, replace(start, context=context, generation=generation)
                ).outcome()
        except TimeoutError as error:
            raise WorkerUnavailableError(f"worker {rank.worker_id} did not prefill in time") from error


@dataclass(frozen=True)
class _Prefill:
    """One prefill that was read: for the workers of ``pool``, until ``deadline``; ``held`` counts its prompt.

    ``trace`` makes its spans; ``None``: it makes none.
    """

    start: WorkerStart
    pool: Pool
    deadline: float
    held: HeldPrompt
    trace: ChoiceTrace | None = None


def _sequence_hashes(start: WorkerStart, pool: Pool) -> tuple[int, ...]:
    """Of its full blocks, as workers compute them; empty as ``RouterRequest.sequence_hashes``."""
    generation = start.generation
    if not pool.block_size or generation.output.num_prompt_logprobs is not None:
        return ()
    token_ids = generation.prompt_token_ids
    if generation.generated_token_ids:
        token_ids = [*token_ids, *generation.generated_token_ids]
    salt, adapter = generation.cache_salt, generation.adapter
    extra_key = ExtraKey(adapter=adapter, cache_salt=salt) if adapter or salt else NO_EXTRA_KEY
    return tuple(sequence_hashes(token_ids, pool.block_size, extra_key))
