"""Pictures that TensorRT-LLM's ``MultimodalEncoder`` encodes and keeps, each until one prefill worker has taken it.

The encoder blocks and belongs to one caller, so an ``EncoderThread`` runs it. For each picture the encoder returns a
handle to the memory that it keeps.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from PIL import Image

from quartet.engine.encoder import EncodedState, EncoderStats, EncodeTimes
from quartet.engine.life_cycle import call_on_loop
from quartet.engine.trtllm.inputs import host_name
from quartet.engine.trtllm.media_model import MediaModel
from quartet.engine.trtllm.media_state import PictureState, num_handle_tokens, write_state
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.engine.trtllm.watchdog import fatal_error_of, shut_down
from quartet.errors import EngineError, InvalidMediaError, InvalidRequestError, ServingError, WorkerUnavailableError
from quartet.media.image_file import decode
from quartet.media.items import MediaFile, MediaKind

_LOG = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 30.0  # for the batch that is being encoded

_NUM_HASH_INTS = 8

_BLANK_EDGE = 224


class PictureStates:
    """See ``StateEncoder``: encodes pictures with ``MultimodalEncoder``. Keeps its records on the event loop."""

    kinds = frozenset({MediaKind.IMAGE})

    def __init__(
        self, model: MediaModel, make: Callable[[], Any], max_batch_size: int, times: TrtllmTimes | None = None
    ) -> None:
        """Load nothing yet; ``make`` loads a ``MultimodalEncoder``, on a thread of its own."""
        self._model = model
        self._make = make
        self._max_batch_size = max_batch_size
        self._times = times or TrtllmTimes()
        self._sizer = model.sizer()
        self._host = host_name()
        self._stats = EncoderStats()
        self._thread: EncoderThread | None = None
        self._lost: ServingError | None = None
        self._is_closed = False
        self._waiting: set[PictureJob] = set()
        self._held: dict[int, EncodedPicture] = {}
        self._has_settled = asyncio.Event()  # the encoder is ready, or lost

    @property
    def is_alive(self) -> bool:
        """False once the encoder has died, or hangs."""
        thread = self._thread
        return self._lost is None and (thread is None or not (thread.is_shut_down or thread.is_overdue))

    @property
    def num_held(self) -> int:
        """Pictures that are kept until their holder is released."""
        return len(self._held)

    @property
    def stats(self) -> EncoderStats:
        """The encoder's load and counts. May be read on any thread."""
        return self._stats

    async def start(self) -> None:
        """Load the encoder, and encode a picture. Raises ``ServingError``, which names what is wrong."""
        call = partial(call_on_loop, asyncio.get_running_loop())
        self._thread = EncoderThread(
            self._make,
            on_ready=partial(call, self._has_settled.set),
            on_begin=partial(call, self._on_begin),
            on_outcomes=partial(call, self._on_outcomes),
            on_lost=partial(call, self._on_lost),
            inputs_of=lambda picture: {"prompt": self._model.placeholder, **self._model.picture_inputs([picture])},
            max_batch_size=self._max_batch_size,
            max_pixels=self._model.max_pixels,
            times=self._times,
        )
        await self._wait_settled(self._thread)
        if self._lost is not None:
            raise self._lost

    async def encode(self, holder: int, file: MediaFile) -> EncodedState:
        """See ``StateEncoder``."""
        size = await asyncio.to_thread(self._sizer.size, file)
        if self._is_closed or self._thread is None:
            raise _closed()
        if not self.is_alive:
            raise _broken()
        job = PictureJob(data=file.data, num_tokens=size.num_tokens, done=asyncio.get_running_loop().create_future())
        self._waiting.add(job)
        self._count()
        self._thread.post(job)
        try:
            outcome = await job.done
        except asyncio.CancelledError:
            self._waiting.discard(job)
            if job.done.done() and not job.done.cancelled() and job.done.exception() is None:
                self._drop(job.done.result().end)
            self._count()
            raise
        if isinstance(outcome.end, ServingError):
            raise outcome.end
        times = EncodeTimes(max(outcome.began_at - job.queued_at, 0.0), outcome.compute_s)
        return EncodedState(self._keep(holder, outcome.end), times)

    def release(self, holder: int, *, was_taken: bool) -> None:
        """See ``StateEncoder``."""
        picture = self._held.pop(holder, None)
        if not was_taken:
            self._drop(picture)

    async def close(self) -> None:
        """Free everything, in bounded time. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_all(_closed())
        self._held.clear()
        if self._thread is None:
            return
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, self._close_timeout_s(self._thread)):
            _LOG.error("the encoder of TensorRT-LLM could not be shut down: processes of it may hold the GPU's memory")

    async def _wait_settled(self, thread: EncoderThread) -> None:
        """Wait for the encoder. Its load may take any time, but its first picture must come in time."""
        while not self._has_settled.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_settled.wait(), self._times.check_interval_s)
            if thread.is_overdue and not self._has_settled.is_set():
                raise EngineError("the encoder of TensorRT-LLM loaded, but does not encode a picture")

    def _close_timeout_s(self, thread: EncoderThread) -> float:
        """How long ``close`` waits: not for a load, which takes its time, nor for an encoding that already hangs."""
        if not self._has_settled.is_set() or thread.is_overdue:
            return 0.0
        return _CLOSE_TIMEOUT_S if self._lost is None else self._times.close_timeout_s

    def _keep(self, holder: int, picture: EncodedPicture) -> bytes:
        state = PictureState(
            width=picture.width,
            height=picture.height,
            handle=picture.handle,
            hashes=picture.hashes,
            host=self._host,
        )
        try:
            written = write_state(state)
        except EngineError:
            self._drop(picture)
            raise
        self._held[holder] = picture
        return written

    def _drop(self, picture: EncodedPicture | ServingError | None) -> None:
        if isinstance(picture, EncodedPicture) and self._thread is not None:
            self._thread.drop(picture.handle)

    def _on_begin(self, num_jobs: int) -> None:
        self._stats = replace(self._stats, num_running=num_jobs)
        self._count()

    def _on_outcomes(self, outcomes: Mapping[PictureJob, PictureOutcome]) -> None:
        num_failed = 0
        for job, outcome in outcomes.items():
            self._waiting.discard(job)
            num_failed += isinstance(outcome.end, ServingError)
            if job.done.done():
                self._drop(outcome.end)  # the request that waited is gone
            else:
                job.done.set_result(outcome)
        stats = self._stats.plus(num_steps=1, num_items=len(outcomes) - num_failed, num_failed=num_failed)
        self._stats = replace(stats, num_running=0)
        self._count()

    def _on_lost(self, error: Exception) -> None:
        if self._has_settled.is_set():
            self._lost = _broken()
        elif isinstance(error, ServingError):
            self._lost = error
        else:
            self._lost = EngineError(f"the encoder of TensorRT-LLM cannot be started: {error}")
        self._has_settled.set()
        self._fail_all(_broken())

    def _fail_all(self, error: ServingError) -> None:
        for job in self._waiting:
            if not job.done.done():
                job.done.set_exception(error)
        self._waiting.clear()
        self._count()

    def _count(self) -> None:
        num_waiting = max(len(self._waiting) - self._stats.num_running, 0)
        self._stats = replace(self._stats, num_waiting=num_waiting)


@dataclass(eq=False, kw_only=True)
class PictureJob:
    """A picture that is to be encoded.

    Attributes:
        num_tokens: tokens that the picture was said to fill.
        done: its request waits for it; done as well once the request waits no more.
        queued_at: in monotonic seconds.
    """

    data: bytes = field(repr=False)
    num_tokens: int
    done: asyncio.Future[PictureOutcome]
    queued_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, kw_only=True)
class EncodedPicture:
    """An encoded picture, which the encoder keeps until a prefill worker takes its handle."""

    width: int
    height: int
    handle: Mapping[str, object] = field(repr=False)
    hashes: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PictureOutcome:
    """How a job ended; ``began_at`` in monotonic seconds."""

    end: EncodedPicture | ServingError
    began_at: float
    compute_s: float


class EncoderThread:
    """Loads an encoder, encodes posted pictures, at most ``max_batch_size`` at a time, and drops posted handles.

    After a quiet while it encodes a blank picture, to prove that it still can.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        on_ready: Callable[[], None],
        on_begin: Callable[[int], None],
        on_outcomes: Callable[[Mapping[PictureJob, PictureOutcome]], None],
        on_lost: Callable[[Exception], None],
        inputs_of: Callable[[Image.Image], dict[str, object]],
        max_batch_size: int,
        max_pixels: int,
        times: TrtllmTimes,
    ) -> None:
        """Start the thread, on which the callbacks are called.

        Args:
            make: loads a ``MultimodalEncoder``.
            on_ready: the encoder has loaded, and encoded a picture.
            on_begin: the encoder begins so many jobs; an ``on_outcomes`` follows for them.
            on_outcomes: how the jobs ended.
            on_lost: the encoder can't be loaded, or broke: no other call follows.
            inputs_of: what the encoder is given for a picture.
            max_batch_size: pictures that it encodes at a time.
            max_pixels: most pixels of a picture.
            times: bounds of its waits.
        """
        self._make = make
        self._on_ready, self._on_begin, self._on_outcomes, self._on_lost = on_ready, on_begin, on_outcomes, on_lost
        self._inputs_of = inputs_of
        self._max_batch_size = max_batch_size
        self._max_pixels = max_pixels
        self._times = times
        self._due_at: float | None = None
        self._quiet_at = 0.0  # when the encoder will have been quiet for long enough to be tried
        self._is_ready = False
        self._encoder: Any = None
        self._posted: queue.SimpleQueue[PictureJob | Mapping[str, object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quartet-trtllm-encoder", daemon=True)
        self._thread.start()

    @property
    def is_shut_down(self) -> bool:
        """Whether the loaded encoder has shut down by itself. May be called on any thread."""
        encoder = self._encoder
        if encoder is None:
            return False
        executor = getattr(encoder, "_executor", None)  # there is no public way to ask
        return executor is None or executor.is_shutdown() or fatal_error_of(encoder) is not None

    @property
    def is_overdue(self) -> bool:
        """Whether the current encoding takes longer than it may. May be called on any thread."""
        due_at = self._due_at
        return due_at is not None and time.monotonic() > due_at

    def post(self, job: PictureJob) -> None:
        """Encode the picture of ``job`` in one of the next batches."""
        self._posted.put(job)

    def drop(self, handle: Mapping[str, object]) -> None:
        """Free the memory behind ``handle``: no prefill worker will take it."""
        self._posted.put(handle)

    def stop(self) -> None:
        """End the thread after what it does now."""
        self._posted.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; return whether it came in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._encoder = self._make()
            self._encode_blank(self._times.warm_up_timeout_s)
            self._is_ready = True
            self._on_ready()
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - the thread's end: waiting requests must get the error
            # Once requests have sent pictures, the error's text may quote them.
            _LOG.error("the encoder of TensorRT-LLM broke: %s", type(error).__name__, exc_info=not self._is_ready)
            self._on_lost(error)
        finally:
            encoder, self._encoder = self._encoder, None
            if encoder is not None:
                shut_down(encoder)

    def _turn(self) -> bool:
        """Drop posted handles and encode one batch, or a blank picture after a quiet while. False: end the thread."""
        jobs: list[PictureJob] = []
        try:
            one = self._posted.get(timeout=max(self._quiet_at - time.monotonic(), 0.0))
            while one is not None:
                if not isinstance(one, PictureJob):
                    drop(one)
                elif not one.done.done():
                    jobs.append(one)
                if len(jobs) >= self._max_batch_size:
                    break
                one = self._posted.get_nowait()
            else:
                return False
        except queue.Empty:
            pass  # that was all
        if jobs:
            self._encode(jobs)
        elif time.monotonic() >= self._quiet_at:
            self._prove()
        return True

    def _prove(self) -> None:
        from tensorrt_llm.executor.utils import RequestError

        try:
            self._encode_blank(self._times.canary_timeout_s)
        except (RequestError, ServingError) as error:
            _LOG.warning("the encoder works, but failed a blank picture: %s", type(error).__name__)

    def _encode_blank(self, timeout_s: float) -> None:
        """Encode a blank picture. Raises whatever the encoder raises, and ``TimeoutError``."""
        with self._due_in(timeout_s):
            blank = Image.new("RGB", (_BLANK_EDGE, _BLANK_EDGE), "white")
            handle, _ = read_handle(self._result(self._encoder.generate_async(self._inputs_of(blank))))
            drop(handle)

    @contextmanager
    def _due_in(self, timeout_s: float) -> Iterator[None]:
        """Set the deadline of one encoding. A hanging one becomes overdue even if waiting for it ignores a timeout."""
        self._due_at = time.monotonic() + timeout_s
        try:
            yield
        finally:
            self._due_at = None
            self._quiet_at = time.monotonic() + self._times.canary_interval_s

    def _result(self, begun: Any) -> Any:
        assert self._due_at is not None, "something is being encoded"
        # Not every release of the package heeds this timeout.
        return begun.result(max(self._due_at - time.monotonic(), 0.0))

    def _encode(self, jobs: Sequence[PictureJob]) -> None:
        self._on_begin(len(jobs))
        began_at = time.monotonic()
        with self._due_in(self._times.encode_timeout_s):
            # Submit pictures before waiting for the first: while we decode one, the encoder computes those before it.
            begun = [self._attempt(self._begin, job) for job in jobs]
            ended = [
                first if isinstance(first, ServingError) else self._attempt(self._finish, job, *first)
                for job, first in zip(jobs, begun, strict=True)
            ]
        compute_s = time.monotonic() - began_at
        self._on_outcomes(
            {
                job: PictureOutcome(end=end, began_at=began_at, compute_s=compute_s)
                for job, end in zip(jobs, ended, strict=True)
            }
        )

    def _attempt(self, step: Callable[..., Any], job: PictureJob, *arguments: Any) -> Any:
        """Return what ``step`` gives, or an error that is this picture's alone; any other error breaks the encoder."""
        from tensorrt_llm.executor.utils import RequestError

        try:
            return step(job, *arguments)
        except ServingError as error:
            return error
        except RequestError as error:
            _LOG.warning("TensorRT-LLM could not encode a picture: %s", type(error).__name__)
            return EngineError("TensorRT-LLM could not encode the picture")
        except (ValueError, TypeError) as error:
            _LOG.warning("TensorRT-LLM does not take a picture: %s", type(error).__name__)
            return InvalidMediaError("TensorRT-LLM does not take the picture", field="file")
        except (AssertionError, NotImplementedError, LookupError) as error:
            # It checks a result where the picture's own handle reads it, so the others go on if the encoder does.
            if self.is_shut_down:
                raise
            _LOG.warning("TensorRT-LLM failed at a picture: %s", type(error).__name__)
            return EngineError("TensorRT-LLM could not encode the picture")

    def _begin(self, job: PictureJob) -> tuple[Any, int, int]:
        try:
            picture = decode(job.data, max_pixels=self._max_pixels)
        except ServingError:
            raise
        except Exception as error:  # reading a stranger's file may raise anything: fail this picture alone
            raise EngineError(f"the picture could not be read: {type(error).__name__}") from error
        return self._encoder.generate_async(self._inputs_of(picture)), picture.width, picture.height

    def _finish(self, job: PictureJob, begun: Any, width: int, height: int) -> EncodedPicture:
        result = self._result(begun)
        try:
            return _read(job, result, width, height)
        except ServingError:
            raise
        except Exception as error:  # the encoder did its part, but we can't read the result: fail this picture alone
            message = f"what TensorRT-LLM made of a picture could not be read: {type(error).__name__}"
            raise EngineError(message) from error


def check_hands_over(encoder: Any) -> None:
    """Refuse a model whose embeddings prefill does not take. Raises ``InvalidRequestError``, field ``model``."""
    if not getattr(getattr(encoder, "input_processor", None), "support_mm_disagg", True):
        encoder.shutdown()
        message = "TensorRT-LLM does not hand the embeddings of this model's pictures over to prefill"
        raise InvalidRequestError(message, field="model")


def read_handle(result: Any) -> tuple[Mapping[str, object], tuple[int, ...]]:
    """Return the handle and the picture's hash of ``result``. Raises ``EngineError`` unless it is of one picture."""
    params = getattr(result, "disaggregated_params", None)
    handles = _flat(getattr(params, "multimodal_embedding_handles", None))
    hashes = getattr(params, "multimodal_hashes", None) or []
    is_one = len(handles) == 1 and isinstance(handles[0], Mapping) and len(hashes) == 1
    if not is_one or len(hashes[0]) != _NUM_HASH_INTS:
        raise EngineError("the encoder of TensorRT-LLM did not give one handle for a picture")
    return handles[0], tuple(int(part) for part in hashes[0])


def drop(handle: Mapping[str, object]) -> None:
    """Have the encoder free the memory behind ``handle``: no prefill worker will take it. Never raises."""
    try:
        if not _count_down(handle):
            _take(handle)
    except Exception as error:  # noqa: BLE001 - a worker took it after all: nothing is held, whatever CUDA says
        _LOG.debug("a picture's embeddings were gone already: %s", type(error).__name__)


def _broken() -> EngineError:
    return EngineError("the encoder of TensorRT-LLM broke")


def _closed() -> WorkerUnavailableError:
    return WorkerUnavailableError("the encoder is closed")


def _count_down(handle: Mapping[str, object]) -> bool:
    """Count the memory's counter down, as a worker that takes the memory does; False: there is no counter here.

    The counter lies in shared memory of the host. So this needs no context on the GPU, which costs hundreds of MB. It
    also works in the process that owns the memory, where CUDA does not open a handle.
    """
    import torch

    release = getattr(torch.UntypedStorage, "_release_ipc_counter", None)  # as torch's own reductions do it
    counter, offset = handle.get("ref_counter_handle"), handle.get("ref_counter_offset")
    if release is None or not isinstance(counter, str) or not isinstance(offset, int):
        return False
    if not torch.cuda.is_available():
        return False
    # Handles carry bytes as text: see `SharedTensorContainer.cuda_handle_to_dict`.
    release(base64.b64decode(counter, validate=True), offset, device=handle.get("storage_device"))
    return True


def _take(handle: Mapping[str, object]) -> None:
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer

    SharedTensorContainer.from_dict(dict(handle)).get_local_view()


def _flat(handles: Any) -> list[Any]:
    """The handles as one list: some releases put the list into a tuple of one."""
    flat: list[Any] = []
    for handle in handles or ():
        flat += handle if isinstance(handle, list | tuple) else [handle]
    return flat


def _read(job: PictureJob, result: Any, width: int, height: int) -> EncodedPicture:
    handle, hashes = read_handle(result)
    num_tokens = num_handle_tokens(handle)
    if num_tokens != job.num_tokens:
        drop(handle)
        message = f"the picture became {num_tokens} tokens, not the {job.num_tokens} that it was said to fill"
        raise EngineError(message)
    return EncodedPicture(width=width, height=height, handle=handle, hashes=hashes)
