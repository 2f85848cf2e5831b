"""Which tokens may come next: a ``Guide`` for each guided request, and masks, computed beside the forward pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import llguidance
import numpy as np
import numpy.typing as npt

from quartet.engine.guided.grammar import FIELD, deep_stacks
from quartet.errors import InvalidRequestError

if TYPE_CHECKING:
    from quartet.engine.runner import RunningRequest

logger = logging.getLogger(__name__)

_WORD_BITS = 32
# CPU time that masks of one output may take: so much at once, and so much each.
_FREE_S, _MASK_S = 0.15, 0.005


#: Makes a matcher at the grammar's start that shares nothing with others, for so many seconds of CPU time at most.
StartAlone: TypeAlias = Callable[[float], llguidance.LLMatcher | None]


class Restarts:
    """CPU time that the guides of one step may take together to begin again: everybody in the step waits for it."""

    def __init__(self) -> None:
        self.left_s = _FREE_S


class Guide:
    """Where one output stands in its grammar. It knows only the tokens that it was given, so it can go on anywhere.

    Attributes:
        matcher: at the last token that it was given.
        error: why the grammar can't be followed any further; ``None``: it can. The request ends with it.
    """

    def __init__(self, matcher: llguidance.LLMatcher, start_alone: StartAlone = lambda _budget_s: None) -> None:
        """``matcher`` is at the grammar's start. It fails for reasons of its own, or of others with which it shares.

        Args:
            matcher: for this guide alone, but for what ``deep_copy`` shares.
            start_alone: asked once ``matcher`` fails; with ``None`` the failure is this guide's own.
        """
        self.matcher = matcher
        self._start_alone: StartAlone | None = start_alone
        self._token_ids: list[int] = []
        self._num_masks, self._spent_s = 0, 0.0
        self.error: InvalidRequestError | None = None

    @property
    def num_tokens(self) -> int:
        """How many it was given."""
        return len(self._token_ids)

    def take(self, token_ids: Sequence[int], restarts: Restarts) -> None:
        """These tokens follow those that came before. A token that the grammar does not allow sets ``error``."""
        self._token_ids += token_ids
        if token_ids and self.error is None and not self._consume(token_ids) and not self._begin_again(restarts):
            self.fail()

    def compute(self, address: int, num_bytes: int, restarts: Restarts) -> None:
        """Write the mask of the next token to memory. A grammar whose masks take too long sets ``error``.

        All requests of a step wait for the slowest mask.
        """
        is_written = self._write(address, num_bytes)
        if not is_written and self._begin_again(restarts):
            is_written = self._write(address, num_bytes)
        self._num_masks += 1
        if not is_written:
            self.fail(self.matcher.get_error() or "its mask could not be computed")
        elif self._budget_s < 0:
            self.fail("its masks take too long")

    def fail(self, why: str = "") -> None:
        """The matcher has failed, or ``why`` says what has."""
        if self.error is None:
            why = why or self.matcher.get_error() or "no token may come next"
            line = why.split("\n")[0]
            self.error = InvalidRequestError(f"the grammar can't be followed any further: {line}", field=FIELD)

    @property
    def _budget_s(self) -> float:
        return _FREE_S + _MASK_S * self._num_masks - self._spent_s

    def _begin_again(self, restarts: Restarts) -> bool:
        """Whether another matcher, which shares nothing, is where this one should be."""
        budget_s = min(self._budget_s, restarts.left_s)
        if self._start_alone is None or budget_s <= 0:
            return False
        began = time.thread_time()
        start_alone, self._start_alone = self._start_alone, None
        try:
            matcher = start_alone(budget_s)
        except BaseException:  # as in _consume
            logger.exception("a grammar could not be compiled again")
            matcher = None
        if matcher is not None:
            self.matcher = matcher
        is_there = matcher is not None and self._consume(self._token_ids)
        spent_s = time.thread_time() - began
        self._spent_s += spent_s
        restarts.left_s -= spent_s
        return is_there

    def _consume(self, token_ids: Sequence[int]) -> bool:
        try:
            return self.matcher.consume_tokens(list(token_ids))
        except BaseException:  # a panic in Rust is no Exception, and only this request may end with it
            logger.exception("tokens could not be followed")
            return False

    def _write(self, address: int, num_bytes: int) -> bool:
        began = time.thread_time()
        try:
            self.matcher.unsafe_compute_mask_ptr(address, num_bytes)
        except BaseException:  # as above
            logger.exception("a mask could not be computed")
            return False
        finally:
            self._spent_s += time.thread_time() - began
        return not self.matcher.is_error()


@dataclass(frozen=True)
class TokenMasks:
    """Which tokens rows may choose.

    Attributes:
        rows: ``[M]`` row numbers.
        bits: ``[M, ceil(V / 32)]`` int32: bit ``i % 32`` of word ``i // 32`` allows token ``i``.
    """

    rows: list[int]
    bits: npt.NDArray[np.int32]


class PendingMasks:
    """Masks that a thread computes."""

    def __init__(self, masks: TokenMasks, computed: Future[None]) -> None:
        self._masks = masks
        self._computed = computed

    def read(self) -> TokenMasks:
        """Wait for them."""
        self._computed.result()
        return self._masks


class MaskThread:
    """Computes the masks of steps, one after the other, in a thread that gives the GIL up meanwhile."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quartet-masks")
        self._has_begun = False

    def begin(self, requests: Sequence[RunningRequest]) -> PendingMasks | None:
        """Begin with the masks for the next tokens of those ``requests`` that are guided; ``None``: none is.

        All of their tokens must be known.
        """
        guided = [(row, running) for row, running in enumerate(requests) if running.guide is not None]
        if not guided:
            return None
        jobs = [_Job.of(running) for _, running in guided]
        masks = TokenMasks([row for row, _ in guided], np.empty((len(jobs), self._num_words), np.int32))
        if self._has_begun:
            return PendingMasks(masks, self._thread.submit(self._fill, jobs, masks.bits))
        self._has_begun = True
        with deep_stacks():  # the thread begins with its first job
            return PendingMasks(masks, self._thread.submit(self._fill, jobs, masks.bits))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fill(self, jobs: Sequence[_Job], bits: npt.NDArray[np.int32]) -> None:
        restarts = Restarts()
        for job in jobs:
            job.guide.take(job.new_token_ids, restarts)
        row_bytes, address = bits.shape[1] * bits.itemsize, bits.ctypes.data
        for row, job in enumerate(jobs):
            if job.guide.error is None:
                job.guide.compute(address + row * row_bytes, row_bytes, restarts)
        for row, job in enumerate(jobs):
            if job.guide.error is None and not bits[row].any():
                job.guide.fail()
            if job.guide.error is not None:
                bits[row] = -1  # whatever it chooses is dropped
            elif job.late_ids:
                _put_off(bits[row], job.late_ids)


@dataclass(frozen=True)
class _Job:
    """``late_ids``: tokens that may end the output only if nothing else may come."""

    guide: Guide
    new_token_ids: Sequence[int]
    late_ids: Sequence[int]

    @classmethod
    def of(cls, running: RunningRequest) -> _Job:
        guide, sampling = running.guide, running.sampling
        assert guide is not None, "it is guided"
        new = running.seq.token_ids[running.num_prompt_tokens + guide.num_tokens :]
        if running.num_output_tokens < sampling.min_tokens:
            return cls(guide, new, tuple(running.stop_ids))
        return cls(
            guide, new, tuple(running.stop_ids.difference(sampling.stop_token_ids)) if sampling.ignore_eos else ()
        )


def _put_off(bits: npt.NDArray[np.int32], token_ids: Sequence[int]) -> None:
    """Take ``token_ids`` out of one row, unless nothing else is left."""
    rest = bits.view(np.uint32).copy()
    for token_id in token_ids:
        rest[token_id // _WORD_BITS] &= ~np.uint32(1 << (token_id % _WORD_BITS))
    if rest.any():
        bits[:] = rest.view(np.int32)
