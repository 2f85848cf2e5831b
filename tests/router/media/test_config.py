"""Values of the media configuration that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.config import build
from quartet.errors import ConfigError
from router.media.config import MediaConfig


def test_no_url_may_be_fetched_by_default() -> None:
    config = MediaConfig()
    assert (config.allowed_local_paths, config.allowed_schemes, config.allowed_hosts) == ((), (), ())
    assert config.allowed_private_networks == ()


def test_it_is_read_from_yaml_values() -> None:
    hosts = ["images.example.com", "*.example.org:8443", "10.1.2.3:80", "[fd00::1]:80", "*"]
    values = {"allowed_local_paths": ["/srv/pictures"], "allowed_schemes": ["https"], "allowed_hosts": hosts}
    config = build(MediaConfig, {**values, "allowed_private_networks": ["10.1.0.0/16", "fd00::/8"]})
    assert config.allowed_local_paths == (Path("/srv/pictures"),)
    assert config.allowed_hosts == tuple(hosts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_local_paths", (Path("pictures"),)),
        ("allowed_schemes", ("ftp",)),
        ("allowed_schemes", ("HTTP",)),
        ("allowed_hosts", ("",)),
        ("allowed_hosts", ("http://example.com",)),
        ("allowed_hosts", ("example.com/",)),
        ("allowed_hosts", ("user@example.com",)),
        ("allowed_hosts", ("*example.com",)),
        ("allowed_hosts", ("www.*.com",)),
        ("allowed_hosts", ("example.com:0",)),
        ("allowed_hosts", ("example.com:65536",)),
        ("allowed_private_networks", ("10.0.0.1/8",)),
        ("allowed_private_networks", ("intranet",)),
        ("max_file_size_mb", 0.0),
        ("max_file_size_mb", 67.2),
        ("max_pixels", 0),
        ("max_items", 0),
        ("max_concurrent_fetches", 0),
        ("fetch_timeout_s", 0.0),
        ("max_redirects", -1),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        MediaConfig(**{name: value})  # type: ignore[arg-type]
