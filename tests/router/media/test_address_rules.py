"""Which addresses are public, in every spelling that a socket takes."""

from __future__ import annotations

import pytest

from quartet.errors import MediaNotAllowedError
from router.media.url_rules import AddressRules


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2a00::1"]
)
def test_public_addresses_may_be_dialled(address: str) -> None:
    AddressRules(()).check(address)


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254"),
        *("172.16.0.1", "192.0.0.8", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.1"),
        *("203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fe80::1%lo", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "100::1"),
        *("2001:db8::1", "3fff::1", "2001:0:1::1", "4000::1", "5f00::1"),
        # Other addresses in disguise: mapped, NAT64, 6to4, compatible.
        *(
            "::ffff:127.0.0.1",
            "::ffff:7f00:1",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::8.8.8.8",
            "2002:7f00:1::",
            "::127.0.0.1",
        ),
        # No address at all.
        *("localhost", "127.1", "0x7f000001", "2130706433", ""),
    ],
)
def test_other_addresses_may_not_be_dialled(address: str) -> None:
    with pytest.raises(MediaNotAllowedError):
        AddressRules(()).check(address)


@pytest.mark.parametrize("address", ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd00::7"])
def test_addresses_of_allowed_networks_may_be_dialled(address: str) -> None:
    AddressRules(("10.1.0.0/16", "fd00::/64")).check(address)


@pytest.mark.parametrize("address", ["10.2.0.1", "127.0.0.1", "fd00:0:0:1::7", "2002:a01:203::"])
def test_allowing_one_network_allows_no_other(address: str) -> None:
    with pytest.raises(MediaNotAllowedError):
        AddressRules(("10.1.0.0/16", "fd00::/64")).check(address)
