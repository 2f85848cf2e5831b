"""Who pays for the messages of streams: each costs its caller credit, and a request that runs earns that back.

To read a message and refuse what it asks takes the event loop 0.1 to 0.5 ms, and 1 ms more for each 800 KiB. No tenant
pays for what is refused or cancelled before it runs. So each caller has an account. While that is empty none of the
caller's streams is read, and HTTP/2's flow control holds the sender back. A request that gets its place is paid for by
its tenant's share, so it earns what its messages cost: a caller whose requests run is never held back. Otherwise credit
comes slowly, at one pace for all callers together, who take turns.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from quartet.rpc.refusal_pace import COPIED_BYTES_PER_S

#: What one caller may have saved up, and has at first unless many came just before it, in messages.
MAX_CREDIT = 1024

# Of all callers that came lately; of what is left a new one gets a quarter at most.
_MAX_FIRST_CREDIT = 8 * MAX_CREDIT
_FIRST_CREDIT_PER_S = 256.0

# All callers without credit together get so much: for a twentieth of the event loop's time.
_INTERVAL_S = 0.01
_CREDIT_PER_INTERVAL = 5

# What a request costs besides its messages if it never ran: a task, a log line and its end.
_IN_VAIN = 2

# Of a twentieth of the event loop's time, refused long messages are to take an eighth.
_REFUSED_WEIGHT = 8

# What a request earns that runs: its messages, with a cancel.
_RAN = 2

# What each credit is worth of the event loop's time, and of the bytes that gRPC copies there meanwhile.
_CREDIT_S = _INTERVAL_S / _CREDIT_PER_INTERVAL / 20
_CREDIT_BYTES = round(COPIED_BYTES_PER_S * _CREDIT_S)

# A caller without streams is remembered, so that it gets no first credit with the next one.
_MAX_REMEMBERED = 4096


def message_credit(size_bytes: int = 0) -> int:
    """What it costs to read a message of ``size_bytes``, which may be left out where it is short."""
    return 1 + size_bytes // _CREDIT_BYTES


class Account:
    """What the streams of one caller may still be sent. Lives on the event loop.

    Attributes:
        credit: messages that may be read. It may be below zero: what a message costs is known once it was read.
    """

    __slots__ = ("_pace", "_waiting", "credit", "num_streams")

    def __init__(self, pace: ReadPace, credit: float) -> None:
        """``ReadPace.account`` opens accounts."""
        self.credit = credit
        self.num_streams = 0
        self._pace: Final = pace
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        """Streams that wait for credit."""
        return len(self._waiting)

    async def wait(self) -> None:
        """Wait until there is credit."""
        while self.credit <= 0:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self._pace.expect(self)
            try:
                await turn
            except asyncio.CancelledError:
                with suppress(ValueError):  # it may have been woken in the same moment
                    self._waiting.remove(turn)
                raise

    def ran(self, num_messages: int = _RAN) -> None:
        """A request got its place, whose ``num_messages`` messages are paid for by that."""
        self.earn(num_messages)

    def ran_in_vain(self) -> None:
        """The caller cancelled a request, which had its place, before it gave anything: take back what it earned."""
        self.credit -= _RAN

    def in_vain(self, size_bytes: int = 0, measure_s: float = 0.0) -> None:
        """A request was refused, or has ended before it ran.

        Its message had ``size_bytes``, and to find that it must be refused took ``measure_s`` seconds of CPU time. For
        these nobody owes more than ``MAX_CREDIT``: when workers go away, all of a gateway's long requests may fail.
        """
        self.credit -= _IN_VAIN
        if long := size_bytes // _CREDIT_BYTES + round(measure_s / _CREDIT_S):
            self.credit = max(self.credit - long, min(self.credit, -MAX_CREDIT))

    def refused(self, size_bytes: int, measure_s: float) -> None:
        """A message was refused before it was parsed: as ``in_vain``, but no caller need send such long ones.

        Its length counts more, so that they take a part of the event loop that others' requests hardly meet.
        """
        self.credit -= _IN_VAIN
        if long := _REFUSED_WEIGHT * (size_bytes // _CREDIT_BYTES + round(measure_s / _CREDIT_S)):
            self.credit = max(self.credit - long, min(self.credit, -_REFUSED_WEIGHT * MAX_CREDIT))

    def earn(self, credit: int) -> None:
        """Add ``credit``; what is beyond ``MAX_CREDIT`` is lost."""
        self.credit = max(self.credit, min(self.credit + credit, MAX_CREDIT))
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        """Let as many streams go on as there is credit for."""
        num_left = self.credit
        while num_left > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                num_left -= 1


class ReadPace:
    """The accounts of all callers of one server's streams."""

    def __init__(self, interval_s: float = _INTERVAL_S) -> None:
        """Those who have no credit get some every ``interval_s`` seconds."""
        self._interval_s = interval_s
        self._used: dict[str, Account] = {}
        self._unused: OrderedDict[str, Account] = OrderedDict()
        self._expecting: OrderedDict[Account, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._first_credit = float(_MAX_FIRST_CREDIT)
        self._counted_at = time.monotonic()

    def __len__(self) -> int:
        """Callers that are known."""
        return len(self._used) + len(self._unused)

    @contextmanager
    def account(self, caller: str) -> Iterator[Account]:
        """The account of ``caller``, an identity or a connection, for one stream: as long as the block lasts."""
        account = self._used.get(caller)
        if account is None:
            account = self._unused.pop(caller) if caller in self._unused else self.new_account()
            self._used[caller] = account
        account.num_streams += 1
        try:
            yield account
        finally:
            account.num_streams -= 1
            if not account.num_streams:
                self._unused[caller] = self._used.pop(caller)
                if len(self._unused) > _MAX_REMEMBERED:
                    self._unused.popitem(last=False)

    def new_account(self) -> Account:
        """The account of a caller that is not known."""
        return Account(self, self._take_first_credit())

    @classmethod
    def free_account(cls) -> Account:
        """One that is never empty: of a caller that is trusted not to flood."""
        return Account(cls(), math.inf)

    def expect(self, account: Account) -> None:
        """``account`` waits for credit."""
        self._expecting.setdefault(account)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._poll)

    def pay(self) -> None:
        """Give the credit of one interval to those that wait, in turns; one alone gets all of it."""
        num_left = _CREDIT_PER_INTERVAL
        paid: OrderedDict[Account, None] = OrderedDict()
        while num_left:
            if not self._expecting:
                if not paid:
                    return
                account = next(iter(paid))
                paid.move_to_end(account)
            else:
                account, _ = self._expecting.popitem(last=False)
                if not account.num_waiting:
                    continue  # its requests earned enough, or its streams are over
                paid[account] = None
            account.earn(1)
            num_left -= 1
        self._expecting.update(paid)  # at the end

    def _poll(self) -> None:
        self._timer = None
        self.pay()
        if self._expecting:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._poll)

    def _take_first_credit(self) -> int:
        """What a new caller begins with. One that connects again and again is new each time."""
        now = time.monotonic()
        left = self._first_credit + (now - self._counted_at) * _FIRST_CREDIT_PER_S
        left, self._counted_at = min(left, _MAX_FIRST_CREDIT), now
        credit = min(MAX_CREDIT, int(left) // 4)
        self._first_credit = left - credit
        return credit
