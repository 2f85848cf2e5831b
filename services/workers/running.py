"""What a dispatcher knows of one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from quartet.engine.base import EngineRequest, Generation
from quartet.rpc.context import RequestContext
from quartet.rpc.outbox import DecodeOutbox
from quartet.rpc.prefill_outbox import PrefillOutbox

OutboxT = TypeVar("OutboxT", DecodeOutbox, PrefillOutbox)


@dataclass
class Running(Generic[OutboxT]):
    """A request between its start and its terminal output.

    Attributes:
        request: what the engine is asked for, while that waits for media; it has taken it else.
        expanded: with the prompt that is to be told, where media files came with the start.
        media_s: seconds from its arrival until its media were here.
        media_ids: of its items.
        outbox: ``None`` once its stream is gone.
    """

    context: RequestContext
    num_prompt_tokens: int
    is_sealed: bool
    slot: int
    outbox: OutboxT | None
    on_end: Callable[[], None]
    has_media: bool = False
    request: EngineRequest | None = None
    expanded: Generation | None = None
    media_s: float = 0.0
    media_ids: tuple[bytes, ...] = ()
    timer: asyncio.TimerHandle | None = None
    is_timed_out: bool = False
    submitted_at: float = field(default_factory=time.monotonic)
