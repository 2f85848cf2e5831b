"""Why little is reused: faults are made, and each is told by the parts of what might have been found cached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from quartet.discovery.base import Rank
from quartet.events.publisher import _PublishSocket
from quartet.kvcache.block_hash import sequence_hashes
from quartet.telemetry.metrics import RouterMetrics
from quartet.v1 import router_pb2 as pb
from router import process
from router.kv_index.index import PrefixIndex
from tests.router.fakes import Fleet, Plan, collect
from tests.router.records import make_record
from tests.router.system import BLOCK_SIZE, NUM_BLOCKS, TIMEOUT_S, Stub, running_system
from tests.router.test_explain import explain
from tests.router.test_generate import make_start
from tests.router.test_request_log import said_in
from tests.router.test_servicer import PROMPT, generate
from tests.router.test_servicer import make_start as router_start

#: What a request's log line has, too.
LOGGED = ("held", "matched", "cached", "evicted")
#: Of ``PROMPT``, what can be found cached: its last token is always computed.
NUM_TOKENS = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE


class Asker:
    """Asks one router, and says by its counters what became of each prompt."""

    def __init__(self, stub: Stub, metrics: RouterMetrics, caplog: pytest.LogCaptureFixture) -> None:
        self._stub, self._metrics, self._caplog = stub, metrics, caplog

    async def ask(self, first: int | None = None, **changes: object) -> dict[str, int]:
        """The parts of one request of which there were tokens; its own begin with ``first`` if that is given."""
        self._caplog.clear()
        before = self._metrics.totals().reuse
        token_ids = PROMPT if first is None else [first, *PROMPT[1:]]
        await generate(self._stub, router_start(token_ids=pb.TokenIds(ids=token_ids), **changes))
        said, after = said_in(self._caplog), self._metrics.totals().reuse
        found = {part: after[part] - before[part] for part in after}
        assert {part: found[part] for part in LOGGED} == {part: said[f"num_{part}_tokens"] for part in LOGGED}
        assert found["held"] + found["unannounced"] == sum(
            found[part] for part in ("cached", "evicted", "elsewhere", "missing")
        )
        return {part: num_tokens for part, num_tokens in found.items() if num_tokens}


@asynccontextmanager
async def asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *worker_ids: str
) -> AsyncIterator[tuple[Asker, Stub]]:
    """A system with these workers; its router takes none for dead whose events are lost."""
    made: list[RouterMetrics] = []

    def make(registry: CollectorRegistry) -> RouterMetrics:
        made.append(RouterMetrics(registry))
        return made[-1]

    monkeypatch.setattr(process, "RouterMetrics", make)
    async with running_system(tmp_path, monkeypatch, *worker_ids, heartbeat_timeout_s=TIMEOUT_S) as (_, stub):
        yield Asker(stub, made[0], caplog), stub


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


async def test_evicted_and_lost_blocks_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(tmp_path, monkeypatch, caplog, "decode-0") as (asker, stub):
        assert await asker.ask() == {}
        await wait_held(stub)
        known = {"held": NUM_TOKENS, "matched": NUM_TOKENS}
        assert await asker.ask() == known | {"cached": NUM_TOKENS}
        # The router does not hear of what is evicted from now on.
        monkeypatch.setattr(PrefixIndex, "remove", lambda *_args: None)
        num_evicting = NUM_BLOCKS // (len(PROMPT) // BLOCK_SIZE)
        for first in range(num_evicting):
            await asker.ask(100 + first)
        assert await asker.ask() == known | {"evicted": NUM_TOKENS}
        # The engine remembers as many as it has, and has forgotten these.
        for first in range(3 * num_evicting):
            await asker.ask(200 + first)
        assert await asker.ask() == known | {"missing": NUM_TOKENS}


async def test_blocks_of_lost_events_are_unannounced_until_the_router_sees_that_it_missed_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    send = _PublishSocket.send
    async with asking(tmp_path, monkeypatch, caplog, "decode-0") as (asker, stub):
        monkeypatch.setattr(_PublishSocket, "send", lambda *_args: None)
        assert await asker.ask() == {}
        assert await asker.ask() == {"cached": NUM_TOKENS, "unannounced": NUM_TOKENS}
        monkeypatch.setattr(_PublishSocket, "send", send)
        await wait_held(stub)  # the next report has a number that the router does not expect
        assert await asker.ask() == dict.fromkeys(("held", "matched", "cached"), NUM_TOKENS)


async def test_another_salt_is_named_by_explain_and_blamed_on_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(tmp_path, monkeypatch, caplog, "prefill-0", "decode-0") as (asker, stub):
        await asker.ask()
        await wait_held(stub)
        known = await explained(stub)
        assert (known.num_held_tokens, known.num_unsalted_tokens, known.num_foreign_tokens) == (NUM_TOKENS, 0, 0)
        salted = await explained(stub, cache_salt="of today")
        assert (salted.num_held_tokens, salted.num_unsalted_tokens, salted.num_foreign_tokens) == (0, NUM_TOKENS, 0)
        assert await asker.ask(cache_salt="of today") == {}


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
    fleet.hops.plan("decode", Plan(num_cached_tokens=0))
    await collect(fleet.generate(start))
    assert value(fleet, "foreign") == most
    assert value(fleet, "held") == value(fleet, "missing") == 0
    explanation = await explain(fleet, start)
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
    assert value(fleet, "foreign") == most, "that of the first request"
    assert value(fleet, "cached") == value(fleet, "missing") == value(fleet, "unannounced") == 0
