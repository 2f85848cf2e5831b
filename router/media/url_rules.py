"""Which URLs may be followed (``UrlRules``), and which addresses may be dialled for them (``AddressRules``)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_network

from yarl import URL

from quartet.errors import InvalidMediaError, MediaFetchError, MediaNotAllowedError

#: The schemes that can be allowed.
SCHEMES = ("http", "https")

# Names as DNS has them, IPv4 addresses, and IPv6 addresses in brackets.
_HOST = re.compile(r"(?P<name>\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?")

# Many servers refuse longer ones.
MAX_URL_LENGTH = 8192

# Not public though `is_global` says so in some versions of Python: transition mechanisms, whose addresses hide others,
# and the newest entries of the registries.
_NOT_PUBLIC = [
    ip_network(network)
    for network in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
]

_GLOBAL_UNICAST = ip_network("2000::/3")

# Each address is another spelling of the IPv4 address in its last 32 bits, which is dialled in the end.
_SPELLINGS_OF_IPV4 = [ip_network("::ffff:0:0/96"), ip_network("64:ff9b::/96")]


@dataclass(frozen=True)
class HostRule:
    """Hosts that may be asked for files.

    Attributes:
        name: of one host; ``*.name``: all hosts below ``name``, but not itself; ``*``: all hosts.
        port: ``None``: the scheme's own.
    """

    name: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> HostRule:
        """The rule that a line of the configuration stands for. Raises ``ValueError``."""
        match = _HOST.fullmatch(text.lower())
        if match is None:
            raise ValueError(f"{text!r} must be a host, *.host or *, and may end in :port")
        port = None if match["port"] is None else int(match["port"])
        if port is not None and not 1 <= port <= 65_535:
            raise ValueError(f"{text!r} must have a port from 1 to 65535")
        return cls(match["name"].strip("[]"), port)

    def allows(self, host: str, port: int, default_port: int) -> bool:
        """Whether ``host`` may be asked at ``port``, for a scheme whose own port is ``default_port``."""
        if port != (default_port if self.port is None else self.port):
            return False
        if self.name.startswith("*"):
            return host.endswith(self.name[1:])
        return host == self.name


class UrlRules:
    """The schemes and hosts of a configuration."""

    def __init__(self, schemes: Sequence[str], hosts: Sequence[str]) -> None:
        self._schemes = frozenset(schemes)
        self._hosts = [HostRule.parse(host) for host in hosts]

    def parse(self, text: str) -> URL:
        """The URL, if it may be followed; raises what ``check`` raises."""
        if len(text) > MAX_URL_LENGTH:
            raise InvalidMediaError(f"the URL is longer than {MAX_URL_LENGTH} characters")
        # Some parsers drop such characters: the URL that is checked must be the URL that is asked for.
        if any(character <= " " or character == "\x7f" or character == "\\" for character in text):
            raise InvalidMediaError("the URL has spaces, backslashes or control characters in it")
        try:
            url = URL(text)
        except ValueError as error:
            raise InvalidMediaError("the URL is malformed") from error
        self.check(url)
        return url

    def redirected(self, url: URL, location: str | None) -> URL:
        """The URL to which an answer of ``url`` redirects, if it may be followed; raises what ``check`` raises."""
        if not location:
            raise MediaFetchError("a redirect of the URL leads nowhere")
        try:
            target = url.join(URL(location))
        except ValueError as error:
            raise MediaFetchError("a redirect of the URL leads to a malformed one") from error
        return self.parse(str(target))

    def check(self, url: URL) -> None:
        """Refuse what may not be followed.

        Raises:
            InvalidMediaError: no host, or a user in front of it.
            MediaNotAllowedError: the scheme, or the host at that port.
        """
        if url.scheme not in self._schemes:
            raise MediaNotAllowedError("URLs of this scheme are not allowed here")
        host, port = url.raw_host, url.port
        if not host or port is None:
            raise InvalidMediaError("the URL has no host")
        if url.raw_user is not None or url.raw_password is not None:
            raise InvalidMediaError("the URL has a user in it")
        default_port = 443 if url.scheme == "https" else 80
        if not any(rule.allows(host.lower(), port, default_port) for rule in self._hosts):
            raise MediaNotAllowedError("URLs of this host and port are not allowed here")


class AddressRules:
    """Public addresses may be dialled, and those of the private networks that the configuration names.

    Not public are the networks of IANA's special-purpose registries (RFC 6890 and its followers) and multicast. Of
    IPv6, only global unicast, 2000::/3, is public.
    """

    def __init__(self, allowed_private_networks: Sequence[str]) -> None:
        self._allowed = [ip_network(network) for network in allowed_private_networks]

    def check(self, address: str) -> None:
        """Raise ``MediaNotAllowedError`` if ``address``, in the form that a socket takes, may not be dialled."""
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
