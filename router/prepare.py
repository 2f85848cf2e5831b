"""A request of the router on its way from arrival to placement: checks, pool, tokens and media."""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

from quartet.api.answer import DeltaSink
from quartet.api.chat import ChatPrompt
from quartet.api.openai.requests import ApiKey
from quartet.api.output import ChoiceOutput, OutputSettings, make_outputs
from quartet.api.request import (
    AskedStart,
    GenerateStart,
    Prompt,
    Relayed,
    Resume,
    TextOptions,
    TextPrompt,
    TokenPrompt,
    check_asked,
    check_read,
    check_resume,
    prompt_field,
)
from quartet.engine.guided.grammar import FIELD
from quartet.engine.sampling import MAX_STOP_IDS, Sampling, check_fields, check_output_fields
from quartet.errors import (
    InvalidRequestError,
    PromptTooLongError,
    RequestTimeoutError,
    UnsupportedFieldError,
    WorkerUnavailableError,
)
from quartet.kvcache.block_hash import NO_EXTRA_KEY, ExtraKey, MediaSpan, sequence_hashes
from quartet.rpc.message_limits import MAX_NUMBER_BYTES, MAX_TEXT_BYTES, MaxBytes
from quartet.telemetry.metrics import RouterMetrics
from quartet.telemetry.tracing import Tracer
from quartet.text.model_text import ModelText
from quartet.text.parsed import OutputParsing
from quartet.text.tokenizer import EncodeLimit
from router.context import RouterContext
from router.guides import LLGUIDANCE_FIELDS, guided_by
from router.media.queue import MediaRoom
from router.media.request import ArrivedMedia, MediaRequest, RequestMedia, arrive, check_items, prepare_media
from router.prompt_memory import HeldPrompt, request_bytes, unread_bytes
from router.rate_limits import Charge
from router.readiness import model_error
from router.request_trace import RequestTrace
from router.tenants import salt_in_domain
from router.thread_queue import TokenizeQueue
from router.workers import Pool, PoolKey, WorkerTable

# To look up a model takes as long as to read so many token ids.
_MIN_LONG_TOKENS = 256

# Tokenizing fewer characters than this costs less than handing them to a thread.
_MAX_INLINE_LENGTH = 2_000

# Of a prompt that is tokenized so much is kept.
_MAX_KEPT_MESSAGES, _MAX_KEPT_CHARACTERS = 64, 16_384

# A message costs as much as so many characters, also an empty one: the template writes its frame.
_MESSAGE_COST = 40

# Bytes of the longest token of a model whose tokenizer is not here yet, and of all text of a request but its prompt.
_UNKNOWN_TOKEN_BYTES = 256
_OTHER_TEXT_BYTES = 256 << 10

# Bytes of the largest token id, and of all numbers of a request but its prompt. A prompt that is up to so many times as
# long as the model allows is refused with the number of its tokens, which says more.
_TOKEN_ID_BYTES, _OTHER_NUMBER_BYTES, _TOLERANCE = 5, 64 << 10, 4

# This many of the prompt's last tokens let the answer's first word keep its space, and an accent find its letter.
_TAIL_TOKENS = 4

_NO_PROMPT = TokenPrompt(())
_NOT_RELAYED = Relayed()

ResultT = TypeVar("ResultT")
#: Makes a request that was read ready to run.
Prepare: TypeAlias = "Callable[[RouterRequest, RouterContext], Awaitable[None]]"


async def run_prepared(
    request: RouterRequest,
    context: RouterContext,
    run: Callable[[RouterRequest], Awaitable[ResultT]],
    *,
    late: str,
    encodes: bool = True,
    num_copies: int = 1,
    prepare: Prepare | None = None,
) -> ResultT:
    """Check ``request``, prepare it, and ``run`` it, all within its time.

    If ``encodes``, its media are encoded meanwhile; at the end, hand-offs that no prefill took are dropped. Files in it
    are ``num_copies`` times in memory. ``prepare`` takes the place of what prepares it for workers of this router.

    Raises:
        InvalidRequestError: a field is impossible or unsupported; names the field.
        ModelNotFoundError: no pool serves the model.
        ModelUnavailableError: whether one does is not known now.
        WorkerUnavailableError: no worker serves the model that gave the tokens of the attempt to resume.
        RateLimitedError: its tenant or its key has used up what it may ask for in a minute.
        QueueFullError: too many prompts wait, and it is the last request of the tenant that has most of them.
        RequestTimeoutError: its time ended before ``run`` did; ``late`` says in its message what was still to be done.
        ServingError: the model's text files are unavailable; and all errors of ``run``.
    """
    request.check()
    _check_namespaces(request, context)
    _admit(request, context)
    _refuse_too_many_ids(request, context.table)
    try:
        if request.asked.shows_media:
            # Their files are in memory already, so they count before the request waits for anything.
            request.take(request.asked.read())
            request.arrived = arrive(request.start, context.media, num_copies=num_copies)
        elif request.asked.num_file_bytes:
            num_bytes = num_copies * request.asked.num_file_bytes
            request.unread = context.media.queue.hold(request.asked.tenant, num_bytes)
        prepare = prepare or partial(_prepare, encodes=encodes)
        return await _run_in_time(request, context, run, prepare, late=late, num_copies=num_copies)
    finally:
        if request.unread is not None:
            request.unread.close()
        if request.arrived is not None:
            request.arrived.close()


def _admit(request: RouterRequest, context: RouterContext) -> None:
    """Let it in unless it is already, and charge it the tokens that are known. Raises ``RateLimitedError``."""
    asked = request.asked
    if request.charge is None:
        request.charge = context.limits.admit(asked.tenant, request.key, asked.num_token_ids)
    else:
        request.charge.pay(asked.num_token_ids)


async def _run_in_time(
    request: RouterRequest,
    context: RouterContext,
    run: Callable[[RouterRequest], Awaitable[ResultT]],
    prepare: Prepare,
    *,
    late: str,
    num_copies: int,
) -> ResultT:
    timeout_s = min(request.asked.timeout_s or context.max_timeout_s, context.max_timeout_s)
    request.deadline = request.arrived_at + timeout_s
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            asked, resume = request.asked, request.resume
            num_bytes = request_bytes(request.start, resume) if asked.shows_media else unread_bytes(asked, resume)
            request.held = context.prompts.hold(asked.tenant, asked.priority, num_bytes, timeout)
            del timeout  # it knows this task, whose error may know this frame
            await _begin(request, context, num_copies)
            request.held.read(request_bytes(request.start, request.resume))
            await prepare(request, context)
            try:
                if request.charge is not None:
                    request.charge.pay(request.num_prompt_tokens)
                return await run(request)
            finally:
                if request.media is not None:
                    request.media.close()
    except TimeoutError as error:
        if request.held is not None and request.held.is_refused:
            raise context.prompts.full_error() from error
        message = f"the request {late} within {timeout_s:g} s{_lack(request, context.table)}"
        raise RequestTimeoutError(message) from error
    finally:
        if request.held is not None:
            request.held.leave()


async def _begin(request: RouterRequest, context: RouterContext, num_copies: int) -> None:
    """Wait for the request's turn, and read it: what that costs counts for the turn."""
    asked, enter = request.asked, context.intake.enter
    num_generated = 0 if request.resume is None else len(request.resume.generated_token_ids)
    if asked.shows_media or asked.is_short:
        if not asked.has_entered:
            await enter(asked.tenant, asked.work + num_generated)
        if asked.shows_media:
            return
        request.take(asked.read())
    else:
        request.take(await _read_in_turns(request, context, num_generated))
    if request.unread is not None:
        request.unread.close()  # from now on they are counted one by one
    if request.start.has_media:
        request.arrived = arrive(request.start, context.media, num_copies=num_copies)


async def _read_in_turns(request: RouterRequest, context: RouterContext, num_generated: int) -> GenerateStart:
    """Read a long request step by step: each waits for its turn."""
    steps, tenant = request.asked.steps(), request.asked.tenant
    await context.intake.enter(tenant, next(steps) + num_generated)
    while True:
        try:
            work = next(steps)
        except StopIteration as end:
            start: GenerateStart = end.value
            return start
        await context.intake.enter(tenant, work)


async def resume_in_turns(request: RouterRequest, outputs: Mapping[int, ChoiceOutput], context: RouterContext) -> None:
    """Give the output of a resumed choice the tokens that its client has, step by step: each waits for its turn.

    To make text of them and to look for stop strings takes several times as long as to read them.

    Raises:
        InvalidRequestError: these tokens can't give the text that the client has.
    """
    if request.resume is None:
        return
    if request.trace is not None:
        request.trace.prepare.begin("resume")
    for work in outputs[request.resume.choice].resume(request.resume):
        await context.intake.enter(request.start.tenant, work)


def _refuse_too_many_ids(request: RouterRequest, table: WorkerTable) -> None:
    """Refuse a prompt of token ids that is too long before any is read. Raises ``PromptTooLongError``."""
    num_token_ids = request.asked.num_token_ids
    if num_token_ids > _MIN_LONG_TOKENS:
        _check_room(num_token_ids, "token_ids.ids", find_pool(request.asked, table, request.resume))


def _lack(request: RouterRequest, table: WorkerTable) -> str:
    """What a request that is late may have waited for; empty: nothing that is known."""
    if "pool" not in vars(request) or not request.start.has_media:
        return ""
    media = table.media(request.pool.key, time.monotonic())
    return ": no encode worker of this model is ready" if media is not None and media.awaits(frozenset()) else ""


class RouterRequest:
    """A request of the router: as it arrived and, after ``run_prepared`` prepared it, bound to a pool and tokenized.

    Attributes:
        asked: what the client asked for, as it came.
        start: all of that; set once it has been read.
        resume: the attempt to resume; ``None``: a new request.
        traceparent: W3C trace context for all that is done for it; empty: no trace.
        trace: makes its spans; ``None``: it makes none.
        key: the API key that its client has shown; ``None``: none.
        charge: what it is charged of the limits of a minute; ``None``: nothing limits it, or it is not let in yet.
        request_id: 32 lower-case hexadecimal digits for a new request; otherwise the id in ``resume``.
        prefill_namespaces: whose routers prefill, the first that can; empty: the router's own workers.
        sent_at_unix_ns: when the router that relays it sent it; 0: none does, or it does not say.
        arrived_at: in monotonic seconds.
        deadline: in monotonic seconds; set by the check, while all fields below are set by preparing.
        worker_priority: the priority that workers are told.
        pool: the pool that serves it.
        text: text side of the pool's model.
        prompt_token_ids: if ``spans`` says where its media lie, the tokens of the media are included; otherwise each
            item is one placeholder.
        seed: seed of its sampling.
        tokenize_s: seconds that template and tokenizer took.
        max_output_tokens: output tokens at which each choice ends at the latest. While the number of its media's tokens
            is unknown, the worker may end a choice sooner unless the client set the limit.
        unread: the memory that its files take until they are read; ``None``: they are few, or read already.
        arrived: its media as they came; ``None``: it names none.
        held: counts its prompt until it is placed.
        media: ``None``: the request is text only.
        spans: where its media lie in the prompt; empty: unknown, or it has none.
        num_unknown_tokens: most tokens by which the prompt can grow once its media are in it.
        trust_domain: id of its tenant's trust domain; empty: that of all tenants without one.
        cache_salt: for workers; the client's own one unless there are trust domains.
    """

    start: GenerateStart
    deadline: float
    worker_priority: int
    pool: Pool
    text: ModelText
    prompt_token_ids: Sequence[int]
    seed: int
    max_output_tokens: int

    def __init__(
        self,
        asked: AskedStart,
        resume: Resume | None = None,
        traceparent: str = "",
        relayed: Relayed = _NOT_RELAYED,
        key: ApiKey | None = None,
        charge: Charge | None = None,
    ) -> None:
        """Accept it without any check, and draw the id of a new request, unless who relayed it has."""
        self.asked = asked
        self.resume = resume
        self.traceparent = traceparent
        self.trace: RequestTrace | None = None
        self.key = key
        self.charge = charge
        self.request_id = resume.request_id if resume is not None else relayed.request_id or secrets.token_hex(16)
        self.prefill_namespaces = relayed.prefill_namespaces
        self.sent_at_unix_ns = relayed.sent_at_unix_ns
        self.arrived_at = time.monotonic()
        self.tokenize_s = 0.0
        self.unread: MediaRoom | None = None
        self.arrived: ArrivedMedia | None = None
        self.held: HeldPrompt | None = None
        self.media: RequestMedia | None = None
        self.spans: tuple[MediaSpan, ...] = ()
        self.num_unknown_tokens = 0
        self.trust_domain, self.cache_salt = "", asked.cache_salt
        self._prompt_hashes: Sequence[int] | None = None
        self._sampling: Sampling | None = None

    def begin_trace(self, tracer: Tracer, received_at: float | None = None) -> None:
        """Have it traced, if it is sampled; called before anything else is done for it.

        ``received_at`` is when its first byte came, where that was noted.
        """
        trace = tracer.begin("request", self.traceparent, self.request_id)
        self.traceparent = trace.traceparent
        if trace.is_sampled:
            received_at = received_at or self.arrived_at
            self.trace = RequestTrace(trace, received_at, self.arrived_at, self.sent_at_unix_ns)

    def check(self) -> None:
        """Refuse at once what no model can serve. Raises ``InvalidRequestError``."""
        check_asked(self.asked)
        if self.resume is not None:
            check_resume(self.resume, self.asked)

    def take(self, start: GenerateStart) -> None:
        """``start`` was read from what was asked for. Raises ``InvalidRequestError``: no model can serve it."""
        check_read(start)
        self.start = start

    def forget_text(self) -> None:
        """It is tokenized: keep only which kind of prompt it was, if it is long.

        What ends badly may stay in memory until garbage is collected, and collecting 100 chats of 4,096 messages takes
        the event loop 400 ms.
        """
        prompt = self.start.prompt
        if isinstance(prompt, ChatPrompt) and len(prompt.messages) > _MAX_KEPT_MESSAGES:
            self.start = replace(self.start, prompt=replace(prompt, messages=()))
        elif isinstance(prompt, TextPrompt) and len(prompt.text) > _MAX_KEPT_CHARACTERS:
            self.start = replace(self.start, prompt=TextPrompt(""))

    def forget_prompt(self) -> None:
        """It has ended, and is only known any more: let its prompt go.

        Its outputs, its task and their errors know each other and it, so reference counts do not free them. The garbage
        collector does, but comes late to what has lived for long.
        """
        known = vars(self).get("start", self.asked)
        if isinstance(known, GenerateStart):
            start = object.__new__(GenerateStart)  # `replace` would cost ten times as much
            vars(start).update(vars(known), prompt=_NO_PROMPT, media=())
            self.asked = self.start = start
        else:
            known.forget()
        self.prompt_token_ids, self._prompt_hashes = (), None

    @property
    def choices(self) -> Sequence[int]:
        """Numbers of the choices that run."""
        return range(self.asked.num_choices) if self.resume is None else (self.resume.choice,)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; while the number of its media's tokens is unknown, the most that it can have."""
        return len(self.prompt_token_ids) + self.num_unknown_tokens

    @property
    def num_resumed_tokens(self) -> int:
        """Output tokens that its client brings: workers compute them like the prompt's."""
        return 0 if self.resume is None else len(self.resume.generated_token_ids)

    @property
    def num_media_tokens(self) -> int:
        """Tokens of the prompt that media fill; 0 also while their number is unknown."""
        return sum(span.num_tokens for span in self.spans)

    @property
    def num_placeholders(self) -> int:
        """Tokens of the prompt that stand for media with an unknown number of tokens."""
        return 0 if self.media is None or self.spans else len(self.media.items)

    def with_prompt(self, token_ids: Sequence[int], spans: tuple[MediaSpan, ...]) -> RouterRequest:
        """A copy with the prompt as a worker laid it out, media included.

        Raises:
            PromptTooLongError: the prompt leaves no room for the answer.
        """
        max_output_tokens = num_output_tokens(self.start, len(token_ids), self.pool)
        request = copy.copy(self)
        request.prompt_token_ids, request.spans, request.num_unknown_tokens = array("I", token_ids), spans, 0
        request.max_output_tokens, request._prompt_hashes, request._sampling = max_output_tokens, None, None
        return request

    def make_outputs(self, sink: DeltaSink, options: TextOptions, metrics: RouterMetrics) -> dict[int, ChoiceOutput]:
        """The outputs of the choices that run, by choice; they write to ``sink``, with text as ``options`` say."""
        model = metrics.for_model(self.pool.key.model_name)
        settings = OutputSettings(
            num_prompt_tokens=len(self.prompt_token_ids),
            arrived_at=self.arrived_at,
            tokenize_s=self.tokenize_s,
            omits_token_ids=options.omit_token_ids,
            ttft=model.ttft,
            itl=model.itl,
            num_media_tokens=self.num_media_tokens,
            num_placeholders=self.num_placeholders,
        )
        parsing = None if options.omit_text else self.parsing
        return make_outputs(self.choices, sink, options, self.text.tokenizer, self.prompt_tail, settings, parsing)

    @property
    def parsing(self) -> OutputParsing | None:
        """How the text of a chat's answer is parsed; ``None``: it is not."""
        prompt = self.start.prompt
        if not isinstance(prompt, ChatPrompt) or self.start.text_options.raw_text:
            return None
        reasoning, calls = self.text.parsers(self.pool.reasoning_parser, self.pool.tool_call_parser)
        tools = prompt.shown_tools
        if not reasoning and not (calls and tools):
            return None
        format = self.text.output_format(reasoning, calls if tools else "")
        return OutputParsing(
            format=format,
            request_id=self.request_id,
            prompt_end=self.text.prompt_end(self.prompt_token_ids) if format.needs_prompt_end else "",
            tools={tool.name: tool.parameters.value("chat.tools") for tool in tools},
            streams_arguments=self.start.text_options.stream_tool_arguments,
            allows_parallel_calls=prompt.parallel_tool_calls,
        )

    @property
    def prompt_tail(self) -> Sequence[int]:
        """The prompt's last few tokens if the answer's text continues them; empty for a chat, which stands alone."""
        return () if isinstance(self.start.prompt, ChatPrompt) else self.prompt_token_ids[-_TAIL_TOKENS:]

    @property
    def sampling(self) -> Sampling:
        """The sampling for workers. It holds everything that can end the answer: it ends alike on every worker.

        Workers may differ in their longest sequence. Engines also don't read the tokenizer's files, and for chat models
        often only these files name the end of a turn.
        """
        if self._sampling is None:
            self._sampling = self._limited_sampling(self.start.sampling)
        return self._sampling

    def _limited_sampling(self, given: Sampling) -> Sampling:
        stop_token_ids = given.stop_token_ids
        if not given.ignore_eos and "stop_token_ids" in self.pool.sampling_fields:
            known = [token_id for token_id in self.text.eos_token_ids if token_id < self.text.vocab_size]
            stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *known)))[:MAX_STOP_IDS]
        # The worker that first learns the prompt's length decides how much room it leaves.
        max_tokens = given.max_tokens if self.num_placeholders else self.max_output_tokens
        if given.max_tokens == max_tokens and stop_token_ids == given.stop_token_ids:
            return given
        return given.limited(max_tokens, stop_token_ids)

    @property
    def sampling_fields(self) -> frozenset[str]:
        """The fields of ``Sampling`` and ``OutputOptions`` that its workers have to honour."""
        fields = self.sampling.changed_fields | self.start.output.fields
        return fields | {"seed"} if _needs_seed(self.start) else fields

    def sequence_hashes(self, generated: Sequence[int]) -> Sequence[int]:
        """Hashes of the full blocks of the prompt and of ``generated``, which follows it, as workers compute them.

        Empty if the pool has no block size, or if workers are to compute the prompt whatever they have cached.
        """
        if generated:
            return self._hashes([*self.prompt_token_ids, *generated], self.cache_salt)
        if self.start.output.num_prompt_logprobs is not None:
            return ()  # the prompt is computed whole
        if self._prompt_hashes is None:
            self._prompt_hashes = self._hashes(self.prompt_token_ids, self.cache_salt)
        return self._prompt_hashes

    def unsalted_hashes(self) -> Sequence[int]:
        """``sequence_hashes`` of the prompt as they would be if the client had given no salt."""
        return self._hashes(self.prompt_token_ids, salt_in_domain(self.trust_domain, ""))

    def _hashes(self, token_ids: Sequence[int], salt: str) -> Sequence[int]:
        if not self.pool.block_size:
            return ()
        adapter = self.start.adapter
        extra_key = ExtraKey(adapter=adapter, cache_salt=salt) if adapter or salt else NO_EXTRA_KEY
        if self.media is not None and not self.spans:
            # The position of the tokens after the first item is unknown.
            token_ids = token_ids[: token_ids.index(self.media.placeholder_id)]
        return sequence_hashes(token_ids, self.pool.block_size, extra_key, self.spans)

    def ended_by(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of ``token_ids`` ends the output."""
        sampling = self.start.sampling
        is_guided = sampling.guided is not None
        eos_token_ids = () if sampling.ignore_eos and not is_guided else self.text.eos_token_ids
        # Before min_tokens, engines treat an end token like any other, unless a grammar ends there.
        return len(token_ids) > (0 if is_guided else sampling.min_tokens) and (
            token_ids[-1] in sampling.stop_token_ids or token_ids[-1] in eos_token_ids
        )


# Refusals of what a pool can't serve, before any worker is asked; each names the field of ``GenerateStart``.


def _needs_seed(start: GenerateStart) -> bool:
    """Whether the request asks for an answer that its seed decides; greedy ones have no use for it."""
    return start.seed is not None and not start.sampling.is_greedy


def check_pool(start: GenerateStart, pool: Pool) -> None:
    """Refuse what this pool can't serve. Raises ``UnsupportedFieldError``."""
    check_fields(start.sampling, pool.sampling_fields, "this model")
    if _must_call(start.prompt) and not pool.sampling_fields >= LLGUIDANCE_FIELDS:
        raise UnsupportedFieldError("this model's engine can't be made to call tools", field="chat.tool_choice")
    check_output_fields(start.output, pool.sampling_fields, "this model")
    if _needs_seed(start) and "seed" not in pool.sampling_fields:
        raise UnsupportedFieldError("this model's engine pays no heed to seeds", field="seed")
    if start.adapter and start.adapter not in pool.adapters:
        raise UnsupportedFieldError("this model has no such adapter", field="adapter")


def check_chat_of_model(start: GenerateStart, pool: Pool, text: ModelText) -> None:
    """Refuse tools that a model can't be shown, or whose calls nobody would find. Raises ``UnsupportedFieldError``."""
    prompt = start.prompt
    if not (isinstance(prompt, ChatPrompt) and prompt.shown_tools and text.chat_template is not None):
        return
    if not text.chat_template.takes_tools:
        raise UnsupportedFieldError("this model's chat template takes no tools", field="chat.tools")
    options = start.text_options
    if not (options.raw_text or options.omit_text or text.parsers(pool.reasoning_parser, pool.tool_call_parser)[1]):
        message = "this model has no parser of tool calls; text_options.raw_text leaves them in the text"
        raise UnsupportedFieldError(message, field="chat.tools")


def check_tokens(start: GenerateStart, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that don't exist. Raises ``InvalidRequestError``."""
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt has no tokens", field=prompt_field(start.prompt))
    check_ids(prompt_token_ids, vocab_size, prompt_field(start.prompt))
    if start.sampling.stop_token_ids:
        check_ids(start.sampling.stop_token_ids, vocab_size, "sampling.stop_token_ids")
    if start.sampling.logit_bias:
        check_ids(start.sampling.logit_bias, vocab_size, "sampling.logit_bias")


def num_output_tokens(start: GenerateStart, num_prompt_tokens: int, pool: Pool) -> int:
    """The number of output tokens at which an answer ends at the latest.

    Each media item of unknown size counts as one token of the prompt, the least that it can fill.

    Raises:
        PromptTooLongError: the prompt can never fit together with the wanted output; workers refuse what only they know
            to be too long.
    """
    limit = _check_room(num_prompt_tokens, prompt_field(start.prompt), pool)
    if num_prompt_tokens + (start.sampling.max_tokens or 0) > limit:
        message = f"{num_prompt_tokens} prompt tokens leave room for {limit - num_prompt_tokens} more"
        raise PromptTooLongError(message, field="sampling.max_tokens")
    if num_prompt_tokens + start.sampling.min_tokens > limit:
        message = f"{num_prompt_tokens} prompt tokens leave room for {limit - num_prompt_tokens} more"
        raise PromptTooLongError(message, field="sampling.min_tokens")
    return start.sampling.max_tokens or limit - num_prompt_tokens


def _check_room(num_prompt_tokens: int, field: str, pool: Pool) -> int:
    """The tokens of the longest sequence, which must leave room for an answer. Raises ``PromptTooLongError``."""
    limit = max_sequence_tokens(pool)
    if num_prompt_tokens + 1 > limit:
        message = f"the prompt has {num_prompt_tokens} tokens; it and the answer have room for {limit}"
        raise PromptTooLongError(message, field=field)
    return limit


def check_generated(resume: Resume, vocab_size: int, max_tokens: int) -> None:
    """Refuse tokens that no answer of at most ``max_tokens`` can contain. Raises ``InvalidRequestError``."""
    field = "resume.generated_token_ids"
    if len(resume.generated_token_ids) > max_tokens:
        raise InvalidRequestError(f"the prompt leaves room for {max_tokens} generated tokens", field=field)
    check_ids(resume.generated_token_ids, vocab_size, field)


def max_message_bytes(pools: Iterable[Pool], known_text: Callable[[PoolKey], ModelText | None]) -> MaxBytes:
    """What the longest message that a request for any of ``pools`` can need holds; the most if there are none.

    ``known_text`` gives a pool's text side, if it is here.
    """
    num_text_bytes = num_tokens = 0
    has_files = False
    for pool in pools:
        text = known_text(pool.key)
        token_bytes = _UNKNOWN_TOKEN_BYTES if text is None else text.tokenizer.longest_token_bytes
        num_tokens = max(num_tokens, max_sequence_tokens(pool))
        num_text_bytes = max(num_text_bytes, max_sequence_tokens(pool) * token_bytes)
        has_files |= bool(pool.media.kinds) or pool.media.awaits_encode
    if not num_tokens:
        return MaxBytes()
    return MaxBytes(
        text=min(num_text_bytes + _OTHER_TEXT_BYTES, MAX_TEXT_BYTES),
        numbers=min(_TOLERANCE * _TOKEN_ID_BYTES * num_tokens + _OTHER_NUMBER_BYTES, MAX_NUMBER_BYTES),
        has_files=has_files,
    )


def max_sequence_tokens(pool: Pool) -> int:
    """Tokens of the longest sequence that the pool's largest decode rank can end."""
    # The last token needs no room, because no later token attends to it.
    return min(pool.max_model_len, pool.num_rank_tokens + 1) if pool.num_rank_tokens else pool.max_model_len


def check_ids(token_ids: Iterable[int], vocab_size: int, field: str) -> None:
    """Refuse ids that the model does not have. Raises ``InvalidRequestError`` naming ``field``."""
    if max(token_ids, default=0) >= vocab_size:
        raise InvalidRequestError(f"token ids must be below {vocab_size}", field=field)


async def _prepare(request: RouterRequest, context: RouterContext, *, encodes: bool) -> None:
    """Bind and tokenize it; workers are asked only for media and, once for each model, for its text files.

    The caller closes the request's media.
    """
    start, resume = request.start, request.resume
    request.worker_priority = min(start.priority, context.tenants.config(start.tenant).max_priority)
    pool = request.pool = find_pool(start, context.table, resume)
    check_pool(start, pool)
    if context.tenants.has_domains:
        request.trust_domain = context.tenants.domain_id(start.tenant)
        request.cache_salt = salt_in_domain(request.trust_domain, start.cache_salt)
    text = request.text = await context.texts.model_text(pool.key)
    check_chat_of_model(start, pool, text)
    token_ids = await tokenize_request(request, context)
    await _guide(request, context)
    if request.held is not None and not isinstance(start.prompt, TokenPrompt):
        request.held.tokenized(len(token_ids))
    if request.arrived is None:
        request.forget_text()
    # Before any token is looked at.
    request.max_output_tokens = num_output_tokens(start, len(token_ids), pool)
    start.output.check_prompt(len(token_ids), has_media=request.arrived is not None)
    if request.arrived is not None:
        await _prepare_media(request, request.arrived, context, token_ids, encodes=encodes)
    elif text.media is not None:
        check_items(start, token_ids, text.media, ())
    try:
        token_ids = request.prompt_token_ids
        check_tokens(start, token_ids, text.vocab_size)
        if request.arrived is not None:
            request.max_output_tokens = num_output_tokens(start, len(token_ids), pool)
        if resume is not None:
            check_generated(resume, text.vocab_size, max_sequence_tokens(pool) - len(token_ids))
            request.resume = resume.read()
    except InvalidRequestError:
        if request.media is not None:
            request.media.close()
        raise
    seed = start.seed if resume is None else resume.seed
    request.seed = secrets.randbits(64) if seed is None else seed


async def tokenize_request(request: RouterRequest, context: RouterContext) -> Sequence[int]:
    """Set ``prompt_token_ids`` and ``tokenize_s``, and return the first. Raises as ``tokenize`` does."""
    start, trace = request.start, request.trace
    if trace is not None and not isinstance(start.prompt, TokenPrompt):
        trace.prepare.begin("tokenize")
    began, max_tokens = time.monotonic(), max_sequence_tokens(request.pool)
    request.prompt_token_ids = await tokenize(start, request.text, max_tokens, context.tokenizing)
    request.tokenize_s = time.monotonic() - began
    if trace is not None:
        trace.prepare.end()
    return request.prompt_token_ids


def _is_guided(start: GenerateStart) -> bool:
    """Whether its answer follows a grammar, must call tools, or must call them by their schemas if it does."""
    prompt = start.prompt
    if start.sampling.guided is not None or _must_call(prompt):
        return True
    return isinstance(prompt, ChatPrompt) and any(tool.strict for tool in prompt.shown_tools)


def _must_call(prompt: Prompt) -> bool:
    return isinstance(prompt, ChatPrompt) and prompt.must_call


async def _guide(request: RouterRequest, context: RouterContext) -> None:
    """Give the request the grammar of its whole output, if it has one. Raises as ``guide_of`` and ``GrammarChecks``."""
    start, text = request.start, request.text
    if not _is_guided(start):
        return
    if request.trace is not None:
        request.trace.prepare.begin("grammar")
    try:
        asked, grammars = start.sampling.guided, context.grammars
        if asked is not None and request.pool.sampling_fields >= LLGUIDANCE_FIELDS:
            await grammars.check(asked, text, start.tenant)
        guided = await grammars.guide_of(start, request.pool, text, text.prompt_end(request.prompt_token_ids))
        request.start = guided_by(start, guided)
        if guided is not None and guided is not asked:
            await grammars.check(guided, text, start.tenant)
    except InvalidRequestError as error:
        if start.sampling.guided is None and error.field == FIELD:  # of the tools' schemas
            error.field = "chat.tools"
        raise


async def _prepare_media(
    request: RouterRequest, arrived: ArrivedMedia, context: RouterContext, token_ids: Sequence[int], *, encodes: bool
) -> None:
    if request.trace is not None:
        request.trace.prepare.begin("media")
    named = MediaRequest(
        request_id=request.request_id,
        start=request.start,
        arrived=arrived,
        worker_priority=request.worker_priority,
        traceparent=request.traceparent,
        first_attempt=0 if request.resume is None else request.resume.attempt,
        deadline=request.deadline,
        trust_domain=request.trust_domain,
        trace=request.trace,
    )
    request.media, prompt = await prepare_media(
        named, request.pool, request.text, token_ids, context.media, encodes=encodes
    )
    request.prompt_token_ids, request.spans = prompt.token_ids, prompt.spans
    request.num_unknown_tokens = prompt.num_unknown_tokens


def find_pool(start: AskedStart, table: WorkerTable, resume: Resume | None = None) -> Pool:
    """The pool that serves the request.

    Raises:
        InvalidRequestError: it names no model, and there are several.
        ModelNotFoundError, ModelUnavailableError: no worker of the model is known.
        WorkerUnavailableError: the model that ``resume`` names is served no more.
    """
    if resume is not None and resume.model_fingerprint:
        return _find_same_pool(start.model, resume.model_fingerprint, table)
    pool = table.pool(start.model, time.monotonic())
    if pool is not None:
        return pool
    if not start.model and table.pools(time.monotonic()):
        raise InvalidRequestError("several models are served: name one", field="model")
    raise model_error(table, start.model, "model", time.monotonic())


def _check_namespaces(request: RouterRequest, context: RouterContext) -> None:
    """Refuse namespaces of which the router does not know. Raises ``InvalidRequestError``."""
    for namespace in request.prefill_namespaces:
        if namespace not in context.prefill_pools.namespaces:
            message = f"this router's prefill_pools have no {namespace}"
            raise InvalidRequestError(message, field="prefill_namespaces")


def _find_same_pool(model_name: str, fingerprint: str, table: WorkerTable) -> Pool:
    """The pool of that very model: several pools serve one name while a new version is rolled out."""
    for pool in table.pools(time.monotonic()):
        if pool.key.fingerprint == fingerprint and model_name in ("", pool.key.model_name):
            return pool
    raise WorkerUnavailableError("the model that gave the tokens to go on after is served no more")


async def tokenize(
    start: GenerateStart, text: ModelText, max_tokens: int, queue: TokenizeQueue, *, add_special_tokens: bool = True
) -> Sequence[int]:
    """The prompt's tokens; more than ``max_tokens`` may be refused before they are counted.

    If not ``add_special_tokens``, a text gets none around it. A chat has those of its template.

    Raises:
        InvalidRequestError: as ``ModelText`` says, with the field of a request.
        QueueFullError: too much text waits.
    """
    prompt = start.prompt
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids
    encode: Callable[..., Sequence[int]]
    if isinstance(prompt, TextPrompt):
        text.tokenizer.check_length(prompt.text, max_tokens, field="text")  # before it waits
        cost = len(prompt.text)
        encode = partial(text.encode_text, prompt.text, add_special_tokens=add_special_tokens)
    else:
        cost = sum([message.num_characters + _MESSAGE_COST for message in prompt.messages])
        tools, arguments = prompt.shown_tools, prompt.template_arguments
        if tools or arguments is not None:
            cost += sum([tool.num_characters + _MESSAGE_COST for tool in tools])
            cost += 0 if arguments is None else arguments.num_characters
        encode = partial(
            text.encode_messages, prompt.messages, prompt.add_generation_prompt, tools=tools, arguments=arguments
        )
    try:
        if cost <= _MAX_INLINE_LENGTH:
            return array("I", encode(limit=EncodeLimit(max_tokens)))
        return await queue.run(
            start.tenant, cost, lambda is_wanted: array("I", encode(limit=EncodeLimit(max_tokens, is_wanted)))
        )
    except InvalidRequestError as error:
        # The text side reads only the chat.
        is_chat = isinstance(prompt, ChatPrompt) and error.field is not None
        field = f"chat.{error.field}" if is_chat else error.field
        raise type(error)(error.message, field=field) from error
