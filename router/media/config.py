"""What a router may fetch, and how much of it."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet.errors import ConfigError
from quartet.media import file_size
from router.media.url_rules import SCHEMES, HostRule


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Bounds of the media of requests. Bytes in a request and ``data:`` URLs are always taken.

    Attributes:
        allowed_local_paths: directories whose files ``file:`` URLs may name; none by default.
        allowed_schemes: of ``http`` and ``https``; none by default.
        allowed_hosts: hosts whose URLs are followed: ``name``, ``*.name`` (all below it) or ``*`` (all), each with
            ``:port`` if the port is not the scheme's own; none by default.
        allowed_private_networks: CIDRs of networks that are not public in which hosts may still be.
        max_file_size_mb: largest file of one item, in MB of 10**6 bytes; a ``data:`` URL may have half as many
            characters more. Workers have a setting of the same name and default, and check files again.
        max_pixels: of one picture; 4096 x 4096 by default.
        max_items: of one request.
        fetch_timeout_s: for one item, from the request to the last byte.
        max_redirects: redirects to follow for one item.
        max_concurrent_fetches: of all requests together; further ones wait. A tenant begins another fetch only while at
            least as many could begin as it has running, so it can't keep the others waiting.
        max_held_bytes: of all files in requests and of those fetched for requests. More files in requests are refused,
            and requests that only name URLs wait; those of a tenant already when its files take four times what is
            free. A request keeps its files until it ends, since another attempt may need them. One that could need more
            by itself is refused.
    """

    allowed_local_paths: tuple[Path, ...] = ()
    allowed_schemes: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_private_networks: tuple[str, ...] = ()
    max_file_size_mb: float = file_size.DEFAULT_MAX_FILE_SIZE_MB
    max_pixels: int = 16_777_216
    max_items: int = 16
    fetch_timeout_s: float = 10.0
    max_redirects: int = 3
    max_concurrent_fetches: int = 64
    max_held_bytes: int = 2 * 1024 * 1024 * 1024

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not all(path.is_absolute() for path in self.allowed_local_paths):
            raise ConfigError("allowed_local_paths: must be absolute")
        if not set(self.allowed_schemes) <= set(SCHEMES):
            raise ConfigError(f"allowed_schemes: must be of {', '.join(SCHEMES)}")
        _check_each("allowed_hosts", self.allowed_hosts, HostRule.parse)
        _check_each("allowed_private_networks", self.allowed_private_networks, ipaddress.ip_network)
        for name in ("max_pixels", "max_items", "max_concurrent_fetches", "max_held_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
        if self.fetch_timeout_s <= 0:
            raise ConfigError("fetch_timeout_s: must be above 0")
        file_size.check_setting(self.max_file_size_mb)
        if self.max_redirects < 0:
            raise ConfigError("max_redirects: must not be negative")

    @property
    def max_file_size_bytes(self) -> int:
        """The largest file, in bytes."""
        return file_size.in_bytes(self.max_file_size_mb)


def _check_each(name: str, texts: Sequence[str], parse: Callable[[str], object]) -> None:
    for text in texts:
        try:
            parse(text)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
