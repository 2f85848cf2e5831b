"""Place on a whole stack: the router places, and its client decodes."""

from __future__ import annotations

import pytest

from quartet.errors import SignedStartUsedError
from tests.e2e.placed import NUM_TOKENS, decode, generate, place, signed_start, unsigned_start
from tests.e2e.process import wait_until
from tests.e2e.stack import Stack


@pytest.mark.parametrize("router", ["router", "router-local"])
def test_the_tokens_are_those_of_generate(stack: Stack, router: str) -> None:
    num_opened = num_starts(stack, "opened")
    with stack.channel(router) as channel:
        expected = generate(channel)
        choice = place(channel)
    assert len(choice.token_ids) == (1 if router == "router" else 0)
    assert choice.stream.address == stack.processes["decode-0"].grpc_address
    with stack.channel("decode-0") as worker:
        decoded = decode(worker, signed_start(choice.stream))
    assert [*choice.token_ids, *decoded.token_ids] == expected
    assert len(expected) == NUM_TOKENS
    wait_for_count(stack, "opened", num_opened + 1)
    stack.wait_blocks_returned(timeout_s=25)


def test_a_placement_can_be_used_once(stack: Stack) -> None:
    with stack.channel("router") as router, stack.channel("decode-0") as worker:
        choice = place(router)
        assert not decode(worker, signed_start(choice.stream)).failures
        [failure] = decode(worker, signed_start(choice.stream)).failures
    assert isinstance(failure, SignedStartUsedError)
    wait_for_count(stack, "signed_start_used", 1)
    stack.wait_blocks_returned(timeout_s=25)


def test_on_loopback_a_start_needs_no_signature(stack: Stack) -> None:
    with stack.channel("router-local") as router:
        expected = generate(router)
    with stack.channel("decode-0") as worker:
        assert decode(worker, unsigned_start()).token_ids == expected
    stack.wait_blocks_returned(timeout_s=25)


def num_starts(stack: Stack, outcome: str) -> float:
    """Signed starts that the Decode worker has counted."""
    return stack.metrics("decode-0").value("quartet_worker_signed_starts_total", outcome=outcome)


def wait_for_count(stack: Stack, outcome: str, num: float) -> None:
    """Wait until there are exactly ``num``: scrapes that come close together share one, so it may be a little old."""
    wait_until(
        lambda: num_starts(stack, outcome) == num, 60, lambda: f"{num_starts(stack, outcome)} {outcome}, not {num}"
    )
