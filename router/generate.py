"""One way for a request: prepared, placed, prefilled, decoded, choice by choice; its sink takes the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from quartet.api.answer import AnswerSink
from quartet.api.fleet import Explanation
from quartet.api.output import ChoiceOutput, OutputSettings
from quartet.api.placement import PlacedRequest
from quartet.api.request import Accepted, ChoiceFinished, ChoicePlacement, GenerateStart, Resume, TimeBreakdown, Usage
from quartet.engine.base import FinishReason
from quartet.errors import NoSigningKeyError, RequestCancelledError, ServingError
from quartet.text.text_stream import TextStream
from router.attempts import ChoiceRun, draw_ticket
from router.context import PipelineTools
from router.explain import explain
from router.media.request import RequestMedia
from router.place import PlaceRun, told_placement
from router.policy.base import Placement
from router.prepare import ArrivedRequest, PreparedRequest, run_prepared
from router.request_log import RequestLog, first_error, outcome_of


class Pipeline:
    """Runs requests."""

    def __init__(self, tools: PipelineTools) -> None:
        """Nothing runs yet."""
        self._tools = tools
        self._running: set[GenerateRun | PlaceRun] = set()

    @property
    def num_running(self) -> int:
        """Requests between arrival and end."""
        return len(self._running)

    def generate(
        self, start: GenerateStart, sink: AnswerSink, *, resume: Resume | None = None, traceparent: str = ""
    ) -> GenerateRun:
        """Run a request; what it is answered with goes to ``sink``, its failure too."""
        run = GenerateRun(ArrivedRequest.now(start, resume, traceparent), self._tools, sink)
        self._begun(run)
        run.begin(self._ended)
        return run

    async def place(
        self, start: GenerateStart, *, resume: Resume | None = None, traceparent: str = ""
    ) -> PlacedRequest:
        """Run a request as far as its prefill, for a client that fetches the tokens itself.

        Raises:
            NoSigningKeyError: this router has no key.
            ServingError: it failed, and nothing is left of it.
        """
        tools = self._tools
        if tools.signer is None:
            raise NoSigningKeyError("this router has no key to sign placements with")
        run = PlaceRun(ArrivedRequest.now(start, resume, traceparent), tools, tools.signer)
        self._begun(run)
        try:
            return await run.run()
        finally:
            self._ended(run)

    async def explain(self, start: GenerateStart) -> Explanation:
        """Where a request would go now. Raises ``ServingError`` as it would be refused before it waits for room."""
        return await explain(start, self._tools)

    def abort_all(self, error: ServingError) -> None:
        """End every running request with ``error``."""
        for run in tuple(self._running):
            run.abort(error)

    def _begun(self, run: GenerateRun | PlaceRun) -> None:
        self._running.add(run)

    def _ended(self, run: GenerateRun | PlaceRun) -> None:
        self._running.discard(run)


class GenerateRun:
    """One request, from arrival to the end of all its choices."""

    def __init__(self, arrived: ArrivedRequest, tools: PipelineTools, sink: AnswerSink) -> None:
        """``begin`` begins it."""
        self._arrived = arrived
        self._tools = tools
        self._sink = sink
        self._log = RequestLog(arrived.request_id, arrived.start, tools.attempts.metrics)
        self._outputs: dict[int, ChoiceOutput] = {}
        self._is_accepted = False
        self._placed_choices: set[int] = set()
        self._finished: set[int] = set()
        self._num_prompt_tokens = 0
        self._model_fingerprint = ""
        self._media: RequestMedia | None = None
        self._seed = arrived.start.seed or 0
        self._work: asyncio.Task[None] | None = None
        self._on_end: Callable[[GenerateRun], None] = _nothing
        self._is_cancelled = False
        self._abort_error: ServingError | None = None

    def begin(self, on_end: Callable[[GenerateRun], None]) -> None:
        """Run; ``on_end`` is told when it has ended and holds nothing any more."""
        self._on_end = on_end
        self._work = asyncio.create_task(self._run(), name=f"request-{self._arrived.request_id}")
        self._work.add_done_callback(self._settle)

    def cancel(self) -> None:
        """End it early: each choice that has not ended gets its end, CANCELLED."""
        self._is_cancelled = True
        assert self._work is not None, "it has begun"
        self._work.cancel()

    def abort(self, error: ServingError) -> None:
        """End it with ``error``."""
        self._abort_error = error
        assert self._work is not None, "it has begun"
        self._work.cancel()

    async def drop(self) -> None:
        """Nobody wants the answer any more: end it, and wait until it holds nothing. Harmless once it has ended."""
        assert self._work is not None, "it has begun"
        if not self._work.done():
            self._work.cancel()
            await asyncio.wait([self._work])

    def _settle(self, work: asyncio.Task[None]) -> None:
        """Tell the sink how the work ended."""
        if not work.cancelled():
            error = work.exception()
            self._sink.end() if error is None else self._fail(error)
        elif self._is_cancelled and self._abort_error is None:
            self._end_cancelled()
        else:
            # Most likely nobody reads any more.
            self._fail(self._abort_error or RequestCancelledError("the request was dropped"))
        self._log.write(time.monotonic() - self._arrived.arrived_at)
        self._on_end(self)

    async def _run(self) -> None:
        await run_prepared(self._arrived, self._tools, self._generate, late="did not end")

    async def _generate(self, request: PreparedRequest) -> None:
        self._num_prompt_tokens, self._seed = len(request.prompt_token_ids), request.seed
        self._model_fingerprint = request.pool.key.fingerprint
        self._media = request.media
        self._make_outputs(request)
        ticket = draw_ticket(request, len(self._outputs), self._tools.attempts)
        works = [
            self._run_choice(
                choice, ChoiceRun(request, choice, output, self._tools.attempts, ticket, partial(self._placed, choice))
            )
            for choice, output in self._outputs.items()
        ]
        if len(works) == 1:
            await works[0]
            return
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)

    def _make_outputs(self, request: PreparedRequest) -> None:
        metrics = self._tools.attempts.metrics.for_model(request.pool.key.model_name)
        options = request.start.text_options
        settings = OutputSettings(
            num_prompt_tokens=self._num_prompt_tokens,
            arrived_at=request.arrived_at,
            tokenize_s=request.tokenize_s,
            omits_token_ids=options.omit_token_ids,
            ttft=metrics.ttft,
            itl=metrics.itl,
            num_media_tokens=request.num_media_tokens,
            num_placeholders=request.num_placeholders,
        )
        for choice in self._arrived.choices:
            text = TextStream(
                None if options.omit_text else request.text.tokenizer,
                options.stop_strings,
                include_stop=options.include_stop_string,
                skip_special_tokens=not options.show_special_tokens,
                prompt_tail=request.prompt_tail,
            )
            output = self._outputs[choice] = ChoiceOutput(settings, choice, text, self._sink)
            if request.media is not None:
                output.note_media(request.media.fetch_s)
        self._log.prepared(request, tuple(self._outputs.values()))
        resume = self._arrived.resume
        if resume is not None:
            self._outputs[resume.choice].resume(resume)

    async def _run_choice(self, choice: int, run: ChoiceRun) -> None:
        reason = await run.run()
        if not self._is_accepted:
            self._accept()  # resumed where nothing was left to do
        self._finish(self._outputs[choice].finish(reason))

    def _placed(self, choice: int, placement: Placement) -> None:
        self._log.placed(placement)
        if choice in self._placed_choices:
            return  # a later attempt: the client was told where the first one went
        self._placed_choices.add(choice)
        told = told_placement(choice, placement)
        if self._is_accepted:
            self._sink.place(told)
        else:
            self._accept(told)

    def _accept(self, *choices: ChoicePlacement) -> None:
        self._is_accepted = True
        accepted = Accepted(
            request_id=self._arrived.request_id,
            choices=choices,
            num_prompt_tokens=self._num_prompt_tokens,
            seed=self._seed,
            model_fingerprint=self._model_fingerprint,
            encode=None if self._media is None else self._media.encode_rank,
        )
        self._sink.accept(accepted)

    def _finish(self, finished: ChoiceFinished) -> None:
        self._finished.add(finished.choice)
        self._log.finished(finished)
        self._sink.finish(finished)

    def _end_cancelled(self) -> None:
        """The client cancelled, maybe before anything was placed: it still gets an ``accepted`` first."""
        try:
            self._arrived.check()  # it may not have been looked at yet
        except ServingError as error:
            self._fail(error)
            return
        if not self._is_accepted:
            self._accept()
        for choice in self._arrived.choices:
            if choice not in self._finished:
                self._finish(self._cancelled(choice))
        self._sink.end()

    def _cancelled(self, choice: int) -> ChoiceFinished:
        if self._outputs:
            return self._outputs[choice].finish(FinishReason.CANCELLED)
        usage = Usage(num_prompt_tokens=0, num_cached_tokens=0, num_output_tokens=0, num_attempts=0)
        total_s = time.monotonic() - self._arrived.arrived_at
        time_breakdown = TimeBreakdown(total_s=total_s)
        return ChoiceFinished(choice=choice, reason=FinishReason.CANCELLED, usage=usage, time=time_breakdown)

    def _fail(self, error: BaseException) -> None:
        first = first_error(error)
        self._log.failed(outcome_of(first))
        self._sink.end(first)


def _nothing(_run: GenerateRun) -> None:
    """Nobody is to be told of the end."""
