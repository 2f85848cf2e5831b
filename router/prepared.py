"""A request made ready: checked, tokenized, named, and bound to a pool."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from quartet.engine.sampling import MAX_STOP_IDS, Sampling
from quartet.errors import InvalidRequestError, ModelNotFoundError, RequestTimeoutError, WorkerUnavailableError
from quartet.kvcache.block_hash import ExtraKey, sequence_hashes
from quartet.rpc.check_start import check_resume, check_start
from quartet.rpc.edge import ChatPrompt, GenerateStart, Prompt, Resume, TextPrompt
from quartet.text.model_text import ModelText
from router.pipeline_tools import PipelineTools
from router.pools import Pool
from router.validation import check_generated, check_pool, check_tokens, max_sequence_tokens
from router.worker_table import WorkerTable

# Below so many characters tokenizing costs less than handing it to a thread.
_MAX_INLINE_LENGTH = 2_000
# Enough for a first word to keep its space, and for an accent to find its letter.
_TAIL_TOKENS = 4


ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class ArrivedRequest:
    """A request as it came: nothing of it is checked yet.

    Attributes:
        resume: what it goes on after; ``None``: a new request.
        traceparent: W3C trace context; empty: no trace.
        request_id: 32 lower-case hexadecimal digits where it is new; else what it says.
        arrived_at: monotonic seconds.
    """

    start: GenerateStart
    resume: Resume | None
    traceparent: str
    request_id: str
    arrived_at: float

    @classmethod
    def now(cls, start: GenerateStart, resume: Resume | None, traceparent: str) -> ArrivedRequest:
        """It arrives; a new one's id is drawn here."""
        return cls(
            start=start,
            resume=resume,
            traceparent=traceparent,
            request_id=secrets.token_hex(16) if resume is None else resume.request_id,
            arrived_at=time.monotonic(),
        )

    @property
    def choices(self) -> Sequence[int]:
        """Numbers of the choices that run."""
        return range(self.start.num_choices) if self.resume is None else (self.resume.choice,)

    def check(self) -> None:
        """Refuse what is impossible with any model. Raises ``InvalidRequestError``."""
        check_start(self.start)
        if self.resume is not None:
            check_resume(self.resume, self.start)


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """A request that can be placed.

    Attributes:
        request_id, traceparent: as in ``ArrivedRequest``.
        arrived_at, deadline: monotonic seconds.
        tokenize_s: seconds that template and tokenizer took.
        max_output_tokens: output tokens at which each choice ends at the latest.
    """

    request_id: str
    start: GenerateStart
    pool: Pool
    text: ModelText
    prompt_token_ids: Sequence[int] = field(repr=False)
    seed: int
    traceparent: str
    arrived_at: float
    deadline: float
    tokenize_s: float
    max_output_tokens: int

    @property
    def prompt_tail(self) -> Sequence[int]:
        """The prompt's last few tokens where the answer's text continues it; a chat's answer stands alone."""
        return () if isinstance(self.start.prompt, ChatPrompt) else self.prompt_token_ids[-_TAIL_TOKENS:]

    @cached_property
    def sampling(self) -> Sampling:
        """What workers are told: everything that ends the answer, so that it ends alike wherever it is generated.

        Their own idea of the longest sequence may differ from place to place; and engines don't read the tokenizer's
        files, which for chat models often are the only ones to name the end of a turn.
        """
        given = self.start.sampling
        stop_token_ids = given.stop_token_ids
        if not given.ignore_eos and "stop_token_ids" in self.pool.sampling_fields:
            known = (token_id for token_id in self.text.eos_token_ids if token_id < self.text.vocab_size)
            stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *known)))[:MAX_STOP_IDS]
        if given.max_tokens == self.max_output_tokens and stop_token_ids == given.stop_token_ids:
            return given
        return replace(given, max_tokens=self.max_output_tokens, stop_token_ids=stop_token_ids)

    @cached_property
    def _prompt_hashes(self) -> Sequence[int]:
        return self._hashes(self.prompt_token_ids)

    def sequence_hashes(self, generated: Sequence[int]) -> Sequence[int]:
        """Names of the full blocks of the prompt and of ``generated``, which follows it, as workers name them.

        Empty where the pool's workers have blocks of different sizes.
        """
        return self._hashes([*self.prompt_token_ids, *generated]) if generated else self._prompt_hashes

    def _hashes(self, token_ids: Sequence[int]) -> Sequence[int]:
        if not self.pool.block_size:
            return ()
        extra_key = ExtraKey(adapter=self.start.adapter, cache_salt=self.start.cache_salt)
        return sequence_hashes(token_ids, self.pool.block_size, extra_key)

    def ended_by(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of ``token_ids`` is one that ends the output."""
        sampling = self.start.sampling
        eos_token_ids = () if sampling.ignore_eos else self.text.eos_token_ids
        # Up to min_tokens, engines take such a token for one like any other.
        return len(token_ids) > sampling.min_tokens and (
            token_ids[-1] in sampling.stop_token_ids or token_ids[-1] in eos_token_ids
        )


async def run_prepared(
    arrived: ArrivedRequest, tools: PipelineTools, run: Callable[[PreparedRequest], Awaitable[ResultT]], *, late: str
) -> ResultT:
    """Check what arrived, make it ready, and ``run`` it: all of that within its time.

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
            return await run(await _prepare(arrived, tools, arrived.arrived_at + timeout_s))
    except TimeoutError as error:
        raise RequestTimeoutError(f"the request {late} within {timeout_s:g} s") from error


async def _prepare(arrived: ArrivedRequest, tools: PipelineTools, deadline: float) -> PreparedRequest:
    """Bind and tokenize; no worker is asked for anything but, once for each model, its text files."""
    start, resume = arrived.start, arrived.resume
    pool = _find_pool(start, tools.table, resume)
    check_pool(start, pool)
    text = await tools.texts.model_text(pool.key)
    began = time.monotonic()
    token_ids = await _tokenize(start.prompt, text)
    check_tokens(start, token_ids, text.vocab_size, pool)
    if resume is not None:
        check_generated(resume, text.vocab_size, max_sequence_tokens(pool) - len(token_ids))
    return PreparedRequest(
        request_id=arrived.request_id,
        start=start,
        pool=pool,
        text=text,
        prompt_token_ids=token_ids,
        seed=_seed(start, resume),
        traceparent=arrived.traceparent,
        arrived_at=arrived.arrived_at,
        deadline=deadline,
        tokenize_s=time.monotonic() - began,
        max_output_tokens=start.sampling.max_tokens or max_sequence_tokens(pool) - len(token_ids),
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
