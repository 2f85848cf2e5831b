"""Place: runs a request up to its prefill; its client fetches the tokens from the decode workers itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from quartet.api.output import ChoiceOutput, first_error
from quartet.api.placement import PlacedChoice, PlacedParsing, PlacedRequest
from quartet.api.request import ChoiceFinished, TextOptions
from quartet.engine.base import FinishReason
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import ServingError, UnsupportedFieldError
from quartet.streams.messages import SignedPlacement
from quartet.text.parsed import OutputParsing, Parsed
from router.attempts import ChoiceRun, run_choices, to_choice_placement
from router.context import RouterContext
from router.fair_queue import Standing
from router.media.request import UNARY_COPIES, RequestMedia
from router.policy.base import Placement
from router.prepare import RouterRequest, resume_in_turns, run_prepared
from router.request_log import RequestLog
from router.signing import Gang, SignedRun, Signer
from router.untaken import Untaken
from router.workers import PoolKey

# The client makes the text; the router only counts tokens.
_NO_TEXT = TextOptions(omit_text=True)


class PlaceRun:
    """One call of Place. Unless it ends well, nothing is left behind."""

    def __init__(self, request: RouterRequest, context: RouterContext, signer: Signer) -> None:
        """Prepare the call; ``run`` runs it."""
        self._request = request
        self._context = context
        self._signer = signer
        self._log = RequestLog(request, context.metrics, path="place", usage=context.usage)
        self._choices: dict[int, _Choice] = {}
        self._untaken: Sequence[Untaken] = ()
        self._given: Sequence[SignedPlacement | ChoiceFinished] = ()  # what the client gets for each choice
        self._task: asyncio.Task[object] | None = None
        self._abort_error: ServingError | None = None

    def abort(self, error: ServingError) -> None:
        """End it with ``error``."""
        self._abort_error = error
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> PlacedRequest:
        """Place every choice. If cancelled, it releases everything.

        Raises:
            ServingError: a choice can't be placed, or the request is impossible.
        """
        self._task = asyncio.current_task()
        if self._request.trace is not None:
            self._request.trace.name_in_logs()
        try:
            self._check_budgets()
            placed = await run_prepared(
                self._request, self._context, self._place, late="was not placed", num_copies=UNARY_COPIES
            )
        except BaseException as error:
            shown = self._abort_error or first_error(error) or error
            self._release()
            self._write_log(shown)
            if shown is error:
                del shown  # its frames know this one
                raise
            raise shown from error
        finally:
            self._task = None  # its error's frames know this
            self._request.forget_prompt()
            for untaken in self._untaken:
                untaken.drop()  # what was signed is kept until it is taken up
        self._write_log(None)
        return placed

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Take a choice's first token, as ``DeltaSink`` says; the choice's output has the token itself."""
        self._choices[choice].logprobs.extend(logprobs)

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Never called: they are refused."""
        raise AssertionError("nobody has asked for them")

    def add_parsed(
        self,
        choice: int,
        token_offset: int,
        token_ids: Sequence[int],
        parsed: Parsed,
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Never called: there is no text."""
        raise AssertionError("the client parses the text")

    def _check_budgets(self) -> None:
        """Refuse a tenant that takes nothing up, before any work is done. Raises ``PlacementBudgetError``."""
        asked = self._request.asked
        pool = self._context.table.pool(asked.model, time.monotonic())
        if pool is not None:
            self._context.untaken.check(asked.tenant, pool.key)

    async def _place(self, request: RouterRequest) -> PlacedRequest:
        if request.start.output.num_prompt_logprobs is not None:
            message = "placed requests have no log probabilities of their prompts; Generate gives them"
            raise UnsupportedFieldError(message, field="output.num_prompt_logprobs")
        if request.media is not None:
            self._check_media(request.media, request.pool.key)
        await self._make_choices(request)
        await self._place_choices(request)
        choices = self._choices.values()
        placed = tuple(choice.placed() for choice in choices)
        self._given = [choice.next for choice in placed]
        return PlacedRequest(
            request_id=request.request_id,
            attempt=max(choice.last_attempt for choice in choices),
            seed=request.seed,
            # If the prefill worker got media files, it reported this number.
            num_prompt_tokens=max(choice.output.usage().num_prompt_tokens for choice in choices),
            choices=placed,
            model=request.pool.key.model_name,
            model_fingerprint=request.pool.key.fingerprint,
            prompt_tail_token_ids=tuple(request.prompt_tail),
            tokenize_s=request.tokenize_s,
            parsing=_to_placed(request.parsing),
        )

    def _check_media(self, media: RequestMedia, pool: PoolKey) -> None:
        """Refuse media that only decode workers could process: they would need the media along with the signature."""
        candidates = self._context.table.snapshot(pool, time.monotonic()).prefill
        if not any(media.needs <= candidate.media for candidate in candidates):
            message = "no prefill worker takes this request's media, so it can't be placed; Generate runs it"
            raise UnsupportedFieldError(message, field=media.field)

    async def _make_choices(self, request: RouterRequest) -> None:
        outputs = request.make_outputs(self, _NO_TEXT, self._context.metrics)
        await resume_in_turns(request, outputs, self._context)
        self._choices = {number: _Choice(number, output) for number, output in outputs.items()}
        self._log.prepared(outputs.values())

    async def _place_choices(self, request: RouterRequest) -> None:
        choices, gang = tuple(self._choices.values()), Gang(len(self._choices))
        num_tokens = request.num_prompt_tokens + max(len(choice.output.token_ids) for choice in choices)
        tenant, pool = request.start.tenant, request.pool.key
        self._untaken = await self._context.untaken.hold(tenant, pool, len(choices), num_tokens)
        untaken = dict(zip(choices, self._untaken, strict=True))

        async def place(choice: _Choice, standing: Standing) -> None:
            await self._place_choice(request, choice, standing, gang, untaken[choice])

        await run_choices(request, self._context, choices, place)

    async def _place_choice(
        self, request: RouterRequest, choice: _Choice, standing: Standing, gang: Gang, untaken: Untaken
    ) -> None:
        avoid: frozenset[str] = frozenset()
        if request.resume is not None:
            # The client alone saw what failed at these workers.
            avoid = self._context.table.placed_at(request.request_id, choice.number)
        run = ChoiceRun(request, choice.number, choice.output, self._context, standing, self._placed, avoid)
        choice.end = await run.place(self._signer, gang, untaken)

    def _placed(self, number: int, placement: Placement) -> None:
        self._choices[number].placement = placement
        self._log.placement = placement

    def _write_log(self, error: BaseException | None) -> None:
        finished = [given for given in self._given if isinstance(given, ChoiceFinished)]
        self._log.write(finished, error, num_given_to_client=len(self._given) - len(finished))

    def _release(self) -> None:
        for choice in self._choices.values():
            if isinstance(choice.end, SignedRun):
                choice.end.release(self._context.hops)
        self._context.admission.wake()


def _to_placed(parsing: OutputParsing | None) -> PlacedParsing | None:
    if parsing is None:
        return None
    format = parsing.format
    return PlacedParsing(
        reasoning_parser=format.reasoning_parser,
        tool_call_parser=format.tool_call_parser,
        prompt_end=parsing.prompt_end,
    )


class _Choice:
    """One choice on its way through Place."""

    def __init__(self, number: int, output: ChoiceOutput) -> None:
        self.number = number
        self.output = output
        self.placement: Placement | None = None
        self.end: SignedRun | FinishReason | None = None
        self.logprobs: list[TokenLogprobs] = []
        # A resumed choice's output starts with what the client already has.
        self._num_given_tokens = len(output.token_ids)
        self._num_given_attempts = output.num_attempts

    @property
    def last_attempt(self) -> int:
        """The number of its last attempt; if it needed no new one, the number of the attempt before."""
        return max(self.output.num_attempts - 1, 0)

    def placed(self) -> PlacedChoice:
        """What the client needs to continue."""
        assert self.end is not None, "it was placed"
        times = self.output.time_breakdown()
        return PlacedChoice(
            choice=self.number,
            placement=None if self.placement is None else to_choice_placement(self.number, self.placement),
            token_ids=tuple(self.output.token_ids[self._num_given_tokens :]),
            logprobs=tuple(self.logprobs),
            next=self.end.signed if isinstance(self.end, SignedRun) else self.output.finish(self.end),
            num_cached_tokens=self.output.usage().num_cached_tokens,
            num_attempts=self.output.num_attempts - self._num_given_attempts,
            router_queue_s=times.router_queue_s,
            prefill_s=times.prefill_s,
            prefill_queue_s=times.prefill_queue_s,
        )
