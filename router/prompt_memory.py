"""The memory of prompts that wait: bounded for all of them, from a request's arrival until it is placed.

A request may wait for its turn, for a tokenizer, for a thread, for its media and for room. Wherever it waits, the
router keeps its prompt. A prompt of 130,000 tokens takes a thousand times the memory of a short one, so a bound of the
number of requests bounds nothing. What was placed is bounded by the room that workers have.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from sys import getsizeof

from quartet.api.request import AskedStart, GenerateStart, Prompt, Resume, TextPrompt, TokenPrompt
from quartet.errors import QueueFullError
from quartet.kvcache.block_hash import TOKEN_SIZE_BYTES
from quartet.media.items import MediaPart
from quartet.text.chat_message import ChatMessage
from router.config import AdmissionConfig
from router.tenants import Tenants

# A token's id takes four bytes, and its part of its block's hash two and a half in blocks of 16 tokens.
_TOKEN_BYTES = 8

# A message of a chat, besides its text.
_MESSAGE_BYTES = 512

# A character of JSON, once it is read.
_JSON_FACTOR = 24

# A request besides its prompt: its call, tasks and settings.
_REQUEST_BYTES = 16 << 10

# So many places in the order of tenants, for each tenant, may be out of date before it is made anew.
_MAX_STALE = 8


class PromptMemory:
    """Counts the prompts that wait, and refuses requests once these are too many. Lives on the event loop.

    While there are too many, it refuses the last request of the tenant whose prompts take most, over its weight. So a
    tenant that floods the router refuses its own requests. A request that waits alone is taken, however long it is.
    """

    def __init__(self, config: AdmissionConfig | None = None, tenants: Tenants | None = None) -> None:
        """Nothing waits. ``tenants`` have the weights."""
        config = config or AdmissionConfig()
        self._max_bytes, self._retry_delay_s = config.max_queued_prompt_bytes, config.retry_delay_s
        self._tenants = tenants or Tenants()
        self._held: dict[str, _OfTenant] = {}
        # Tenants, the one that has most first, since there was once too much. One that has less by now is at its old
        # place still, one that has more is at its new place too.
        self._most: list[tuple[float, str]] | None = None
        self._num_held = 0
        self.num_bytes = 0

    @property
    def usage(self) -> float:
        """The share of the memory for them that prompts take. Any thread may read it."""
        return self.num_bytes / self._max_bytes

    def hold(self, tenant: str, priority: int, num_bytes: int, timeout: asyncio.Timeout) -> HeldPrompt:
        """Count a request of so many bytes until ``leave``. If it is refused meanwhile, ``timeout``, its own one, ends.

        Raises:
            QueueFullError: too much waits, and it is the last request of the tenant that has most.
        """
        held = HeldPrompt(self, tenant, priority, num_bytes, timeout)
        of_tenant = self._held.get(held.tenant)
        if of_tenant is None:
            of_tenant = self._held[held.tenant] = _OfTenant()
        of_tenant.by_priority.setdefault(held.priority, {})[held] = None
        self._num_held += 1
        self._count(held, of_tenant, num_bytes)
        if self.num_bytes > self._max_bytes:
            self._shorten(held)
        return held

    def grow(self, held: HeldPrompt, num_bytes: int) -> None:
        """The prompt of ``held`` takes so many bytes more. Raises ``QueueFullError`` as ``hold``."""
        if held.is_held:
            held.num_bytes += num_bytes
            self._count(held, self._held[held.tenant], num_bytes)
            if self.num_bytes > self._max_bytes:
                self._shorten(held)

    def drop(self, held: HeldPrompt) -> None:
        """``held`` counts no more."""
        held.is_held = False
        of_tenant = self._held[held.tenant]
        of_same_priority = of_tenant.by_priority[held.priority]
        del of_same_priority[held]
        if not of_same_priority:
            del of_tenant.by_priority[held.priority]
            if not of_tenant.by_priority:
                del self._held[held.tenant]
        self._num_held -= 1
        of_tenant.num_bytes -= held.num_bytes
        self.num_bytes -= held.num_bytes
        if not self._held:
            self._most = None

    def full_error(self) -> QueueFullError:
        """The refusal."""
        message = "the prompts that wait take up the router's memory for them"
        return QueueFullError(message, retry_delay_s=self._retry_delay_s)

    def _count(self, held: HeldPrompt, of_tenant: _OfTenant, num_bytes: int) -> None:
        of_tenant.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if self._most is not None:
            heappush(self._most, (self._amount(held.tenant), held.tenant))
            if len(self._most) > _MAX_STALE * len(self._held) + _MAX_STALE:
                self._most = None

    def _shorten(self, newest: HeldPrompt) -> None:
        """Refuse the last ones until there are few enough. Raises ``QueueFullError`` if ``newest`` is one of them."""
        while self.num_bytes > self._max_bytes and self._num_held > 1:
            last = self._held[self._fullest()].last()
            self.drop(last)
            if last is newest:
                raise self.full_error()
            last.refuse()

    def _fullest(self) -> str:
        """The tenant that has most."""
        if self._most is None:
            self._most = [(self._amount(tenant), tenant) for tenant in self._held]
            heapify(self._most)
        most = self._most
        while True:
            before, tenant = most[0]
            amount = self._amount(tenant)
            if amount == before:
                return tenant
            if amount:
                heapreplace(most, (amount, tenant))
            else:
                heappop(most)

    def _amount(self, tenant: str) -> float:
        """What the tenant has, over its weight, less than nothing; 0: it has nothing."""
        of_tenant = self._held.get(tenant)
        return 0.0 if of_tenant is None else -of_tenant.num_bytes / self._tenants.config(tenant).weight


class HeldPrompt:
    """The prompt of one request, as long as it waits.

    Attributes:
        is_refused: it was refused while it waited.
    """

    __slots__ = ("_memory", "_timeout", "is_held", "is_refused", "num_bytes", "priority", "tenant")

    def __init__(
        self, memory: PromptMemory, tenant: str, priority: int, num_bytes: int, timeout: asyncio.Timeout
    ) -> None:
        """Made by ``memory``."""
        self._memory = memory
        self._timeout: asyncio.Timeout | None = timeout
        self.tenant = tenant
        self.priority = priority
        self.num_bytes = num_bytes
        self.is_held, self.is_refused = True, False

    def read(self, num_bytes: int) -> None:
        """Its request was read, and takes so many bytes in all. Raises ``QueueFullError``: with them too much waits."""
        if num_bytes != self.num_bytes:
            self._memory.grow(self, num_bytes - self.num_bytes)

    def tokenized(self, num_tokens: int) -> None:
        """Its text became so many tokens. Raises ``QueueFullError``: with them too much waits."""
        self._memory.grow(self, num_tokens * _TOKEN_BYTES)

    def leave(self) -> None:
        """Its request waits no more. May be called again."""
        if self.is_held:
            self._memory.drop(self)
            self._timeout = None  # it knows the task, whose frames know this

    def refuse(self) -> None:
        """End the request, which waits somewhere."""
        timeout, self._timeout = self._timeout, None
        if timeout is not None and not timeout.expired():  # else it is about to end anyway
            self.is_refused = True
            timeout.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False, slots=True)
class _OfTenant:
    """What one tenant has: by priority, and those of one priority in the order of arrival, as an ordered set."""

    by_priority: dict[int, dict[HeldPrompt, None]] = field(default_factory=dict)
    num_bytes: int = 0

    def last(self) -> HeldPrompt:
        """The one of lowest priority that came last."""
        return next(reversed(self.by_priority[min(self.by_priority)]))


def unread_bytes(asked: AskedStart, resume: Resume | None) -> int:
    """What a request that was not read yet takes in memory."""
    num_bytes = _REQUEST_BYTES + (_TOKEN_BYTES * asked.num_token_ids or asked.num_message_bytes)
    return num_bytes if resume is None else num_bytes + _TOKEN_BYTES * len(resume.generated_token_ids)


def prefill_bytes(num_tokens: int) -> int:
    """What a prompt of so many tokens takes that came in the one message of a call, which keeps it until its end."""
    return _REQUEST_BYTES + (_TOKEN_BYTES + TOKEN_SIZE_BYTES) * num_tokens


def request_bytes(start: GenerateStart, resume: Resume | None) -> int:
    """The memory that a request takes besides its media: as it came, and for token ids all that is made of them."""
    num_bytes = _REQUEST_BYTES + len(start.model) + len(start.adapter) + _prompt_bytes(start.prompt)
    return num_bytes if resume is None else num_bytes + _TOKEN_BYTES * len(resume.generated_token_ids)


def _prompt_bytes(prompt: Prompt) -> int:
    if isinstance(prompt, TokenPrompt):
        return _TOKEN_BYTES * len(prompt.token_ids)
    if isinstance(prompt, TextPrompt):
        return getsizeof(prompt.text)
    # Up to 4096, in one turn of the event loop. A string's method gives what `getsizeof` does, five times as fast.
    num_bytes = _MESSAGE_BYTES * len(prompt.messages)
    num_bytes += sum([one.role.__sizeof__() + _content_bytes(one.content) for one in prompt.messages])
    num_bytes += sum([_calls_bytes(one) for one in prompt.messages if one.tool_calls or one.reasoning])
    num_bytes += sum([_MESSAGE_BYTES + _JSON_FACTOR * tool.num_characters for tool in prompt.tools])
    arguments = prompt.template_arguments
    return num_bytes if arguments is None else num_bytes + _JSON_FACTOR * arguments.num_characters


def _calls_bytes(message: ChatMessage) -> int:
    calls = message.tool_calls
    num_characters = sum([call.num_characters for call in calls])
    return message.reasoning.__sizeof__() + _MESSAGE_BYTES * len(calls) + _JSON_FACTOR * num_characters


def _content_bytes(content: str | tuple[str | MediaPart, ...]) -> int:
    return content.__sizeof__() if isinstance(content, str) else sum(map(getsizeof, content))
