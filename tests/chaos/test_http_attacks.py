"""Attacks of ``benchmarks.isolation`` by HTTP that once left another tenant without an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.command import attack

#: Bodies that are costly to parse, and floods of refusals.
ATTACKS = ("http_bombs", "http_malformed")


@pytest.mark.timeout(150)
@pytest.mark.usefixtures("etcd_binary")
def test_attacks_by_http_leave_no_request_of_another_tenant_without_an_answer(tmp_path: Path) -> None:
    attack(ATTACKS, tmp_path / "report.json")
