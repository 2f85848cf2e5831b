"""Which callers may call which method: one table, and the identity that a certificate's URI SAN gives its holder.

The SAN is ``quartet://NAMESPACE/(router|worker|client|operator)/NAME``. Where a server has no TLS (loopback), there are
no identities and every method is open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from quartet.errors import PermissionDeniedError, UnauthenticatedError

_SAN = re.compile(r"quartet://([A-Za-z0-9._-]+)/(router|worker|client|operator)/([A-Za-z0-9._-]+)")
# Names in gRPC's auth context.
_SAN_KEY = "x509_subject_alternative_name"
_CERTIFICATE_KEY = "x509_pem_cert"


class IdentityKind(StrEnum):
    """What the holder of a certificate is."""

    ROUTER = "router"
    WORKER = "worker"
    CLIENT = "client"
    OPERATOR = "operator"


class Audience(StrEnum):
    """The callers that a method is for."""

    CLIENT = "client"  # users of the models
    PEER = "peer"  # routers and workers of the same namespace
    OPERATOR = "operator"  # people who run the system


@dataclass(frozen=True)
class Identity:
    """The caller, as its certificate says.

    Attributes:
        namespace: deployment that it belongs to.
        name: unique among its kind.
    """

    namespace: str
    kind: IdentityKind
    name: str

    @property
    def audience(self) -> Audience:
        """The audience that it belongs to."""
        return _AUDIENCE_OF[self.kind]


_AUDIENCE_OF = {
    IdentityKind.ROUTER: Audience.PEER,
    IdentityKind.WORKER: Audience.PEER,
    IdentityKind.CLIENT: Audience.CLIENT,
    IdentityKind.OPERATOR: Audience.OPERATOR,
}

_EVERYBODY = frozenset(Audience)
_USERS = frozenset({Audience.CLIENT, Audience.OPERATOR})
_PEERS = frozenset({Audience.PEER})
_OPERATORS = frozenset({Audience.OPERATOR})

#: The audiences of each method; a method that is not listed can't be called. ``/package.Service/*``: all its methods.
AUDIENCES: Mapping[str, frozenset[Audience]] = {
    "/quartet.v1.RouterService/Generate": _USERS,
    "/quartet.v1.RouterService/Place": _USERS,
    "/quartet.v1.RouterService/Session": _USERS,
    "/quartet.v1.RouterService/Explain": _USERS,
    "/quartet.v1.RouterService/GetModel": _USERS,
    "/quartet.v1.RouterService/ListWorkers": _OPERATORS,
    "/quartet.v1.RouterService/WatchWorkers": _OPERATORS,
    # Prompts that were checked already, from routers only.
    "/quartet.v1.RouterService/PrefillFor": _PEERS,
    "/quartet.v1.EncodeService/Encode": _PEERS,
    "/quartet.v1.PrefillService/Prefill": _PEERS,
    # Only peers (see `is_peer`) may send starts on it that no router signed.
    "/quartet.v1.DecodeService/Decode": _EVERYBODY,
    "/quartet.v1.TransferService/Pull": _PEERS,
    "/quartet.v1.WorkerService/GetInfo": _PEERS | _OPERATORS,
    "/quartet.v1.WorkerService/GetModelFiles": _EVERYBODY,
    "/quartet.v1.WorkerService/StreamKvSnapshot": _PEERS,
    "/quartet.v1.WorkerService/Drain": _OPERATORS,
    "/grpc.health.v1.Health/*": _EVERYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/*": _EVERYBODY,
    # It shows every connection's addresses.
    "/grpc.channelz.v1.Channelz/*": _OPERATORS,
}


#: What holders of trusted namespaces may call, by their kinds; nothing else is for them.
NEIGHBOURS: Mapping[str, frozenset[IdentityKind]] = {
    **{
        f"/quartet.v1.RouterService/{name}": frozenset({IdentityKind.ROUTER})
        for name in ("Generate", "Place", "Session", "Explain", "GetModel", "ListWorkers", "WatchWorkers", "PrefillFor")
    },
    "/quartet.v1.TransferService/Pull": frozenset({IdentityKind.ROUTER, IdentityKind.WORKER}),
    # What the router here has placed for them.
    "/quartet.v1.DecodeService/Decode": frozenset({IdentityKind.CLIENT, IdentityKind.OPERATOR}),
    "/quartet.v1.WorkerService/GetModelFiles": frozenset(
        {IdentityKind.ROUTER, IdentityKind.CLIENT, IdentityKind.OPERATOR}
    ),
    "/grpc.health.v1.Health/*": frozenset(IdentityKind),
}


def audiences_of(method: str) -> frozenset[Audience]:
    """The audiences of ``method`` (``/package.Service/Method``)."""
    listed = AUDIENCES.get(method)
    return listed if listed is not None else AUDIENCES.get(method.rpartition("/")[0] + "/*", frozenset())


def is_for_neighbour(method: str, kind: IdentityKind) -> bool:
    """Whether ``method`` is for holders of that kind of a trusted namespace."""
    listed = NEIGHBOURS.get(method, NEIGHBOURS.get(method.rpartition("/")[0] + "/*", frozenset()))
    return kind in listed


def parse_identity(uri: str) -> Identity | None:
    """The identity that a SAN names, or ``None`` where it is another kind of SAN."""
    match = _SAN.fullmatch(uri)
    return match and Identity(match[1], IdentityKind(match[2]), match[3])


def caller_identity(auth_context: Mapping[str, Iterable[bytes]]) -> Identity | None:
    """The caller, from ``ServicerContext.auth_context()``; ``None`` without TLS or without an identity of ours.

    Raises:
        UnauthenticatedError: the certificate names several identities.
    """
    names = (san.decode("utf-8", "replace") for san in auth_context.get(_SAN_KEY, ()))
    found = {identity for name in names if (identity := parse_identity(name)) is not None}
    if len(found) > 1:
        raise UnauthenticatedError("the certificate names more than one identity")
    return next(iter(found), None)


def is_peer(auth_context: Mapping[str, Iterable[bytes]]) -> bool:
    """Whether the caller is a router or a worker.

    ``Gate`` has let it in, so it is one of this deployment, or the method is for those of trusted namespaces too.
    """
    identity = caller_identity(auth_context)
    return identity is not None and identity.audience is Audience.PEER


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Checks the callers of one server that has TLS.

    Attributes:
        namespace: callers of another namespace are refused, but for routers and workers of those trusted.
        allow_anonymous: callers are not asked for a certificate: all are clients.
    """

    namespace: str
    allow_anonymous: bool
    trusted_namespaces: frozenset[str] = frozenset()

    def check(self, method: str, auth_context: Mapping[str, Iterable[bytes]]) -> None:
        """Let the caller pass to ``method``.

        Raises:
            UnauthenticatedError: it shows no identity, and one is needed.
            PermissionDeniedError: its identity may not call this method.
        """
        audiences = audiences_of(method)
        identity = caller_identity(auth_context)
        if identity is None:
            # A certificate without an identity of ours is not anonymous: its holder meant to be recognised.
            is_anonymous = self.allow_anonymous and _CERTIFICATE_KEY not in auth_context
            if not is_anonymous or Audience.CLIENT not in audiences:
                raise UnauthenticatedError(f"{method} takes a certificate with a quartet:// identity")
        elif identity.namespace != self.namespace:
            if identity.namespace not in self.trusted_namespaces:
                raise PermissionDeniedError("the caller belongs to another namespace")
            if not is_for_neighbour(method, identity.kind):
                raise PermissionDeniedError(f"callers of other namespaces may not call {method}")
        elif identity.audience not in audiences:
            raise PermissionDeniedError(f"the caller's identity may not call {method}")
