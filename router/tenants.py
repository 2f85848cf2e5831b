"""Tenants: what is configured for each, the names that an identity may use, and which caches a tenant shares.

A trust domain goes into everything that names cached content. Its id stands before the cache salt that workers get, so
it is part of every KV block's extra key on every engine; and media ids of a domain differ from those of others
(``quartet.media.media_id.in_trust_domain``). So equal content of two domains has different names in workers, in KV
events and in the router's index.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate

from quartet.api.request import MAX_NAME_LENGTH, check_name
from quartet.discovery.base import SALTED_BLOCKS, WorkerRecord
from quartet.errors import ConfigError, PermissionDeniedError

logger = logging.getLogger(__name__)

# As in `fnmatch`: names with one of these are patterns.
_GLOB = re.compile(r"[*?\[]")

_ID_LENGTH = 32

#: Characters of the longest salt that a router sends to workers: a domain's id, and a client's own salt.
MAX_SALT_LENGTH = _ID_LENGTH + MAX_NAME_LENGTH

# Stands before the salts of tenants without a domain: else such a tenant's salt could begin with a domain's id.
_NO_DOMAIN = "0" * _ID_LENGTH

# As of an API key's limits.
_MAX_LIMIT = 10**18

# Clients may make up names, so only so many are remembered.
_MAX_KNOWN = 4096

# More than wait in a router's queues.
_MAX_NAMED = 16_384


@dataclass(frozen=True, kw_only=True)
class TenantConfig:
    """What applies to one tenant, or to all tenants whose names match a pattern.

    Attributes:
        trust_domain: tenants of one domain share cached blocks and embeddings with each other only;
            ``None``: the domain of all tenants for which no other is configured. Its name is part of what is hashed, so
            a name that is hard to guess keeps others from making up prompts whose hashes are those of the domain's.
        isolated: each of these tenants has a domain of its own, named by ``trust_domain`` and the tenant.
        weight: its share of the work while other tenants wait too, over the weights of these.
        max_priority: workers are told at most this priority: theirs goes before other tenants' requests, and if their
            blocks run out, they compute requests of lower priority again. In the router's queue a priority only orders
            its own tenant's requests, and has no limit.
        requests_per_minute: requests that each of these tenants may begin in a minute, at each router; as many at
            once. ``None``: any number.
        tokens_per_minute: of prompts and answers, likewise (``router.rate_limits``).
    """

    trust_domain: str | None = None
    isolated: bool = False
    weight: float = 1.0
    max_priority: int = 0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not 0 < self.weight < float("inf"):
            raise ConfigError("weight: must be above 0")
        if not -(2**31) <= self.max_priority < 2**31:
            raise ConfigError("max_priority: must be a signed 32-bit number")
        for name in ("requests_per_minute", "tokens_per_minute"):
            if (limit := getattr(self, name)) is not None and not 1 <= limit < _MAX_LIMIT:
                raise ConfigError(f"{name}: must be at least 1, and below 10^18; leave it out for any number")
        if self.trust_domain == "":
            raise ConfigError("trust_domain: must not be empty; leave it out for the domain of all other tenants")

    @property
    def has_domain(self) -> bool:
        """Whether these tenants have another domain than all tenants for which none is configured."""
        return self.isolated or self.trust_domain is not None

    @property
    def is_limited(self) -> bool:
        """Whether these tenants may ask for only so much in a minute."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    def domain_id(self, tenant: str) -> str:
        """The id of the tenant's domain: 32 lower-case hexadecimal digits; empty: that of all other tenants.

        By digest, no message to a worker holds a domain's name, and all ids have one length.
        """
        if not self.has_domain:
            return ""
        named = json.dumps([self.trust_domain, tenant if self.isolated else None])
        return hashlib.sha256(named.encode()).hexdigest()[:_ID_LENGTH]


#: What applies to a tenant that the configuration does not name.
UNNAMED = TenantConfig()


class Tenants:
    """What is configured for each tenant: by its name, else by the first pattern that matches."""

    def __init__(self, configs: Mapping[str, TenantConfig] | None = None) -> None:
        """``configs`` by name or pattern, as ``fnmatch`` has them: ``acme``, ``acme-*``. Upper case is distinct."""
        self._identities: dict[str, str] = {}
        self.replace(configs or {})

    def replace(self, configs: Mapping[str, TenantConfig]) -> None:
        """From now on ``configs`` count, also for requests that wait; what is running goes on."""
        self._exact = {name: config for name, config in configs.items() if not _GLOB.search(name)}
        self._patterns = [(_compile(name), config) for name, config in configs.items() if _GLOB.search(name)]
        self._known: dict[str, TenantConfig] = {}
        self._domain_ids: dict[str, str] = {}
        #: Whether caches are separated at all.
        self.has_domains = has_domains(configs)

    def config(self, tenant: str) -> TenantConfig:
        """What applies to ``tenant``."""
        known = self._known.get(tenant)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[tenant] = self._exact.get(tenant) or self._first_match(tenant)
        return known

    def identity(self, tenant: str) -> str | None:
        """The identity that named the tenant last; ``None``: none did, as far as is remembered, or it has that name."""
        return self._identities.get(tenant)

    def note_identity(self, tenant: str, identity: str) -> None:
        """``identity``, whose own name is another one, makes a request for ``tenant``."""
        identities = self._identities
        identities.pop(tenant, None)  # so the order is that of the last requests
        identities[tenant] = identity
        if len(identities) > _MAX_NAMED:
            del identities[next(iter(identities))]

    def _first_match(self, tenant: str) -> TenantConfig:
        return next((config for pattern, config in self._patterns if pattern.fullmatch(tenant)), UNNAMED)

    def domain_id(self, tenant: str) -> str:
        """The id of the tenant's trust domain, as ``TenantConfig.domain_id``."""
        known = self._domain_ids.get(tenant)
        if known is None:
            if len(self._domain_ids) >= _MAX_KNOWN:
                self._domain_ids.clear()
            known = self._domain_ids[tenant] = self.config(tenant).domain_id(tenant)
        return known


def salt_in_domain(domain_id: str, salt: str) -> str:
    """The cache salt for workers, where there are trust domains: from ``salt``, which the client chose.

    Different pairs give different salts. Only a request without domain and salt has none: it shares blocks with
    workers' own probes, and TensorRT-LLM announces them.
    """
    return (domain_id or _NO_DOMAIN) + salt if domain_id or salt else ""


class TenantNames:
    """Whom a request of a client with a certificate is accounted to."""

    def __init__(
        self,
        trusted_gateways: Collection[str] = (),
        identity_tenants: Mapping[str, Sequence[str]] | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        """By names of identities: ``trusted_gateways`` may name any tenant, others only those configured for them.

        ``tenants`` are told who names which.
        """
        self._tenants = tenants or Tenants()
        self.replace(trusted_gateways, identity_tenants or {})

    def replace(self, trusted_gateways: Collection[str], identity_tenants: Mapping[str, Sequence[str]]) -> None:
        """From now on these count."""
        bound = identity_tenants
        self._gateways = frozenset(trusted_gateways)
        self._patterns = {identity: [_compile(tenant) for tenant in tenants] for identity, tenants in bound.items()}
        self._firsts = {identity: tenants[0] for identity, tenants in bound.items() if not _GLOB.search(tenants[0])}

    def tenant(self, identity: str, named: str, *, is_gateway: bool = False) -> str:
        """The tenant of a request of ``identity`` that names the tenant ``named``, which may be empty.

        ``is_gateway``: it may name any tenant here, unless those that it may use are configured.

        Raises:
            InvalidRequestError: ``named`` is longer than any tenant's name may be.
            PermissionDeniedError: the identity may not use that tenant, or has several and names none.
        """
        tenant = self._tenant(identity, named, is_gateway=is_gateway or identity in self._gateways)
        if tenant != identity:
            check_name("tenant", tenant)  # before anything is kept by it
            self._tenants.note_identity(tenant, identity)
        return tenant

    def _tenant(self, identity: str, named: str, *, is_gateway: bool) -> str:
        patterns = self._patterns.get(identity)
        if patterns is None:
            return named if named and is_gateway else identity
        if not named:
            if identity not in self._firsts:
                raise PermissionDeniedError("this identity may use several tenants: name one", field="tenant")
            return self._firsts[identity]
        if len(named) > MAX_NAME_LENGTH or not any(pattern.fullmatch(named) for pattern in patterns):
            raise PermissionDeniedError("this identity may not use this tenant", field="tenant")
        return named


class UnannouncedSalts:
    """Logs, once for each model, that routing does not see the cached blocks of trust domains at some workers."""

    def __init__(self) -> None:
        """Nothing is logged yet."""
        self._models: set[str] = set()

    def note(self, record: WorkerRecord) -> None:
        """A worker appeared."""
        if SALTED_BLOCKS in record.unannounced_blocks and record.model_name not in self._models:
            self._models.add(record.model_name)
            logger.warning(
                "workers of model %s (first: %s) don't announce salted blocks: routing ignores what they have cached"
                " for tenants with a trust domain, except prompts that this router sent there a moment ago",
                record.model_name,
                record.worker_id,
            )


def has_domains(configs: Mapping[str, TenantConfig]) -> bool:
    """Whether any tenant has a trust domain."""
    return any(config.has_domain for config in configs.values())


def check_identity_tenants(identity_tenants: Mapping[str, Sequence[str]], gateways: Collection[str]) -> None:
    """Raises ``ConfigError``, naming the field and the identity, if an identity has no tenant, or also has all."""
    for identity, tenants in identity_tenants.items():
        if not tenants or "" in tenants:
            raise ConfigError(f"identity_tenants.{identity}: must list the tenants that the identity may use")
        if identity in gateways:
            raise ConfigError(f"identity_tenants.{identity}: also in trusted_gateways, which may use every tenant")


def _compile(name: str) -> re.Pattern[str]:
    return re.compile(translate(name) if _GLOB.search(name) else re.escape(name))
