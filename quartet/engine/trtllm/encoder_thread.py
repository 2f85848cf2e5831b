"""``MultimodalEncoder`` on a thread of its own: it blocks, and belongs to one caller."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from quartet.engine.trtllm.media_state import num_handle_tokens
from quartet.engine.trtllm.picture_handles import drop, read_handle
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.errors import EngineError, InvalidMediaError, InvalidRequestError, ServingError
from quartet.media.image_file import decode

_LOG = logging.getLogger(__name__)

_BLANK_EDGE = 224


@dataclass(eq=False, kw_only=True)
class PictureJob:
    """A picture that is to be encoded.

    Attributes:
        num_tokens: that it has been told to fill.
        is_wanted: cleared by who waits no more.
    """

    data: bytes = field(repr=False)
    num_tokens: int
    is_wanted: bool = True


@dataclass(frozen=True, kw_only=True)
class EncodedPicture:
    """What became of one, kept until its handle is taken."""

    width: int
    height: int
    handle: Mapping[str, object] = field(repr=False)
    hashes: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PictureOutcome:
    """How a job ended; ``began_at`` in monotonic seconds."""

    job: PictureJob
    end: EncodedPicture | ServingError
    began_at: float
    compute_s: float


@dataclass(frozen=True, kw_only=True)
class EncoderListener:
    """Who hears of a thread; called on that thread.

    Attributes:
        on_ready: it has loaded, and encoded a picture.
        on_begin: these jobs are begun, of which an ``on_outcomes`` follows.
        on_lost: it can't be loaded, or broke: nothing comes any more.
    """

    on_ready: Callable[[], None]
    on_begin: Callable[[Sequence[PictureJob]], None]
    on_outcomes: Callable[[Sequence[PictureOutcome]], None]
    on_lost: Callable[[Exception], None]


class EncoderThread:
    """Loads, encodes what is posted, at most ``max_batch_size`` at a time, and drops what nobody took.

    When it was quiet for a while it encodes a blank picture, which proves that it can.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        listener: EncoderListener,
        *,
        placeholder: str,
        max_batch_size: int,
        max_pixels: int,
        times: TrtllmTimes,
    ) -> None:
        """Begin. ``make`` loads a ``MultimodalEncoder``; ``placeholder`` is the text of the model's."""
        self._make = make
        self._listener = listener
        self._placeholder = placeholder
        self._max_batch_size = max_batch_size
        self._max_pixels = max_pixels
        self._times = times
        self._due_at: float | None = None
        self._quiet_at = 0.0  # nothing was encoded for long enough by then
        self._is_ready = False
        self._encoder: Any = None
        self._posted: queue.SimpleQueue[PictureJob | Mapping[str, object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quartet-trtllm-encoder", daemon=True)
        self._thread.start()

    @property
    def is_shut_down(self) -> bool:
        """Whether what it has loaded is gone, though nobody closed it. May be called on any thread."""
        encoder = self._encoder
        if encoder is None:
            return False
        executor = getattr(encoder, "_executor", None)  # there is no public way to ask
        return executor is None or executor.is_shutdown()

    @property
    def is_overdue(self) -> bool:
        """Whether what it is encoding takes longer than anything may. May be called on any thread."""
        due_at = self._due_at
        return due_at is not None and time.monotonic() > due_at

    def post(self, job: PictureJob) -> None:
        """Encode that, too."""
        self._posted.put(job)

    def drop(self, handle: Mapping[str, object]) -> None:
        """Nobody will take what is behind ``handle``."""
        self._posted.put(handle)

    def stop(self) -> None:
        """End after what is being done."""
        self._posted.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; whether it came in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._encoder = self._make()
            self._encode_blank(self._times.warm_up_timeout_s)
            self._is_ready = True
            self._listener.on_ready()
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - the thread's end: whoever waits for it must hear
            # Once there are pictures of others, what it says may quote them.
            _LOG.error("the encoder of TensorRT-LLM broke: %s", type(error).__name__, exc_info=not self._is_ready)
            self._listener.on_lost(error)
        finally:
            encoder, self._encoder = self._encoder, None
            if encoder is not None:
                encoder.shutdown()

    def _turn(self) -> bool:
        """Do what was posted, of pictures one batch, or prove that it could. False: it is to end."""
        jobs: list[PictureJob] = []
        try:
            one = self._posted.get(timeout=max(self._quiet_at - time.monotonic(), 0.0))
            while one is not None:
                if not isinstance(one, PictureJob):
                    drop(one)
                elif one.is_wanted:
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
        """Raises whatever the encoder raises, and ``TimeoutError``."""
        with self._due_in(timeout_s):
            blank = Image.new("RGB", (_BLANK_EDGE, _BLANK_EDGE), "white")
            handle, _ = read_handle(self._result(self._encoder.generate_async(self._inputs(blank))))
            drop(handle)

    @contextmanager
    def _due_in(self, timeout_s: float) -> Iterator[None]:
        """While something is encoded. What hangs is overdue, whether it can be waited for with a bound or not."""
        self._due_at = time.monotonic() + timeout_s
        try:
            yield
        finally:
            self._due_at = None
            self._quiet_at = time.monotonic() + self._times.canary_interval_s

    def _result(self, begun: Any) -> Any:
        assert self._due_at is not None, "something is being encoded"
        # Not every release of the package heeds it.
        return begun.result(max(self._due_at - time.monotonic(), 0.0))

    def _inputs(self, picture: Image.Image) -> dict[str, object]:
        return {"prompt": self._placeholder, "multi_modal_data": {"image": [picture]}}

    def _encode(self, jobs: Sequence[PictureJob]) -> None:
        self._listener.on_begin(jobs)
        began_at = time.monotonic()
        with self._due_in(self._times.encode_timeout_s):
            # All are on their way before the first is waited for; while one is decoded the others are computed.
            begun = [self._attempt(self._begin, job) for job in jobs]
            ended = [
                first if isinstance(first, ServingError) else self._attempt(self._finish, job, *first)
                for job, first in zip(jobs, begun, strict=True)
            ]
        compute_s = time.monotonic() - began_at
        self._listener.on_outcomes(
            [
                PictureOutcome(job=job, end=end, began_at=began_at, compute_s=compute_s)
                for job, end in zip(jobs, ended, strict=True)
            ]
        )

    def _attempt(self, step: Callable[..., Any], job: PictureJob, *arguments: Any) -> Any:
        """What ``step`` gives, or the error that is this picture's alone; anything else breaks the encoder."""
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

    def _begin(self, job: PictureJob) -> tuple[Any, int, int]:
        try:
            picture = decode(job.data, max_pixels=self._max_pixels)
        except ServingError:
            raise
        except Exception as error:  # whatever reading what strangers send raises: it is this picture's fault alone
            raise EngineError(f"the picture could not be read: {type(error).__name__}") from error
        return self._encoder.generate_async(self._inputs(picture)), picture.width, picture.height

    def _finish(self, job: PictureJob, begun: Any, width: int, height: int) -> EncodedPicture:
        result = self._result(begun)
        try:
            return _read(job, result, width, height)
        except ServingError:
            raise
        except Exception as error:  # the encoder did its part: what we make of it is this picture's fault alone
            message = f"what TensorRT-LLM made of a picture could not be read: {type(error).__name__}"
            raise EngineError(message) from error


def _read(job: PictureJob, result: Any, width: int, height: int) -> EncodedPicture:
    handle, hashes = read_handle(result)
    num_tokens = num_handle_tokens(handle)
    if num_tokens != job.num_tokens:
        drop(handle)
        message = f"the picture became {num_tokens} tokens, not the {job.num_tokens} that it was said to fill"
        raise EngineError(message)
    return EncodedPicture(width=width, height=height, handle=handle, hashes=hashes)


def check_hands_over(encoder: Any) -> None:
    """Refuse a model whose embeddings prefill does not take. Raises ``InvalidRequestError``, field ``model``."""
    if not getattr(getattr(encoder, "input_processor", None), "support_mm_disagg", True):
        encoder.shutdown()
        message = "TensorRT-LLM does not hand the embeddings of this model's pictures over to prefill"
        raise InvalidRequestError(message, field="model")
