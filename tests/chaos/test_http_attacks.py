"""Attacks of ``benchmarks.isolation`` by HTTP that once left another tenant without an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.isolation_attack import Attack
from tests.chaos.command import attack
from tests.e2e.fork_server import ForkServer

#: Bodies that are costly to parse, and floods of refusals.
ATTACKS = (Attack.HTTP_BOMBS, Attack.HTTP_MALFORMED)


@pytest.mark.usefixtures("etcd_binary")
async def test_attacks_by_http_leave_no_request_of_another_tenant_without_an_answer(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    await attack(ATTACKS, tmp_path, fork_server)
