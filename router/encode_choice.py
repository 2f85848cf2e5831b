"""Which encode worker gets a request's media: the one that has most of them already, then the least busy. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quartet.discovery.place import Place


@dataclass(frozen=True)
class EncodeCandidate:
    """An encode worker.

    Attributes:
        num_items: that wait or run there, those included that this router sent and no report tells of yet.
    """

    place: Place
    num_items: int


def choose_encode(
    candidates: Sequence[EncodeCandidate],
    num_cached: Mapping[Place, int],
    avoid: frozenset[str],
    rng: random.Random,
) -> Place | None:
    """The place to encode at; ``None``: there is none.

    Args:
        candidates: those that can.
        num_cached: by place, how many of the request's items it has already.
        avoid: ids of workers that just failed it; taken only where no other is left.
        rng: breaks ties, so that several routers with the same picture don't all send to the same worker.
    """
    able = [candidate for candidate in candidates if candidate.place.worker_id not in avoid] or candidates
    if not able:
        return None
    ranks = [(-num_cached.get(candidate.place, 0), candidate.num_items) for candidate in able]
    best = min(ranks)
    return rng.choice([candidate.place for candidate, rank in zip(able, ranks, strict=True) if rank == best])
