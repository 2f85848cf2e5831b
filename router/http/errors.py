"""Errors as each API has them: the one table from gRPC codes to HTTP codes, and from fields to OpenAI's parameters."""

from __future__ import annotations

import json
import math
import re
from enum import Enum, auto
from typing import Any

from aiohttp import web

from quartet.errors import (
    MediaTooLargeError,
    MessageTooLargeError,
    ModelNotFoundError,
    PromptTooLongError,
    RateLimitedError,
    ServingError,
)
from quartet.rpc.errors import public_error, status_code

#: The HTTP code and OpenAI's ``type`` of each gRPC code; any other is a 500.
STATUS: dict[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "OUT_OF_RANGE": (400, "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "UNIMPLEMENTED": (404, "invalid_request_error"),
    "ALREADY_EXISTS": (409, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled"),  # as nginx has it: the client has gone
    "INTERNAL": (500, "server_error"),
    "ABORTED": (500, "server_error"),
    "UNAVAILABLE": (503, "service_unavailable_error"),
    "DEADLINE_EXCEEDED": (504, "timeout_error"),
}

#: Anthropic's ``type`` of each HTTP code; any other is an ``api_error``, or an ``invalid_request_error`` below 500.
ANTHROPIC_TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# Types of errors that HTTP or OpenAI have a name of their own for.
_HTTP_CODES: dict[type[ServingError], int] = {MessageTooLargeError: 413, MediaTooLargeError: 413}
_OPENAI_CODES: dict[type[ServingError], str] = {
    ModelNotFoundError: "model_not_found",
    PromptTooLongError: "context_length_exceeded",
    RateLimitedError: "rate_limit_exceeded",
}

_MAX_MESSAGE_LENGTH = 800

# Paths of `GenerateStart` and how OpenAI's requests call the same; `sampling.` and the like are left out of the rest.
_PARAMETERS = {
    "num_choices": "n",
    "text_options.stop_strings": "stop",
    "text_options.omit_text": "stop",
    "output.logprobs": "logprobs",
    "output.num_prompt_logprobs": "echo",
    "sampling.guided": "response_format",
    "client_request_id": "request_id",
    "adapter": "model",
    "text": "prompt",
    "token_ids.ids": "prompt",
    "chat.template_arguments": "chat_template_kwargs",
    "chat.tool_name": "tool_choice",
}
_PREFIXES = re.compile(r"(sampling|chat|output|text_options)\.")
_PART = re.compile(r"\.parts\[")
_OF_MEDIA = re.compile(r"(?<=\])\.media\b")
_OF_FUNCTION = re.compile(r"(tools|tool_calls)(\[\d+\])\.(name|parameters|arguments)$")


class ErrorShape(Enum):
    """How an API's clients read errors."""

    COMPLETIONS = auto()  # OpenAI's; fields of the pipeline are called as in requests for completions
    RESPONSES = auto()  # OpenAI's; fields are named as they are
    MESSAGES = auto()  # Anthropic's; the message names the field

    @classmethod
    def of_path(cls, path: str) -> ErrorShape:
        """That of what is asked for at ``path``."""
        if path == "/v1/messages" or path.startswith("/v1/messages/"):
            return cls.MESSAGES
        return cls.RESPONSES if path == "/v1/responses" else cls.COMPLETIONS


class HttpError(ServingError, reason="INVALID_REQUEST"):
    """A request that HTTP itself refuses.

    Attributes:
        status: the HTTP code.
        headers: of the answer.
    """

    def __init__(
        self, status: int, message: str, *, field: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message, field=field)
        self.status = status
        self.headers = headers or {}


def http_code(error: ServingError) -> int:
    """The HTTP code of ``error``: that of its own type, else of its gRPC code."""
    if isinstance(error, HttpError):
        return error.status
    if type(error) in _HTTP_CODES:
        return _HTTP_CODES[type(error)]
    return STATUS.get(status_code(error).name, STATUS["INTERNAL"])[0]


def error_body(error: BaseException, shape: ErrorShape = ErrorShape.COMPLETIONS) -> dict[str, Any]:
    """``error`` in an API's shape. A bug of ours is logged and says no more than that."""
    shown = public_error(error)
    code = http_code(shown)
    kind = next((kind for status, kind in STATUS.values() if status == code), "invalid_request_error")
    message = shown.message[:_MAX_MESSAGE_LENGTH]
    parameter = shown.field
    if parameter is not None and shape is ErrorShape.COMPLETIONS:
        parameter = to_parameter(parameter)
    # Anthropic's clients get no field but in the message.
    is_named = parameter is None or (
        message.startswith(parameter) if shape is ErrorShape.MESSAGES else parameter in message
    )
    if not is_named:
        message = f"{parameter}: {message}"
    if shape is ErrorShape.MESSAGES:
        kind = ANTHROPIC_TYPES.get(code, "api_error" if code >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": parameter,
            "code": "invalid_api_key" if code == 401 else _OPENAI_CODES.get(type(shown), shown.reason.lower()),
        }
    }


def error_response(error: BaseException, shape: ErrorShape = ErrorShape.COMPLETIONS) -> web.Response:
    """The answer to a request that failed before any of its answer was sent."""
    shown = public_error(error)
    headers = dict(shown.headers) if isinstance(shown, HttpError) else {}
    if shown.retry_delay_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(shown.retry_delay_s)))
    body = json.dumps(error_body(shown, shape)).encode()
    return web.Response(status=http_code(shown), body=body, content_type="application/json", headers=headers)


def to_parameter(field: str) -> str:
    """The parameter of OpenAI's request that became ``field`` of ours: ``messages[2].content[0]``."""
    known = _PARAMETERS.get(field)
    if known is not None:
        return known
    name = _OF_MEDIA.sub(".image_url", _PART.sub(".content[", _PREFIXES.sub("", field, count=1)))
    return _OF_FUNCTION.sub(r"\1\2.function.\3", name)
