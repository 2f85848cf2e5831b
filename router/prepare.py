"""Making a request ready: checks, pool, tokens, media; and running it within its time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from quartet.errors import InvalidRequestError, ModelNotFoundError, RequestTimeoutError, WorkerUnavailableError
from quartet.rpc.edge import ChatPrompt, GenerateStart, Prompt, Resume, TextPrompt
from quartet.text.model_text import ModelText
from router.media_fields import check_items
from router.media_run import MediaPrompt, MediaRequest
from router.pipeline_tools import PipelineTools
from router.pools import Pool
from router.prepare_media import has_media, prepare_media
from router.prepared import ArrivedRequest, PreparedRequest
from router.validation import check_generated, check_pool, check_tokens, max_sequence_tokens, num_output_tokens
from router.worker_table import WorkerTable

# Below so many characters tokenizing costs less than handing it to a thread.
_MAX_INLINE_LENGTH = 2_000

ResultT = TypeVar("ResultT")


async def run_prepared(
    arrived: ArrivedRequest,
    tools: PipelineTools,
    run: Callable[[PreparedRequest], Awaitable[ResultT]],
    *,
    late: str,
    encodes: bool = True,
) -> ResultT:
    """Check what arrived, make it ready, and ``run`` it: all of that within its time.

    Its media are encoded meanwhile, if ``encodes``; what nobody took of them is let go of in the end.

    Raises:
        InvalidRequestError: an impossible or unsupported field, named.
        ModelNotFoundError: no pool serves the model.
        WorkerUnavailableError: none serves the very model that gave the tokens to go on after.
        RequestTimeoutError: its time ended before ``run`` did; ``late`` says in its message what was not done in time.
        ServingError: the model's text files can't be had; and what ``run`` raises.
    """
    arrived.check()
    timeout_s = min(arrived.start.timeout_s or tools.max_timeout_s, tools.max_timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            request = await _prepare(arrived, tools, arrived.arrived_at + timeout_s, encodes=encodes)
            if request.media is None:
                return await run(request)
            try:
                return await run(request)
            finally:
                request.media.close()
    except TimeoutError as error:
        raise RequestTimeoutError(f"the request {late} within {timeout_s:g} s") from error


async def _prepare(arrived: ArrivedRequest, tools: PipelineTools, deadline: float, *, encodes: bool) -> PreparedRequest:
    """Bind and tokenize; workers are asked for nothing but, once for each model, its text files, and to encode media.

    Whoever gets it closes its media.
    """
    start, resume = arrived.start, arrived.resume
    pool = _find_pool(start, tools.table, resume)
    check_pool(start, pool)
    text = await tools.texts.model_text(pool.key)
    began = time.monotonic()
    token_ids = await _tokenize(start.prompt, text)
    tokenize_s = time.monotonic() - began
    media, prompt = None, MediaPrompt(token_ids)
    if has_media(start):
        request = MediaRequest(
            request_id=arrived.request_id,
            start=start,
            traceparent=arrived.traceparent,
            first_attempt=0 if resume is None else resume.attempt,
            deadline=deadline,
        )
        media, prompt = await prepare_media(request, pool, text, token_ids, tools.media, encodes=encodes)
    elif text.media is not None:
        check_items(start, token_ids, text.media, ())
    try:
        check_tokens(start, prompt.token_ids, text.vocab_size, pool)
        max_output_tokens = num_output_tokens(start, len(prompt.token_ids), pool)
        if resume is not None:
            check_generated(resume, text.vocab_size, max_sequence_tokens(pool) - len(prompt.token_ids))
    except InvalidRequestError:
        if media is not None:
            media.close()
        raise
    return PreparedRequest(
        request_id=arrived.request_id,
        start=start,
        pool=pool,
        text=text,
        prompt_token_ids=prompt.token_ids,
        seed=_seed(start, resume),
        traceparent=arrived.traceparent,
        arrived_at=arrived.arrived_at,
        deadline=deadline,
        tokenize_s=tokenize_s,
        max_output_tokens=max_output_tokens,
        media=media,
        spans=prompt.spans,
        num_unknown_tokens=prompt.num_unknown_tokens,
    )


def _seed(start: GenerateStart, resume: Resume | None) -> int:
    if resume is not None:
        return resume.seed
    return secrets.randbits(64) if start.seed is None else start.seed


def _find_pool(start: GenerateStart, table: WorkerTable, resume: Resume | None) -> Pool:
    if resume is not None and resume.model_fingerprint:
        return _find_same_pool(start.model, resume.model_fingerprint, table)
    pool = table.pool(start.model, time.monotonic())
    if pool is not None:
        return pool
    if start.model:
        raise ModelNotFoundError("no worker serves a model of this name", field="model")
    if table.pools(time.monotonic()):
        raise InvalidRequestError("several models are served: name one", field="model")
    raise ModelNotFoundError("no worker serves any model yet", field="model")


def _find_same_pool(model_name: str, fingerprint: str, table: WorkerTable) -> Pool:
    """The pool of that very model: while a new version is rolled out, several serve one name."""
    for pool in table.pools(time.monotonic()):
        if pool.key.fingerprint == fingerprint and model_name in ("", pool.key.model_name):
            return pool
    raise WorkerUnavailableError("the model that gave the tokens to go on after is served no more")


async def _tokenize(prompt: Prompt, text: ModelText) -> Sequence[int]:
    if isinstance(prompt, TextPrompt):
        if len(prompt.text) <= _MAX_INLINE_LENGTH:
            return text.encode_text(prompt.text)
        return await asyncio.to_thread(text.encode_text, prompt.text)
    if isinstance(prompt, ChatPrompt):
        return await _tokenize_chat(prompt, text)
    return prompt.token_ids


async def _tokenize_chat(prompt: ChatPrompt, text: ModelText) -> Sequence[int]:
    try:
        if sum(message.num_characters for message in prompt.messages) <= _MAX_INLINE_LENGTH:
            return text.encode_messages(prompt.messages, prompt.add_generation_prompt)
        return await asyncio.to_thread(text.encode_messages, prompt.messages, prompt.add_generation_prompt)
    except InvalidRequestError as error:
        # To the text side the messages are all there is; in a request they are part of `chat`.
        field = "chat.messages" if error.field == "messages" else error.field
        raise type(error)(error.message, field=field) from error
