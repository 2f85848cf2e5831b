"""Attention-data-parallel ranks behind one engine: each has its own scheduler, prefix cache and thread.

The ranks step independently of one another, as those of ai-dynamo/dynamo's mock engine do. An engine whose ranks
exchange activations in every step (TensorRT-LLM's attention DP) steps them together; it is no ``StepEngine``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from quartet.engine.base import EngineCapabilities, EngineRequest, EngineStats, Failed, StepOutput, Turn
from quartet.engine.life_cycle import OutputQueue
from quartet.engine.step_engine import StepEngine
from quartet.errors import EngineError, UnsupportedFieldError
from quartet.events.kv import Cleared, KvEvent, RankEvents, Removed, Stored, StoredBlocks, Tier
from quartet.kvcache.block_pool import parents_first
from quartet.kvcache.layout import HandOff, PieceLayout
from quartet.transfer.base import BlockMemory, Claim, FetchResult, PieceCopy, PieceRun, Puller, never

logger = logging.getLogger(__name__)


class DataParallelEngine:
    """An ``Engine`` of several ranks, each a ``StepEngine`` that knows only itself, as rank 0.

    The ranks' blocks are in one memory, one rank after the other, and callers see them numbered through.
    """

    def __init__(self, num_ranks: int, make_rank: Callable[[int, Puller], StepEngine], puller: Puller) -> None:
        """Nothing is loaded before ``start``.

        Args:
            num_ranks: at least one.
            make_rank: makes the engine of a rank, which pulls by the given puller. All runners have the same
                ``memory``, with the blocks of all ranks.
            puller: fetches hand-offs into that memory. The caller closes it, after the engine.
        """
        self._puller = puller
        self._rank_pullers = [_RankPuller(puller) for _ in range(num_ranks)]
        self._ranks = [make_rank(rank, rank_puller) for rank, rank_puller in enumerate(self._rank_pullers)]
        self._snapshots = RankSnapshots(num_ranks)
        self._outputs = OutputQueue()
        self._readers: asyncio.Task[None] | None = None
        self._loss: EngineError | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        """What it can do; valid after ``start``."""
        return replace(self._ranks[0].capabilities, data_parallel_size=len(self._ranks))

    @property
    def memory(self) -> BlockMemory | None:
        """The block pools of all ranks as bytes, for transfers out."""
        return self._ranks[0].memory

    @property
    def embeddings(self) -> None:
        """None: its ranks take text only."""
        return None

    @property
    def is_alive(self) -> bool:
        """Whether all ranks were started and step on."""
        return all(rank.is_alive for rank in self._ranks)

    async def start(self) -> None:
        """Load, warm up and begin stepping. Raises ``ServingError`` naming what is wrong; ``close`` even then."""
        for number, rank in enumerate(self._ranks):
            await rank.start()
            self._rank_pullers[number].first_block = self._first_block(number)
        capabilities, memory = self.capabilities, self.memory
        assert memory is not None, "transfers reach the ranks' pool"
        assert memory.num_blocks == len(self._ranks) * capabilities.num_blocks, "it has the blocks of all ranks"
        assert capabilities.layout is not None, "the ranks page by themselves"
        self._puller.attach(memory, capabilities.layout, lambda: bool(self.turns()))
        self._readers = asyncio.get_running_loop().create_task(self._read_all())

    def submit(self, request: EngineRequest) -> None:
        """Queue ``request`` at its rank; every outcome, refusal included, arrives in ``outputs``.

        Raises:
            EngineError, WorkerUnavailableError: a rank died or was closed; there are no more outputs.
        """
        if self._loss is not None:
            raise EngineError(self._loss.message)
        generation = request.generation
        if generation.data_parallel_rank >= len(self._ranks):
            message = f"this engine has data-parallel ranks 0 to {len(self._ranks) - 1}"
            error = UnsupportedFieldError(message, field="data_parallel_rank")
            self._outputs.put(StepOutput(failed=(Failed(request.id, error),)))
            return
        rank = self._ranks[generation.data_parallel_rank]
        rank.submit(replace(request, generation=replace(generation, data_parallel_rank=0)))

    def cancel(self, id: int) -> None:
        """End a request at the next step; its ``failed`` (or how it had already ended) still arrives."""
        for rank in self._ranks:
            rank.cancel(id)

    def release(self, id: int) -> None:
        """Free the blocks that a completed prefill holds. Unknown ids are ignored."""
        for rank in self._ranks:
            rank.release(id)

    def request_kv_snapshot(self) -> None:
        """Have one of the next outputs carry a ``kv_snapshot``; one answers all requests before it."""
        self._snapshots.want()
        for rank in self._ranks:
            rank.request_kv_snapshot()

    def outputs(self) -> AsyncIterator[StepOutput]:
        """The steps' outputs, in order, for one consumer. Ends after ``close``; raises ``EngineError`` when it died."""
        return self._outputs.read()

    def stats(self) -> Sequence[EngineStats]:
        """The latest steps' statistics, by rank."""
        return [stats for rank in self._ranks for stats in rank.stats()]

    def turns(self) -> Sequence[Turn]:
        """The turns of the ranks' threads, but for those that wait for work."""
        return [replace(turn, thread=number) for number, rank in enumerate(self._ranks) for turn in rank.turns()]

    async def close(self) -> None:
        """Fail running requests, stop transfers and steps, free everything. Bounded in time; may be called twice."""
        await asyncio.gather(*(rank.close() for rank in self._ranks))
        if self._readers is not None:
            await self._readers
        self._outputs.end()

    def _first_block(self, number: int) -> int:
        return number * self._ranks[number].capabilities.num_blocks

    async def _read_all(self) -> None:
        try:
            await asyncio.gather(*(self._read(number) for number in range(len(self._ranks))))
        except Exception as error:  # the outputs end here, and with them the engine
            logger.exception("the outputs of the ranks can't be read")
            self._loss = EngineError(f"the engine is lost: {error!r}")
        self._outputs.end(self._loss)

    async def _read(self, number: int) -> None:
        try:
            async for output in self._ranks[number].outputs():
                self._outputs.put(self._whole(number, output))
        except EngineError as error:
            if self._loss is None:
                self._loss = error
                await self._close_others(number)

    async def _close_others(self, number: int) -> None:
        """A rank is lost, and with it the engine: fail the requests of the other ranks."""
        await asyncio.gather(*(rank.close() for other, rank in enumerate(self._ranks) if other != number))

    def _whole(self, number: int, output: StepOutput) -> StepOutput:
        """A rank's output as the engine's."""
        output = _renumbered(output, number, self._first_block(number)) if number else output
        snapshot = self._snapshots.take(output.kv_events, output.kv_snapshot)
        return output if output.kv_snapshot is None else replace(output, kv_snapshot=snapshot)


def _renumbered(output: StepOutput, rank: int, first_block: int) -> StepOutput:
    prefilled = [
        replace(prefilled, block_ids=tuple(first_block + block_id for block_id in prefilled.block_ids))
        for prefilled in output.prefilled
    ]
    kv_events = [RankEvents(rank, changed.events) for changed in output.kv_events]
    snapshot = output.kv_snapshot
    if snapshot is not None:
        snapshot = [StoredBlocks(rank, blocks.parent_hashes, blocks.tier) for blocks in snapshot]
    return replace(output, prefilled=prefilled, kv_events=kv_events, kv_snapshot=snapshot)


class _RankPuller:
    """A ``Puller`` for one rank, whose blocks begin at ``first_block`` of the memory that all ranks share."""

    def __init__(self, puller: Puller) -> None:
        self.first_block = 0
        self._puller = puller

    def attach(self, memory: BlockMemory, layout: PieceLayout, is_busy: Callable[[], bool] = never) -> None:
        """Does nothing: the engine attaches the ranks' memory once."""

    def claim(self, hand_off: HandOff) -> Claim:
        return _RankClaim(self._puller.claim(hand_off), self.first_block)

    async def close(self) -> None:
        """Does nothing: the engine's owner closes the puller once."""


class _RankClaim:
    def __init__(self, claim: Claim, first_block: int) -> None:
        self._claim = claim
        self._first_block = first_block

    async def fetch(self, copies: Sequence[PieceCopy]) -> FetchResult:
        if isinstance(copies, PieceRun):
            return await self._claim.fetch(copies.moved(self._first_block))
        return await self._claim.fetch([PieceCopy(copy.piece, self._first_block + copy.block_id) for copy in copies])

    async def release(self) -> None:
        await self._claim.release()


class RankSnapshots:
    """Merges the ranks' snapshots into one.

    Ranks answer one after the other. Until the last one has, events keep the earlier parts up to date, so that all
    parts are of one moment.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._is_wanted = False
        self._parts: dict[int, _Tables] = {}

    def want(self) -> None:
        """A snapshot was requested from every rank."""
        self._is_wanted = True

    def take(
        self, kv_events: Iterable[RankEvents], kv_snapshot: Sequence[StoredBlocks] | None
    ) -> Sequence[StoredBlocks] | None:
        """Take one output, events first; each rank's outputs come in order.

        Returns:
            All ranks' blocks, with this output's events applied, if it completes the snapshot; else ``None``.
        """
        for changed in kv_events:
            if changed.data_parallel_rank in self._parts:
                _apply(self._parts[changed.data_parallel_rank], changed.events)
        if kv_snapshot is None or not self._is_wanted:
            return None
        self._parts |= {blocks.data_parallel_rank: {} for blocks in kv_snapshot}
        for blocks in kv_snapshot:
            self._parts[blocks.data_parallel_rank][blocks.tier] = dict(blocks.parent_hashes)
        if len(self._parts) < self._num_ranks:
            return None
        self._is_wanted, parts, self._parts = False, self._parts, {}
        return [
            StoredBlocks(rank, parents_first(table), tier)
            for rank in sorted(parts)
            for tier, table in sorted(parts[rank].items())
        ]


_Tables: TypeAlias = dict[Tier, dict[int, int | None]]


def _apply(tables: _Tables, events: Iterable[KvEvent]) -> None:
    for event in events:
        match event:
            case Stored(parent, sequence_hashes, tier):
                table = tables.setdefault(tier, {})
                for sequence_hash in sequence_hashes:
                    table[sequence_hash] = parent
                    parent = sequence_hash
            case Removed(sequence_hashes, tier):
                for sequence_hash in sequence_hashes:
                    tables.get(tier, {}).pop(sequence_hash, None)
            case Cleared():
                tables.clear()
                tables[Tier.DEVICE] = {}
