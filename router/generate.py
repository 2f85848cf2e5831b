"""The path of a request: prepare, place, prefill and decode each choice; the request's sink takes the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from quartet.api.answer import AnswerSink
from quartet.api.fleet import Explanation
from quartet.api.openai.requests import ApiKey
from quartet.api.output import ChoiceOutput, RunningChoices
from quartet.api.placement import PlacedRequest
from quartet.api.request import Accepted, AskedStart, ChoicePlacement, Relayed, Resume
from quartet.errors import NoSigningKeyError, ServingError
from router.attempts import ChoiceRun, run_choices, to_choice_placement
from router.context import RouterContext
from router.explain import ExplainTurns, explain
from router.fair_queue import Standing
from router.place import PlaceRun
from router.policy.base import Placement
from router.prepare import Prepare, RouterRequest, resume_in_turns, run_prepared
from router.rate_limits import Charge
from router.request_log import RequestLog


class PlaceCall(Protocol):
    """One call of Place."""

    async def run(self) -> PlacedRequest:
        """Place every choice. Raises ``ServingError``."""
        ...

    def abort(self, error: ServingError) -> None:
        """End it with ``error``."""
        ...


class Pipeline:
    """Runs requests."""

    def __init__(self, context: RouterContext) -> None:
        """Start without requests."""
        self._context = context
        self._running: set[GenerateRun | PlaceCall] = set()
        self._explain_turns = ExplainTurns(context.admission.share)

    @property
    def context(self) -> RouterContext:
        """What all requests share."""
        return self._context

    @property
    def num_running(self) -> int:
        """Requests between arrival and end."""
        return len(self._running)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that running requests of ``generate`` have given so far. It takes time for each of them."""
        return sum([run.num_output_tokens for run in self._running if isinstance(run, GenerateRun)])

    def generate(
        self,
        start: AskedStart,
        sink: AnswerSink,
        *,
        resume: Resume | None = None,
        traceparent: str = "",
        relayed: Relayed | None = None,
        on_queued: Callable[[], None] | None = None,
        received_at: float | None = None,
        key: ApiKey | None = None,
        charge: Charge | None = None,
    ) -> GenerateRun:
        """Run a request; its answer goes to ``sink``, and so does its failure.

        ``on_queued`` is called when a choice of it begins to wait for a worker: it has passed all checks then.
        ``received_at`` is as for ``RouterRequest.begin_trace``. ``key`` is the API key that its client has shown.
        ``charge``: it is let in already, and charged so.
        """
        request = RouterRequest(start, resume, traceparent, relayed or Relayed(), key, charge)
        if self._context.tracer is not None:
            request.begin_trace(self._context.tracer, received_at)
        run = self._make_run(request, sink, on_queued)
        self._running.add(run)
        return run

    def _make_run(self, request: RouterRequest, sink: AnswerSink, on_queued: Callable[[], None] | None) -> GenerateRun:
        return GenerateRun(request, self._context, sink, self._running.discard, on_queued)

    async def place(
        self,
        start: AskedStart,
        *,
        resume: Resume | None = None,
        traceparent: str = "",
        relayed: Relayed | None = None,
    ) -> PlacedRequest:
        """Run a request up to its prefill, for a client that fetches the tokens itself.

        Raises:
            NoSigningKeyError: this router has no key.
            ServingError: it failed and left nothing behind.
        """
        request = RouterRequest(start, resume, traceparent, relayed or Relayed())
        if self._context.tracer is not None:
            request.begin_trace(self._context.tracer)
        run = self._make_place(request)
        self._running.add(run)
        try:
            return await run.run()
        finally:
            self._running.discard(run)

    def _make_place(self, request: RouterRequest) -> PlaceCall:
        signer = self._context.signer
        if signer is None:
            raise NoSigningKeyError("this router has no key to sign placements with")
        return PlaceRun(request, self._context, signer)

    async def explain(self, start: AskedStart) -> Explanation:
        """Where a request would go now. Raises ``ServingError`` as it would be refused before it waits for room."""
        return await explain(start, self._context, self._explain_turns)

    async def drop_all(self, runs: Iterable[GenerateRun]) -> None:
        """Their client no longer reads: end all of ``runs`` at once, and wait until they hold nothing.

        They end also if the caller is cancelled meanwhile.
        """
        works = [work for run in runs if (work := run.cancel_work()) is not None]
        if works:
            await asyncio.wait(works)

    def abort_all(self, error: ServingError) -> None:
        """End every running request with ``error``."""
        for run in tuple(self._running):
            run.abort(error)


class GenerateRun:
    """One request, from arrival to the end of all its choices."""

    def __init__(
        self,
        request: RouterRequest,
        context: RouterContext,
        sink: AnswerSink,
        on_end: Callable[[GenerateRun], None],
        on_queued: Callable[[], None] | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        """Begin to run; ``on_end`` is called once the request has ended and holds nothing any more.

        ``prepare`` is that of ``run_prepared``.
        """
        self._request = request
        self._context = context
        self._sink = sink
        self._choices = RunningChoices(request.choices, sink, request.arrived_at)
        self._log = RequestLog(request, context.metrics, usage=context.usage)
        self._placed_choices: set[int] = set()
        self._on_end = on_end
        self._on_queued = on_queued
        self._is_cancelled = False
        self._abort_error: ServingError | None = None
        run = partial(run_prepared, request, context, self._generate, late="did not end", prepare=prepare)
        work = run() if request.trace is None else request.trace.named_in_logs(run)
        self._work: asyncio.Task[None] | None = asyncio.create_task(work, name=f"request-{request.request_id}")
        self._work.add_done_callback(self._settle)

    @property
    def request_id(self) -> str:
        """Names it in every log of the system."""
        return self._request.request_id

    @property
    def num_output_tokens(self) -> int:
        """Tokens that its choices have given so far, without those that its client brought."""
        num_tokens = sum([len(output.token_ids) for output in self._choices.outputs.values()])
        return max(num_tokens - self._request.num_resumed_tokens, 0)

    def cancel(self) -> None:
        """End it early: each choice that has not ended ends as CANCELLED."""
        self._is_cancelled = True
        self.cancel_work()

    def abort(self, error: ServingError) -> None:
        """End it with ``error``."""
        self._abort_error = error
        self.cancel_work()

    async def drop(self) -> None:
        """The client no longer reads: end it, and wait until it holds nothing. Harmless after its end."""
        if (work := self.cancel_work()) is not None:
            await asyncio.wait([work])

    def cancel_work(self) -> asyncio.Task[None] | None:
        """Cancel the task that runs it, and return that; ``None``: it has ended."""
        if self._work is not None:
            self._work.cancel()
        return self._work

    def _settle(self, work: asyncio.Task[None]) -> None:
        """Report to the sink and the log how the work ended."""
        is_cancelled = self._is_cancelled and self._abort_error is None
        error: BaseException | None = None
        try:
            error = self._choices.settle(
                work, cancelled=self._accept_cancelled if is_cancelled else None, dropped=self._abort_error
            )
            self._log.write(self._choices.finished, error)
        finally:  # a sink that fails must not keep the prompt, nor a drain waiting
            self._forget(error)
            self._on_end(self)

    def _forget(self, error: BaseException | None) -> None:
        """Let the prompt go, and the task and the error, whose frames know it and this.

        An error that is a bug of ours keeps its traceback, for the log.
        """
        self._work = None
        self._request.forget_prompt()
        if isinstance(error, ServingError):
            error.__traceback__ = error.__cause__ = error.__context__ = None

    async def _generate(self, request: RouterRequest) -> None:
        context = self._context
        outputs = request.make_outputs(self._sink, request.start.text_options, context.metrics)
        if request.media is not None:
            for output in outputs.values():
                output.add_time("media_s", request.media.fetch_s)
        if request.resume is not None:
            await resume_in_turns(request, outputs, context)
        self._choices.outputs = outputs
        self._log.prepared(outputs.values())
        await run_choices(request, context, tuple(outputs.items()), self._run_choice)

    async def _run_choice(self, numbered: tuple[int, ChoiceOutput], standing: Standing) -> None:
        choice, output = numbered
        if self._on_queued is not None:
            self._on_queued()
        reason = await ChoiceRun(self._request, choice, output, self._context, standing, self._placed).run()
        if not self._choices.is_accepted:
            self._choices.accept(self._accepted())  # the resumed request had nothing left to do
        self._choices.finish(output.finish(reason))

    def _placed(self, choice: int, placement: Placement) -> None:
        self._log.placement = placement
        if choice in self._placed_choices:
            return  # a later attempt: the client knows only the first placement
        self._placed_choices.add(choice)
        shown = to_choice_placement(choice, placement)
        if self._choices.is_accepted:
            self._sink.placed(shown)
        else:
            self._choices.accept(self._accepted(shown))

    def _accepted(self, *choices: ChoicePlacement) -> Accepted:
        request = self._request
        return Accepted(
            request_id=request.request_id,
            choices=choices,
            num_prompt_tokens=len(request.prompt_token_ids),
            seed=request.seed,
            model_fingerprint=request.pool.key.fingerprint,
            encode=None if request.media is None else request.media.encode_rank,
        )

    def _accept_cancelled(self) -> Accepted:
        """The ``Accepted`` of a request that was cancelled before it was placed, and maybe before it was checked."""
        request = self._request
        request.check()
        if self._choices.outputs:
            return self._accepted()
        return Accepted(request_id=request.request_id, choices=(), num_prompt_tokens=0, seed=request.asked.seed or 0)
