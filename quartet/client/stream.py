"""The answer to one request, whichever way it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from typing import Protocol

from quartet.rpc.edge import AnswerPart


class ClientRequest(Protocol):
    """One request on its way; each path has its own."""

    @property
    def router(self) -> str | None:
        """``host:port`` of the router that took it; ``None`` until one has."""
        ...

    def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Send it and give its answer, part by part; the generator's end, whatever way it comes, ends the request."""
        ...

    async def cancel(self) -> None:
        """Ask for an early end; may come before ``parts`` is iterated, and twice."""
        ...


class GenerateStream:
    """Iterate it once: ``Accepted``, then ``Delta``s, and a ``ChoiceFinished`` for each choice.

    A choice that had to wait longer for room than the first is told by ``Placed``, before its first ``Delta``.

    Dropping it, or ``aclose``, cancels the request; ``cancel`` ends it in order. The request is sent when the first
    part is asked for. Until the first part has come, another router takes over from one that can't be reached.

    Raises, while it is iterated:
        ServingError: of the type that the router failed with; ``RouterUnavailableError`` where none answers;
            ``StalledStreamError`` where too much was left unread.
    """

    def __init__(self, request: ClientRequest) -> None:
        """Made by ``QuartetClient.generate``."""
        self._request = request
        # Nobody else may hold it: its end, which also comes when it is dropped, cancels the request.
        self._parts = request.parts()

    def __aiter__(self) -> GenerateStream:
        return self

    def __anext__(self) -> Awaitable[AnswerPart]:
        # Not a coroutine of its own around it, which would cost something for each token.
        return self._parts.__anext__()

    @property
    def router(self) -> str | None:
        """``host:port`` of the router that took the request; ``None`` until one has."""
        return self._request.router

    async def cancel(self) -> None:
        """Ask for an early end; each choice that runs still gets its ``ChoiceFinished``. Keep on iterating for it."""
        await self._request.cancel()

    async def aclose(self) -> None:
        """Drop the request, wherever it is. May be called twice."""
        await self._parts.aclose()

    async def __aenter__(self) -> GenerateStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
