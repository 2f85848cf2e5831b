"""Sends one request and takes down what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeAlias

from cli.bench.measure import Recorder
from cli.bench.workload import BenchRequest
from quartet.client import ChoiceFinished, Delta, GenerateFields, QuartetClient, RequestPath, Sampling
from quartet.errors import ServingError

#: ``Sender.send``, as loops see it.
Send: TypeAlias = Callable[[BenchRequest, float], Coroutine[None, None, float]]

# Who was turned away, and not told for how long, does not come back at once: that would measure refusals.
_PAUSE_AFTER_ERROR_S = 1.0


@dataclass(frozen=True, kw_only=True)
class SenderConfig:
    """What all requests have in common.

    Attributes:
        model: empty: the only one.
        temperature: ``None``: the default.
        timeout_s: for each request; ``None``: the router's limit.
    """

    path: RequestPath = RequestPath.GENERATE
    model: str = ""
    temperature: float | None = None
    timeout_s: float | None = None


class Sender:
    """Sends requests with one client."""

    def __init__(self, client: QuartetClient, config: SenderConfig, recorder: Recorder) -> None:
        self._client = client
        self._config = config
        self._recorder = recorder

    async def send(self, request: BenchRequest, due_at: float) -> float:
        """Send ``request``, due at ``due_at`` by ``time.perf_counter``, and wait for its end.

        Returns:
            Seconds to wait before sending another in its place: 0, but for one that failed.
        """
        record = self._recorder.begin(due_at)
        try:
            finished: ChoiceFinished | None = None
            async with self._client.generate(request.text, path=self._config.path, **self._fields(request)) as stream:
                async for part in stream:
                    if type(part) is Delta:
                        if part.token_ids:
                            record.tokens(len(part.token_ids))
                    elif type(part) is ChoiceFinished:
                        finished = part
        except ServingError as error:
            record.failed(error)
            return _PAUSE_AFTER_ERROR_S if error.retry_delay_s is None else error.retry_delay_s
        except asyncio.CancelledError:
            record.cut_off()
            raise
        assert finished is not None, "a stream that ends well has told so"
        record.finished(finished)
        return 0.0

    def _fields(self, request: BenchRequest) -> GenerateFields:
        config = self._config
        temperature = Sampling().temperature if config.temperature is None else config.temperature
        sampling = Sampling(max_tokens=request.num_output_tokens, ignore_eos=True, temperature=temperature)
        return {
            "token_ids": request.token_ids,
            "model": config.model,
            "sampling": sampling,
            "timeout_s": config.timeout_s,
        }
