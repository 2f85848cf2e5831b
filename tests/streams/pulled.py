"""Decodes whose outputs wait until a test asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from quartet.engine.sampling import TokenLogprobs
from quartet.errors import WorkerUnavailableError
from quartet.streams.client import DecodeCall, DecodeClient
from quartet.streams.messages import DecodeFinished, DecodeStarted, WorkerStart


@dataclass(kw_only=True)
class DecodeProgress:
    """All that has gathered for one decode since it was last looked at."""

    token_offset: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    started: DecodeStarted | None = None
    finished: DecodeFinished | None = None

    def merge_tokens(self, offset: int, token_ids: Sequence[int]) -> None:
        """Append tokens that begin at ``offset``; those that are here already are dropped."""
        if not self.token_ids:
            self.token_offset = offset
        end = self.token_offset + len(self.token_ids)
        if offset > end:
            raise WorkerUnavailableError(f"the worker lost tokens: {end} to {offset - 1}")
        self.token_ids.extend(token_ids[end - offset :])


class PulledDecode:
    """A decode's sink, and the call itself once it is started."""

    def __init__(self) -> None:
        self.call: DecodeCall
        self._progress = DecodeProgress()
        self._has_progress = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.call.is_over

    def cancel(self) -> None:
        self.call.cancel()

    def started(self, started: DecodeStarted) -> None:
        self._progress.started = started
        self._has_progress.set()

    def take(self, offset: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float) -> bool:
        num_known = len(self._progress.token_ids)
        self._progress.merge_tokens(offset, token_ids)
        num_new = len(self._progress.token_ids) - num_known
        if logprobs and num_new:
            self._progress.logprobs.extend(logprobs[-num_new:])
        self._has_progress.set()
        return True

    async def next(self) -> DecodeProgress:
        """Wait for more; the last one has ``finished`` set. Tokens that came before a bad end come first."""
        ended, has_more = (asyncio.ensure_future(work) for work in (self.call.outcome(), self._has_progress.wait()))
        try:
            await asyncio.wait({ended, has_more}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            has_more.cancel()
            await asyncio.wait({ended, has_more})
        is_ended = ended.done() and not ended.cancelled()
        if self._has_progress.is_set():
            self._has_progress.clear()
            progress, self._progress = self._progress, DecodeProgress()
            if is_ended and ended.exception() is None:
                progress.finished = ended.result()
            return progress
        return DecodeProgress(finished=ended.result())


class PullingDecodeClient:
    """A ``DecodeClient`` whose decodes are pulled."""

    def __init__(self, client: DecodeClient) -> None:
        self.client = client

    def start(self, start: WorkerStart) -> PulledDecode:
        """Start a decode."""
        pulled = PulledDecode()
        pulled.call = self.client.start(start, pulled)
        return pulled

    async def close(self) -> None:
        """Break the stream for good."""
        await self.client.close()
