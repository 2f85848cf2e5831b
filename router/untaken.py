"""What each tenant's placements may hold before their clients take them up.

A placed start keeps room at its decode worker until its client brings it there, or no longer can. A tenant that takes
up nothing would keep everybody else out, so it has two budgets in each pool (``UntakenBudgets``): how many placements,
and how many tokens of KV, are untaken at a time; and for how long, in token-seconds, placements lay untaken lately.

A caller that names many tenants would have as many budgets. So all tenants of one caller together have these budgets,
too, half way between a tenant's and the whole pool.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from quartet.errors import PlacementBudgetError
from quartet.streams.wakeable import result_if_done

# A tenant whose clients take nothing up for so long is refused; other clients need a fraction of it. In seconds.
_GRACE_S = 1.0

# Token-seconds: a tenant may have its whole share lie untaken for the first, and has that back within the second.
_WASTE_S, _RETURN_S = 20.0, 60.0

# When room is freed, so many of a caller's tenants are looked at: one that is at its own limit holds half of a pool.
_MAX_TURNS = 8

# Above this many accounts, forget those that hold nothing and owe nothing.
_MAX_ACCOUNTS = 4096


@dataclass(frozen=True)
class Capacity:
    """What the decode workers of a pool have together.

    Attributes:
        num_tokens: tokens of KV.
        num_requests: requests that they may have at a time; 0: unknown.
    """

    num_tokens: int
    num_requests: int


PoolT = TypeVar("PoolT", bound=Hashable)


class UntakenBudgets(Generic[PoolT]):
    """The budgets of all tenants in all pools. Lives on the event loop; costs nothing until a tenant is at its limit.

    A placement counts from before it is placed, so that many calls at once are bounded before any work is done for
    them, until its worker reports it, it has ended, or no client can bring it any more. Whatever its size, one call is
    let through while its tenant holds nothing.
    """

    def __init__(
        self,
        capacity: Callable[[PoolT], Capacity],
        *,
        share: float,
        max_waiting: int,
        timeout_s: float,
        caller: Callable[[str], str | None] = lambda _tenant: None,
        poll_interval_s: float = _GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Each tenant may hold ``share`` of what ``capacity`` returns for a pool; ``clock`` gives seconds.

        At that limit ``max_waiting`` of its calls may wait, each for ``timeout_s`` seconds. Every ``poll_interval_s``
        they are checked as new ones are. ``caller`` says who names a tenant, if that may name others too; as many calls
        of all these may wait, with equal parts for those that have any.
        """
        self._capacity = capacity
        self._share = share
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._poll_interval_s = poll_interval_s
        self._clock = clock
        self._caller = caller
        self._accounts: dict[tuple[str, PoolT], _Account] = {}
        self._callers: dict[tuple[str, PoolT], _Account] = {}
        self._max_accounts = _MAX_ACCOUNTS

    def check(self, tenant: str, pool: PoolT) -> None:
        """Refuse a tenant whose clients don't take up what was placed for them.

        Raises:
            PlacementBudgetError: says which budget is used up, and for how long.
        """
        account, caller = self._accounts.get((tenant, pool)), self._caller(tenant)
        if account is not None:
            self._set_limits(account, pool)
            account.check(self._clock())
        if caller is not None and (above := self._callers.get((caller, pool))) is not None:
            self._set_limits(above, pool, is_caller=True)
            above.check(self._clock())

    async def hold(self, tenant: str, pool: PoolT, num_choices: int, num_tokens: int) -> Sequence[Untaken]:
        """Count ``num_choices`` placements of ``num_tokens`` tokens each; wait while their tenant is at its limit.

        Returns:
            One for each choice; the caller must ``drop`` each of them.

        Raises:
            PlacementBudgetError: the tenant stayed at its limit for too long, or too many of its calls wait.
        """
        account = self._account(tenant, pool)
        call = _Call(num_choices, num_tokens)
        if not account.waiting and account.admits(call):
            return self._take(account, call, pool)
        if account.num_may_wait(self._max_waiting) <= len(account.waiting):
            raise account.full_error()
        call.placed = asyncio.get_running_loop().create_future()
        account.wait(call)
        gives_up_at = time.monotonic() + self._timeout_s
        try:
            while time.monotonic() < gives_up_at:
                await asyncio.wait([call.placed], timeout=self._poll_interval_s)
                if call.placed.done():
                    return call.placed.result()
                account.check_all(self._clock())
            raise account.full_error()
        except BaseException:
            if call in account.waiting:
                account.leave(call)
                self._released(account, pool)  # the next one may be smaller
            for untaken in result_if_done(call.placed) or ():
                untaken.drop()
            raise

    def _account(self, tenant: str, pool: PoolT) -> _Account:
        account = self._accounts.get((tenant, pool))
        if account is None:
            self._forget_clear()
            account = self._accounts[tenant, pool] = _Account(self._clock(), "this tenant")
        if not account.num_placements and not account.waiting:
            caller = self._caller(tenant)
            account.caller = None if caller is None else self._callers.get((caller, pool))
            if caller is not None and account.caller is None:
                account.caller = self._callers[caller, pool] = _Account(self._clock(), "this caller")
        self._renew_limits(account, pool)
        return account

    def _forget_clear(self) -> None:
        if len(self._accounts) < self._max_accounts:
            return
        now = self._clock()
        self._accounts = {key: one for key, one in self._accounts.items() if not one.is_clear(now)}
        self._callers = {key: one for key, one in self._callers.items() if not one.is_clear(now)}
        self._max_accounts = max(_MAX_ACCOUNTS, 2 * len(self._accounts))

    def _renew_limits(self, account: _Account, pool: PoolT) -> None:
        self._set_limits(account, pool)
        if account.caller is not None:
            self._set_limits(account.caller, pool, is_caller=True)

    def _set_limits(self, account: _Account, pool: PoolT, *, is_caller: bool = False) -> None:
        capacity = self._capacity(pool)
        if not capacity.num_tokens:  # no worker is there, so nothing can be kept from others: what was known stays
            return
        share = (1 + self._share) / 2 if is_caller else self._share
        num_placements = max(int(share * capacity.num_requests), 1) if capacity.num_requests else None
        account.limits = _Limits(num_placements, max(share * capacity.num_tokens, 1.0))

    def _take(self, account: _Account, call: _Call, pool: PoolT) -> Sequence[Untaken]:
        account.take(call)
        return [
            Untaken(account, call.num_tokens, self._clock, lambda: self._released(account, pool))
            for _ in range(call.num_choices)
        ]

    def _released(self, account: _Account, pool: PoolT) -> None:
        """Let the calls go on for which there is room now: in order, and tenants of one caller in turn."""
        self._let_go_on(account, pool)
        if (caller := account.caller) is None:
            return
        for other in list(islice(caller.line, _MAX_TURNS)):
            if other.waiting and not caller.has_room(other.waiting[0]):
                return
            self._let_go_on(other, pool)
            if caller.line.pop(other, 0) is None:  # it waits still: it comes last
                caller.line[other] = None

    def _let_go_on(self, account: _Account, pool: PoolT) -> None:
        if account.waiting:
            self._renew_limits(account, pool)
        while account.waiting:
            call = account.waiting[0]
            if not call.placed.done():  # else it was cancelled, and is about to leave
                if not account.admits(call):
                    return
                call.placed.set_result(self._take(account, call, pool))
            account.leave(call)


class Untaken:
    """One placement that counts until all who keep it have dropped it; its maker keeps it first."""

    def __init__(
        self, account: _Account, num_tokens: int, clock: Callable[[], float], on_release: Callable[[], None]
    ) -> None:
        self._account = account
        self._num_tokens = num_tokens
        self._clock = clock
        self._on_release = on_release
        self._num_keepers = 1
        self._signed_at: float | None = None

    def keep(self) -> None:
        """Its start was signed: from now on it is for the client to take it up. The caller must ``drop`` it."""
        self._num_keepers += 1
        if self._signed_at is None:
            self._signed_at = self._clock()
            for account in self._account.with_caller():
                account.sign(self._signed_at)

    def drop(self) -> None:
        """It was taken up or has ended, as far as the caller is concerned."""
        self._num_keepers -= 1
        if not self._num_keepers:
            for account in self._account.with_caller():
                account.release(self._num_tokens, self._signed_at, self._clock())
            self._on_release()


# One tenant in one pool; pure.


@dataclass(frozen=True)
class _Limits:
    """``num_placements`` is ``None`` where workers don't say how many requests they run."""

    num_placements: int | None
    num_tokens: float


@dataclass(eq=False)
class _Call:
    """One call of Place: choices of ``num_tokens`` tokens each."""

    num_choices: int
    num_tokens: int
    placed: asyncio.Future[Sequence[Untaken]] = field(init=False)


class _Account:
    """What a tenant, or a caller's tenants together, hold in a pool, how much of it is signed, and the calls that wait.

    Attributes:
        limits: as last known.
        waiting: calls of the tenant.
        caller: the account of the tenant's caller; it stays the same while anything is held or waits.
        line: of a caller: the accounts of its tenants that have calls waiting, as an ordered set.
    """

    def __init__(self, now: float, whose: str) -> None:
        self._whose = whose
        self.caller: _Account | None = None
        self.line: dict[_Account, None] = {}
        self.limits = _Limits(None, 1.0)
        self.num_placements = self.num_tokens = 0
        self.waiting: deque[_Call] = deque()
        self._num_signed = 0
        self._moved_at = now  # when a placement was last signed, or taken up
        self._wasted, self._wasted_at = 0.0, now  # token-seconds, and as of when

    def is_clear(self, now: float) -> bool:
        """Whether nothing is lost if it is forgotten."""
        return not (self.num_placements or self.waiting or self.line or self._waste(now))

    def with_caller(self) -> Sequence[_Account]:
        """This account, and that of its caller if there is one."""
        return (self,) if self.caller is None else (self, self.caller)

    def wait(self, call: _Call) -> None:
        """``call`` comes last."""
        self.waiting.append(call)
        if self.caller is not None:
            self.caller.line[self] = None

    def leave(self, call: _Call) -> None:
        """``call`` waits no more."""
        self.waiting.remove(call)
        if self.caller is not None and not self.waiting:
            self.caller.line.pop(self, None)

    def num_may_wait(self, max_waiting: int) -> int:
        """How many calls may wait here, where ``max_waiting`` of one caller may."""
        if self.caller is None:
            return max_waiting
        return max_waiting // (len(self.caller.line) + (self not in self.caller.line))

    def take(self, call: _Call) -> None:
        """``call`` is placed, as far as budgets are concerned."""
        for account in self.with_caller():
            account.num_placements += call.num_choices
            account.num_tokens += call.num_choices * call.num_tokens

    def admits(self, call: _Call) -> bool:
        """Whether ``call`` may be placed beside what is held."""
        return all(account.has_room(call) for account in self.with_caller())

    def has_room(self, call: _Call) -> bool:
        """As ``admits``, for this account alone."""
        if not self.num_placements:
            return True
        num_placements = self.num_placements + call.num_choices
        if self.limits.num_placements is not None and num_placements > self.limits.num_placements:
            return False
        return self.num_tokens + call.num_choices * call.num_tokens <= self.limits.num_tokens

    def sign(self, now: float) -> None:
        """A placement is its client's from ``now`` on."""
        self._num_signed += 1
        self._moved_at = now

    def release(self, num_tokens: int, signed_at: float | None, now: float) -> None:
        """A placement of ``num_tokens`` tokens is no longer held."""
        self.num_placements -= 1
        self.num_tokens -= num_tokens
        if signed_at is None:
            return
        self._num_signed -= 1
        self._moved_at = now
        idle_s = now - signed_at - _GRACE_S
        if idle_s > 0:
            self._wasted = self._waste(now) + max(num_tokens, self._least_tokens()) * idle_s
            self._wasted_at = now

    def check_all(self, now: float) -> None:
        """As ``check``, for the caller too."""
        for account in self.with_caller():
            account.check(now)

    def check(self, now: float) -> None:
        """Raises ``PlacementBudgetError`` as ``UntakenBudgets.check`` does."""
        excess = self._waste(now) - self._waste_budget()
        if excess > 0:
            raise PlacementBudgetError(
                "the budget of untaken placements' block-seconds is used up: "
                f"{self._whose}'s held more than "
                f"{self._waste_budget():.0f} token-seconds of KV blocks that no client took up",
                retry_delay_s=excess * _RETURN_S / self._waste_budget(),
            )
        is_idle = 0 < self._num_signed == self.num_placements and now - self._moved_at > _GRACE_S
        if is_idle and not self.has_room(_Call(1, 1)):
            raise self.full_error()

    def full_error(self) -> PlacementBudgetError:
        """The refusal while the placements held are as many, or as large, as they may be."""
        if self.caller is not None and self.has_room(_Call(1, 1)):
            return self.caller.full_error()
        return PlacementBudgetError(
            f"the budget of untaken placements is used up: {self.num_placements} of {self._whose}, with "
            f"{self.num_tokens} tokens, wait for their clients to bring them to the workers",
            retry_delay_s=_GRACE_S,
        )

    def _waste(self, now: float) -> float:
        returned = (now - self._wasted_at) * self._waste_budget() / _RETURN_S
        return max(self._wasted - returned, 0.0)

    def _waste_budget(self) -> float:
        return self.limits.num_tokens * _WASTE_S

    def _least_tokens(self) -> float:
        """A small placement holds a place in a batch as long as a large one: it counts as that place's part."""
        limits = self.limits
        return limits.num_tokens / limits.num_placements if limits.num_placements else 0.0
