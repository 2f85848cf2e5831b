"""A request placed by a router, whose tokens come straight from the decode worker."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from functools import partial

from quartet.client.direct_choice import DirectChoice
from quartet.client.direct_tools import DirectTools
from quartet.client.generate import GenerateRequest
from quartet.client.placer import NoTextError, Placer
from quartet.client.request import check_size
from quartet.client.routers import MAX_UNREAD
from quartet.engine.base import FinishReason
from quartet.errors import (
    MessageTooLargeError,
    PlaceTooLargeError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
)
from quartet.rpc.answer import Answer
from quartet.rpc.choice_output import ChoiceOutput, OutputSettings
from quartet.rpc.convert.edge_start import to_generate_start
from quartet.rpc.edge import (
    Accepted,
    AnswerPart,
    ChoiceFinished,
    Delta,
    GenerateStart,
    Placed,
    TimeBreakdown,
    Usage,
)
from quartet.rpc.placement import PlacedChoice, PlacedRequest
from quartet.text.text_stream import TextStream
from quartet.text.tokenizer import Tokenizer


class DirectRequest:
    """One request by ``Place`` and ``Decode``; see ``ClientRequest``."""

    def __init__(self, tools: DirectTools, start: GenerateStart) -> None:
        """Raises ``InvalidRequestError``: a field that its message can't hold."""
        check_size(start, to_generate_start(start))
        self._tools = tools
        self._start = start
        self._placer = Placer(tools, start)
        self._by_router: GenerateRequest | None = None
        self._answer = Answer(max_unread=MAX_UNREAD)
        self._work: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._is_accepted = False
        self._outputs: dict[int, ChoiceOutput] = {}
        self._finished: set[int] = set()

    @property
    def router(self) -> str | None:
        """``host:port`` of the router that placed it last."""
        return self._placer.router if self._by_router is None else self._by_router.router

    async def cancel(self) -> None:
        """Ask for an early end."""
        self._is_cancelled = True
        if self._by_router is not None:
            await self._by_router.cancel()
        elif self._work is not None:
            self._work.cancel()

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Send it and give its answer. Raises ``ServingError``."""
        self._placer = Placer(self._tools, self._start)
        work = self._work = asyncio.create_task(self._run(), name="direct request")
        work.add_done_callback(self._settle)
        if self._is_cancelled:
            work.cancel()
        try:
            while (parts := self._answer.take()) is not None:
                for part in parts:
                    yield part
                if not parts:
                    await self._answer.more()
        finally:
            work.cancel()
            await asyncio.wait([work])

    def _settle(self, work: asyncio.Task[None]) -> None:
        """Tell the answer how the work ended."""
        error: BaseException | None = None
        if not work.cancelled():
            error = work.exception()
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]  # the one that ended the others
        elif self._is_cancelled:
            try:
                self._end_cancelled()
            except ServingError as unread:
                error = unread
        else:
            # By its user, who reads no more, or by the client that was closed under it.
            error = RequestCancelledError("the request was dropped")
        self._answer.end(error)

    async def _run(self) -> None:
        timeout_s = self._start.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._generate()
        except TimeoutError as error:
            raise RequestTimeoutError(f"the request did not end within {timeout_s:g} s") from error

    async def _generate(self) -> None:
        try:
            request, tokenizer = await self._placer.place()
        except (MessageTooLargeError, PlaceTooLargeError, NoTextError):
            # Too long to be sealed, no room for all choices at once, or nobody is there to give the tokenizer.
            await self._generate_by_router()
            return
        self._accept(request)
        self._make_outputs(request, tokenizer)
        if len(request.choices) == 1:
            await self._run_choice(request.choices[0])
            return
        async with asyncio.TaskGroup() as group:
            for placed in request.choices:
                group.create_task(self._run_choice(placed))

    async def _generate_by_router(self) -> None:
        self._by_router = GenerateRequest(self._tools.routers, self._start)
        async with contextlib.aclosing(self._by_router.parts()) as parts:
            async for part in parts:
                match part:
                    case Accepted():
                        self._is_accepted = True
                        self._answer.accept(part)
                    case Placed():
                        self._answer.place(part.placement)
                    case Delta():
                        self._answer.add(part.choice, part.token_offset, part.token_ids, part.text, part.logprobs)
                    case ChoiceFinished():
                        self._finish(part)

    def _accept(self, request: PlacedRequest) -> None:
        self._is_accepted = True
        accepted = Accepted(
            request_id=request.request_id,
            choices=tuple(placed.placement for placed in request.choices if placed.placement is not None),
            num_prompt_tokens=request.num_prompt_tokens,
            seed=request.seed,
            model_fingerprint=request.model_fingerprint,
        )
        self._answer.accept(accepted)

    def _make_outputs(self, request: PlacedRequest, tokenizer: Tokenizer | None) -> None:
        options = self._start.text_options
        settings = OutputSettings(
            num_prompt_tokens=request.num_prompt_tokens,
            arrived_at=self._placer.arrived_at,
            tokenize_s=request.tokenize_s,
            omits_token_ids=options.omit_token_ids,
            ttft=_Unobserved(),
            itl=_Unobserved(),
        )
        for placed in request.choices:
            text = TextStream(
                tokenizer,
                options.stop_strings,
                include_stop=options.include_stop_string,
                skip_special_tokens=not options.show_special_tokens,
                prompt_tail=request.prompt_tail_token_ids,
            )
            self._outputs[placed.choice] = ChoiceOutput(settings, placed.choice, text, self._answer)

    async def _run_choice(self, placed: PlacedChoice) -> None:
        place_again = partial(self._placer.place_again, placed.choice)
        choice = DirectChoice(self._outputs[placed.choice], self._tools.workers, place_again)
        self._finish(await choice.run(placed))

    def _finish(self, finished: ChoiceFinished) -> None:
        self._finished.add(finished.choice)
        self._answer.finish(finished)

    def _end_cancelled(self) -> None:
        """The user cancelled, maybe before anything was placed: there is an ``Accepted`` all the same."""
        if not self._is_accepted:
            # No router has named it, or told so.
            request_id, seed = secrets.token_hex(16), self._start.seed or 0
            self._answer.accept(Accepted(request_id=request_id, choices=(), num_prompt_tokens=0, seed=seed))
        for choice in range(self._start.num_choices):
            if choice not in self._finished:
                self._finish(self._cancelled(choice))

    def _cancelled(self, choice: int) -> ChoiceFinished:
        if choice in self._outputs:
            return self._outputs[choice].finish(FinishReason.CANCELLED)
        usage = Usage(num_prompt_tokens=0, num_cached_tokens=0, num_output_tokens=0, num_attempts=0)
        time_breakdown = TimeBreakdown(total_s=time.monotonic() - self._placer.arrived_at)
        return ChoiceFinished(choice=choice, reason=FinishReason.CANCELLED, usage=usage, time=time_breakdown)


class _Unobserved:
    def observe(self, amount: float) -> None:
        """Nobody keeps count here."""
