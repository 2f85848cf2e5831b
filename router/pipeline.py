"""One way for a request: prepared, placed, prefilled, decoded, choice by choice; the client reads the parts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

from quartet.engine.base import FinishReason
from quartet.errors import RequestCancelledError, RequestTimeoutError, ServingError
from quartet.rpc.check_start import check_start
from quartet.rpc.edge import (
    Accepted,
    AnswerPart,
    ChoiceFinished,
    ChoicePlacement,
    GenerateStart,
    TimeBreakdown,
    Usage,
)
from router.answer import Answer
from router.attempts import AttemptTools, ChoiceRun
from router.choice_output import ChoiceOutput
from router.hops import ModelTexts
from router.policy.base import Placement
from router.prepared import prepare
from router.request_log import RequestLog
from router.worker_table import WorkerTable


@dataclass(frozen=True, kw_only=True)
class PipelineTools:
    """What requests run on; ``max_timeout_s`` caps the time of each."""

    table: WorkerTable
    texts: ModelTexts
    attempts: AttemptTools
    max_timeout_s: float


class Pipeline:
    """Runs requests."""

    def __init__(self, tools: PipelineTools) -> None:
        self._tools = tools
        self._running: set[GenerateRun] = set()

    @property
    def num_running(self) -> int:
        """Requests between arrival and end."""
        return len(self._running)

    def generate(self, start: GenerateStart, *, traceparent: str = "") -> GenerateRun:
        """A request that begins when its parts are first asked for."""
        return GenerateRun(start, traceparent, self._tools, self._running)

    def abort_all(self, error: ServingError) -> None:
        """End every running request with ``error``."""
        for run in tuple(self._running):
            run.abort(error)


class GenerateRun:
    """One request, from arrival to the end of all its choices."""

    def __init__(self, start: GenerateStart, traceparent: str, tools: PipelineTools, running: set[GenerateRun]) -> None:
        """The run is among ``running`` while it runs."""
        self._start = start
        self._traceparent = traceparent
        self._tools = tools
        self._all_running = running
        self._arrived_at = time.monotonic()
        self._request_id = secrets.token_hex(16)
        self._answer = Answer()
        self._log = RequestLog(self._request_id, start, tools.attempts.metrics)
        self._outputs: list[ChoiceOutput] = []
        self._placed_choices: set[int] = set()
        self._finished: dict[int, ChoiceFinished] = {}
        self._num_prompt_tokens = 0
        self._seed = start.seed or 0
        self._work: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._abort_error: ServingError | None = None

    def cancel(self) -> None:
        """End it early: each choice that has not ended gets its end, CANCELLED."""
        self._is_cancelled = True
        if self._work is not None:
            self._work.cancel()

    def abort(self, error: ServingError) -> None:
        """End it with ``error``."""
        self._abort_error = error
        if self._work is not None:
            self._work.cancel()

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """The answer: accepted, placements, deltas and an end for each choice. Closing it early frees all it holds.

        Raises:
            ServingError: the request failed.
        """
        self._work = asyncio.create_task(self._run(), name=f"request-{self._request_id}")
        self._work.add_done_callback(self._settle)
        self._all_running.add(self)
        self._tools.attempts.metrics.set_running_requests(len(self._all_running))
        if self._is_cancelled or self._abort_error is not None:
            self._work.cancel()
        try:
            async for part in self._answer.parts():
                yield part
        finally:
            self._work.cancel()
            try:
                await asyncio.wait([self._work])
            finally:  # whoever reads may be cancelled once more just here
                self._all_running.discard(self)
                self._tools.attempts.metrics.set_running_requests(len(self._all_running))
                self._log.write(time.monotonic() - self._arrived_at)

    def _settle(self, work: asyncio.Task[None]) -> None:
        """Tell the client how the work ended."""
        if not work.cancelled():
            error = work.exception()
            self._answer.end() if error is None else self._fail(error)
        elif self._is_cancelled and self._abort_error is None:
            self._end_cancelled()
        else:
            # Most likely nobody reads any more.
            self._fail(self._abort_error or RequestCancelledError("the request was dropped"))

    async def _run(self) -> None:
        check_start(self._start)
        timeout_s = min(self._start.timeout_s or self._tools.max_timeout_s, self._tools.max_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._generate(self._arrived_at + timeout_s)
        except TimeoutError as error:
            raise RequestTimeoutError(f"the request did not end within {timeout_s:g} s") from error

    async def _generate(self, deadline: float) -> None:
        request = await prepare(
            self._start,
            self._tools.table,
            self._tools.texts,
            request_id=self._request_id,
            traceparent=self._traceparent,
            arrived_at=self._arrived_at,
            deadline=deadline,
        )
        self._num_prompt_tokens, self._seed = len(request.prompt_token_ids), request.seed
        metrics = self._tools.attempts.metrics.for_model(request.pool.key.model_name)
        ticket = self._tools.attempts.admission.ticket(request.pool.key, self._start.priority)
        self._outputs = [
            ChoiceOutput(request, choice, metrics, self._answer) for choice in range(self._start.num_choices)
        ]
        self._log.prepared(request, self._outputs)
        async with asyncio.TaskGroup() as group:
            for choice, output in enumerate(self._outputs):
                on_placed = partial(self._placed, choice)
                run = ChoiceRun(request, choice, output, self._tools.attempts, ticket, on_placed)
                group.create_task(self._run_choice(run))

    async def _run_choice(self, run: ChoiceRun) -> None:
        self._finish(await run.run())

    def _placed(self, choice: int, placement: Placement) -> None:
        self._log.placed(placement)
        if choice in self._placed_choices:
            return  # a later attempt: the client was told where the first one went
        self._placed_choices.add(choice)
        told = ChoicePlacement(choice=choice, prefill=placement.prefill, decode=placement.decode)
        if self._answer.is_accepted:
            self._answer.place(told)
        else:
            self._accept(told)

    def _accept(self, *choices: ChoicePlacement) -> None:
        accepted = Accepted(
            request_id=self._request_id, choices=choices, num_prompt_tokens=self._num_prompt_tokens, seed=self._seed
        )
        self._answer.accept(accepted)

    def _finish(self, finished: ChoiceFinished) -> None:
        self._finished[finished.choice] = finished
        self._log.finished(finished)
        self._answer.finish(finished)

    def _end_cancelled(self) -> None:
        """The client cancelled, maybe before anything was placed: it still gets an ``accepted`` first."""
        try:
            check_start(self._start)  # it may not have been looked at yet
        except ServingError as error:
            self._fail(error)
            return
        if not self._answer.is_accepted:
            self._accept()
        for choice in range(self._start.num_choices):
            if choice not in self._finished:
                self._finish(self._cancelled(choice))
        self._answer.end()

    def _cancelled(self, choice: int) -> ChoiceFinished:
        if self._outputs:
            return self._outputs[choice].finish(FinishReason.CANCELLED)
        usage = Usage(num_prompt_tokens=0, num_cached_tokens=0, num_output_tokens=0, num_attempts=0)
        total_s = time.monotonic() - self._arrived_at
        time_breakdown = TimeBreakdown(total_s=total_s)
        return ChoiceFinished(choice=choice, reason=FinishReason.CANCELLED, usage=usage, time=time_breakdown)

    def _fail(self, error: BaseException) -> None:
        first = _first_error(error)
        self._log.failed(first.reason.lower() if isinstance(first, ServingError) else "internal")
        self._answer.end(first)


def _first_error(error: BaseException) -> BaseException:
    """Of a group, the error that ended the others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
