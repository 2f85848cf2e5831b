"""The requests without blocks, in the order in which they are to get some."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from quartet.engine.running import RunningRequest


class WaitingQueue:
    """Higher priority first, then first come, first served; a preempted request is back at its old rank.

    Attributes:
        num_prefill_tokens: tokens to compute before all of these decode; those to be pulled are not computed.
    """

    def __init__(self) -> None:
        self.num_prefill_tokens = 0
        self._by_rank: list[RunningRequest] = []

    def __len__(self) -> int:
        return len(self._by_rank)

    @property
    def head(self) -> RunningRequest:
        """Who is next; there must be one."""
        return self._by_rank[0]

    def push(self, running: RunningRequest) -> None:
        """Queue ``running`` at its rank."""
        insort(self._by_rank, running, key=attrgetter("rank"))
        self.num_prefill_tokens += _num_prefill_tokens(running)

    def remove(self, running: RunningRequest) -> None:
        """Take ``running`` out, wherever it is."""
        self._by_rank.remove(running)
        self.num_prefill_tokens -= _num_prefill_tokens(running)


def _num_prefill_tokens(running: RunningRequest) -> int:
    return 0 if running.needs_pull else len(running.seq)
