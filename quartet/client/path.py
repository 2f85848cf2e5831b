"""The three ways from a client to its tokens."""

from __future__ import annotations

from enum import StrEnum

from quartet.errors import InvalidRequestError


class RequestPath(StrEnum):
    """How a request reaches its workers. Its answer is the same on all of them."""

    #: A call of its own to the router, which streams the answer.
    GENERATE = "generate"
    #: One of many on the client's one stream with the router, which streams all answers.
    SESSION = "session"
    #: Placed by the router; its tokens come straight from the decode worker, and the client makes the text.
    DIRECT = "direct"


def to_path(path: str) -> RequestPath:
    """The path of this name. Raises ``InvalidRequestError`` where there is none."""
    try:
        return RequestPath(path)
    except ValueError as error:
        names = ", ".join(RequestPath)
        raise InvalidRequestError(f"path is one of {names}, not {path!r}", field="path") from error
