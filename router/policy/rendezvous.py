"""Highest random weight: a key's order of places, in which one that comes or goes moves no other.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from quartet.discovery.place import Place
from router.policy.base import Candidate

_MASK = 2**64 - 1


def rendezvous_order(key: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    """``candidates``, the one first where ``key`` belongs; every router orders them alike."""
    seed = _hash(key)
    return sorted(candidates, key=lambda candidate: _mix(seed ^ _hash_of(candidate.place)), reverse=True)


@lru_cache(maxsize=4096)
def _hash_of(place: Place) -> int:
    return _hash(str(place))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _mix(value: int) -> int:
    """The finalizer of splitmix64: a hundred places are mixed in less time than ten are hashed."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
