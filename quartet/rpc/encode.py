"""The encode hop in domain terms: what the router starts on an encode worker, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaItem
from quartet.rpc.context import RequestContext


@dataclass(frozen=True, kw_only=True)
class EncodeStart:
    """The items of one request, at least one, in the order of its prompt.

    Attributes:
        items: an id is empty where the worker is to work it out.
    """

    context: RequestContext
    items: tuple[MediaItem, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class EncodedItem:
    """One item's embeddings can be pulled.

    Attributes:
        item: which, from 0.
        queue_s, compute_s: as ``quartet.engine.encoder.EncodeTimes``; 0 where it was cached.
    """

    item: int
    hand_off: HandOff
    queue_s: float = 0.0
    compute_s: float = 0.0
