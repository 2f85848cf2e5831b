"""Has a request placed by a router, and its choices again after an attempt that broke."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from quartet.client.direct_tools import DirectTools
from quartet.client.retries import Retries
from quartet.client.routers import DEADLINE_GRACE_S, ClientClosedError, Router
from quartet.errors import ProtocolError, RequestTimeoutError, ServingError
from quartet.rpc.convert.place import from_place_response, to_place_request
from quartet.rpc.edge import GenerateStart, Resume
from quartet.rpc.placement import PlacedChoice, PlacedRequest, SealedPlacement
from quartet.text.tokenizer import Tokenizer


class NoTextError(Exception):
    """The request ended before any worker was chosen that could give its model's text files, and they aren't here."""


class Placer:
    """Places one request.

    Attributes:
        router: ``host:port`` of the router that did so last.
    """

    def __init__(self, tools: DirectTools, start: GenerateStart) -> None:
        """The request's time runs from now on."""
        self.router: str | None = None
        self.arrived_at = time.monotonic()
        self._tools = tools
        self._start = start
        self._request: PlacedRequest | None = None
        self._attempts: dict[int, int] = {}

    async def place(self) -> tuple[PlacedRequest, Tokenizer | None]:
        """Where it goes on, and what makes its text; no tokenizer where none is wanted.

        Raises:
            NoTextError: another path must make the text.
            ServingError: no router places it, or nobody gives the model's text files.
        """
        retries = Retries()
        while True:
            request = self._request = await self._ask(None)
            try:
                return request, await self._tokenizer(request)
            except asyncio.CancelledError:
                self._tools.workers.let_go(request.choices)
                raise
            except ServingError as error:
                failure = error
            self._tools.workers.let_go(request.choices)
            # Nothing was shown yet, so it may as well begin anew.
            await asyncio.sleep(retries.note(failure))

    async def place_again(self, choice: int, token_ids: Sequence[int]) -> PlacedChoice:
        """Where ``choice`` goes on, which has ``token_ids``. Raises ``ServingError``: no router places it."""
        assert self._request is not None, "it was placed before"
        # One that no router answered counts as well: some worker may still be at it.
        attempt = self._attempts[choice] = self._attempts.get(choice, self._request.attempt) + 1
        resume = Resume(
            request_id=self._request.request_id,
            attempt=attempt,
            seed=self._request.seed,
            choice=choice,
            generated_token_ids=tuple(token_ids),
            model_fingerprint=self._request.model_fingerprint,
        )
        request = await self._ask(resume)
        self._attempts[choice] = max(request.attempt, attempt)
        return request.choices[0]

    async def _ask(self, resume: Resume | None) -> PlacedRequest:
        if self._tools.workers.is_closed:
            raise ClientClosedError

        async def call(router: Router) -> PlacedRequest:
            timeout_s = self._time_left_s()
            message = to_place_request(replace(self._start, timeout_s=timeout_s), resume)
            deadline_s = None if timeout_s is None else timeout_s + DEADLINE_GRACE_S
            response = await router.stub.Place(message, timeout=deadline_s)
            self.router = router.address
            placed = from_place_response(response)
            if not placed.choices:
                raise ProtocolError("the router placed no choice")
            return placed

        return await self._tools.routers.call(call)

    def _time_left_s(self) -> float | None:
        if self._start.timeout_s is None:
            return None
        left_s = self.arrived_at + self._start.timeout_s - time.monotonic()
        if left_s <= 0:
            raise RequestTimeoutError(f"the request did not end within {self._start.timeout_s:g} s")
        return left_s

    async def _tokenizer(self, request: PlacedRequest) -> Tokenizer | None:
        if self._start.text_options.omit_text:
            return None
        fingerprint = request.model_fingerprint
        addresses = [choice.next.address for choice in request.choices if isinstance(choice.next, SealedPlacement)]
        if not addresses and self._tools.known_text(fingerprint) is None:
            raise NoTextError
        text = await self._tools.model_text(fingerprint, addresses)
        return text.tokenizer
