"""Where a request's time went, as parts that add up to what its client waited."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from quartet.client import TimeBreakdown


class Hop(StrEnum):
    """One part of a request's time, in the order in which they come."""

    TOKENIZE = "tokenize"  # template and tokenizer
    ROUTER_QUEUE = "router_queue"  # waiting in the router for room
    PREFILL_QUEUE = "prefill_queue"  # waiting in the prefill worker
    PREFILL = "prefill"  # the rest of the prefill hop: computing the prompt, and the way there and back
    TRANSFER = "transfer"  # moving KV blocks
    DECODE_QUEUE = "decode_queue"  # waiting in the decode worker, the transfer excluded
    DECODE = "decode"  # all else that was seen: computing the tokens, and the way of each
    OUTSIDE = "outside"  # before and after what was seen: network, this client, and its delay in sending


def split_time(time: TimeBreakdown, e2e_s: float) -> Mapping[Hop, float]:
    """Seconds by hop; what did not happen is 0. Their sum is ``e2e_s``, unless more time than that was seen."""
    prefill_queue_s = time.prefill_queue_s or 0.0
    parts = {
        Hop.TOKENIZE: time.tokenize_s or 0.0,
        Hop.ROUTER_QUEUE: time.router_queue_s or 0.0,
        Hop.PREFILL_QUEUE: prefill_queue_s,
        Hop.PREFILL: max(0.0, (time.prefill_s or 0.0) - prefill_queue_s),
        Hop.TRANSFER: time.transfer_s or 0.0,
        Hop.DECODE_QUEUE: time.decode_queue_s or 0.0,
    }
    total_s = time.total_s or 0.0
    parts[Hop.DECODE] = max(0.0, total_s - sum(parts.values()))
    parts[Hop.OUTSIDE] = max(0.0, e2e_s - total_s)
    return parts
