"""The book of calls that wait for embeddings: who is prepared next, and who rides the tower's next run. No threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from quartet.engine.encoder import EncodeTimes
from quartet.media.items import MediaFile

if TYPE_CHECKING:  # it imports torch, which takes seconds: only the tower's thread may
    from quartet.engine.torch.encoder_tower import Prepared


@dataclass(frozen=True)
class Passenger:
    """What a run of the tower puts into those blocks."""

    prepared: Prepared
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class RunTimes:
    """When a run began, by ``time.monotonic``, and how long it took.

    Attributes:
        unfit: positions in the batch of items that even alone did not fit into the device's memory.
    """

    began_at: float
    compute_s: float
    unfit: frozenset[int] = frozenset()


class Stage(Enum):
    """How far a job is."""

    WAITING = auto()
    PREPARING = auto()  # in a worker thread, which writes to no block
    READY = auto()
    RUNNING = auto()  # in the tower's thread, which writes to the job's blocks


@dataclass(eq=False)
class Job:
    """One call.

    Attributes:
        queued_at: by ``time.monotonic``.
        done: what the caller waits for.
        prepared: from READY on.
    """

    file: MediaFile = field(repr=False)
    block_ids: tuple[int, ...]
    queued_at: float
    done: asyncio.Future[EncodeTimes]
    stage: Stage = Stage.WAITING
    prepared: Prepared | None = field(default=None, repr=False)


class JobQueue:
    """Jobs in the order in which they came, until they are removed.

    Prepared pictures are large, so no more are made than two runs can take; a job overtakes only those that are not
    prepared yet.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._jobs: dict[Job, None] = {}

    def __len__(self) -> int:
        """Jobs of all stages."""
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        """Whether ``job`` was added, and not removed."""
        return job in self._jobs

    def add(self, job: Job) -> None:
        """Put ``job`` last."""
        self._jobs[job] = None

    def remove(self, job: Job) -> None:
        """Forget ``job``, if it is still here."""
        self._jobs.pop(job, None)

    def running(self) -> list[Job]:
        """The jobs in the tower's thread."""
        return [job for job in self._jobs if job.stage is Stage.RUNNING]

    def begin_preparing(self) -> list[Job]:
        """The jobs that are to be prepared now; they are PREPARING from here on."""
        num_ahead = sum(job.stage in (Stage.PREPARING, Stage.READY) for job in self._jobs)
        waiting = [job for job in self._jobs if job.stage is Stage.WAITING]
        chosen = waiting[: max(0, 2 * self._max_batch_size - num_ahead)]
        for job in chosen:
            job.stage = Stage.PREPARING
        return chosen

    def begin_running(self) -> list[Job]:
        """The jobs of the tower's next run, RUNNING from here on; none while it is busy or nothing is ready."""
        if self.running():
            return []
        batch = [job for job in self._jobs if job.stage is Stage.READY][: self._max_batch_size]
        for job in batch:
            job.stage = Stage.RUNNING
        return batch

    def fail(self, make_error: Callable[[], Exception], *, spare_running: bool = False) -> int:
        """Remove all jobs and tell their callers; how many. Those in the tower's thread only once it writes no more."""
        failed = [job for job in self._jobs if not (spare_running and job.stage is Stage.RUNNING)]
        for job in failed:
            self.remove(job)
            job.done.set_exception(make_error())
        return len(failed)
