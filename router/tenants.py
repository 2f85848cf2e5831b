"""What the configuration says of each tenant, by its name or by a pattern of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quartet.errors import ConfigError

# Gateways may name any number of tenants; above this many, those that were looked up are forgotten.
_MAX_KNOWN = 4096


@dataclass(frozen=True, kw_only=True)
class TenantConfig:
    """What one tenant may do.

    Attributes:
        weight: its share of the work while other tenants wait too, over the weights of these.
        max_priority: workers are told at most this priority: theirs goes before other tenants' requests, and if their
            blocks run out, they compute requests of lower priority again. In the router's queue a priority only orders
            its own tenant's requests, and has no limit.
    """

    weight: float = 1.0
    max_priority: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not 0 < self.weight < float("inf"):
            raise ConfigError("weight: must be above 0")
        if not -(2**31) <= self.max_priority < 2**31:
            raise ConfigError("max_priority: must be a signed 32-bit number")


#: What holds for a tenant that the configuration does not name.
UNNAMED = TenantConfig()


class Tenants:
    """Finds the settings of a tenant: those of its name, else those of the first pattern that its name matches."""

    def __init__(self, configs: Mapping[str, TenantConfig] | None = None) -> None:
        """``configs`` are by name or by pattern, as ``fnmatch`` has them: ``team-*``, or ``*`` for all others."""
        self._configs = dict(configs or {})
        self._known: dict[str, TenantConfig] = {}

    def config(self, tenant: str) -> TenantConfig:
        """The settings of ``tenant``."""
        found = self._known.get(tenant)
        if found is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            found = self._known[tenant] = self._find(tenant)
        return found

    def _find(self, tenant: str) -> TenantConfig:
        if tenant in self._configs:
            return self._configs[tenant]
        matching = (config for pattern, config in self._configs.items() if fnmatchcase(tenant, pattern))
        return next(matching, UNNAMED)
