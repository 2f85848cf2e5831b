"""What the router refuses before any worker is touched; every refusal names the field of ``GenerateStart``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from quartet.errors import InvalidRequestError, PromptTooLongError, UnsupportedFieldError
from quartet.rpc.edge import ChatPrompt, GenerateStart, Prompt, TextPrompt
from router.worker_table import Pool

_MAX_CHOICES = 64
_MAX_STOP_STRINGS, _MAX_STOP_STRING_BYTES = 16, 1024
_MAX_CLIENT_REQUEST_ID_BYTES = 128
_MAX_NAME_LENGTH = 256


def check_start(start: GenerateStart) -> None:
    """Refuse what is impossible with any model. Raises ``InvalidRequestError``."""
    if not 1 <= start.num_choices <= _MAX_CHOICES:
        raise InvalidRequestError(f"num_choices must be in [1, {_MAX_CHOICES}]", field="num_choices")
    if start.timeout_s is not None and not (start.timeout_s > 0 and math.isfinite(start.timeout_s)):
        raise InvalidRequestError("timeout must be positive", field="timeout")
    if len(start.client_request_id.encode()) > _MAX_CLIENT_REQUEST_ID_BYTES:
        message = f"client_request_id is longer than {_MAX_CLIENT_REQUEST_ID_BYTES} bytes"
        raise InvalidRequestError(message, field="client_request_id")
    for name in ("tenant", "session_key", "cache_salt"):
        if len(getattr(start, name)) > _MAX_NAME_LENGTH:
            raise InvalidRequestError(f"{name} is longer than {_MAX_NAME_LENGTH} characters", field=name)
    _check_text_options(start)
    if _is_empty(start.prompt):
        raise InvalidRequestError("the prompt is empty", field=prompt_field(start.prompt))


def check_pool(start: GenerateStart, pool: Pool) -> None:
    """Refuse what this pool can't honour. Raises ``UnsupportedFieldError``."""
    unsupported = sorted(start.sampling.changed_fields() - pool.sampling_fields)
    if unsupported:
        raise UnsupportedFieldError(f"this model takes no {unsupported[0]}", field=f"sampling.{unsupported[0]}")
    if start.output.logprobs is not None and "logprobs" not in pool.sampling_fields:
        raise UnsupportedFieldError("this model gives no log probabilities", field="output.logprobs")
    if start.adapter and start.adapter not in pool.adapters:
        raise UnsupportedFieldError("this model has no such adapter", field="adapter")


def check_tokens(start: GenerateStart, prompt_token_ids: Sequence[int], vocab_size: int, pool: Pool) -> None:
    """Refuse token ids that don't exist and lengths that never fit. Raises ``InvalidRequestError``."""
    field = prompt_field(start.prompt)
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt has no tokens", field=field)
    _check_ids(prompt_token_ids, vocab_size, field)
    _check_ids(start.sampling.stop_token_ids, vocab_size, "sampling.stop_token_ids")
    _check_ids(start.sampling.logit_bias, vocab_size, "sampling.logit_bias")
    limit = max_sequence_tokens(pool)
    num_prompt_tokens = len(prompt_token_ids)
    if num_prompt_tokens + 1 > limit:
        message = f"the prompt has {num_prompt_tokens} tokens; it and the answer have room for {limit}"
        raise PromptTooLongError(message, field=field)
    if num_prompt_tokens + (start.sampling.max_tokens or 0) > limit:
        message = f"{num_prompt_tokens} prompt tokens leave room for {limit - num_prompt_tokens} more"
        raise PromptTooLongError(message, field="sampling.max_tokens")


def max_sequence_tokens(pool: Pool) -> int:
    """Tokens of the longest sequence that the pool's largest decode place can end."""
    # The last token needs no room, as nothing attends to it.
    return min(pool.max_model_len, pool.num_place_tokens + 1) if pool.num_place_tokens else pool.max_model_len


def prompt_field(prompt: Prompt) -> str:
    """The path of the field that the prompt came in."""
    if isinstance(prompt, TextPrompt):
        return "text"
    return "chat.messages" if isinstance(prompt, ChatPrompt) else "token_ids.ids"


def _check_text_options(start: GenerateStart) -> None:
    options, field = start.text_options, "text_options.stop_strings"
    if len(options.stop_strings) > _MAX_STOP_STRINGS:
        raise InvalidRequestError(f"there are more than {_MAX_STOP_STRINGS} stop strings", field=field)
    for stop_string in options.stop_strings:
        if not 1 <= len(stop_string.encode()) <= _MAX_STOP_STRING_BYTES:
            message = f"a stop string has 1 to {_MAX_STOP_STRING_BYTES} bytes"
            raise InvalidRequestError(message, field=field)
    if options.omit_text and options.stop_strings:
        raise InvalidRequestError("stop strings are looked for in text", field="text_options.omit_text")


def _check_ids(token_ids: Iterable[int], vocab_size: int, field: str) -> None:
    if max(token_ids, default=0) >= vocab_size:
        raise InvalidRequestError(f"token ids must be below {vocab_size}", field=field)


def _is_empty(prompt: Prompt) -> bool:
    if isinstance(prompt, TextPrompt):
        return not prompt.text
    return not (prompt.messages if isinstance(prompt, ChatPrompt) else prompt.token_ids)
