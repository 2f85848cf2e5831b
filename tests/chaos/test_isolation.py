"""Attacks of ``benchmarks.isolation`` that once left another tenant without an answer, or with one a second later."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.command import attack

ATTACKS = ("messages", "choices", "small", "tiny", "resume", "session_messages")

# Clients of the attack with tiny requests.
NUM_CLIENTS = 64


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("etcd_binary")
def test_an_attacked_router_answers_every_request_of_another_tenant(tmp_path: Path) -> None:
    # These attacks once stalled it for 373 ms to eleven seconds.
    found = attack(ATTACKS, tmp_path / "report.json")
    # Shares, in counts. A request of the other tenant, of 128 tokens and 2, costs as much as two tiny ones. What the
    # clients had running when it asked for the last time, and what ran when it had its last answer, comes on top.
    tiny = found["tiny"]["attacked"]
    assert tiny["ended"]["length"] > tiny["requests"], "the attack was answered, too"
    assert tiny["overtaken"] <= 2 * tiny["waiting"] + 4 * NUM_CLIENTS
