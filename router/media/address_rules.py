"""Which addresses may be dialled: public ones, and those of networks that are named.

The networks that are not public are those of IANA's special-purpose registries (RFC 6890 and its followers) with
multicast; of IPv6 only global unicast, 2000::/3, is public.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_network

from quartet.errors import MediaNotAllowedError

# Beyond what `is_global` knows, in any version of Python: transition mechanisms, whose address hides another, and the
# newest entries of the registries.
_NOT_PUBLIC = [
    ip_network(network)
    for network in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
]
_GLOBAL_UNICAST = ip_network("2000::/3")
# Each is another spelling of the IPv4 address in its last 32 bits, and that is what is dialled in the end.
_SPELLINGS_OF_IPV4 = [ip_network("::ffff:0:0/96"), ip_network("64:ff9b::/96")]


class AddressRules:
    """The rule, with the private networks that a configuration names."""

    def __init__(self, allowed_private_networks: Sequence[str]) -> None:
        self._allowed = [ip_network(network) for network in allowed_private_networks]

    def check(self, address: str) -> None:
        """Raise ``MediaNotAllowedError`` where ``address``, as a socket takes it, may not be dialled."""
        try:
            ip = _plain(ipaddress.ip_address(address))
        except ValueError as error:
            raise MediaNotAllowedError("the URL's host has an address of an unknown kind") from error
        if not _is_public(ip) and not any(ip in network for network in self._allowed):
            raise MediaNotAllowedError("the URL's host lies in a network that is not allowed here")


def _plain(ip: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    if any(ip in network for network in _SPELLINGS_OF_IPV4):
        return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip


def _is_public(ip: IPv4Address | IPv6Address) -> bool:
    if not ip.is_global or ip.is_multicast or ip.is_reserved or any(ip in network for network in _NOT_PUBLIC):
        return False
    return ip.version == 4 or ip in _GLOBAL_UNICAST
