"""Whom a connection is counted with: its host, or the network that one customer mostly has."""

from __future__ import annotations

import asyncio
from ipaddress import IPv4Address, IPv6Network, ip_address


def client_address(transport: asyncio.BaseTransport | None) -> str:
    """The host of the client; of IPv6 the network that one customer mostly has."""
    peer = None if transport is None else transport.get_extra_info("peername")
    if not isinstance(peer, tuple) or not peer:
        return ""
    host = str(peer[0]).partition("%")[0]  # without the scope of a link-local address
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((address, 64), strict=False))
