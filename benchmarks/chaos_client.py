"""Clients that want every token of their answers, whatever breaks: they go on at any router with what they have.

A client asks by ``Generate``, ``Session`` or directly (``Place``). If that breaks, it continues with a ``Resume`` in a
session of its own, at one router after the other, until its request's time is over.
"""

from __future__ import annotations

import asyncio
import io
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import grpc
from PIL import Image

from benchmarks.chaos_fleet import REQUEST_TIMEOUT_S
from quartet import errors
from quartet.api.convert.answer import from_accepted
from quartet.api.convert.request import to_generate_start, to_resume
from quartet.api.request import Accepted, ChoiceFinished, Delta, Resume
from quartet.client import MediaFile, MediaKind, QuartetClient, RequestPath, Sampling
from quartet.client.request import make_start
from quartet.client.routers import MADE_UP_DETAILS
from quartet.errors import ServingError
from quartet.rpc.channels import create_channel
from quartet.rpc.errors import from_failure, from_rpc_error
from quartet.streams.messages import split_tokens
from quartet.v1 import router_pb2, router_pb2_grpc

# What a client tries again after; anything else is the answer's end.
_PASSING = (errors.RouterUnavailableError, errors.WorkerUnavailableError, errors.DrainingError, errors.QueueFullError)
_PAUSE_S, _GRACE_S = 0.1, 1.0
_ATTEMPTS_APART = 100
# The tiny model's.
_PLACEHOLDER_ID = 7
_FIRST_TOKEN_ID, _END_TOKEN_ID = 16, 2048


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request; the same one always gets the same tokens.

    Attributes:
        media: what the placeholders among ``token_ids`` stand for.
    """

    token_ids: tuple[int, ...] = field(repr=False)
    media: tuple[MediaFile, ...] = field(default=(), repr=False)
    num_tokens: int
    seed: int

    @property
    def sampling(self) -> Sampling:
        """Its settings: exactly ``num_tokens`` tokens."""
        return Sampling(temperature=0.7, max_tokens=self.num_tokens, ignore_eos=True)


def draw_asks(
    rng: random.Random, count: int, *, num_tokens: range, num_prompt_tokens: range = range(20, 400)
) -> list[Ask]:
    """Requests with random prompts, for so many tokens."""
    return [
        Ask(
            token_ids=tuple(rng.choices(range(_FIRST_TOKEN_ID, _END_TOKEN_ID), k=rng.choice(num_prompt_tokens))),
            num_tokens=rng.choice(num_tokens),
            seed=rng.getrandbits(63),
        )
        for _ in range(count)
    ]


def draw_picture_asks(rng: random.Random, count: int) -> list[Ask]:
    """Requests with one picture of coloured noise each."""
    return [
        replace(ask, media=(_draw_picture(rng),), token_ids=(_PLACEHOLDER_ID, *ask.token_ids[:40]))
        for ask in draw_asks(rng, count, num_tokens=range(16, 33))
    ]


def _draw_picture(rng: random.Random) -> MediaFile:
    image = Image.effect_noise((64, 64), rng.uniform(20.0, 100.0)).convert("RGB")
    image.putpixel((0, 0), tuple(rng.choices(range(256), k=3)))
    file = io.BytesIO()
    image.save(file, "PNG")
    return MediaFile(MediaKind.IMAGE, file.getvalue())


@dataclass
class Answer:
    """What one client got.

    Attributes:
        error: why it gave up; ``None``: it has the whole answer.
        num_breaks: times that it had to go on elsewhere.
        duration_s: from its start to its end.
    """

    token_ids: list[int] = field(default_factory=list)
    error: str | None = None
    num_breaks: int = 0
    duration_s: float = 0.0


class Clients:
    """Clients of the routers at ``addresses``, within ``async with``."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Dial when first asked."""
        # What breaks is resumed here, message by message, as a client in another language does it.
        self._client = QuartetClient(addresses, resume_timeout_s=0)
        self._channels = [create_channel(address, None) for address in addresses]
        self._stubs: list[router_pb2_grpc.RouterServiceAsyncStub] = [
            router_pb2_grpc.RouterServiceStub(channel) for channel in self._channels
        ]

    async def close(self) -> None:
        """End everything."""
        await self._client.close()
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def ask(self, ask: Ask, path: RequestPath) -> Answer:
        """Get the whole answer; never raises a ``ServingError``."""
        request = _Request(ask, Answer())
        began = time.monotonic()
        try:
            await self._run(request, path, began + REQUEST_TIMEOUT_S)
        except ServingError as error:
            request.answer.error = f"{type(error).__name__}: {error.message}"
        request.answer.duration_s = time.monotonic() - began
        return request.answer

    async def _run(self, request: _Request, path: RequestPath, deadline: float) -> None:
        try:
            await self._first(request, path, deadline)
        except _PASSING as error:
            failure: ServingError = error
        else:
            return
        number = 0
        while not request.is_whole:
            request.answer.num_breaks += 1
            if time.monotonic() + _PAUSE_S >= deadline:
                raise failure
            await asyncio.sleep(_PAUSE_S)
            number += 1
            try:
                await self._again(request, self._stubs[number % len(self._stubs)], deadline)
            except _PASSING as error:
                failure = error

    async def _first(self, request: _Request, path: RequestPath, deadline: float) -> None:
        ask = request.ask
        stream = self._client.generate(
            path=path,
            token_ids=ask.token_ids,
            media=ask.media,
            sampling=ask.sampling,
            seed=ask.seed,
            timeout_s=deadline - time.monotonic(),
            omit_text=True,
        )
        async with stream:
            async for part in stream:
                request.take(part)

    async def _again(self, request: _Request, stub: router_pb2_grpc.RouterServiceAsyncStub, deadline: float) -> None:
        """Go on after what ``request`` has. Raises ``ServingError``."""
        left_s = deadline - time.monotonic()
        call = stub.Session(timeout=left_s + _GRACE_S)
        try:
            await call.write(router_pb2.SessionRequest(start=request.start(left_s)))
            async for message in call:
                request.take_session(message)
                if request.is_whole:
                    return
            raise errors.RouterUnavailableError("the session ended before its request")
        except asyncio.InvalidStateError as error:
            raise errors.RouterUnavailableError("the call had ended before it was sent") from error
        except grpc.aio.AioRpcError as error:
            if error.details() == MADE_UP_DETAILS:
                raise errors.RouterUnavailableError("the call had ended before it was sent") from error
            raise from_rpc_error(error) from error
        finally:
            call.cancel()


class _Request:
    """One request and how far it got."""

    def __init__(self, ask: Ask, answer: Answer) -> None:
        self.ask, self.answer = ask, answer
        self.is_whole = False
        self._accepted: Accepted | None = None
        self._attempt = 0

    def take(self, part: object) -> None:
        """Take a part of the answer."""
        if isinstance(part, Accepted):
            self._accepted = self._accepted or part
        elif isinstance(part, Delta):
            self.answer.token_ids += part.token_ids
        elif isinstance(part, ChoiceFinished):
            self.is_whole = True

    def take_session(self, message: router_pb2.SessionResponse) -> None:
        """Take a message of a session that has no other request. Raises ``ServingError``: it ended badly."""
        for opened in message.accepted:
            self.take(from_accepted(opened.accepted))
        for offset, token_ids in zip(
            message.token_offsets, split_tokens(message.token_ids[:], message.num_tokens[:]), strict=True
        ):
            if offset != len(self.answer.token_ids):
                raise errors.ProtocolError(f"token {offset} follows {len(self.answer.token_ids)}")
            self.answer.token_ids += token_ids
        self.is_whole |= bool(message.finished)
        for failed in message.failures:
            raise from_failure(failed.failure)

    def start(self, timeout_s: float) -> router_pb2.SessionStart:
        """What to send to go on, or to begin if no router has accepted it yet."""
        ask, accepted = self.ask, self._accepted
        start = make_start(
            token_ids=ask.token_ids,
            media=ask.media,
            sampling=ask.sampling,
            seed=ask.seed,
            timeout_s=timeout_s,
            omit_text=True,
        )
        resume = None
        if accepted is not None:
            # Above the attempts of the router that is gone.
            self._attempt += _ATTEMPTS_APART
            resume = to_resume(
                Resume(
                    request_id=accepted.request_id,
                    attempt=self._attempt,
                    seed=accepted.seed,
                    generated_token_ids=tuple(self.answer.token_ids),
                    model_fingerprint=accepted.model_fingerprint,
                )
            )
        return router_pb2.SessionStart(start=to_generate_start(start), resume=resume)
