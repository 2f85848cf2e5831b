"""The queue of long texts, which threads tokenize: so much may wait, and each tenant has a share of the threads.

Without it a tenant that sends a few texts of megabytes would keep all threads busy, long after it has gone.
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
from router.config import TokenizeConfig
from router.fair_queue import FairShare

ResultT = TypeVar("ResultT")

# A text counts as so many characters at least of those that may wait: a line of 4096 texts is as much as can be looked
# through in a millisecond.
_MIN_CHARACTERS = 16_384

#: Tells a thread whether anybody still waits for what it does.
IsWanted: TypeAlias = Callable[[], bool]


class TokenizeQueue:
    """Runs work on texts in threads, in an order that is fair to tenants. Lives on the event loop."""

    def __init__(self, config: TokenizeConfig, share: FairShare) -> None:
        """``share`` orders the texts of tenants, by characters; it belongs to this queue alone."""
        self._config = config
        self._share = share
        # Others must not wait for one tenant's texts.
        self._max_of_tenant = max(config.num_threads - 1, 1)
        self._threads = ThreadPoolExecutor(config.num_threads, thread_name_prefix="tokenize")
        self._waiting: dict[str, deque[_Job]] = {}  # by tenant, in order of arrival
        self._num_waiting_characters = 0
        self._running: Counter[str] = Counter()  # jobs by tenant

    @property
    def length(self) -> int:
        """Texts that wait for a thread."""
        return sum(map(len, self._waiting.values()))

    async def run(self, tenant: str, num_characters: int, work: Callable[[IsWanted], ResultT]) -> ResultT:
        """Run ``work`` in a thread when it is the tenant's turn.

        If the caller is cancelled, work that has not begun never runs, and work that runs is told so.

        Raises:
            QueueFullError: too much text waits, and no tenant has more of it than this one.
        """
        job = _Job(tenant=tenant, num_characters=num_characters, work=work)
        if tenant not in self._waiting:
            self._waiting[tenant] = deque()
            self._share.waits(tenant, num_characters)
        self._waiting[tenant].append(job)
        self._num_waiting_characters += job.num_counted
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
            self._share.serve(job.tenant, job.num_characters)
            self._leave(job)
            self._running[job.tenant] += 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.run)
            running.add_done_callback(partial(self._end, job))

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
        """While too much waits, refuse the last text of the tenant that has most of it here."""
        while self._num_waiting_characters > self._config.max_queued_characters:
            last = max(self._waiting.values(), key=_num_counted)[-1]
            self._leave(last)
            if not last.done.done():  # else its caller was just cancelled
                error = QueueFullError("too much text waits to be tokenized", retry_delay_s=self._config.retry_delay_s)
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
        self._num_waiting_characters -= job.num_counted


@dataclass(eq=False, kw_only=True)
class _Job:
    tenant: str
    num_characters: int
    work: Callable[[IsWanted], Any]
    is_wanted: bool = True
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def num_counted(self) -> int:
        return max(self.num_characters, _MIN_CHARACTERS)

    def run(self) -> Any:
        return self.work(lambda: self.is_wanted)


def _num_counted(jobs: Iterable[_Job]) -> int:
    return sum(job.num_counted for job in jobs)
