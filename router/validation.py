"""What a pool can't serve, refused before any worker is touched; a refusal names the field of ``GenerateStart``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from quartet.errors import InvalidRequestError, PromptTooLongError, UnsupportedFieldError
from quartet.rpc.check_start import prompt_field
from quartet.rpc.edge import GenerateStart, Resume
from router.pools import Pool

# W3C Trace Context, section 3.2: version, trace id, parent id, flags; later versions may add fields.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?")
_MAX_TRACEPARENT_LENGTH = 256


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
    """Refuse token ids that don't exist and lengths that never fit. Raises ``InvalidRequestError``.

    Media of unknown sizes count as one token each, which is the least that they can fill: workers refuse the rest.
    """
    field = prompt_field(start.prompt)
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt has no tokens", field=field)
    _check_ids(prompt_token_ids, vocab_size, field)
    _check_ids(start.sampling.stop_token_ids, vocab_size, "sampling.stop_token_ids")
    _check_ids(start.sampling.logit_bias, vocab_size, "sampling.logit_bias")
    check_length(start, len(prompt_token_ids), pool)


def check_length(start: GenerateStart, num_prompt_tokens: int, pool: Pool) -> None:
    """Refuse a prompt that never fits together with what is wanted. Raises ``PromptTooLongError``."""
    field, limit = prompt_field(start.prompt), max_sequence_tokens(pool)
    if num_prompt_tokens + 1 > limit:
        message = f"the prompt has {num_prompt_tokens} tokens; it and the answer have room for {limit}"
        raise PromptTooLongError(message, field=field)
    if num_prompt_tokens + (start.sampling.max_tokens or 0) > limit:
        message = f"{num_prompt_tokens} prompt tokens leave room for {limit - num_prompt_tokens} more"
        raise PromptTooLongError(message, field="sampling.max_tokens")
    if num_prompt_tokens + start.sampling.min_tokens > limit:
        message = f"{num_prompt_tokens} prompt tokens leave room for {limit - num_prompt_tokens} more"
        raise PromptTooLongError(message, field="sampling.min_tokens")


def check_generated(resume: Resume, vocab_size: int, max_tokens: int) -> None:
    """Refuse tokens that no answer of ``max_tokens`` at most can have given. Raises ``InvalidRequestError``."""
    field = "resume.generated_token_ids"
    _check_ids(resume.generated_token_ids, vocab_size, field)
    if len(resume.generated_token_ids) > max_tokens:
        raise InvalidRequestError(f"the prompt leaves room for {max_tokens} generated tokens", field=field)


def num_output_tokens(start: GenerateStart, num_prompt_tokens: int, pool: Pool) -> int:
    """At how many output tokens an answer ends at the latest. Raises ``PromptTooLongError``: there is room for none."""
    num_left = max_sequence_tokens(pool) - num_prompt_tokens
    if num_left < 1:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens and leaves no room", field=prompt_field(start.prompt)
        )
    return start.sampling.max_tokens or num_left


def valid_traceparent(header: str) -> str:
    """``header`` if it is a W3C ``traceparent``, else empty: the standard has whoever gets another one ignore it."""
    match = _TRACEPARENT.fullmatch(header)
    if match is None or len(header) > _MAX_TRACEPARENT_LENGTH or (header.startswith("00") and match["more"]):
        return ""
    return header


def max_sequence_tokens(pool: Pool) -> int:
    """Tokens of the longest sequence that the pool's largest decode place can end."""
    # The last token needs no room, as nothing attends to it.
    return min(pool.max_model_len, pool.num_place_tokens + 1) if pool.num_place_tokens else pool.max_model_len


def _check_ids(token_ids: Iterable[int], vocab_size: int, field: str) -> None:
    if max(token_ids, default=0) >= vocab_size:
        raise InvalidRequestError(f"token ids must be below {vocab_size}", field=field)
