"""Grammars of requests in the router: made for calls that an answer must make, and checked before anything runs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from llguidance import regex_to_lark

from quartet.api.chat import ChatPrompt, ToolChoice
from quartet.api.request import GenerateStart
from quartet.engine.guided.checker import GrammarChecker
from quartet.engine.guided.grammar import FIELD, check_followable, choices_of
from quartet.engine.sampling import GrammarKind, GuidedDecoding, guided_fields
from quartet.errors import InvalidRequestError, UnsupportedFieldError
from quartet.text.call_grammar import (
    CallableTool,
    CallRules,
    call_grammar,
    content_head,
    reasoning_markers,
    with_reasoning,
)
from quartet.text.chat_message import Tool
from quartet.text.json_object import JsonObject
from quartet.text.lark import json_rule, literals, quoted
from quartet.text.model_text import ModelText
from router.fair_queue import FairShare
from router.thread_queue import IsWanted, ThreadQueue, ThreadQueueConfig
from router.workers import Pool

_NUM_KEPT = 256
# To read and write so many characters of schemas takes a fraction of a millisecond.
_MAX_INLINE_LENGTH = 8_192
# As a queue of threads counts: a check is one of 16,384 characters at least.
_MAX_WAITING = 512 * 16_384
_NO_TOKENS: Mapping[str, int] = {}
_Key: TypeAlias = tuple[GuidedDecoding, tuple[tuple[str, int], ...]]
#: What engines that follow grammars by llguidance announce.
LLGUIDANCE_FIELDS = guided_fields((GrammarKind.LARK,))


class GrammarChecks:
    """Has children check grammars, in turns that are fair to tenants, and remembers the last 256. Lives on the loop."""

    def __init__(self, share: FairShare | None = None) -> None:
        """``share`` orders the checks of tenants, and belongs to these alone."""
        bounds = ThreadQueueConfig(
            name="grammars",
            num_threads=2,
            max_waiting_size=_MAX_WAITING,
            refusal="too many grammars wait to be checked",
        )
        self._queue = ThreadQueue(bounds, share or FairShare())
        self._checker = GrammarChecker()
        self._known: OrderedDict[_Key, InvalidRequestError | None] = OrderedDict()
        # By tenant: a grammar that two tenants have is checked when it is the turn of either.
        self._running: dict[tuple[str, _Key], asyncio.Event] = {}

    async def check(self, guided: GuidedDecoding, text: ModelText, tenant: str) -> None:
        """Refuse a grammar that can't be followed. Requests of a tenant with one grammar wait for one check.

        Raises:
            InvalidRequestError: it is malformed, or too large or complex.
            UnsupportedFieldError: it has a part that can't be followed; names the keyword.
            QueueFullError: too much waits to be checked.
        """
        # Only tags name special tokens by their texts.
        special = text.tokenizer.special_token_ids_by_text if guided.kind is GrammarKind.STRUCTURAL_TAG else _NO_TOKENS
        key = guided, tuple(special.items())
        while key not in self._known:
            running = self._running.get((tenant, key))
            if running is not None:
                await running.wait()
                continue
            ended = self._running[tenant, key] = asyncio.Event()
            try:
                self._keep(key, await self._queue.run(tenant, len(guided.text), partial(self._error_of, key)))
            finally:
                del self._running[tenant, key]
                ended.set()
        self._known.move_to_end(key)
        error = self._known[key]
        if error is not None:
            raise type(error)(error.message, field=error.field)

    async def guide_of(
        self, start: GenerateStart, pool: Pool, text: ModelText, prompt_end: str
    ) -> GuidedDecoding | None:
        """As ``guide_of``; long schemas of tools are read in a thread, when it is the tenant's turn."""
        prompt = start.prompt
        size = sum([tool.num_characters for tool in prompt.tools]) if isinstance(prompt, ChatPrompt) else 0
        if size <= _MAX_INLINE_LENGTH:
            return guide_of(start, pool, text, prompt_end)
        return await self._queue.run(start.tenant, size, lambda _is_wanted: guide_of(start, pool, text, prompt_end))

    def close(self) -> None:
        """End the children. No check may be waited for any more."""
        self._checker.close()
        self._queue.close()

    def _keep(self, key: _Key, error: InvalidRequestError | None) -> None:
        self._known[key] = error
        if len(self._known) > _NUM_KEPT:
            self._known.popitem(last=False)

    def _error_of(self, key: _Key, _is_wanted: IsWanted) -> InvalidRequestError | None:
        """What is wrong with a grammar. Called in a thread; another tenant's check may have said it meanwhile."""
        guided, special_tokens = key
        try:
            return self._known[key]
        except KeyError:
            pass
        try:
            self._checker.check(guided, dict(special_tokens))
        except InvalidRequestError as error:
            return error
        return None


def guide_of(start: GenerateStart, pool: Pool, text: ModelText, prompt_end: str) -> GuidedDecoding | None:
    """The grammar of the whole output, reasoning and calls included; ``None``: it is free.

    Args:
        start: the request.
        pool: that serves it.
        text: of its model.
        prompt_end: the end of the prompt's text: templates may begin the reasoning.

    Raises:
        InvalidRequestError: a call is required, and a grammar as well.
        UnsupportedFieldError: this model can't be made to call.
    """
    prompt, guided = start.prompt, start.sampling.guided
    if not isinstance(prompt, ChatPrompt) or not pool.sampling_fields >= LLGUIDANCE_FIELDS:
        return guided
    reasoning, calls = text.parsers(pool.reasoning_parser, pool.tool_call_parser)
    if prompt.must_call:
        if guided is not None:
            raise InvalidRequestError("a grammar leaves no room for calls", field="chat.tool_choice")
        answer = _calls(prompt, calls, text, is_needed=True)
        if answer is None:
            what = f"calls as {calls} writes them" if calls else "calls of a model without a parser of calls"
            raise UnsupportedFieldError(f"{what} can't be forced", field="chat.tool_choice")
    elif guided is not None:
        answer = _answer_of(guided, prompt, (reasoning, calls), text)
    elif prompt.tool_choice is ToolChoice.AUTO and any(tool.strict for tool in prompt.tools):
        answer = _calls(prompt, calls, text, is_needed=False)
    else:
        return None
    if answer is None:
        return guided
    markers = reasoning_markers(reasoning)
    has_begun = markers is not None and prompt_end.rstrip().endswith(markers.begin)
    special_token = text.tokenizer.special_token_id
    return GuidedDecoding(GrammarKind.LARK, with_reasoning(answer, markers, special_token, has_begun=has_begun))


def guided_by(start: GenerateStart, guided: GuidedDecoding | None) -> GenerateStart:
    """``start`` with this grammar."""
    return start if guided is start.sampling.guided else replace(start, sampling=replace(start.sampling, guided=guided))


def _calls(prompt: ChatPrompt, parser: str, text: ModelText, *, is_needed: bool) -> str | None:
    named = [
        tool for tool in prompt.tools if prompt.tool_choice is not ToolChoice.FUNCTION or tool.name == prompt.tool_name
    ]
    rules = CallRules(
        tools=[
            CallableTool(tool.name, _schema_of(tool, is_needed=is_needed), is_strict=bool(tool.strict))
            for tool in named
        ],
        is_needed=is_needed,
        allows_parallel=prompt.parallel_tool_calls and prompt.tool_choice is not ToolChoice.FUNCTION,
    )
    return call_grammar(parser, rules, text.tokenizer.special_token_id)


def _schema_of(tool: Tool, *, is_needed: bool) -> Mapping[str, Any] | None:
    """What its arguments follow: of a tool that is not strict, only what can be followed."""
    schema = tool.parameters.value("chat.tools")
    if tool.strict:
        check_followable(schema)
        return schema
    return {**schema, "x-guidance": {"lenient": True, "coerce_one_of": True}} if is_needed else None


def _answer_of(guided: GuidedDecoding, prompt: ChatPrompt, parsers: tuple[str, str], text: ModelText) -> str | None:
    """The rule ``answer`` for a grammar, or else for calls, if there are tools.

    ``None``: the grammar is all there is to the output, or it says by itself what all of the output is.
    """
    reasoning, parser = parsers
    calls = _calls(prompt, parser, text, is_needed=True) if prompt.shown_tools else None
    if calls is None and reasoning_markers(reasoning) is None:
        return None
    content = _content_of(guided)
    if content is None:
        return None
    head = literals(content_head(reasoning), text.tokenizer.special_token_id)
    if calls is None:
        return f"answer: {head} ({content})"
    return f"answer: content | calls\ncontent: {head} ({content})\ncalls: {calls.removeprefix('answer: ')}"


def _content_of(guided: GuidedDecoding) -> str | None:
    """The grammar as a part of a rule; ``None``: it has rules of its own."""
    match guided.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = JsonObject.of_text(guided.text).value(FIELD)
            check_followable(schema)
            return json_rule(schema)
        case GrammarKind.REGEX:
            return f"/{regex_to_lark(guided.text, '')}/"
        case GrammarKind.CHOICE:
            return " | ".join(map(quoted, choices_of(guided.text)))
        case _:
            return None
