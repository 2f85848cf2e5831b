"""Place: a request as far as its prefill; its client fetches the tokens from the decode workers itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from quartet.api.output import ChoiceOutput, OutputSettings
from quartet.api.placement import PlacedChoice, PlacedRequest
from quartet.api.request import ChoicePlacement, Resume
from quartet.engine.base import FinishReason
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import ServingError, UnsupportedFieldError
from quartet.text.text_stream import TextStream
from router.admission import Ticket
from router.attempts import ChoiceRun, draw_ticket
from router.context import PipelineTools
from router.media.request import RequestMedia
from router.policy.base import Placement
from router.prepare import ArrivedRequest, PreparedRequest, run_prepared
from router.request_log import RequestLog, first_error, outcome_of
from router.signing import SignedRun, Signer, Together
from router.workers import PoolKey


class PlaceRun:
    """One call of rank. Whatever way it ends but well, nothing is left behind."""

    def __init__(self, arrived: ArrivedRequest, tools: PipelineTools, signer: Signer) -> None:
        """``run`` runs it."""
        self._arrived = arrived
        # It makes no text, so none is owed.
        self._resume = arrived.resume and replace(arrived.resume, num_text_bytes=0)
        self._tools = tools
        self._signer = signer
        self._log = RequestLog(arrived.request_id, arrived.start, tools.attempts.metrics, path="place")
        self._choices: list[_Choice] = []
        self._task: asyncio.Task[object] | None = None
        self._abort_error: ServingError | None = None

    def abort(self, error: ServingError) -> None:
        """End it with ``error``."""
        self._abort_error = error
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> PlacedRequest:
        """Place every choice. Cancelled, it lets go of everything.

        Raises:
            ServingError: a choice can't be placed, or the request is impossible.
        """
        self._task = asyncio.current_task()
        try:
            placed = await run_prepared(self._arrived, self._tools, self._place, late="was not placed")
        except BaseException as error:
            shown = self._abort_error or first_error(error)
            self._log.failed(outcome_of(shown))
            self._let_go()
            if shown is error:
                raise
            raise shown from error
        finally:
            self._log.write(time.monotonic() - self._arrived.arrived_at)
        return placed

    async def _place(self, request: PreparedRequest) -> PlacedRequest:
        if request.media is not None:
            self._check_media(request.media, request.pool.key)
        self._make_choices(request)
        await self._place_choices(request)
        placed = tuple(choice.placed() for choice in self._choices)
        for choice in placed:
            self._log.placed_for_client(choice)
        return PlacedRequest(
            request_id=request.request_id,
            attempt=max(choice.last_attempt for choice in self._choices),
            seed=request.seed,
            # Where files went to prefill workers, these told it.
            num_prompt_tokens=max(choice.output.usage().num_prompt_tokens for choice in self._choices),
            choices=placed,
            model=request.pool.key.model_name,
            model_fingerprint=request.pool.key.fingerprint,
            prompt_tail_token_ids=tuple(request.prompt_tail),
            tokenize_s=request.tokenize_s,
        )

    def _check_media(self, media: RequestMedia, pool: PoolKey) -> None:
        """Refuse what only decode workers could compute: they would need the media with the signature."""
        candidates = self._tools.table.snapshot(pool, time.monotonic()).prefill
        if not any(media.needs <= candidate.media for candidate in candidates):
            message = "no prefill worker takes this request's media, so it can't be placed; Generate runs it"
            raise UnsupportedFieldError(message, field=media.field)

    def _make_choices(self, request: PreparedRequest) -> None:
        metrics = self._tools.attempts.metrics.for_model(request.pool.key.model_name)
        settings = OutputSettings(
            num_prompt_tokens=len(request.prompt_token_ids),
            arrived_at=request.arrived_at,
            tokenize_s=request.tokenize_s,
            omits_token_ids=False,
            ttft=metrics.ttft,
            itl=metrics.itl,
            num_media_tokens=request.num_media_tokens,
            num_placeholders=request.num_placeholders,
        )
        self._choices = [_Choice(number, settings, self._resume) for number in self._arrived.choices]
        self._log.prepared(request, [choice.output for choice in self._choices])

    async def _place_choices(self, request: PreparedRequest) -> None:
        ticket = draw_ticket(request, len(self._choices), self._tools.attempts)
        runs = [self._choice_run(request, choice, ticket) for choice in self._choices]
        together = Together(len(runs))
        if len(runs) == 1:
            await self._place_choice(self._choices[0], runs[0], together)
            return
        async with asyncio.TaskGroup() as group:
            for choice, run in zip(self._choices, runs, strict=True):
                group.create_task(self._place_choice(choice, run, together))

    def _choice_run(self, request: PreparedRequest, choice: _Choice, ticket: Ticket) -> ChoiceRun:
        avoid: frozenset[str] = frozenset()
        if self._resume is not None:
            # Whatever is wrong there, only its client has seen it.
            avoid = self._tools.table.placed_at(request.request_id, choice.number)
        on_placed = partial(self._begun, choice)
        return ChoiceRun(request, choice.number, choice.output, self._tools.attempts, ticket, on_placed, avoid)

    async def _place_choice(self, choice: _Choice, run: ChoiceRun, together: Together) -> None:
        choice.end = await run.place(self._signer, together)

    def _begun(self, choice: _Choice, placement: Placement) -> None:
        choice.placement = placement
        self._log.placed(placement)

    def _let_go(self) -> None:
        for choice in self._choices:
            if isinstance(choice.end, SignedRun):
                choice.end.let_go(self._tools.attempts.hops)
        self._tools.attempts.admission.wake()


class _Choice:
    """One choice's way through Place; it takes its own log probabilities."""

    def __init__(self, number: int, settings: OutputSettings, resume: Resume | None) -> None:
        self.number = number
        self.output = ChoiceOutput(settings, number, TextStream(None), self)
        self.placement: Placement | None = None
        self.end: SignedRun | FinishReason | None = None
        self._logprobs: list[TokenLogprobs] = []
        if resume is not None:
            self.output.resume(resume)
        self._num_given_tokens = len(self.output.token_ids)
        self._num_given_attempts = self.output.num_attempts

    @property
    def last_attempt(self) -> int:
        """The number of its last attempt; of one that needed none, that of the one before."""
        return max(self.output.num_attempts - 1, 0)

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """The first token's log probabilities came."""
        self._logprobs.extend(logprobs)

    def placed(self) -> PlacedChoice:
        """How the client goes on."""
        assert self.end is not None, "it was placed"
        times = self.output.time_breakdown()
        return PlacedChoice(
            choice=self.number,
            placement=self._told_placement(),
            token_ids=tuple(self.output.token_ids[self._num_given_tokens :]),
            logprobs=tuple(self._logprobs),
            next=self.end.signed if isinstance(self.end, SignedRun) else self.output.finish(self.end),
            num_cached_tokens=self.output.usage().num_cached_tokens,
            num_attempts=self.output.num_attempts - self._num_given_attempts,
            router_queue_s=times.router_queue_s,
            prefill_s=times.prefill_s,
            prefill_queue_s=times.prefill_queue_s,
        )

    def _told_placement(self) -> ChoicePlacement | None:
        return None if self.placement is None else told_placement(self.number, self.placement)


def told_placement(choice: int, placement: Placement) -> ChoicePlacement:
    """What a client is told of where a choice went."""
    return ChoicePlacement(
        choice=choice,
        prefill=placement.prefill,
        decode=placement.decode,
        num_matched_tokens=placement.num_cached_tokens,
        cost=placement.cost,
    )
