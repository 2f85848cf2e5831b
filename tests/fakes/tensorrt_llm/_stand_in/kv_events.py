"""KV events of one rank, as upstream's event manager numbers and buffers them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from tensorrt_llm._stand_in.switches import SWITCHES

Event = dict[str, Any]


class EventLog:
    """Numbers a rank's events, and keeps the newest ``size`` unfetched ones; older ones are lost silently."""

    def __init__(self, size: int, rank: int | None, was_put: Callable[[], None]) -> None:
        self._events: deque[Event] = deque(maxlen=size)
        self._rank, self._was_put = rank, was_put
        self._next_id = 0
        self._lock = threading.Lock()
        self.num_to_lose = 0

    def put(self, window_size: int, data: dict[str, Any]) -> None:
        """Number an event and keep it."""
        with self._lock:
            event: Event = {"event_id": self._next_id, "data": data, "window_size": window_size}
            if self._rank is not None:
                event["attention_dp_rank"] = self._rank
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
    return {"type": "stored", "parent_hash": None if parent_hash is None else _name(parent_hash), "blocks": blocks}


def stored_block(
    block_hash: int, token_ids: tuple[int, ...], extra_ids: tuple[int, ...], salt: str = ""
) -> dict[str, Any]:
    """One block of a `stored` event."""
    tokens = [
        {"type": "unique_token", "token_id": token_id, "token_extra_id": extra_id}
        for token_id, extra_id in zip(token_ids, extra_ids, strict=True)
    ]
    block: dict[str, Any] = {"type": "stored_block", "block_hash": _name(block_hash), "tokens": tokens}
    block |= {"cache_level": 0, "priority": 35}
    if SWITCHES.is_1_4:
        block["cache_salt"] = salt or None
    if SWITCHES.mm_keys or SWITCHES.is_1_4:
        block["mm_keys"] = [{"type": "mm_key", "hash": f"{extra:08x}"} for extra in sorted({*extra_ids} - {0})]
    return block


def removed(block_hashes: list[int]) -> dict[str, Any]:
    """Blocks that are gone from every level."""
    return {"type": "removed", "block_hashes": [_name(block_hash) for block_hash in block_hashes]}


def moved(block_hash: int, old_level: int, new_level: int) -> dict[str, Any]:
    """A block that went to the host or came back."""
    diff = {"type": "event_diff", "new_value": new_level, "old_value": old_level}
    return {"type": "updated", "block_hash": _name(block_hash), "cache_level": diff, "priority": None}


def _name(block_hash: int) -> int | str:
    """A block's hash as events have it: a number, or with ``v2_sha256`` the digest's text."""
    return f"{block_hash:064x}" if SWITCHES.is_1_4 else block_hash
