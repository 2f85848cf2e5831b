"""What is impossible with any model; every refusal names the field of ``GenerateStart``."""

from __future__ import annotations

import math

from quartet.errors import InvalidRequestError
from quartet.rpc.context import is_request_id
from quartet.rpc.edge import ChatPrompt, GenerateStart, Prompt, Resume, TextPrompt

_MAX_CHOICES = 64
_MAX_ATTEMPT = 2**31
_MAX_STOP_STRINGS, _MAX_STOP_STRING_BYTES = 16, 1024
_MAX_CLIENT_REQUEST_ID_BYTES = 128
_MAX_NAME_LENGTH = 256


def check_start(start: GenerateStart) -> None:
    """Refuse what is impossible with any model; the router does, and clients may save themselves the way to it.

    Raises:
        InvalidRequestError: naming the field.
    """
    if not 1 <= start.num_choices <= _MAX_CHOICES:
        raise InvalidRequestError(f"num_choices must be in [1, {_MAX_CHOICES}]", field="num_choices")
    if start.timeout_s is not None:
        _check_timeout(start.timeout_s)
    if _size_bytes(start.client_request_id) > _MAX_CLIENT_REQUEST_ID_BYTES:
        message = f"client_request_id is longer than {_MAX_CLIENT_REQUEST_ID_BYTES} bytes"
        raise InvalidRequestError(message, field="client_request_id")
    for name in ("tenant", "session_key", "cache_salt"):
        if len(getattr(start, name)) > _MAX_NAME_LENGTH:
            raise InvalidRequestError(f"{name} is longer than {_MAX_NAME_LENGTH} characters", field=name)
    _check_text_options(start)
    if _is_empty(start.prompt):
        raise InvalidRequestError("the prompt is empty", field=prompt_field(start.prompt))


def check_resume(resume: Resume, start: GenerateStart) -> None:
    """Refuse to go on with what never was. Raises ``InvalidRequestError`` naming the field."""
    if not is_request_id(resume.request_id):
        message = "request_id is not 32 lower-case hexadecimal digits"
        raise InvalidRequestError(message, field="resume.request_id")
    if not 1 <= resume.attempt <= _MAX_ATTEMPT:
        raise InvalidRequestError(f"attempt must be in [1, {_MAX_ATTEMPT}]", field="resume.attempt")
    if resume.choice >= start.num_choices:
        raise InvalidRequestError("the request has no such choice", field="resume.choice")
    if start.seed is not None and resume.seed != start.seed:
        raise InvalidRequestError("resume and start name different seeds", field="resume.seed")


def prompt_field(prompt: Prompt) -> str:
    """The path of the field that the prompt came in."""
    if isinstance(prompt, TextPrompt):
        return "text"
    return "chat.messages" if isinstance(prompt, ChatPrompt) else "token_ids.ids"


def _check_timeout(timeout_s: float) -> None:
    if not timeout_s > 0:  # not a number is refused here too
        raise InvalidRequestError("timeout must be above 0", field="timeout")
    if math.isinf(timeout_s):
        raise InvalidRequestError("timeout must be finite", field="timeout")


def _check_text_options(start: GenerateStart) -> None:
    options, field = start.text_options, "text_options.stop_strings"
    if len(options.stop_strings) > _MAX_STOP_STRINGS:
        raise InvalidRequestError(f"there are more than {_MAX_STOP_STRINGS} stop strings", field=field)
    for stop_string in options.stop_strings:
        if not 1 <= _size_bytes(stop_string) <= _MAX_STOP_STRING_BYTES:
            message = f"a stop string has 1 to {_MAX_STOP_STRING_BYTES} bytes"
            raise InvalidRequestError(message, field=field)
    if options.omit_text and options.stop_strings:
        raise InvalidRequestError("stop strings are looked for in text", field="text_options.omit_text")


def _is_empty(prompt: Prompt) -> bool:
    if isinstance(prompt, TextPrompt):
        return not prompt.text
    return not (prompt.messages if isinstance(prompt, ChatPrompt) else prompt.token_ids)


def _size_bytes(text: str) -> int:
    # Half a surrogate pair is refused where messages are written, not while it is measured.
    return len(text.encode(errors="surrogatepass"))
