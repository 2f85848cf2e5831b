"""Requests whose media are not all here yet: nothing of them is in the engine, and all of them are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from quartet.engine.base import EngineStats
from quartet.errors import RequestCancelledError, ServingError, UnsupportedFieldError
from quartet.rpc.errors import public_error
from quartet.rpc.inner import InnerStart
from services.workers.media import MediaStage, MediaUse, ReadyMedia


@dataclass
class _Preparing:
    use: MediaUse
    rank: int
    task: asyncio.Task[ReadyMedia]
    is_cancelled: bool = False


class MediaGate:
    """Lets requests through to the engine once their media are here, and keeps those there until they have ended."""

    def __init__(
        self,
        stage: MediaStage | None,
        on_ready: Callable[[int, ReadyMedia], None],
        on_failed: Callable[[int, ServingError], None],
    ) -> None:
        """Exactly one of ``on_ready`` and ``on_failed`` follows each ``begin``; without a stage all are refused."""
        self._stage = stage
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._preparing: dict[int, _Preparing] = {}
        self._uses: dict[int, MediaUse] = {}

    @property
    def num_steps(self) -> int:
        """What moves here: grows with every item that comes to be here."""
        return 0 if self._stage is None else self._stage.num_steps

    def begin(self, id: int, start: InnerStart) -> None:
        """Have the media of request ``id`` here; ``end`` is to follow. Raises as ``MediaStage.open`` does."""
        if self._stage is None:
            raise UnsupportedFieldError("the engine of this worker takes no media", field="media")
        use = self._uses[id] = self._stage.open(start)
        task = asyncio.get_running_loop().create_task(use.prepare(), name="media")
        self._preparing[id] = _Preparing(use, start.generation.data_parallel_rank, task)
        task.add_done_callback(partial(self._prepared, id))

    def cancel(self, id: int) -> bool:
        """End a request that is here still; ``on_failed`` follows. False: it is not here."""
        preparing = self._preparing.get(id)
        if preparing is None:
            return False
        preparing.is_cancelled = True
        preparing.task.cancel()
        return True

    def end(self, id: int, *, has_ended_well: bool) -> None:
        """A request has ended, in the engine or here: its media may go."""
        use = self._uses.pop(id, None)
        if use is not None:
            use.release(has_ended_well=has_ended_well)

    def add_to(self, stats: Sequence[EngineStats]) -> Sequence[EngineStats]:
        """``stats`` of an engine with the requests here as such that wait."""
        if not self._preparing:
            return stats
        ranks = list(stats)
        for preparing in self._preparing.values():
            rank = preparing.rank if preparing.rank < len(ranks) else 0
            num_tokens = preparing.use.num_prompt_tokens
            ranks[rank] = replace(
                ranks[rank],
                num_waiting=ranks[rank].num_waiting + 1,
                num_queued_prefill_tokens=ranks[rank].num_queued_prefill_tokens + num_tokens,
                num_unbegun_prefill_tokens=ranks[rank].num_unbegun_prefill_tokens + num_tokens,
            )
        return ranks

    def _prepared(self, id: int, task: asyncio.Task[ReadyMedia]) -> None:
        preparing = self._preparing.pop(id)
        error = None if task.cancelled() else task.exception()
        if preparing.is_cancelled or task.cancelled():
            self._on_failed(id, RequestCancelledError("cancelled by the caller"))
        elif error is not None:
            self._on_failed(id, public_error(error))
        else:
            self._on_ready(id, task.result())
