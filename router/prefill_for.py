"""Prefills for routers of other namespaces: a queue of its own, over the workers that only prefill.

The policy sees these workers as it sees others that compute the prompts that they decode: it weighs what is cached
there and what waits there, and the room that the prompt takes until its blocks are pulled.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from quartet.api.convert.prefill import AskedPrefill, PrefilledFor
from quartet.discovery.base import Rank
from quartet.engine.sampling import check_fields, check_output_fields
from quartet.errors import (
    ModelNotFoundError,
    PromptTooLongError,
    RequestTimeoutError,
    ServingError,
    WorkerUnavailableError,
)
from quartet.kvcache.block_hash import NO_EXTRA_KEY, ExtraKey, sequence_hashes
from quartet.streams.client import FINAL
from quartet.streams.messages import PrefillOutcome, WorkerStart
from router.admission import Admission, QueuedRequest
from router.book import Booking, Reservation, numbering
from router.context import RouterContext
from router.policy.base import Pending, Placement, Snapshot
from router.workers import Pool, PoolKey, WorkerTable


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
    """Runs prefills whose decoding is in another namespace."""

    def __init__(self, context: RouterContext, admission: Admission, table: WorkerTable) -> None:
        """``admission`` queues them for the prefill workers of ``table``."""
        self._context = context
        self._admission = admission
        self._table = table

    async def run(self, asked: AskedPrefill) -> PrefilledFor:
        """Prefill at the worker that the policy names, or, if that fails, at another.

        Raises:
            ModelNotFoundError: no worker has the very same model.
            PromptTooLongError: no worker could hold it.
            RequestTimeoutError: its time is over, which is at most what this router gives any request.
            ServingError: it can't be placed, or all attempts failed.
        """
        start, key = asked.start, PoolKey(asked.model_name, asked.model_fingerprint)
        pool = next((one for one in self._table.pools(time.monotonic()) if one.key == key), None)
        if pool is None:
            raise ModelNotFoundError("no worker here has this model", field="model_fingerprint")
        generation = start.generation
        check_fields(generation.sampling, pool.sampling_fields, "this model")
        check_output_fields(generation.output, pool.sampling_fields, "this model")
        num_tokens = len(generation.prompt_token_ids) + len(generation.generated_token_ids)
        if num_tokens >= pool.max_model_len:
            message = (
                f"{num_tokens} tokens leave no room for an answer: it and the prompt may have {pool.max_model_len}"
            )
            raise PromptTooLongError(message, field="start.generation.prompt_token_ids")
        most_s = self._context.max_timeout_s
        timeout_s = min(start.context.timeout_s or most_s, most_s)
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._context.intake.enter(start.context.tenant, num_tokens)
                return await self._run(start, pool, deadline)
        except TimeoutError as error:
            raise RequestTimeoutError("the prompt was not prefilled in time") from error

    async def _run(self, start: WorkerStart, pool: Pool, deadline: float) -> PrefilledFor:
        avoid = set[str]()
        for number in range(self._context.config.max_attempts):
            reservation = await self._admission.admit(self._queued(start, pool, deadline, avoid, is_retry=number > 0))
            rank = reservation.placement.decode
            try:
                return PrefilledFor(outcome=await self._prefill(start, rank, reservation.decode), rank=rank)
            except ServingError as error:
                if isinstance(error, FINAL):
                    raise
                failure = error
                avoid.add(rank.worker_id)
            finally:
                reservation.release()
                self._admission.wake()
        raise failure

    def _queued(
        self, start: WorkerStart, pool: Pool, deadline: float, avoid: set[str], *, is_retry: bool
    ) -> QueuedRequest:
        generation, context = start.generation, start.context
        token_ids = [*generation.prompt_token_ids, *generation.generated_token_ids]
        num_tokens, now = len(token_ids), time.monotonic()
        salt, adapter = generation.cache_salt, generation.adapter
        extra_key = ExtraKey(adapter=adapter, cache_salt=salt) if adapter or salt else NO_EXTRA_KEY
        standing = self._admission.standing(
            pool.key,
            priority=context.priority,
            tenant=context.tenant,
            num_tokens=num_tokens,
            deadline=deadline,
        )
        return QueuedRequest(
            standing=standing,
            is_retry=is_retry,
            num_tokens=num_tokens,
            num_reserved_tokens=num_tokens,
            num_most_tokens=num_tokens,
            adapter=adapter,
            avoid=frozenset(avoid),
            arrived_at=now,
            session_key=context.session_key,
            sequence_hashes=sequence_hashes(token_ids, pool.block_size, extra_key, ()) if pool.block_size else (),
        )

    async def _prefill(self, start: WorkerStart, rank: Rank, booking: Booking) -> PrefillOutcome:
        context = replace(
            start.context,
            router_id=numbering(self._context.router_id, booking.epoch),
            router_request_number=booking.send(),
        )
        generation = replace(start.generation, data_parallel_rank=rank.data_parallel_rank)
        try:
            async with asyncio.timeout(self._context.config.prefill_timeout_s):
                return await self._context.hops.prefill(
                    rank, replace(start, context=context, generation=generation)
                ).outcome()
        except TimeoutError as error:
            raise WorkerUnavailableError(f"worker {rank.worker_id} did not prefill in time") from error
