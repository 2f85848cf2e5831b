"""Attacks of ``benchmarks.isolation`` that once left another tenant without an answer, or with one a second later."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.isolation_attack import Attack
from tests.chaos.command import attack
from tests.e2e.fork_server import ForkServer

ATTACKS = (Attack.MESSAGES, Attack.CHOICES, Attack.SMALL, Attack.TINY, Attack.RESUME, Attack.SESSION_MESSAGES)

# Clients of the attack with tiny requests.
NUM_CLIENTS = 64


@pytest.mark.usefixtures("etcd_binary")
async def test_an_attacked_router_answers_every_request_of_another_tenant(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    # These attacks once stalled it for 373 ms to eleven seconds.
    found = await attack(ATTACKS, tmp_path, fork_server)
    # Shares, in counts. A request of the other tenant, of 128 tokens and 2, costs as much as two tiny ones. What the
    # clients had running when it asked for the last time, and what ran when it had its last answer, comes on top.
    tiny = found[Attack.TINY]
    assert tiny.ended["length"] > tiny.requests, "the attack was answered, too"
    assert tiny.overtaken <= 2 * tiny.waiting + 4 * NUM_CLIENTS
