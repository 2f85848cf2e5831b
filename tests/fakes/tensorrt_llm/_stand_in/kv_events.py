"""KV events of one rank, as upstream's event manager numbers and buffers them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tensorrt_llm._stand_in.switches import SWITCHES

Event = dict[str, Any]
Item = tuple[str, int, int]  # a picture's name or hash in hex digits, its first position in the sequence, its tokens


class EventLog:
    """Numbers a rank's events, and keeps the newest ``size`` unfetched ones; older ones are lost silently.

    Those of the second KV cache manager (``is_v2``) have another hash, and say so.
    """

    def __init__(self, size: int, rank: int | None, was_put: Callable[[], None], *, is_v2: bool = False) -> None:
        self._events: deque[Event] = deque(maxlen=size)
        self._rank, self._was_put = rank, was_put
        self.is_v2 = is_v2
        self._next_id = 0
        self._lock = threading.Lock()
        self.num_to_lose = 0

    def put(self, window_size: int, data: dict[str, Any]) -> None:
        """Number an event and keep it."""
        with self._lock:
            event: Event = {"event_id": self._next_id, "data": data, "window_size": window_size}
            if self._rank is not None:
                event["attention_dp_rank"] = self._rank
            if self.is_v2:
                event |= {"hash_algo": "v2_sha256", "layer_group_id": 0, "data": _in_text(data)}
            self._next_id += 1
            if self.num_to_lose > 0:
                self.num_to_lose -= 1
            else:
                self._events.append(event)
        self._was_put()

    def drain(self) -> list[Event]:
        """Take all events."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events


def created(num_blocks: int, num_host_blocks: int) -> dict[str, Any]:
    """The first event of a window size."""
    return {"type": "created", "num_blocks_per_cache_level": [num_blocks, num_host_blocks]}


def stored(parent_hash: int | None, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Blocks that follow each other."""
    return {"type": "stored", "parent_hash": parent_hash, "blocks": blocks}


def stored_block(
    block_hash: int,
    token_ids: tuple[int, ...],
    extra_ids: tuple[int, ...],
    salt: str = "",
    mm_keys: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """One block of a `stored` event; from 1.3 on its salt as it was given, and its pictures, which mark no token."""
    marks = [0] * len(extra_ids) if SWITCHES.is_1_4 else extra_ids
    tokens = [
        {"type": "unique_token", "token_id": token_id, "token_extra_id": mark}
        for token_id, mark in zip(token_ids, marks, strict=True)
    ]
    block: dict[str, Any] = {"type": "stored_block", "block_hash": block_hash, "tokens": tokens}
    block |= {"cache_level": 0, "priority": 35}
    if SWITCHES.is_1_4:
        block |= {"cache_salt": salt or None, "mm_keys": mm_keys or []}
    elif SWITCHES.mm_keys:
        block["mm_keys"] = [{"type": "mm_key", "hash": f"{extra:08x}"} for extra in sorted({*extra_ids} - {0})]
    return block


def mm_keys(items: Sequence[Item], first: int, num_tokens: int) -> list[dict[str, Any]]:
    """Name the pictures in a block that begins at position ``first``, and where in each one its part begins."""
    return [
        {"type": "mm_key", "hash": item_hash, "start_offset": max(first - begin, 0)}
        for item_hash, begin, size in items
        if begin < first + num_tokens and first < begin + size
    ]


def removed(block_hashes: list[int]) -> dict[str, Any]:
    """Blocks that are gone from every level."""
    return {"type": "removed", "block_hashes": block_hashes}


def moved(block_hash: int, old_level: int, new_level: int) -> dict[str, Any]:
    """A block that went to the host or came back."""
    diff = {"type": "event_diff", "new_value": new_level, "old_value": old_level}
    return {"type": "updated", "block_hash": block_hash, "cache_level": diff, "priority": None}


def _in_text(data: dict[str, Any]) -> dict[str, Any]:
    """What the second manager makes of an event: hashes are digests, and it names neither salts nor pictures."""
    changed = dict(data)
    for name in ("parent_hash", "block_hash"):
        if changed.get(name) is not None:
            changed[name] = _name(changed[name])
    if "block_hashes" in changed:
        changed["block_hashes"] = [_name(block_hash) for block_hash in changed["block_hashes"]]
    if "blocks" in changed:
        unnamed = {"cache_salt": None, "mm_keys": []}
        changed["blocks"] = [
            {**block, **unnamed, "block_hash": _name(block["block_hash"])} for block in changed["blocks"]
        ]
    return changed


def _name(block_hash: int) -> str:
    return f"{block_hash:064x}"
