"""Who asks, and how long it may take: what every start carries from hop to hop."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from quartet.errors import InvalidRequestError

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
_MAX_NAME_LENGTH = 256


@dataclass(frozen=True, kw_only=True)
class RequestContext:
    """What names a request and bounds it, on every hop.

    Attributes:
        request_id: 32 lower-case hexadecimal digits, or empty: whoever gets it draws one.
        attempt: which try of this request it is, from 0.
        choice: which of the request's parallel answers this is, from 0.
        timeout_s: seconds left for the whole request when the message was made; ``None``: no limit of its own.
        traceparent: W3C trace context; empty: no trace.
        tenant: whom the request is accounted to; empty: nobody in particular.
        priority: higher first among waiting requests.
        session_key: requests of one conversation share it; empty: none.
        router_id: the router that placed it; empty: it came without one.
        router_request_number: counts the starts that this router sent to this worker, from 1; 0: without a router.

    Raises:
        InvalidRequestError: with ``field`` = ``context.NAME``.
    """

    request_id: str = ""
    attempt: int = 0
    choice: int = 0
    timeout_s: float | None = None
    traceparent: str = ""
    tenant: str = ""
    priority: int = 0
    session_key: str = field(default="", repr=False)
    router_id: str = ""
    router_request_number: int = 0

    def __post_init__(self) -> None:
        if self.request_id and not is_request_id(self.request_id):
            raise InvalidRequestError("request_id is not 32 lower-case hexadecimal digits", field="context.request_id")
        for name in ("traceparent", "tenant", "session_key", "router_id"):
            if len(getattr(self, name)) > _MAX_NAME_LENGTH:
                message = f"{name} is longer than {_MAX_NAME_LENGTH} characters"
                raise InvalidRequestError(message, field=f"context.{name}")


def is_request_id(text: str) -> bool:
    """Whether ``text`` is 32 lower-case hexadecimal digits."""
    return _REQUEST_ID.fullmatch(text) is not None
