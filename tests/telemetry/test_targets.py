"""The list of processes for Prometheus."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from quartet.telemetry.targets import Target, is_near, render_targets

WORKER = Target(address="10.0.0.1:9000", role="decode", worker_id="decode-0", namespace="here", model="m")


def test_each_process_is_a_group_with_its_labels() -> None:
    router = Target(address="[::1]:9001", role="router", worker_id="router-1", namespace="here")
    assert json.loads(render_targets([router, WORKER])) == [
        {
            "targets": ["[::1]:9001"],
            "labels": {
                "__meta_quartet_role": "router",
                "__meta_quartet_worker_id": "router-1",
                "__meta_quartet_namespace": "here",
            },
        },
        {
            "targets": ["10.0.0.1:9000"],
            "labels": {
                "__meta_quartet_role": "decode",
                "__meta_quartet_worker_id": "decode-0",
                "__meta_quartet_namespace": "here",
                "__meta_quartet_model": "m",
            },
        },
    ]


def test_no_process_is_an_empty_list() -> None:
    assert render_targets([]) == b"[]"


def test_the_list_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    many = [replace(WORKER, address=f"10.0.0.1:{number}") for number in range(5000)]
    groups = json.loads(render_targets(many))
    assert len(groups) == 4096 and groups[0]["targets"] == ["10.0.0.1:0"]
    assert "4096 targets of 5000" in caplog.text


@pytest.mark.parametrize(
    ("peer", "own", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.1.1", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::1%eth0", True),
        ("10.0.0.2", "10.0.0.1", False),
        ("fe80::2%eth0", "fe80::1%eth0", False),
    ],
)
def test_who_dials_an_address_of_this_host_from_it_is_near(peer: str, own: str, expected: bool) -> None:
    assert is_near(peer, own) is expected
