"""The queue of calls that wait for embeddings: which to prepare next, and which the tower runs next. No threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeAlias

from quartet.engine.encoder import EncodeTimes
from quartet.media.items import MediaFile

if TYPE_CHECKING:  # torch takes seconds to import: the tower's thread does it
    import torch

    from quartet.engine.torch.vision import Pixels

#: A picture to encode, or rows of embeddings to write as they are.
Prepared: TypeAlias = "Pixels | torch.Tensor"


@dataclass(frozen=True)
class Passenger:
    """One item of a run of the tower, and the blocks that it goes to."""

    prepared: Prepared
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class RunTimes:
    """When a run began, by ``time.monotonic``, and how long it took.

    Attributes:
        unfit: positions in the batch of items that did not fit into the device's memory even alone.
    """

    began_at: float
    compute_s: float
    unfit: frozenset[int] = frozenset()


class Stage(Enum):
    """The state of a job."""

    QUEUED = auto()
    PREPARING = auto()  # in a worker thread, which writes to no block
    READY = auto()
    RUNNING = auto()  # in the tower's thread, which writes to the job's blocks


@dataclass(eq=False)
class Job:
    """One call.

    Attributes:
        queued_at: by ``time.monotonic``.
        done: the caller waits for it.
        prepared: set from READY on.
    """

    file: MediaFile = field(repr=False)
    block_ids: tuple[int, ...]
    queued_at: float
    done: asyncio.Future[EncodeTimes]
    stage: Stage = Stage.QUEUED
    prepared: Prepared | None = field(default=None, repr=False)


class JobQueue:
    """Jobs in the order of their arrival, until they are removed.

    Prepared pictures are large, so at most two runs' worth of them exist. A job overtakes only jobs that are not
    prepared yet.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._jobs: dict[Job, None] = {}

    def __len__(self) -> int:
        """Jobs of all stages."""
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        """Whether ``job`` was added and not removed."""
        return job in self._jobs

    def add(self, job: Job) -> None:
        """Put ``job`` last."""
        self._jobs[job] = None

    def remove(self, job: Job) -> None:
        """Remove ``job``; does nothing if it was removed already."""
        self._jobs.pop(job, None)

    def running(self) -> list[Job]:
        """The jobs in the tower's thread."""
        return [job for job in self._jobs if job.stage is Stage.RUNNING]

    def begin_preparing(self) -> list[Job]:
        """The jobs to prepare now; they become PREPARING."""
        num_ahead = sum(job.stage in (Stage.PREPARING, Stage.READY) for job in self._jobs)
        queued = [job for job in self._jobs if job.stage is Stage.QUEUED]
        chosen = queued[: max(0, 2 * self._max_batch_size - num_ahead)]
        for job in chosen:
            job.stage = Stage.PREPARING
        return chosen

    def begin_running(self) -> list[Job]:
        """The jobs of the tower's next run, which become RUNNING; none while it is busy or no job is ready."""
        if self.running():
            return []
        batch = [job for job in self._jobs if job.stage is Stage.READY][: self._max_batch_size]
        for job in batch:
            job.stage = Stage.RUNNING
        return batch

    def fail(self, make_error: Callable[[], Exception], *, spare_running: bool = False) -> int:
        """Remove all jobs and fail their callers; returns how many. Spare running jobs while the tower still writes."""
        failed = [job for job in self._jobs if not (spare_running and job.stage is Stage.RUNNING)]
        for job in failed:
            self.remove(job)
            job.done.set_exception(make_error())
        return len(failed)
