"""Turns the errors that TensorRT-LLM raises into the errors that callers get.

TensorRT-LLM does not promise the exact texts, so they decide only between answers that are all safe. They may quote
what a request asked for, so they are not repeated where readers of logs would see them.
"""

from __future__ import annotations

import re
import traceback

from quartet.engine.base import EngineRequest
from quartet.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    ServingError,
    TransferError,
    WorkerUnavailableError,
)

_TOO_LONG = re.compile(
    r"max_num_tokens|max_seq_len|max_input_len|max_tokens_in_buffer|too long|exceeds?\b.*(capacity|length|tokens)", re.I
)
_TRANSFER = re.compile(r"transfer|transceiver|opaque_state|ctx_request_id|context phase", re.I)
_GUIDE = re.compile(r"guided|grammar|regex|json.?schema|ebnf", re.I)
_SHUTTING_DOWN = re.compile(r"shut(ting)? ?down", re.I)
_MAX_TRACES = 5
#: Words in the text of a refusal, and the request's field that they point to.
_FIELDS = (
    (_GUIDE, "sampling.guided"),
    (re.compile(r"lora", re.I), "adapter"),
    (re.compile(r"multi.?modal|image|embedding", re.I), "media"),
    (re.compile(r"logprobs", re.I), "output.logprobs"),
    (re.compile(r"cache_salt", re.I), "cache_salt"),
    (re.compile(r"attention_dp_rank", re.I), "data_parallel_rank"),
    (re.compile(r"end_id|stop_token_ids", re.I), "sampling.stop_token_ids"),
    *(
        (re.compile(rf"\b{name}\b"), f"sampling.{name}")
        for name in """
        temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed min_tokens max_tokens
        """.split()
    ),
)


def refusal(error: Exception, request_error: type[Exception]) -> ServingError:
    """Return the caller's error for a request whose call raised ``error``; the engine goes on."""
    text = str(error)
    if isinstance(error, ServingError):
        return error
    if isinstance(error, request_error | ValueError | TypeError):
        if _TOO_LONG.search(text):
            return _too_long()
        return _invalid(text)
    return _shutting_down(error) or EngineError(f"the engine could not take the request: {type(error).__name__}")


def failure(
    error: Exception,
    request_error: type[Exception],
    request: EngineRequest,
    *,
    is_pulling: bool,
    awaits_media: bool = False,
    is_gone: bool = False,
) -> ServingError | None:
    """Return the caller's error for ``request``, which ended with ``error``; ``None``: the engine is dead.

    Args:
        error: what the request's handle raised.
        request_error: TensorRT-LLM's own type for an error of one request.
        request: the request that failed.
        is_pulling: the KV of its hand-off was on its way.
        awaits_media: it had no output yet, and an encode worker keeps embeddings for it.
        is_gone: the engine itself says that it has ended.
    """
    if isinstance(error, ServingError):
        return error
    if isinstance(error, AssertionError) and not is_gone:
        # TensorRT-LLM checks a result where the request's own handle reads it: others go on.
        return EngineError("the engine's result of the request contradicts itself")
    if not isinstance(error, request_error):
        return _shutting_down(error)
    text = str(error)
    if _TOO_LONG.search(text) and not (is_pulling and _TRANSFER.search(text)):
        return _too_long()
    if is_pulling:
        # Any other error before the first output: the KV is not here, and another prefill brings it.
        return TransferError("the prompt's KV cache did not come over")
    if request.generation.sampling.guided is not None and _GUIDE.search(text):
        return InvalidRequestError("the grammar can not be followed", field="sampling.guided")
    if _TRANSFER.search(text):
        return TransferError("the prompt's KV cache could not be handed over")
    if awaits_media:
        # Most likely the encode worker that keeps them is gone; encoding them again puts them elsewhere.
        return TransferError("the embeddings of the prompt's media did not come over")
    return EngineError("the engine failed the request")


def start_error_of(error: Exception) -> ServingError | ConfigError:
    """The error for the caller that starts an engine, with its full text: no request has come that it could quote."""
    return error if isinstance(error, ServingError | ConfigError) else EngineError(f"the engine is lost: {error!r}")


def loss_of(error: Exception) -> EngineError:
    """The error for every request of an engine that ``error`` ended; leaves out texts that may quote one of them."""
    what = error.message if isinstance(error, ServingError) else type(error).__name__
    return EngineError(f"the engine is lost: {what}")


def trace_of(error: BaseException) -> str:
    """``error`` for a log: types and stack frames of it and of its causes, without their texts."""
    parts: list[str] = []
    link: BaseException | None = error
    while link is not None and len(parts) < _MAX_TRACES:
        frames = "".join(traceback.format_tb(link.__traceback__)).rstrip()
        parts.append(f"{type(link).__qualname__}\n{frames}".rstrip())
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\nafter ".join(parts)


def _shutting_down(error: Exception) -> WorkerUnavailableError | None:
    is_shutting_down = isinstance(error, RuntimeError) and _SHUTTING_DOWN.search(str(error))
    return WorkerUnavailableError("the engine is shutting down") if is_shutting_down else None


def _too_long() -> PromptTooLongError:
    return PromptTooLongError("the prompt exceeds what the engine takes at once", field="prompt_token_ids")


def _invalid(text: str) -> InvalidRequestError:
    field = next((field for words, field in _FIELDS if words.search(text)), None)
    return InvalidRequestError(f"the engine refuses {field or 'the request'}", field=field)


def is_foreseen(error: Exception, request_error: type[Exception]) -> bool:
    """Whether ``error`` is one that a call for a request may raise; any other is logged with its trace."""
    return isinstance(error, ServingError | request_error | ValueError | TypeError | RuntimeError)
