"""Routers that know one answer, and break off while they give it: to a client they look like killed ones.

They check that what a client resumes is a place between two parts of the answer, and go on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from quartet.errors import ServingError
from quartet.rpc.errors import abort, to_duration, to_failure
from quartet.v1 import router_pb2, router_pb2_grpc, types_pb2
from tests.client.fake_router import in_slot

REQUEST_ID = "00ff" * 8
SEED = 2**63 + 5
FINGERPRINT = "f00d" * 16
_CODE = grpc.StatusCode.UNAVAILABLE


@dataclass
class KnownAnswer:
    """The answer: deltas by choice, whose offsets follow from their tokens.

    Attributes:
        placed_later: choices whose placement comes just before their first delta.
        has_prompt_logprobs: those of the prompt come before the first delta.
    """

    choices: Sequence[Sequence[router_pb2.Delta]]
    placed_later: frozenset[int] = frozenset()
    has_prompt_logprobs: bool = False

    def messages(self, resume: router_pb2.Resume | None) -> Iterator[router_pb2.GenerateResponse]:
        """All of it, choices in turn, or what follows ``resume``."""
        if resume is None:
            skips = dict.fromkeys(range(len(self.choices)), 0)
        else:
            skips = {resume.choice: self._skip(resume)}
        now = [choice for choice in skips if resume is not None or choice not in self.placed_later]
        accepted = router_pb2.Accepted(
            request_id=REQUEST_ID,
            choices=[_placement(choice) for choice in now],
            num_prompt_tokens=4,
            seed=SEED,
            model_fingerprint=FINGERPRINT,
        )
        yield router_pb2.GenerateResponse(accepted=accepted)
        has_begun = resume is not None and resume.generated_token_ids.ids
        if self.has_prompt_logprobs and 0 in skips and not has_begun:
            yield router_pb2.GenerateResponse(
                prompt_logprobs=types_pb2.PromptLogprobs(token_ids=[1, 2, 3, 4], logprobs=[-1, -2, -3])
            )
        for number in range(max(map(len, self.choices)) + 1):
            for choice, skip in skips.items():
                deltas = self.choices[choice]
                if number == 0 and choice not in now:
                    yield router_pb2.GenerateResponse(placed=_placement(choice))
                if skip <= number < len(deltas):
                    yield router_pb2.GenerateResponse(delta=deltas[number])
                if number == len(deltas):
                    yield router_pb2.GenerateResponse(finished=self._finished(choice, resume))

    def _skip(self, resume: router_pb2.Resume) -> int:
        """How many deltas of the choice the client has."""
        assert (resume.request_id, resume.seed) == (REQUEST_ID, SEED)
        assert resume.model_fingerprint == FINGERPRINT
        for number in range(len(self.choices[resume.choice]) + 1):
            if _shown(self.choices[resume.choice][:number]) == _given(resume):
                return number
        raise AssertionError(f"no client can have {_given(resume)}")

    def _finished(self, choice: int, resume: router_pb2.Resume | None) -> router_pb2.ChoiceFinished:
        num_tokens = sum(len(delta.token_ids) for delta in self.choices[choice])
        first_token = None if resume is not None else to_duration(0.25)
        return router_pb2.ChoiceFinished(
            choice=choice,
            reason=types_pb2.FINISH_REASON_LENGTH,
            usage=router_pb2.Usage(
                num_prompt_tokens=4,
                num_output_tokens=num_tokens,
                num_attempts=1 if resume is None else resume.attempt + 1,
            ),
            time=router_pb2.TimeBreakdown(first_token=first_token, total=to_duration(0.5)),
        )


def with_offsets(deltas: Sequence[router_pb2.Delta], choice: int) -> list[router_pb2.Delta]:
    """The deltas as those of ``choice``, each at its offset."""
    num_tokens, placed = 0, []
    for delta in deltas:
        copy = router_pb2.Delta()
        copy.CopyFrom(delta)
        copy.choice, copy.token_offset = choice, num_tokens
        num_tokens += len(delta.token_ids)
        placed.append(copy)
    return placed


#: One choice of six parts.
WORDS = with_offsets([router_pb2.Delta(token_ids=[100 + n], text=f"wört {n} ") for n in range(6)], 0)


def _shown(deltas: Sequence[router_pb2.Delta]) -> tuple[object, ...]:
    calls = [call for delta in deltas for call in delta.tool_calls]
    return (
        [token_id for delta in deltas for token_id in delta.token_ids],
        sum(len(delta.text.encode()) for delta in deltas),
        sum(len(delta.reasoning.encode()) for delta in deltas),
        max((call.index + 1 for call in calls), default=0),
        sum(len(call.arguments.encode()) for call in calls),
    )


def _given(resume: router_pb2.Resume) -> tuple[object, ...]:
    return (
        list(resume.generated_token_ids.ids),
        resume.num_text_bytes,
        resume.num_reasoning_bytes,
        resume.num_tool_calls,
        resume.num_argument_bytes,
    )


def _placement(choice: int) -> router_pb2.ChoicePlacement:
    return router_pb2.ChoicePlacement(choice=choice, decode=types_pb2.Rank(worker_id=f"decode-{choice}"))


@dataclass
class Script:
    """What all routers of a test do.

    Attributes:
        answer: what they answer.
        breaks: for each call or session that comes, after how many messages it breaks off; then none does. It may be
            after all of them, before the status.
        last_words: what it breaks off with; ``None``: as a killed process does.
        starts, resumes: what came; of resumes ``None``: a new request.
        holds_after: messages after which an answer waits for ever, unless it is cancelled; ``None``: none does.
        holding: set while one waits.
        refusals: what requests to resume are refused with, one after the other; then none is.
    """

    answer: KnownAnswer
    breaks: list[int] = field(default_factory=list)
    last_words: ServingError | None = None
    starts: list[router_pb2.GenerateStart] = field(default_factory=list)
    resumes: list[router_pb2.Resume | None] = field(default_factory=list)
    holds_after: int | None = None
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    refusals: list[ServingError] = field(default_factory=list)

    def refusal(self, resume: router_pb2.Resume | None) -> ServingError | None:
        """What a request is refused with."""
        return self.refusals.pop(0) if resume is not None and self.refusals else None

    def note(self, start: router_pb2.GenerateStart, resume: router_pb2.Resume | None) -> None:
        """A request came."""
        self.starts.append(start)
        self.resumes.append(resume)


class BreakingRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers by a script."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def Generate(self, requests: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        request = await anext(requests)
        resume = request.resume if request.HasField("resume") else None
        self.script.note(request.start, resume)
        if (refusal := self.script.refusal(resume)) is not None:
            await abort(context, refusal)
        limit = self._next_limit()
        for number, message in enumerate(self.script.answer.messages(resume)):
            if number == limit:
                await self._break_off(context)
            if number == self.script.holds_after:
                self.script.holding.set()
                await asyncio.Event().wait()
            yield message
        if limit == number + 1:
            await self._break_off(context)

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[router_pb2.SessionResponse]:
        limit, number = self._next_limit(), 0
        async for request in requests:
            if not request.HasField("start"):
                continue
            start = request.start
            resume = start.resume if start.HasField("resume") else None
            self.script.note(start.start, resume)
            if (refusal := self.script.refusal(resume)) is not None:
                yield _failed(start.slot, refusal)
                continue
            for message in self.script.answer.messages(resume):
                if number == limit:
                    if self.script.last_words is not None:
                        yield _failed(start.slot, self.script.last_words)
                        break
                    await self._break_off(context)
                if number == self.script.holds_after:
                    self.script.holding.set()
                    await asyncio.Event().wait()
                number += 1
                yield in_slot(start.slot, message)
            else:
                if number == limit:
                    await self._break_off(context)

    async def _break_off(self, context: Any) -> None:
        """End the call as the script says."""
        if self.script.last_words is not None:
            await abort(context, self.script.last_words)
        await context.abort(_CODE, "the process was killed")

    def _next_limit(self) -> int | None:
        return self.script.breaks.pop(0) if self.script.breaks else None


def _failed(slot: int, error: ServingError) -> router_pb2.SessionResponse:
    failure = router_pb2.SessionFailure(slot=slot, failure=to_failure(error))
    return router_pb2.SessionResponse(failures=[failure])


@dataclass
class Serving:
    """Routers that serve.

    Attributes:
        addresses: where, in the order of the routers.
    """

    addresses: list[str] = field(default_factory=list)
    servers: list[grpc.aio.Server] = field(default_factory=list)

    async def add(self, router: BreakingRouter, address: str = "127.0.0.1:0") -> str:
        """Serve one more."""
        server = grpc.aio.server()
        router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
        port = server.add_insecure_port(address)
        await server.start()
        self.servers.append(server)
        self.addresses.append(f"127.0.0.1:{port}")
        return self.addresses[-1]

    async def kill(self, number: int) -> None:
        """End a router in the midst of its answers."""
        await self.servers[number].stop(0)


@asynccontextmanager
async def serving(*routers: BreakingRouter) -> AsyncIterator[Serving]:
    """Serve each of them at an address of its own."""
    served = Serving()
    try:
        for router in routers:
            await served.add(router)
        yield served
    finally:
        await asyncio.gather(*(server.stop(0) for server in served.servers))
