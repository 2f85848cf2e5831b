"""What a worker is told to begin an attempt with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from quartet.engine.base import Generation
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile
from quartet.rpc.context import RequestContext
from quartet.rpc.inner import InnerStart, MediaInput
from router.book import Booking, numbering
from router.prepared import PreparedRequest


@dataclass(frozen=True, kw_only=True)
class StartOrder:
    """One attempt's hop to one worker.

    Attributes:
        number: of the start among the router's to that worker.
        rank: data-parallel rank that serves it.
        generated_token_ids: what the choice has given so far.
        hand_off: what it decodes from; ``None``: its prompt is computed there.
        media: what that takes.
    """

    choice: int
    attempt: int
    booking: Booking
    number: int
    rank: int
    generated_token_ids: Sequence[int]
    hand_off: HandOff | None = None
    media: Sequence[MediaInput] = ()


def make_inner_start(request: PreparedRequest, order: StartOrder, router_id: str) -> InnerStart:
    """The start of ``order``, by the router of that id."""
    start = request.start
    context = RequestContext(
        request_id=request.request_id,
        attempt=order.attempt,
        choice=order.choice,
        timeout_s=max(request.deadline - time.monotonic(), 0.0),
        traceparent=request.traceparent,
        tenant=start.tenant,
        priority=start.priority,
        session_key=start.session_key,
        router_id=numbering(router_id, order.booking.epoch),
        router_request_number=order.number,
    )
    token_ids, spans = request.prompt_token_ids, request.spans
    if order.media and request.media is not None and isinstance(order.media[0].source, MediaFile):
        # Also where another worker told by now what becomes of it.
        token_ids, spans = request.media.token_ids, ()
    generation = Generation(
        prompt_token_ids=token_ids,
        generated_token_ids=tuple(order.generated_token_ids),
        sampling=request.sampling,
        seed=request.seed,
        choice=order.choice,
        adapter=start.adapter,
        cache_salt=start.cache_salt,
        data_parallel_rank=order.rank,
        media=spans,
        output=start.output,
    )
    return InnerStart(context=context, generation=generation, hand_off=order.hand_off, media=tuple(order.media))
