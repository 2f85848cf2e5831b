"""Why little is reused: faults are made, and each is told by the parts of what might have been found cached."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from quartet.discovery.base import Rank
from quartet.kvcache.block_hash import sequence_hashes
from quartet.v1 import router_pb2 as pb
from router.kv_index.index import PrefixIndex
from tests.router.fakes import Fleet, Plan, collect
from tests.router.records import make_record
from tests.router.system import BLOCK_SIZE, NUM_BLOCKS, TIMEOUT_S, Stub, running_system
from tests.router.test_explain import explain
from tests.router.test_generate import make_start
from tests.router.test_request_log import said_in
from tests.router.test_servicer import PROMPT, generate
from tests.router.test_servicer import make_start as router_start

#: Of ``PROMPT``, what can be found cached: its last token is always computed.
NUM_TOKENS = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE


async def ask(stub: Stub, caplog: pytest.LogCaptureFixture, first: int | None = None) -> dict[str, int]:
    """What the log says of one request, whose tokens begin with ``first`` if that is given."""
    caplog.clear()
    start = router_start() if first is None else router_start(token_ids=pb.TokenIds(ids=[first, *PROMPT[1:]]))
    await generate(stub, start)
    said = said_in(caplog)
    return {part: int(str(said[f"num_{part}_tokens"])) for part in ("held", "matched", "cached", "evicted")}


async def explained(stub: Stub, **changes: object) -> pb.ExplainResponse:
    return await stub.Explain(pb.ExplainRequest(start=router_start(**changes)), timeout=TIMEOUT_S)


async def wait_held(stub: Stub) -> None:
    """Until the worker's events have come."""
    async with asyncio.timeout(TIMEOUT_S):
        while (await explained(stub)).num_held_tokens < NUM_TOKENS:
            pass  # each look is a call that takes its time


@pytest.fixture(autouse=True)
def _only_events_tell(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, logger="router.request_log")
    monkeypatch.setattr(PrefixIndex, "predict", lambda *_args: None)


def parts(held: int, matched: int, cached: int, evicted: int) -> dict[str, int]:
    return {"held": held, "matched": matched, "cached": cached, "evicted": evicted}


async def test_evicted_and_lost_blocks_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0") as (_system, stub):
        assert await ask(stub, caplog) == parts(0, 0, 0, 0)
        await wait_held(stub)
        assert await ask(stub, caplog) == parts(NUM_TOKENS, NUM_TOKENS, NUM_TOKENS, 0)
        # The router does not hear of what is evicted from now on.
        monkeypatch.setattr(PrefixIndex, "remove", lambda *_args: None)
        num_evicting = NUM_BLOCKS // (len(PROMPT) // BLOCK_SIZE)
        for first in range(num_evicting):
            await ask(stub, caplog, 100 + first)
        assert await ask(stub, caplog) == parts(NUM_TOKENS, NUM_TOKENS, 0, NUM_TOKENS)
        # The engine remembers as many as it has, and has forgotten these.
        for first in range(3 * num_evicting):
            await ask(stub, caplog, 200 + first)
        assert await ask(stub, caplog) == parts(NUM_TOKENS, NUM_TOKENS, 0, 0)


async def test_blocks_that_were_never_heard_of_are_unannounced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PrefixIndex, "store", lambda *_args: None)
    async with running_system(tmp_path, monkeypatch, "decode-0") as (_system, stub):
        await ask(stub, caplog)
        assert await ask(stub, caplog) == parts(0, 0, NUM_TOKENS, 0)


async def test_another_salt_is_named_by_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0") as (_system, stub):
        await ask(stub, caplog)
        await wait_held(stub)
        known = await explained(stub)
        assert (known.num_held_tokens, known.num_unsalted_tokens, known.num_foreign_tokens) == (NUM_TOKENS, 0, 0)
        salted = await explained(stub, cache_salt="of today")
        assert (salted.num_held_tokens, salted.num_unsalted_tokens, salted.num_foreign_tokens) == (0, NUM_TOKENS, 0)


def value(fleet: Fleet, part: str) -> float | None:
    return fleet.registry.get_sample_value("quartet_router_reuse_tokens_total", {"part": part})


async def test_blocks_of_another_model_are_foreign_and_those_of_another_rank_elsewhere() -> None:
    fleet = Fleet("decode-0", "decode-1")
    start = make_start(model="tiny")
    prompt = start.prompt
    block_size = make_record().block_size
    hashes = sequence_hashes(prompt.token_ids, block_size)  # type: ignore[union-attr]
    most = (len(prompt.token_ids) - 1) // block_size * block_size  # type: ignore[union-attr]
    fleet.join("decode-9", model_name="other")
    fleet.index.store(Rank("decode-9"), None, hashes)
    explanation = await explain(fleet, start)
    assert (explanation.num_held_tokens, explanation.num_foreign_tokens) == (0, most)
    # The policy goes by load alone, and both are idle.
    [chosen] = [option.rank for option in explanation.options if option.is_chosen]
    [other] = {Rank("decode-0"), Rank("decode-1")} - {chosen}
    fleet.index.store(other, None, hashes)
    explanation = await explain(fleet, start)
    assert (explanation.num_held_tokens, explanation.num_foreign_tokens) == (most, 0)
    fleet.hops.plan("decode", Plan(num_cached_tokens=0))
    answer = await collect(fleet.generate(start))
    assert answer.accepted is not None
    [placement] = answer.accepted.choices
    assert placement.num_held_tokens == most
    assert (placement.decode, placement.num_matched_tokens) == (chosen, 0)
    assert value(fleet, "held") == value(fleet, "elsewhere") == most
    assert value(fleet, "cached") == value(fleet, "missing") == value(fleet, "unannounced") == 0
