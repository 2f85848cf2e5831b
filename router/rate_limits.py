"""How much tenants and API keys may ask for in a minute: requests, and tokens of prompts and answers.

Each limit is a token bucket: it holds a minute's worth and is filled evenly. A request is let in while one is left of
everything. It takes one request, and its prompt once that is counted, if a token is left then too: many may have been
let in meanwhile. Its answer is taken when it has ended, because nobody knows before how long it gets. So an account may
go below nothing, and lets nothing in until that is made up for: over any longer time the rate holds (decision 100).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter

from quartet.api.openai.requests import ApiKey
from quartet.errors import InvalidRequestError, RateLimitedError
from router.tenants import Tenants

_MINUTE_S = 60.0

# Clients may make up names. Those that asked for nothing for longest are forgotten, and have all again when they come
# back: so do all that were idle for a minute, unless they are below nothing. Of those as many more are kept.
_MAX_ACCOUNTS = 16_384

#: The settings, and how headers call what they limit.
SETTINGS = {"requests_per_minute": "requests", "tokens_per_minute": "tokens"}

# Less than one by so little is one: the time to wait is rounded.
_ROUNDING = 1e-6


class RateLimits:
    """The accounts of tenants and of keys. Lives on the event loop; each call takes the same time for any number."""

    def __init__(
        self,
        tenants: Tenants | None = None,
        *,
        count: Callable[[str], None] = lambda setting: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``tenants`` have the limits; ``count`` is told each setting that refuses a request; ``clock``: seconds."""
        self._tenants = tenants or Tenants()
        self._clock = clock
        self._of_tenants, self._of_keys = _Accounts(), _Accounts()
        self._count = count

    def check(self, tenant: str, key: ApiKey | None = None) -> None:
        """Whether a request would be let in. Raises ``RateLimitedError``, with the time until it would be."""
        self._checked(tenant, key)

    def admit(self, tenant: str, key: ApiKey | None, num_tokens: int) -> Charge | None:
        """Let a request in, of which so many tokens are known, and charge it; ``None``: nothing limits it.

        Raises:
            RateLimitedError: as ``check``; nothing was charged.
        """
        [charge] = self.admit_all(tenant, key, 1)
        if charge is not None:
            charge.settle(num_tokens)
        return charge

    def admit_all(self, tenant: str, key: ApiKey | None, num_requests: int) -> Sequence[Charge | None]:
        """Let in so many requests of one call, or none of them; none of their tokens are known yet.

        Raises:
            InvalidRequestError: they are more than a minute's worth.
            RateLimitedError: as ``check``; nothing was charged.
        """
        accounts = self._checked(tenant, key, num_requests)
        if not accounts:
            return [None] * num_requests
        for account in accounts:
            if account.requests is not None:
                account.requests.left -= num_requests
        buckets = [account.tokens for account in accounts if account.tokens is not None]
        call = _Call(buckets, self._check_tokens)
        return [Charge(call) for _ in range(num_requests)]

    def headers(self, tenant: str, key: ApiKey | None = None) -> Mapping[str, str]:
        """What is left, as OpenAI's ``x-ratelimit`` headers: of two limits the one that leaves less. No limit: none."""
        shown: dict[str, str] = {}
        buckets = [bucket for account in self._accounts(tenant, key) for bucket in account.buckets()]
        for setting, name in SETTINGS.items():
            of_kind = [bucket for bucket in buckets if bucket.setting == setting]
            if of_kind:
                least = min(of_kind, key=lambda bucket: bucket.left)
                shown[f"x-ratelimit-limit-{name}"] = str(least.limit)
                shown[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(least.left + _ROUNDING)))
                shown[f"x-ratelimit-reset-{name}"] = _duration((least.limit - least.left) / least.per_s)
        return shown

    def _checked(self, tenant: str, key: ApiKey | None, num_requests: int = 1) -> list[_Account]:
        accounts, lacking = self._accounts(tenant, key), list[tuple[float, _Bucket]]()
        for account in accounts:
            for bucket in account.buckets():
                needed = num_requests if bucket is account.requests else 1
                if needed > bucket.limit:
                    message = f"{bucket.owner} has {bucket.setting} of {bucket.limit}: {needed} prompts never fit"
                    raise InvalidRequestError(message, field="prompt")
                if (delay_s := bucket.delay_s(needed)) > 0:
                    lacking.append((delay_s, bucket))
        self._refuse(lacking)
        return accounts

    def _check_tokens(self, buckets: Iterable[_Bucket], num_own: int) -> None:
        """Whether one token was left in each bucket before ``num_own`` were taken. Raises ``RateLimitedError``."""
        now, lacking = self._clock(), list[tuple[float, _Bucket]]()
        for bucket in buckets:
            bucket.fill(bucket.limit, now)
            if (delay_s := bucket.delay_s(1 - num_own)) > 0:
                lacking.append((delay_s, bucket))
        self._refuse(lacking)

    def _refuse(self, lacking: Sequence[tuple[float, _Bucket]]) -> None:
        """Raise ``RateLimitedError`` for the bucket that takes longest, if there is one."""
        if lacking:
            delay_s, bucket = max(lacking, key=itemgetter(0))
            self._count(bucket.setting)
            raise _refusal(bucket, delay_s)

    def _accounts(self, tenant: str, key: ApiKey | None) -> list[_Account]:
        """Those that a request of the tenant, with that key, is charged to, as they are now."""
        config, found = self._tenants.config(tenant), list[_Account]()
        if not config.is_limited and (key is None or not key.is_limited):
            return found
        now = self._clock()
        if config.is_limited:
            owner = f"tenant {tenant}" if tenant else "the tenant without a name"
            account = self._of_tenants.get(tenant, owner, now)
            account.bring_up_to(now, config.requests_per_minute, config.tokens_per_minute)
            found.append(account)
        if key is not None and key.is_limited:
            account = self._of_keys.get(key.id, f"API key {key.id}", now)
            account.bring_up_to(now, key.requests_per_minute, key.tokens_per_minute)
            found.append(account)
        return found


class _Accounts:
    """Accounts by name: those that asked last, and of those that asked before them the last that are below nothing."""

    def __init__(self) -> None:
        self._recent: dict[str, _Account] = {}
        self._owing: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._recent) + len(self._owing)

    def get(self, name: str, owner: str, now: float) -> _Account:
        """That of ``name``, or a new one; it is the last that asked."""
        account = self._recent.pop(name, None) or self._owing.pop(name, None) or _Account(owner)
        self._recent[name] = account  # so the order is that of the last requests
        if len(self._recent) > _MAX_ACCOUNTS:
            oldest = next(iter(self._recent))
            left = self._recent.pop(oldest)
            if left.owes(now):
                self._owing[oldest] = left
                if len(self._owing) > _MAX_ACCOUNTS:
                    del self._owing[next(iter(self._owing))]
        return account


class _Call:
    """Requests that were let in together: so the first of them that can pay lets the others pay too."""

    __slots__ = ("_check", "_has_paid", "_num_tokens", "buckets")

    def __init__(self, buckets: Sequence[_Bucket], check: Callable[[Sequence[_Bucket], int], None]) -> None:
        self.buckets = buckets
        self._check = check
        self._has_paid = False
        self._num_tokens = 0

    def check(self) -> None:
        """Whether its prompts can be paid for. Raises ``RateLimitedError``."""
        if not self._has_paid:
            self._check(self.buckets, self._num_tokens)
            self._has_paid = True

    def add(self, num_tokens: int) -> None:
        """Charge it so many tokens more."""
        self._num_tokens += num_tokens
        for bucket in self.buckets:
            bucket.left -= num_tokens


class Charge:
    """The tokens that one request is charged, to its tenant and to its key."""

    __slots__ = ("_call", "_num_tokens")

    def __init__(self, call: _Call) -> None:
        """Nothing is charged yet. Made by ``RateLimits``."""
        self._call = call
        self._num_tokens = 0

    def pay(self, num_tokens: int) -> None:
        """The prompt has so many tokens, as far as is known: charge what is more than was known, if a token is left.

        Raises:
            RateLimitedError: requests that were let in before have used up all; nothing more was charged.
        """
        if num_tokens > self._num_tokens:
            self._call.check()
        self.settle(num_tokens)

    def settle(self, num_tokens: int) -> None:
        """The request takes so many tokens, all in all, as far as is known: charge what is more, give back the rest."""
        self.add(num_tokens - self._num_tokens)

    def add(self, num_tokens: int) -> None:
        """The request takes so many tokens more than were known."""
        self._num_tokens += num_tokens
        self._call.add(num_tokens)


class _Bucket:
    """What one account has left of one limit.

    Attributes:
        owner: whose account it is, for messages.
        setting: that it is for.
        limit: a minute's worth, and the most that it holds.
        left: what is left, as of the last ``fill``; below 0: that is to be made up for.
    """

    __slots__ = ("_filled_at", "left", "limit", "owner", "setting")

    def __init__(self, owner: str, setting: str, limit: int, now: float) -> None:
        self.owner = owner
        self.setting = setting
        self.limit = limit
        self.left = float(limit)
        self._filled_at = now

    @property
    def per_s(self) -> float:
        """What comes in a second."""
        return self.limit / _MINUTE_S

    def delay_s(self, needed: int) -> float:
        """Seconds until it holds ``needed``; 0: it does."""
        lack = needed - self.left
        return lack / self.per_s if lack > _ROUNDING else 0.0

    def left_at(self, now: float) -> float:
        """What it will have left then."""
        return min(self.left + (now - self._filled_at) * self.per_s, float(self.limit))

    def fill(self, limit: int, now: float) -> None:
        """Fill it for the time since; from now on it holds ``limit``."""
        self.left = min(self.left_at(now), float(limit))
        self.limit, self._filled_at = limit, now


class _Account:
    """The buckets of one tenant or key; ``None``: nothing limits it."""

    __slots__ = ("_known", "_owner", "requests", "tokens")

    def __init__(self, owner: str) -> None:
        self._owner = owner
        # Also those whose limit was taken away: when it comes back, what was owed is owed still.
        self._known: dict[str, _Bucket] = {}
        self.requests: _Bucket | None = None
        self.tokens: _Bucket | None = None

    def buckets(self) -> list[_Bucket]:
        """Those that there are."""
        return [bucket for bucket in (self.requests, self.tokens) if bucket is not None]

    def bring_up_to(self, now: float, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        """Fill its buckets; the limits may have changed."""
        self.requests = self._filled("requests_per_minute", requests_per_minute, now)
        self.tokens = self._filled("tokens_per_minute", tokens_per_minute, now)

    def owes(self, now: float) -> bool:
        """Whether it is below nothing."""
        return any(bucket.left_at(now) < 0 for bucket in self._known.values())

    def _filled(self, setting: str, limit: int | None, now: float) -> _Bucket | None:
        if limit is None:
            return None
        bucket = self._known.get(setting)
        if bucket is None:
            bucket = self._known[setting] = _Bucket(self._owner, setting, limit, now)
        else:
            bucket.fill(limit, now)
        return bucket


def _refusal(bucket: _Bucket, delay_s: float) -> RateLimitedError:
    # Clients show the time beside it: by gRPC it is in the status, by HTTP in ``Retry-After``.
    return RateLimitedError(f"{bucket.owner} has used up its {bucket.setting} ({bucket.limit})", retry_delay_s=delay_s)


def _duration(seconds: float) -> str:
    """As OpenAI writes it: ``6m0s``, ``1.5s``, ``20ms``."""
    num_ms = max(0, math.ceil(seconds * 1000 - _ROUNDING))
    if num_ms < 1000:
        return f"{num_ms}ms"
    minutes, rest_ms = divmod(num_ms, 60_000)
    return f"{minutes}m{rest_ms / 1000:g}s" if minutes else f"{rest_ms / 1000:g}s"
