"""Why a request can't go to a place now, in words."""

from __future__ import annotations

from router.policy.base import Candidate, Pending
from router.policy.room import Tally, can_ever_hold, can_prefill

#: Of a place that could take it, while others can that did not.
JUST_FAILED = "just failed it"


def prefill_obstacle(place: Candidate, pending: Pending) -> str:
    """Why ``pending`` can't be prefilled at a place that only prefills; empty: it can."""
    if can_prefill(place, pending):
        return ""
    return _no_media(place, pending) or _misfit(place, pending, pending.num_tokens)


def decode_obstacle(place: Candidate, pending: Pending, tally: Tally) -> str:
    """Why ``pending`` can't be decoded there now; empty: it can."""
    if not can_ever_hold(place, pending):
        no_media = _no_media(place, pending) if pending.is_local else ""
        return no_media or _misfit(place, pending, pending.num_most_tokens)
    if not tally.has_room(place, pending):
        num_needed, num_free = place.num_blocks(pending.num_reserved_tokens), max(tally.num_free(place), 0)
        return f"no room: {num_free} blocks free of {num_needed} needed"
    return ""


def _no_media(place: Candidate, pending: Pending) -> str:
    missing = sorted(pending.needs_media - place.media)
    return f"does not take media as {', '.join(missing)}" if missing else ""


def _misfit(place: Candidate, pending: Pending, num_tokens: int) -> str:
    if not place.serves(pending.adapter):
        return f"does not serve the adapter {pending.adapter}"
    return f"too small: {place.num_total_blocks} blocks of {place.num_blocks(num_tokens)} needed"
