"""Which tenant comes first: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), in tokens."""

from __future__ import annotations

from collections.abc import Mapping

from quartet.errors import ConfigError

# Above this many tenants, forget those whose next request would begin at the present anyway.
_MAX_TENANTS = 4096


class FairShare:
    """A clock that counts work, not time.

    Each request gets a start on it: the present, or the end of its tenant's last request if that is later. Serving
    requests in the order of their starts gives each busy tenant a share of the work: its weight over the weights of all
    busy tenants. A tenant alone gets everything, and an idle tenant saves nothing up.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Tenants without an entry in ``weights`` weigh 1."""
        self._weights = weights
        self._now = 0.0
        self._ends: dict[str, float] = {}
        self._max_ends = _MAX_TENANTS

    def start(self, tenant: str, num_tokens: int) -> float:
        """The start of a request of ``num_tokens`` tokens."""
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + num_tokens / self._weights.get(tenant, 1.0)
        if len(self._ends) > self._max_ends:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
            self._max_ends = max(_MAX_TENANTS, 2 * len(self._ends))
        return start

    def served(self, start: float) -> None:
        """A request with that start is served, so the present moves at least to it."""
        self._now = max(self._now, start)

    def give_back(self, tenant: str, num_tokens: int) -> None:
        """``num_tokens`` of the tenant's tokens will not be served."""
        if tenant in self._ends:
            self._ends[tenant] = max(self._now, self._ends[tenant] - num_tokens / self._weights.get(tenant, 1.0))


def check_weights(weights: Mapping[str, float]) -> None:
    """Raises ``ConfigError``, naming the field and the tenant, if a weight is not above 0."""
    for tenant, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise ConfigError(f"tenant_weights.{tenant}: must be above 0")
