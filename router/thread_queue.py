"""Work that threads do for requests: each tenant has a share of the threads, and what is no longer wanted is skipped.

Without it a tenant that sends a few texts or pictures of megabytes would keep all threads busy, long after it has gone.
The router has two such queues: long texts wait to be tokenized in one, and files to be read and checked in the other.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

from quartet.errors import QueueFullError
from quartet.supervision import vital
from router.config import TokenizeConfig
from router.fair_queue import FairShare

ResultT = TypeVar("ResultT")

# A job counts as so much at least: of its tenant's share, because a thread takes its time for a small one too, and of
# what may wait, because a line of 4096 jobs is as much as can be looked through in a millisecond.
_MIN_SIZE = 16_384

#: Tells a thread whether a caller still waits for what it does.
IsWanted: TypeAlias = Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class ThreadQueueConfig:
    """Bounds of a queue for threads.

    Attributes:
        name: of the threads.
        num_threads: threads; one tenant's work uses all but one of them.
        max_waiting_size: of all work that waits for a thread, each piece counting as 16,384 at least. Of more, the last
            piece of the tenant that has most of it is refused. ``None``: the callers of ``run`` bound it.
        refusal: the message of that refusal.
        retry_delay_s: the delay that refused clients are asked to wait.
    """

    name: str
    num_threads: int
    max_waiting_size: int | None = None
    refusal: str = "too much work waits"
    retry_delay_s: float = 1.0


class ThreadQueue:
    """Runs work in threads, in an order that is fair to tenants. Lives on the event loop."""

    def __init__(self, config: ThreadQueueConfig, share: FairShare) -> None:
        """``share`` orders the work of tenants, by its size; it belongs to this queue alone."""
        self._config = config
        self._share = share
        # Others must not wait for one tenant's work.
        self._max_of_tenant = max(config.num_threads - 1, 1)
        self._threads = ThreadPoolExecutor(config.num_threads, thread_name_prefix=config.name)
        self._waiting: dict[str, deque[_Job]] = {}  # by tenant, in order of arrival
        self._waiting_size = 0
        self._running: Counter[str] = Counter()  # jobs by tenant

    @property
    def length(self) -> int:
        """Pieces of work that wait for a thread."""
        return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, size: int, work: Callable[[IsWanted], ResultT]) -> ResultT:
        """Run ``work`` in a thread when it is the tenant's turn.

        If the caller is cancelled, work that has not begun never runs, and work that runs is told so.

        Args:
            tenant: the tenant that the work is accounted to.
            size: of the text in characters or of the file in bytes: the time that the work takes grows with it.
            work: gets a function that tells whether a caller still waits for it.

        Raises:
            QueueFullError: too much work waits, and no tenant has more of it than this one.
        """
        job = _Job(tenant=tenant, size=size, work=work)
        if tenant not in self._waiting:
            self._waiting[tenant] = deque()
            self._share.waits(tenant, job.counted_size)
        self._waiting[tenant].append(job)
        self._waiting_size += job.counted_size
        self._poll()
        self._refuse_excess()
        try:
            result: ResultT = await job.done
        finally:
            job.is_wanted = False
            self._leave(job)
        return result

    def close(self) -> None:
        """Wait for the threads; no ``run`` may be waited for any more."""
        self._threads.shutdown()

    def _poll(self) -> None:
        """Give free threads to the tenants whose turn it is."""
        while self._running.total() < self._config.num_threads:
            tenants = [tenant for tenant in self._waiting if self._running[tenant] < self._max_of_tenant]
            if not tenants:
                return
            job = self._waiting[min(tenants, key=self._share.start)][0]
            self._share.serve(job.tenant, job.counted_size)
            self._leave(job)
            self._running[job.tenant] += 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.run)
            running.add_done_callback(partial(self._end, job))

    @vital
    def _end(self, job: _Job, running: asyncio.Future[Any]) -> None:
        self._running[job.tenant] -= 1
        if not self._running[job.tenant]:
            del self._running[job.tenant]
        error = None if running.cancelled() else running.exception()
        if not job.done.done():  # otherwise its caller has gone
            if error is not None:
                job.done.set_exception(error)
            elif running.cancelled():
                job.done.cancel()
            else:
                job.done.set_result(running.result())
        self._poll()

    def _refuse_excess(self) -> None:
        """While too much waits, refuse the last job of the tenant that has most of it here."""
        max_size = self._config.max_waiting_size
        while max_size is not None and self._waiting_size > max_size:
            last = max(self._waiting.values(), key=_counted_size)[-1]
            self._leave(last)
            if not last.done.done():  # else its caller was just cancelled
                error = QueueFullError(self._config.refusal, retry_delay_s=self._config.retry_delay_s)
                last.done.set_exception(error)

    def _leave(self, job: _Job) -> None:
        """It waits no more."""
        jobs = self._waiting.get(job.tenant, ())
        if job not in jobs:
            return
        self._waiting[job.tenant].remove(job)
        if not self._waiting[job.tenant]:
            del self._waiting[job.tenant]
            self._share.waits_no_more(job.tenant)
        self._waiting_size -= job.counted_size


class TokenizeQueue(ThreadQueue):
    """The queue of long texts, which threads tokenize. Their size is in characters."""

    def __init__(self, config: TokenizeConfig, share: FairShare) -> None:
        """``share`` orders the texts of tenants, by characters; it belongs to this queue alone."""
        bounds = ThreadQueueConfig(
            name="tokenize",
            num_threads=config.num_threads,
            max_waiting_size=config.max_queued_characters,
            refusal="too much text waits to be tokenized",
            retry_delay_s=config.retry_delay_s,
        )
        super().__init__(bounds, share)


@dataclass(eq=False, kw_only=True)
class _Job:
    tenant: str
    size: int
    work: Callable[[IsWanted], Any]
    is_wanted: bool = True
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def counted_size(self) -> int:
        return max(self.size, _MIN_SIZE)

    def run(self) -> Any:
        return self.work(lambda: self.is_wanted)


def _counted_size(jobs: Iterable[_Job]) -> int:
    return sum(job.counted_size for job in jobs)
