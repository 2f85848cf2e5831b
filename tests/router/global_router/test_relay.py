"""A request's way from pool to pool. The pools' routers are scripts: what each answers, and what it was asked."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from quartet.api.answer import AnswerSink
from quartet.api.fleet import WorkerState, WorkerStatus
from quartet.api.request import (
    Accepted,
    ChoiceFinished,
    ChoicePlacement,
    GenerateStart,
    Relayed,
    Resume,
    TimeBreakdown,
    TokenPrompt,
    Usage,
)
from quartet.api.router_link import WorkerChanges
from quartet.config import build
from quartet.discovery.base import Rank
from quartet.engine.base import FinishReason
from quartet.engine.sampling import Sampling, TokenLogprobs
from quartet.errors import (
    DrainingError,
    InvalidRequestError,
    ModelUnavailableError,
    OutOfBlocksError,
    QueueFullError,
    RouterUnavailableError,
    ServingError,
)
from quartet.telemetry.metrics import PoolMetrics
from quartet.telemetry.tracing import Span
from quartet.text.parsed import GivenParts, Parsed, ToolCallDelta
from router.global_router import pools as global_pools
from router.global_router.config import GlobalRouterConfig, without_units
from router.global_router.pipeline import RelayPipeline
from router.global_router.pools import Pools, Wish
from router.tenants import TenantConfig
from router.usage_log import UsageLog
from router.workers import PoolKey, WorkerTable
from tests.router.fakes import Fleet
from tests.router.global_router.test_config import DISAGG
from tests.router.http.face import until
from tests.router.records import make_load, make_record
from tests.router.system import TIMEOUT_S
from tests.span_list import SpanList

FINGERPRINT = "ab" * 32
WISH = Wish(PoolKey("tiny", FINGERPRINT), 3, None, None)
START = GenerateStart(prompt=TokenPrompt((5, 6, 7)), sampling=Sampling(max_tokens=20), seed=7)
LOST, FULL = RouterUnavailableError("it is gone"), QueueFullError("it is full", retry_delay_s=0.5)


@dataclass
class Leg:
    """What one router was asked, with the sink of its answer."""

    sink: AnswerSink
    resume: Resume | None
    num_choices: int

    @property
    def choices(self) -> Sequence[int]:
        """Those that run there."""
        return range(self.num_choices) if self.resume is None else (self.resume.choice,)

    def give(self, choice: int, *tokens: int) -> None:
        """More of a choice, after what it was resumed with."""
        given = 0 if self.resume is None else len(self.resume.generated_token_ids)
        self.sink.add(choice, given, tokens, "", ())

    def accept(self) -> None:
        """Say where its choices run."""
        placements = tuple(
            ChoicePlacement(choice=choice, prefill=None, decode=Rank("decode-0")) for choice in self.choices
        )
        self.sink.accept(
            Accepted(
                request_id="cd" * 16,
                choices=placements,
                num_prompt_tokens=3,
                seed=7,
                model_fingerprint=FINGERPRINT,
            )
        )

    def finish(self, choice: int) -> None:
        """End a choice."""
        usage = Usage(num_prompt_tokens=3, num_cached_tokens=0, num_output_tokens=0, num_attempts=1)
        self.sink.finish(
            ChoiceFinished(choice=choice, reason=FinishReason.LENGTH, usage=usage, time=TimeBreakdown(total_s=0.0))
        )


Script = Callable[[Leg], None]


def fails(error: ServingError) -> Script:
    """The router answers with an error only."""
    return lambda leg: leg.sink.end(error)


def breaks(error: ServingError, *tokens: int, text: Script | None = None) -> Script:
    """The router gives ``tokens`` of each of its choices, and fails."""

    def run(leg: Leg) -> None:
        leg.accept()
        for choice in leg.choices:
            leg.give(choice, *tokens)
        if text is not None:
            text(leg)
        leg.sink.end(error)

    return run


def ends(*tokens: int) -> Script:
    """The router gives ``tokens`` of each of its choices, and ends them."""

    def run(leg: Leg) -> None:
        leg.accept()
        for choice in leg.choices:
            leg.give(choice, *tokens)
            leg.finish(choice)
        leg.sink.end()

    return run


def stays(*tokens: int) -> Script:
    """The router gives ``tokens`` and no end."""

    def run(leg: Leg) -> None:
        leg.accept()
        for choice in leg.choices:
            leg.give(choice, *tokens)

    return run


class Call:
    """A call that ends by itself only, and says of each choice that its first token was sent an hour ago."""

    def __init__(self) -> None:
        self.first_sent_at_unix_ns = dict.fromkeys(range(8), time.time_ns() - 3600 * 10**9)

    def cancel(self) -> None:
        """Nothing answers."""

    def drop(self, _error: ServingError) -> None:
        """Nothing is held."""


@dataclass
class Routers:
    """The routers of all pools.

    Attributes:
        scripts: by namespace, what its router answers, leg by leg.
        asked: namespace and resume of each leg, in order.
        told: of each leg, its trace context and when it was sent.
    """

    scripts: dict[str, list[Script]] = field(default_factory=lambda: defaultdict(list))
    asked: list[tuple[str, Resume | None]] = field(default_factory=list)
    told: list[tuple[str, int]] = field(default_factory=list)

    @property
    def order(self) -> list[str]:
        """The namespaces that were asked."""
        return [namespace for namespace, _ in self.asked]


class ScriptedLink:
    """A router that answers by its script."""

    is_idle = True

    def __init__(self, namespace: str, routers: Routers) -> None:
        self.address = f"{namespace}:1"
        self._namespace = namespace
        self._routers = routers

    def start(
        self, start: GenerateStart, sink: AnswerSink, *, resume: Resume | None, traceparent: str, relayed: Relayed
    ) -> Call:
        # The run goes on with the array that the resume has.
        if resume is not None:
            resume = replace(resume, generated_token_ids=array("I", resume.generated_token_ids))
        self._routers.asked.append((self._namespace, resume))
        self._routers.told.append((traceparent, relayed.sent_at_unix_ns))
        script = self._routers.scripts[self._namespace].pop(0)
        asyncio.get_running_loop().call_soon(script, Leg(sink, resume, start.num_choices))
        return Call()

    async def close(self) -> None:
        """Nothing is open."""


class Raw:
    """Keeps an answer as it came, delta by delta."""

    def __init__(self) -> None:
        self.accepted: list[Accepted] = []
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.parsed: list[tuple[str, tuple[ToolCallDelta, ...]]] = []
        self.finished: dict[int, ChoiceFinished] = {}
        self.came = asyncio.Event()
        self.ended = asyncio.Event()
        self.error: BaseException | None = None

    def accept(self, accepted: Accepted) -> None:
        self.accepted.append(accepted)

    def placed(self, placement: ChoicePlacement) -> None:
        raise AssertionError(f"{placement} is placed already")

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], _text: str, _logprobs: Sequence[TokenLogprobs]
    ) -> None:
        assert token_offset == len(self.tokens[choice])
        self.tokens[choice] += token_ids
        self.came.set()

    def add_parsed(
        self, _choice: int, _offset: int, _token_ids: Sequence[int], parsed: Parsed, _logprobs: Sequence[TokenLogprobs]
    ) -> None:
        self.parsed.append((parsed.reasoning, tuple(parsed.tool_calls)))

    def add_prompt_logprobs(self, _logprobs: object) -> None:
        raise AssertionError("nobody asked for them")

    def finish(self, finished: ChoiceFinished) -> None:
        assert finished.choice not in self.finished
        self.finished[finished.choice] = finished

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self.ended.set()


class Scene:
    """A pipeline of a global router over scripted routers."""

    def __init__(self, fleet: Fleet, pools: Pools, routers: Routers, config: GlobalRouterConfig) -> None:
        self.fleet = fleet
        self.pools = pools
        self.routers = routers
        self.pipeline = RelayPipeline(fleet.pipeline.context, pools, config)

    async def run(self, num_choices: int = 1, resume: Resume | None = None) -> Raw:
        """One request to its end."""
        raw = Raw()
        self.begin(raw, num_choices, resume)
        async with asyncio.timeout(TIMEOUT_S):
            await raw.ended.wait()
        assert all(not scripts for scripts in self.routers.scripts.values()), "a router was not asked"
        return raw

    def begin(self, raw: Raw, num_choices: int = 1, resume: Resume | None = None) -> Callable[[], None]:
        """Start a request; returns what cancels it."""
        start = replace(START, num_choices=num_choices)
        return self.pipeline.generate(start, raw, resume=resume).cancel


def agg(*namespaces: str, retries: bool = False, num_routers: int = 1) -> dict[str, Any]:
    """Settings of these pools, the first of which the grid names."""
    return {
        "mode": "agg",
        "num_agg_pools": len(namespaces),
        "agg_pool_dynamo_namespaces": list(namespaces),
        # After the first, in their order.
        "agg_pool_priorities": list(range(len(namespaces), 0, -1)),
        "enable_priority_retry": retries,
        "agg_pool_selection_strategy": {
            "ttft_min_ms": 0,
            "ttft_max_ms": 1000,
            "ttft_resolution": 1,
            "itl_min_ms": 0,
            "itl_max_ms": 100,
            "itl_resolution": 1,
            "agg_pool_mapping": [[0]],
        },
        "pool_routers": {name: [f"{name}:{port}" for port in range(1, num_routers + 1)] for name in namespaces},
    }


@pytest.fixture
def make_scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    def make(
        settings: Mapping[str, Any], roles: Mapping[str, Sequence[str]] | None = None, **fleet_settings: Any
    ) -> Scene:
        routers = Routers()
        monkeypatch.setattr(
            global_pools, "RouterLink", lambda address, _dialer: ScriptedLink(address.split(":")[0], routers)
        )
        config = build(GlobalRouterConfig, without_units(dict(settings)))
        table = WorkerTable("global", heartbeat_timeout_s=8.0)
        pools = Pools(config, table, PoolMetrics(CollectorRegistry()))
        for namespace in config.namespaces:
            records = [make_record(one) for one in (roles or {}).get(namespace, ["decode-0"])]
            statuses = tuple(
                WorkerStatus(record=one, state=WorkerState.READY, load=make_load(one), load_age_s=0.0, num_requests=0)
                for one in records
            )
            for link in pools.of(namespace).links:
                pools.of(namespace).saw(link, WorkerChanges(updated=statuses, is_complete=True))
        return Scene(Fleet("decode-0", **fleet_settings), pools, routers, config)

    return make


# A pool dies, and the next one has no room.


@pytest.mark.parametrize("refusal", [FULL, OutOfBlocksError("it has no blocks")])
async def test_an_answer_whose_pool_dies_goes_past_a_full_pool(
    make_scene: Callable[..., Scene], refusal: ServingError
) -> None:
    scene = make_scene(agg("a", "b", "c"))
    scene.routers.scripts.update(a=[breaks(LOST, 1, 2)], b=[fails(refusal)], c=[ends(3)])
    raw = await scene.run()
    assert (raw.error, raw.tokens, list(raw.finished)) == (None, {0: [1, 2, 3]}, [0])
    assert scene.routers.order == ["a", "b", "c"]
    assert scene.fleet.pauses == []


async def test_an_answer_whose_pool_dies_waits_for_room_where_no_other_is_left(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(agg("a", "b"))
    scene.routers.scripts.update(a=[breaks(LOST, 1, 2)], b=[fails(FULL), fails(FULL), ends(3)])
    raw = await scene.run()
    assert (raw.error, raw.tokens) == (None, {0: [1, 2, 3]})
    assert scene.routers.order == ["a", "b", "b", "b"]
    assert scene.fleet.pauses == [0.5, 0.5]


async def test_all_pools_without_room_are_asked_again_after_a_pause(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(agg("a", "b", "c"))
    scene.routers.scripts.update(a=[breaks(LOST, 1, 2)], b=[fails(FULL)] * 2, c=[fails(FULL), ends(3)])
    raw = await scene.run()
    assert (raw.error, raw.tokens) == (None, {0: [1, 2, 3]})
    assert scene.routers.order == ["a", "b", "c", "b", "c"]
    assert scene.fleet.pauses == [0.5]


async def test_an_answer_waits_for_no_pool_that_is_lost(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(agg("a", "b"))
    scene.routers.scripts.update(a=[breaks(LOST, 1, 2)], b=[fails(LOST)])
    raw = await scene.run()
    assert isinstance(raw.error, ModelUnavailableError)
    assert (scene.routers.order, scene.fleet.pauses) == (["a", "b"], [])


async def test_each_choice_waits_for_room(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(agg("a", "b"))
    refusals = [fails(FULL), fails(FULL)]
    scene.routers.scripts.update(a=[breaks(LOST, 1, 2)], b=[*refusals, ends(3), ends(3)])
    raw = await scene.run(num_choices=2)
    assert (raw.error, raw.tokens) == (None, {0: [1, 2, 3], 1: [1, 2, 3]})
    assert scene.fleet.pauses == [0.5, 0.5]


async def test_a_pool_that_stays_full_ends_the_answer_with_its_refusal(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(agg("a", "b"))
    scene.routers.scripts.update(a=[breaks(LOST, 1, 2)], b=[fails(FULL)] * 7)
    raw = await scene.run()
    assert raw.error is FULL
    assert scene.fleet.pauses == [0.5] * 6


async def test_a_pool_that_dies_while_an_answer_waits_for_its_room_is_not_asked_again(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(agg("a", "b"))
    scene.routers.scripts.update(a=[breaks(LOST, 1, 2)], b=[fails(FULL)])
    [link] = scene.pools.of("b").links
    scene.fleet.on_pause = lambda: scene.pools.of("b").lost(link)
    raw = await scene.run()
    assert isinstance(raw.error, ModelUnavailableError)
    assert scene.fleet.pauses == [0.5]


@pytest.mark.parametrize(("retries", "order"), [(False, ["a"]), (True, ["a", "b"])])
async def test_a_request_without_output_waits_for_no_room(
    make_scene: Callable[..., Scene], retries: bool, order: list[str]
) -> None:
    scene = make_scene(agg("a", "b", retries=retries))
    scene.routers.scripts.update({namespace: [fails(FULL)] for namespace in order})
    raw = await scene.run()
    assert isinstance(raw.error, ModelUnavailableError if retries else QueueFullError)
    assert (scene.routers.order, scene.fleet.pauses) == (order, [])


async def test_an_answer_that_is_cancelled_while_it_waits_ends_with_what_came_of_it(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(agg("a", "b"))
    scene.routers.scripts.update(a=[breaks(LOST, 1, 2)], b=[fails(FULL)])
    raw = Raw()
    cancel = scene.begin(raw)
    scene.fleet.on_pause = cancel
    async with asyncio.timeout(TIMEOUT_S):
        await raw.ended.wait()
    assert raw.error is None
    finished = raw.finished[0]
    assert (finished.reason, finished.usage.num_output_tokens) == (FinishReason.CANCELLED, 2)
    assert scene.routers.order == ["a", "b"]


async def test_a_choice_that_waits_is_cancelled_with_one_that_runs(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(agg("a", "b"))
    scene.routers.scripts.update(a=[breaks(LOST, 1, 2)], b=[stays(3), fails(FULL)])
    raw = Raw()
    cancel = scene.begin(raw, num_choices=2)
    scene.fleet.on_pause = cancel
    async with asyncio.timeout(TIMEOUT_S):
        await raw.ended.wait()
    assert raw.error is None
    counts = {choice: (end.reason, end.usage.num_output_tokens) for choice, end in raw.finished.items()}
    assert counts == {0: (FinishReason.CANCELLED, 3), 1: (FinishReason.CANCELLED, 2)}
    assert len(scene.routers.asked) == 3


# What a request pays that ends here early.


async def test_what_a_client_was_given_before_it_left_is_paid_for_and_recorded(
    make_scene: Callable[..., Scene], tmp_path: Path
) -> None:
    path = tmp_path / "usage.jsonl"
    usage = UsageLog(path)
    scene = make_scene(agg("a", "b"), tenants={"*": TenantConfig(tokens_per_minute=1000)}, usage=usage)
    limits = scene.pipeline.context.limits
    scene.routers.scripts.update(a=[stays(1, 2, 3, 4), breaks(LOST, 5, 6)], b=[fails(InvalidRequestError("no"))])
    run = scene.pipeline.generate(START, Raw())
    await until(lambda: run.num_output_tokens == 4)
    await run.drop()
    assert limits.headers("")["x-ratelimit-remaining-tokens"] == str(1000 - 3 - 4)
    raw = await scene.run()
    assert isinstance(raw.error, InvalidRequestError)
    assert limits.headers("")["x-ratelimit-remaining-tokens"] == str(1000 - 3 - 4 - 3 - 2)
    usage.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    used = [(one["outcome"], one["num_prompt_tokens"], one["num_output_tokens"]) for one in records]
    assert used == [("cancelled", 3, 4), ("invalid_field", 3, 2)]


async def test_what_no_pool_began_costs_no_tokens(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(agg("a", "b"), tenants={"*": TenantConfig(tokens_per_minute=1000)})
    scene.routers.scripts.update(a=[fails(FULL)])
    await scene.run()
    assert scene.pipeline.context.limits.headers("")["x-ratelimit-remaining-tokens"] == "1000"


# What the next pool is told.


async def test_reasoning_and_calls_come_once_when_a_pool_dies_within_the_second_call(
    make_scene: Callable[..., Scene],
) -> None:
    whole = [
        Parsed(reasoning="Zwölf "),
        Parsed(reasoning="Äpfel"),
        Parsed(tool_calls=[ToolCallDelta(0, "one", "add", '{"a": "ä"}', is_complete=True)]),
        Parsed(tool_calls=[ToolCallDelta(1, "two", "mul")]),
        Parsed(tool_calls=[ToolCallDelta(1, arguments='{"b": ')]),
        Parsed(tool_calls=[ToolCallDelta(1, arguments="2}", is_complete=True)]),
    ]

    def show(leg: Leg, parts: Sequence[Parsed]) -> None:
        given = leg.resume or Resume(request_id="", attempt=1, seed=0)
        left = GivenParts(
            given.num_text_bytes, given.num_reasoning_bytes, given.num_tool_calls, given.num_argument_bytes
        )
        for part in parts:
            shown = left.leave_out(part)
            if shown.reasoning or any(call != ToolCallDelta(call.index) for call in shown.tool_calls):
                leg.sink.add_parsed(0, 0, (), shown, ())

    def rest(leg: Leg) -> None:
        leg.accept()
        show(leg, whole)
        leg.finish(0)
        leg.sink.end()

    scene = make_scene(agg("a", "b"))
    scene.routers.scripts.update(a=[breaks(LOST, 1, text=lambda leg: show(leg, whole[:5]))], b=[rest])
    raw = await scene.run()
    told = [(part.reasoning, tuple(part.tool_calls)) for part in whole]
    # The end of the first call came before the second one began, so it is not said again.
    assert raw.parsed == told


async def test_a_choice_that_loses_its_pool_twice_leaves_the_other_its_tries(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(agg("a", "b", "c", num_routers=2))
    a, b = scene.pools.of("a"), scene.routers.scripts["b"]
    scene.routers.scripts["a"] += [breaks(DrainingError("it goes"), 1)]
    # The first choice loses both routers of the next pool, the second one of them.
    b += [breaks(LOST, 2), breaks(LOST, 2), breaks(LOST, 3), ends(3)]
    scene.routers.scripts["c"] += [ends(4)]
    raw = await scene.run(num_choices=2)
    assert a.num_relayed == 0
    assert raw.tokens == {0: [1, 2, 3, 4], 1: [1, 2, 3]}
    by_choice: dict[int, list[str]] = defaultdict(list)
    for namespace, resume in scene.routers.asked[1:]:
        assert resume is not None
        by_choice[resume.choice].append(namespace)
    assert by_choice == {0: ["b", "b", "c"], 1: ["b", "b"]}


@pytest.mark.parametrize("error", [DrainingError("it goes"), FULL])
async def test_a_pool_that_one_choice_leaves_may_keep_the_other(
    make_scene: Callable[..., Scene], error: ServingError
) -> None:
    scene = make_scene(agg("a", "b", "c", num_routers=2))
    b = [fails(error), breaks(LOST, 2), ends(3)]
    scene.routers.scripts.update(a=[breaks(DrainingError("it goes"), 1)], b=b, c=[ends(2)])
    raw = await scene.run(num_choices=2)
    assert (raw.error, raw.tokens) == (None, {0: [1, 2], 1: [1, 2, 3]})
    assert scene.routers.order == ["a", "b", "b", "c", "b"]


async def test_attempts_of_an_answer_that_its_client_resumed_go_on_above_the_clients(
    make_scene: Callable[..., Scene],
) -> None:
    given = Resume(
        request_id="ef" * 16,
        attempt=50_000,
        seed=7,
        generated_token_ids=(1, 2),
        num_text_bytes=4,
        num_reasoning_bytes=3,
        num_tool_calls=2,
        num_argument_bytes=1,
        model_fingerprint=FINGERPRINT,
    )
    scene = make_scene(agg("a", "b"))
    scene.routers.scripts.update(a=[breaks(LOST, 3)], b=[ends(4)])
    raw = Raw()
    raw.tokens[0] += given.generated_token_ids
    scene.begin(raw, resume=given)
    async with asyncio.timeout(TIMEOUT_S):
        await raw.ended.wait()
    assert (raw.error, raw.tokens) == (None, {0: [1, 2, 3, 4]})
    first, second = [resume for _, resume in scene.routers.asked]
    assert first == replace(given, generated_token_ids=array("I", (1, 2)))
    # A pool's router numbers its own attempts from there.
    assert second == replace(
        given, request_id=second.request_id, attempt=second.attempt, generated_token_ids=array("I", (1, 2, 3))
    )
    assert second.attempt >= given.attempt + 1000


async def test_tokens_that_a_client_brings_are_not_counted_as_shown(make_scene: Callable[..., Scene]) -> None:
    scene, raw = make_scene(agg("a")), Raw()
    scene.routers.scripts.update(a=[breaks(InvalidRequestError("it ends here"), 3)])
    raw.tokens[0] += (1, 2)
    scene.begin(raw, resume=Resume(request_id="ef" * 16, attempt=1, seed=7, generated_token_ids=(1, 2)))
    async with asyncio.timeout(TIMEOUT_S):
        await raw.ended.wait()
    assert raw.tokens == {0: [1, 2, 3]}
    assert scene.fleet.registry.get_sample_value("quartet_router_output_tokens_total", {"model": "tiny"}) == 1


@pytest.mark.parametrize("token_ids", [(1, 2**32 - 1), (1,) * 100_000])
async def test_tokens_that_no_answer_can_have_are_refused_before_a_pool_is_asked(
    make_scene: Callable[..., Scene], token_ids: tuple[int, ...]
) -> None:
    scene, raw = make_scene(agg("a")), Raw()
    scene.begin(raw, resume=Resume(request_id="ef" * 16, attempt=1, seed=7, generated_token_ids=token_ids))
    async with asyncio.timeout(TIMEOUT_S):
        await raw.ended.wait()
    assert isinstance(raw.error, InvalidRequestError) and raw.error.field == "resume.generated_token_ids"
    assert scene.routers.asked == []
    assert not scene.fleet.registry.get_sample_value("quartet_router_output_tokens_total", {"model": "tiny"})


async def test_a_pool_that_failed_to_answer_may_still_prefill(make_scene: Callable[..., Scene]) -> None:
    settings = {
        **DISAGG,
        "prefill_pool_dynamo_namespaces": ["both", "p1"],
        "decode_pool_dynamo_namespaces": ["both", "d1"],
        "pool_routers": {name: [f"{name}:1"] for name in ("both", "p1", "d1")},
    }
    scene = make_scene(settings, {"both": ["prefill-0", "decode-0"], "p1": ["prefill-0"]})
    wish = replace(WISH, ttft_ms=10, itl_ms=5)
    chosen = scene.pools.choose(wish)
    assert (chosen.serving.namespace, chosen.prefill) == ("both", ("both", "p1"))
    chosen = scene.pools.choose(wish, {"both"})
    assert (chosen.serving.namespace, chosen.prefill) == ("d1", ("both", "p1"))


# Its spans.


def relays(spans: SpanList) -> list[Span]:
    """What a trace has of relays, and of the pauses between them, in the order of their begins."""
    return sorted(
        (span for span in spans.spans if span.name in ("relay hop", "pause")), key=lambda span: span.begin_unix_ns
    )


async def test_relays_and_pauses_follow_each_other_without_a_gap(make_scene: Callable[..., Scene]) -> None:
    spans = SpanList()
    scene = make_scene(agg("a", "b"), tracer=spans.tracer)
    scene.routers.scripts.update(a=[breaks(LOST, 1, 2)], b=[fails(FULL), ends(3)])
    raw = await scene.run()
    assert raw.tokens == {0: [1, 2, 3]}
    parts, request = relays(spans), spans.one("request")
    assert [span.name for span in parts] == ["relay hop", "pause", "relay hop", "pause", "relay hop"]
    before = spans.one("read")
    for part in parts:
        assert (part.begin_unix_ns, part.parent_id) == (before.end_unix_ns, request.span_id)
        before = part
    lost, full, last = parts[::2]
    assert [hop.attributes["quartet.namespace"] for hop in (lost, full, last)] == ["a", "b", "b"]
    assert [hop.attributes.get("error.type") for hop in (lost, full, last)] == [
        "router_unavailable",
        "queue_full",
        None,
    ]
    resumed = [resume for _, resume in scene.routers.asked[1:]]
    attempts = [0, *(resume.attempt for resume in resumed if resume is not None)]
    assert [hop.attributes["quartet.attempt"] for hop in (lost, full, last)] == attempts
    for hop, (traceparent, sent_at_unix_ns) in zip((lost, full, last), scene.routers.told, strict=True):
        assert traceparent.split("-")[2] == f"{hop.span_id:016x}"
        assert sent_at_unix_ns == hop.begin_unix_ns
    assert request.error == ""


async def test_the_first_token_was_on_its_way_from_its_pool(make_scene: Callable[..., Scene]) -> None:
    spans = SpanList()
    scene = make_scene(agg("a", "b"), tracer=spans.tracer)
    scene.routers.scripts.update(a=[breaks(LOST, 1, 2)], b=[ends(3)])
    await scene.run()
    request, reply = spans.one("request"), spans.one("reply")
    [(event, at, _)] = request.events
    assert (event, at, reply.parent_id) == ("first token", reply.end_unix_ns, request.span_id)
    first, _second = (hop for hop in relays(spans) if hop.name == "relay hop")
    assert first.begin_unix_ns <= at <= first.end_unix_ns
    assert 3500 < (reply.end_unix_ns - reply.begin_unix_ns) / 1e9 < 3700


async def test_choices_that_part_have_relays_of_their_own(make_scene: Callable[..., Scene]) -> None:
    spans = SpanList()
    scene = make_scene(agg("a", "b"), tracer=spans.tracer)
    scene.routers.scripts.update(a=[breaks(LOST, 1)], b=[ends(2), ends(2)])
    raw = await scene.run(num_choices=2)
    assert raw.tokens == {0: [1, 2], 1: [1, 2]}
    first, *later = (span for span in relays(spans) if span.name == "relay hop")
    assert [hop.attributes["quartet.namespace"] for hop in later] == ["b", "b"]
    assert len(spans.one("request").events) == 1
    shared, *own = (span for span in relays(spans) if span.name == "pause")
    assert shared.begin_unix_ns == first.end_unix_ns
    assert {pause.begin_unix_ns for pause in own} == {shared.end_unix_ns}
    assert [pause.end_unix_ns for pause in own] == [hop.begin_unix_ns for hop in later]


async def test_a_relay_that_its_client_cancels_has_not_failed(make_scene: Callable[..., Scene]) -> None:
    spans = SpanList()
    scene = make_scene(agg("a"), tracer=spans.tracer)
    scene.routers.scripts.update(a=[stays(1)])
    raw = Raw()
    cancel = scene.begin(raw)
    async with asyncio.timeout(TIMEOUT_S):
        await raw.came.wait()
        cancel()
        await raw.ended.wait()
    assert [span for span in spans.spans if span.error or "error.type" in span.attributes] == []
    assert spans.one("request").attributes["quartet.outcome"] == "cancelled"
    assert spans.one("relay hop").attributes["quartet.namespace"] == "a"


async def test_without_a_trace_nobody_is_told_when_it_was_sent(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(agg("a"))
    scene.routers.scripts.update(a=[ends(1)])
    await scene.run()
    assert scene.routers.told == [("", 0)]
