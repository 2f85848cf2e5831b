"""A ``MediaEncoder`` on transformers: vision tower and projector of LLaVA-family checkpoints.

Worker threads decode and preprocess files. When the tower becomes free, it takes the items that are ready. The jobs
live on the event loop; only the tower's thread writes to the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from quartet.engine.encoder import EncoderCapabilities, EncoderStats, EncodeTimes, ItemSize
from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.late_import import importing
from quartet.engine.life_cycle import call_on_loop
from quartet.engine.media.rows_encoder import RowsParts
from quartet.engine.media_config import make_embedding_memory, read_media_config, shared_item_tokens
from quartet.engine.torch.config import TorchEncoderConfig
from quartet.engine.torch.encoder_jobs import Job, JobQueue, Passenger, Prepared, RunTimes, Stage
from quartet.errors import EngineError, InvalidRequestError, MediaTooLargeError, ServingError, WorkerUnavailableError
from quartet.kvcache.layout import EmbeddingLayout
from quartet.media.items import MediaFile, MediaKind
from quartet.transfer.base import EmbeddingMemory
from quartet.transfer.cuda.driver import CudaError

if TYPE_CHECKING:
    from quartet.engine.torch.encoder_tower import Tower

logger = logging.getLogger(__name__)

_NUM_READERS = 2  # threads that decode; each may hold a picture of ``max_pixels`` several times

_CLOSE_TIMEOUT_S = 30.0  # for the run that the tower is in

#: Loads the tower, on the tower's thread.
_LoadTower: TypeAlias = "Callable[[TorchEncoderConfig, EmbeddingMemory | None], Tower]"


def _load_tower(config: TorchEncoderConfig, embeddings: EmbeddingMemory | None) -> Tower:
    with importing("torch"):
        from quartet.engine.torch.encoder_tower import load_tower

    return load_tower(config, embeddings)


class TorchEncoder:
    """See ``MediaEncoder``. Loads nothing before ``start``."""

    def __init__(
        self,
        config: TorchEncoderConfig,
        embeddings: EmbeddingMemory | None = None,
        load: _LoadTower = _load_tower,
    ) -> None:
        """Write to ``embeddings``; ``None``: to a pool of its own."""
        self._config = config
        self._embeddings = embeddings
        self._load = load
        self._jobs = JobQueue(config.max_batch_size)
        self._stats = EncoderStats()
        self._tower: Tower | None = None
        self._lost: ServingError | None = None
        self._is_closed = False
        self._thread: TowerThread | None = None
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="quartet-media")
        self._has_settled = asyncio.Event()  # it is ready or lost
        self._has_ended = asyncio.Event()  # the tower's thread writes nothing more

    @property
    def capabilities(self) -> EncoderCapabilities:
        """What it can do; valid from ``start`` to ``close``."""
        return self._started().capabilities

    @property
    def embeddings(self) -> EmbeddingMemory:
        """The pool that it writes to; valid from ``start`` to ``close``."""
        return self._started().memory

    @property
    def states(self) -> None:
        """None: all goes into the pool."""

    @property
    def is_alive(self) -> bool:
        """False once it has died; it encodes nothing more."""
        return self._lost is None

    async def start(self) -> None:
        """Load and warm up, in the tower's thread. Called once.

        Raises:
            InvalidRequestError: field ``model``, ``device`` or ``num_blocks``: it cannot be run so.
            EngineError: the checkpoint is damaged, the pool is of another layout, or the first pictures fail.
            WorkerUnavailableError: it was closed meanwhile.
        """
        self._thread = TowerThread(
            partial(self._load, self._config, self._embeddings),
            on_ready=self._on_ready,
            on_run=self._on_run,
            on_lost=self._on_lost,
            on_end=self._has_ended.set,
        )
        await self._has_settled.wait()
        if self._lost is not None:
            raise self._lost
        if self._is_closed:
            raise _closed()

    async def size(self, file: MediaFile) -> ItemSize:
        """See ``MediaEncoder``."""
        return await asyncio.to_thread(self._started().reader.size, file)

    async def encode(self, file: MediaFile, block_ids: Sequence[int]) -> EncodeTimes:
        """See ``MediaEncoder``."""
        self._check_serving()
        job = Job(file, tuple(block_ids), time.monotonic(), asyncio.get_running_loop().create_future())
        self._jobs.add(job)
        self._advance()
        try:
            await asyncio.wait([job.done])
        except asyncio.CancelledError:
            while job.stage is Stage.RUNNING and not job.done.done():
                # A second cancel waits too: the tower still writes to blocks that another item would get.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([job.done])
            self._jobs.remove(job)
            if not job.done.cancel():
                job.done.exception()  # retrieved, else asyncio logs that nothing did
            self._advance()
            raise
        return job.done.result()

    def stats(self) -> EncoderStats:
        """The latest statistics. May be called on any thread, also after ``close``."""
        return self._stats

    async def close(self) -> None:
        """Free everything, within 30 s and the time of decoding: the tower ends the run that it is in.

        Loading can't be interrupted and is not waited for: what it loads is freed once that is complete.
        """
        self._is_closed = True
        self._fail_all(_closed, spare_running=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.stop()
            if not self._has_settled.is_set():
                return
            try:
                await asyncio.wait_for(self._has_ended.wait(), _CLOSE_TIMEOUT_S)
            except TimeoutError:
                logger.error("the encoder is still busy after %.0f s: its thread is left behind", _CLOSE_TIMEOUT_S)
                self._fail_all(_closed)
                return
            self._thread.join()
        await asyncio.to_thread(self._readers.shutdown)
        tower, self._tower = self._tower, None
        await asyncio.to_thread(self._free, tower)

    def _free(self, tower: Tower | None) -> None:
        """Not on the event loop: a GPU's memory is freed once the GPU has nothing to do."""
        if self._embeddings is not None or tower is None:
            return
        try:
            tower.memory.memory.close()
        except CudaError as error:
            logger.error("the pool of embeddings was not given back: %s", error)

    def _started(self) -> Tower:
        if self._tower is None:
            raise WorkerUnavailableError("the encoder is not running")
        return self._tower

    def _check_serving(self) -> None:
        if self._is_closed:
            raise _closed()
        if self._lost is not None:
            raise _broken()
        self._started()

    def _advance(self) -> None:
        """Give the tower and the worker threads the jobs that they can take."""
        if self._tower is not None and self._thread is not None and self._lost is None and not self._is_closed:
            # The tower first: a run makes room to prepare more.
            if batch := self._jobs.begin_running():
                self._thread.post([Passenger(job.prepared, job.block_ids) for job in batch if job.prepared is not None])
            for job in self._jobs.begin_preparing():
                future = self._readers.submit(_prepare, self._tower, job)
                future.add_done_callback(partial(self._notify_prepared, asyncio.get_running_loop(), job))
        self._count()

    def _notify_prepared(self, loop: asyncio.AbstractEventLoop, job: Job, future: Future[Prepared | None]) -> None:
        """On a worker thread."""
        call_on_loop(loop, self._on_prepared, job, future)

    def _on_prepared(self, job: Job, future: Future[Prepared | None]) -> None:
        if job not in self._jobs:
            return  # its caller has gone
        if error := future.exception():
            self._jobs.remove(job)
            job.done.set_exception(_failure(error))
            self._count(num_failed=1)
        else:
            job.stage, job.prepared = Stage.READY, future.result()
        self._advance()

    def _on_ready(self, tower: Tower) -> None:
        if self._is_closed:
            freeing = asyncio.get_running_loop().run_in_executor(None, self._free, tower)
            freeing.add_done_callback(lambda _: self._has_settled.set())
        else:
            self._tower = tower
            self._has_settled.set()

    def _on_run(self, times: RunTimes) -> None:
        batch = self._jobs.running()  # none, if ``close`` gave them up
        unfit = times.unfit.intersection(range(len(batch)))
        for index, job in enumerate(batch):
            self._jobs.remove(job)
            if index in unfit:
                job.done.set_exception(MediaTooLargeError("the device has no room to encode it", field="file"))
            else:
                job.done.set_result(EncodeTimes(times.began_at - job.queued_at, times.compute_s))
        if batch:
            slowest_s = max(self._stats.slowest_item_s, times.compute_s / len(batch))
            self._stats = replace(self._stats, slowest_item_s=slowest_s)
        self._count(num_steps=1, num_items=len(batch) - len(unfit), num_failed=len(unfit))
        self._advance()

    def _on_lost(self, error: Exception) -> None:
        if self._tower is not None:
            self._lost = _broken()
        elif isinstance(error, ServingError):
            self._lost = error
        else:
            self._lost = EngineError(f"the vision tower cannot be started: {error}")
        self._has_settled.set()
        self._fail_all(_broken)

    def _fail_all(self, make_error: Callable[[], ServingError], *, spare_running: bool = False) -> None:
        self._count(num_failed=self._jobs.fail(make_error, spare_running=spare_running))

    def _count(self, *, num_steps: int = 0, num_items: int = 0, num_failed: int = 0) -> None:
        """Update the statistics: from the jobs, and by these counts."""
        num_running = len(self._jobs.running())
        stats = self._stats.plus(num_steps=num_steps, num_items=num_items, num_failed=num_failed)
        self._stats = replace(stats, num_running=num_running, num_waiting=len(self._jobs) - num_running)


def _prepare(tower: Tower, job: Job) -> Prepared | None:
    """On a worker thread; ``None`` if the caller went while the file waited for the thread."""
    if job.done.done():
        return None
    return tower.reader.prepare(job.file, len(job.block_ids))


def _failure(error: BaseException) -> ServingError:
    """The error for the caller of a file that could not be prepared: other items are not affected."""
    if isinstance(error, ServingError):
        return error
    logger.error("a media file could not be prepared", exc_info=error)
    return EngineError("the file could not be prepared for the vision tower")


def _broken() -> EngineError:
    return EngineError("the vision tower broke")


def _closed() -> WorkerUnavailableError:
    return WorkerUnavailableError("the encoder is closed")


class TowerThread:
    """Loads the tower, then runs batches in the order in which they were posted, until ``stop`` or an exception."""

    def __init__(
        self,
        load: Callable[[], Tower],
        *,
        on_ready: Callable[[Tower], None],
        on_run: Callable[[RunTimes], None],
        on_lost: Callable[[Exception], None],
        on_end: Callable[[], None],
    ) -> None:
        """Begin to load; the callbacks are called on the running event loop, in order.

        Args:
            load: loads the tower, on the thread.
            on_ready: the tower is loaded and warm.
            on_run: the oldest posted batch is in its blocks, except items that did not fit into the device's memory.
            on_lost: loading or a run failed; the thread writes nothing more.
            on_end: the thread is about to end.
        """
        self._load = load
        self._on_ready, self._on_run, self._on_lost, self._on_end = on_ready, on_run, on_lost, on_end
        self._inbox: queue.SimpleQueue[Sequence[Passenger] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        # A daemon thread: a device that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name="quartet-encoder", daemon=True)
        self._thread.start()

    def post(self, batch: Sequence[Passenger]) -> None:
        """Hand over a batch. Never blocks."""
        self._inbox.put(batch)

    def stop(self) -> None:
        """Make the thread end after the batches that were posted; ``on_end`` follows."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait until the thread has ended; call it after ``on_end``."""
        self._thread.join()

    def _main(self) -> None:
        try:
            tower = self._load()
            self._notify(self._on_ready, tower)
            while (batch := self._inbox.get()) is not None:
                self._notify(self._on_run, tower.run(batch))
        except Exception as error:  # the thread's work ends here; the listener fails the live jobs
            logger.exception("the encoder is lost")
            self._notify(self._on_lost, error)
        finally:
            self._notify(self._on_end)

    def _notify(self, callback: Callable[..., None], *args: object) -> None:
        call_on_loop(self._loop, callback, *args)


def make_rows_parts(config: TorchEncoderConfig) -> RowsParts:
    """The pool and capabilities of an encode worker that takes embeddings only, so that its tower is not loaded.

    The pool is in host memory, whatever ``config.device`` says: such a worker needs no GPU.

    Raises:
        ModelFilesError: a file is missing or malformed.
        InvalidRequestError: field ``model``: it takes text only; ``dtype``: the checkpoint does not say it.
    """
    media = read_media_config(config.model_path)
    if media is None:
        raise InvalidRequestError("config.json names no vision tower: the model takes text only", field="model")
    dtype = media.dtype if config.dtype == "auto" else config.dtype
    if dtype is None:
        raise InvalidRequestError("config.json does not say the dtype of embeddings", field="dtype")
    layout = EmbeddingLayout(
        model_fingerprint=model_fingerprint(config.model_path, dtype, config.random_seed),
        dtype=dtype,
        hidden_size=media.hidden_size,
        block_size=config.block_size,
    )
    capabilities = EncoderCapabilities(
        kinds=frozenset({MediaKind.EMBEDDINGS}),
        model_fingerprint=layout.model_fingerprint,
        preprocessing_fingerprint=media.preprocessing_fingerprint,
        max_item_tokens=config.max_item_tokens
        or shared_item_tokens(num_blocks=config.num_blocks, block_size=config.block_size),
    )
    return RowsParts(capabilities, make_embedding_memory(layout, config.num_blocks))
