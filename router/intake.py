"""How requests begin: so much work in one turn of the event loop, tenants by fair share.

A request is checked, hashed and placed on the event loop: 64 prompts of 8,000 tokens that came in one turn held it for
25 to 100 ms, and another tenant's request takes some twenty turns. So one of them begins at a time, with turns between
for all else, and the next one is of the tenant that had least.
"""

from __future__ import annotations

import asyncio

from quartet.supervision import vital
from router.fair_queue import FairQueue, FairShare, Lane, Standing, Turn
from router.workers import PoolKey

# Work is counted in tokens of a prompt; what a request needs whatever its length counts as so many.
_REQUEST_TOKENS = 8_192

# Each of gRPC's listeners hands over one call in about five turns, in order of arrival, without regard to tenants.
# Calls are to wait here, where tenants have shares, and not there. So after a request nothing begins for so many turns.
_TURNS_BETWEEN = 4

# After long work, moreover, nothing begins for twice the time that it took beyond a short request.
_PAUSE_S_PER_TOKEN = 2e-7
# A timer is no finer than a millisecond.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.0005, 0.01

# There is one line for all models.
_POOL = PoolKey("", "")


class Intake:
    """Lets requests begin, in turns of the event loop. Lives on it."""

    def __init__(self, share: FairShare) -> None:
        """``share`` orders the tenants, by the work that beginning takes; it belongs to this intake alone."""
        self._share = share
        self._waiting: FairQueue[Turn] = FairQueue(share)
        self._num_entered = 0
        self._pause_s = 0.0
        self._num_turns_left = 0

    @property
    def length(self) -> int:
        """Requests that wait to begin."""
        return len(self._waiting)

    async def enter(self, tenant: str, num_prompt_tokens: int) -> None:
        """Wait until the tenant's request may begin, which mostly is at once."""
        num_tokens = _REQUEST_TOKENS + num_prompt_tokens
        if self._num_turns_left <= 0 and not self._waiting:
            self._share.serve(tenant, num_tokens)
            self._begin(num_tokens)
            return
        self._num_entered += 1
        standing = Standing(pool=_POOL, tenant=tenant, number=self._num_entered, num_tokens=num_tokens)
        turn = Turn(standing=standing, placed=asyncio.get_running_loop().create_future())
        self._waiting.add(turn)
        try:
            await turn.placed
        finally:
            self._waiting.remove(turn)

    def _begin(self, num_tokens: int) -> None:
        self._num_turns_left = _TURNS_BETWEEN
        self._pause_s += _pause_s(num_tokens)
        self._plan_turn()

    def _plan_turn(self) -> None:
        asyncio.get_running_loop().call_soon(self._turn)

    @vital
    def _turn(self) -> None:
        """The next turn of the event loop has come."""
        if self._pause_s >= _MIN_PAUSE_S:
            pause_s, self._pause_s = min(self._pause_s, _MAX_PAUSE_S), 0.0
            asyncio.get_running_loop().call_later(pause_s, self._turn)
            return
        self._num_turns_left -= 1
        if self._num_turns_left > 0:
            self._plan_turn()
            return
        turn = next(self._waiting.in_order(_is_kept), None)
        if turn is not None:
            self._waiting.serve(turn)
            turn.placed.set_result(None)
            self._begin(turn.standing.num_tokens)  # after what begins: the pause follows the work


def _pause_s(num_tokens: int) -> float:
    """The time for which nothing begins after a request, or a step of one, of so much work."""
    return (num_tokens - _REQUEST_TOKENS) * _PAUSE_S_PER_TOKEN


def _is_kept(_lane: Lane[Turn]) -> bool:
    """No request waits for anything but its turn."""
    return False
