"""``MultimodalEncoder`` on a thread of its own: it blocks, and belongs to one caller."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quartet.engine.trtllm.media_state import num_handle_tokens
from quartet.errors import EngineError, InvalidMediaError, InvalidRequestError, ServingError
from quartet.media.image_file import decode

_LOG = logging.getLogger(__name__)

_NUM_HASH_INTS = 8


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
        on_ready: it has loaded.
        on_begin: these jobs are begun, of which an ``on_outcomes`` follows.
        on_lost: it can't be loaded, or broke: nothing comes any more.
    """

    on_ready: Callable[[], None]
    on_begin: Callable[[Sequence[PictureJob]], None]
    on_outcomes: Callable[[Sequence[PictureOutcome]], None]
    on_lost: Callable[[Exception], None]


class EncoderThread:
    """Loads, encodes what is posted, at most ``max_batch_size`` at a time, and drops what nobody took."""

    def __init__(
        self,
        make: Callable[[], Any],
        listener: EncoderListener,
        *,
        placeholder: str,
        max_batch_size: int,
        max_pixels: int,
    ) -> None:
        """Begin. ``make`` loads a ``MultimodalEncoder``; ``placeholder`` is the text of the model's."""
        self._make = make
        self._listener = listener
        self._placeholder = placeholder
        self._max_batch_size = max_batch_size
        self._max_pixels = max_pixels
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
            self._listener.on_ready()
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - the thread's end: whoever waits for it must hear
            _LOG.exception("the encoder of TensorRT-LLM broke")
            self._listener.on_lost(error)
        finally:
            encoder, self._encoder = self._encoder, None
            if encoder is not None:
                encoder.shutdown()

    def _turn(self) -> bool:
        """Do what was posted, of pictures one batch. False: it is to end."""
        jobs: list[PictureJob] = []
        goes_on = True
        one = self._posted.get()
        while True:
            if one is None:
                goes_on = False
                break
            if not isinstance(one, PictureJob):
                _drop(one)
            elif one.is_wanted:
                jobs.append(one)
            if len(jobs) >= self._max_batch_size:
                break
            try:
                one = self._posted.get_nowait()
            except queue.Empty:
                break
        if jobs and goes_on:
            self._encode(jobs)
        return goes_on

    def _encode(self, jobs: Sequence[PictureJob]) -> None:
        self._listener.on_begin(jobs)
        began_at = time.monotonic()
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
            _LOG.warning("TensorRT-LLM could not encode a picture: %s", error)
            return EngineError("TensorRT-LLM could not encode the picture")
        except (ValueError, TypeError) as error:
            _LOG.warning("TensorRT-LLM does not take a picture: %s", error)
            return InvalidMediaError("TensorRT-LLM does not take the picture", field="file")

    def _begin(self, job: PictureJob) -> tuple[Any, int, int]:
        picture = decode(job.data, max_pixels=self._max_pixels)
        inputs = {"prompt": self._placeholder, "multi_modal_data": {"image": [picture]}}
        return self._encoder.generate_async(inputs), picture.width, picture.height

    def _finish(self, job: PictureJob, begun: Any, width: int, height: int) -> EncodedPicture:
        result = begun.result()
        handles = _flat(getattr(result.disaggregated_params, "multimodal_embedding_handles", None))
        hashes = getattr(result.disaggregated_params, "multimodal_hashes", None) or []
        is_one = len(handles) == 1 and isinstance(handles[0], Mapping) and len(hashes) == 1
        if not is_one or len(hashes[0]) != _NUM_HASH_INTS:
            raise EngineError("the encoder of TensorRT-LLM did not give one handle for a picture")
        picture = EncodedPicture(
            width=width, height=height, handle=handles[0], hashes=tuple(int(part) for part in hashes[0])
        )
        num_tokens = num_handle_tokens(picture.handle)
        if num_tokens != job.num_tokens:
            _drop(picture.handle)
            message = f"the picture became {num_tokens} tokens, not the {job.num_tokens} that it was said to fill"
            raise EngineError(message)
        return picture


def check_hands_over(encoder: Any) -> None:
    """Refuse a model whose embeddings prefill does not take. Raises ``InvalidRequestError``, field ``model``."""
    if not getattr(getattr(encoder, "input_processor", None), "support_mm_disagg", True):
        encoder.shutdown()
        message = "TensorRT-LLM does not hand the embeddings of this model's pictures over to prefill"
        raise InvalidRequestError(message, field="model")


def _flat(handles: Any) -> list[Any]:
    """Some of the releases put the list into a tuple of one."""
    flat: list[Any] = []
    for handle in handles or ():
        flat += handle if isinstance(handle, list | tuple) else [handle]
    return flat


def _drop(handle: Mapping[str, object]) -> None:
    """Be the one taker: there is no other way to tell the encoder's memory that nobody will come."""
    from tensorrt_llm._torch.shared_tensor import SharedTensorContainer

    try:
        SharedTensorContainer.from_dict(dict(handle)).get_local_view()
    except Exception as error:  # noqa: BLE001 - it was taken after all: nothing is held, whatever CUDA says
        _LOG.debug("a picture's embeddings were gone already: %s", type(error).__name__)
