"""Prefills for routers of other namespaces: limits before the work, one account, and attempts at several workers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from quartet.api.convert.prefill import (
    AskedPrefill,
    PrefilledFor,
    UnreadPrefill,
    from_prefill_for_request,
    to_prefill_for_request,
)
from quartet.api.request import Relayed
from quartet.discovery.base import Rank, Role
from quartet.engine.base import Generation
from quartet.engine.sampling import GrammarKind, GuidedDecoding, OutputOptions, Sampling, guided_fields
from quartet.errors import (
    EngineError,
    InvalidRequestError,
    MessageTooLargeError,
    ModelNotFoundError,
    PermissionDeniedError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
    ServingError,
    UnsupportedFieldError,
    WorkersLostError,
    WorkerUnavailableError,
)
from quartet.rpc.errors import from_rpc_error
from quartet.rpc.server import StalledCalls
from quartet.streams.messages import RequestContext, WorkerStart
from quartet.telemetry.tracing import ids_of
from quartet.v1 import router_pb2
from router.config import AdmissionConfig, AttemptConfig
from router.generate import Pipeline
from router.policy.base import Decision, Pending, Snapshot
from router.policy.greedy import LeastLoadedPolicy
from router.prefill_for import PrefillFor
from router.request_trace import PrefillTrace
from router.servicer import RouterServicer
from router.tenants import MAX_SALT_LENGTH, TenantConfig, TenantNames
from tests.router.fakes import TIMEOUT_S, Fleet, Plan, collect
from tests.router.records import ALL_SAMPLING_FIELDS
from tests.router.system import running_system
from tests.router.test_generate import make_start
from tests.router.test_traces import pass_time
from tests.span_list import SpanList

NUM_TOKENS = 900
#: What counts of a prompt of so many tokens.
PROMPT_BYTES = (16 << 10) + 12 * NUM_TOKENS


class Noting(LeastLoadedPolicy):
    """Keeps what it was shown, choice by choice."""

    def __init__(self) -> None:
        super().__init__(0, random.Random(0))
        self.shown: list[Pending] = []

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        self.shown += queued
        return super().assign(queued, snapshot)


class Scene:
    """A router whose prefill workers work for others, too."""

    def __init__(self, *worker_ids: str, max_bytes: int = 1 << 30, **fleet: Any) -> None:
        config = AdmissionConfig(max_queued_prompt_bytes=max_bytes)
        self.fleet = Fleet(*worker_ids, admission=config, **fleet)
        self.policy = Noting()
        self.prefills = PrefillFor(self.fleet.pipeline.context, self.policy, config, self.fleet.index)

    def lose_prefill(self) -> None:
        """From now on the model has no prefill worker that is ready."""
        self.fleet.join("prefill-0")
        self.fleet.break_worker("prefill-0")

    def ask(self, **changes: Any) -> asyncio.Task[PrefilledFor]:
        return asyncio.create_task(self.prefills.run(asked(**changes)))

    def assert_nothing_left(self) -> None:
        self.fleet.hops.held.clear()  # nobody takes what was handed off
        self.fleet.assert_nothing_left()
        assert self.prefills.num_queued == self.prefills.num_running == 0


def asked(
    *,
    num_tokens: int = NUM_TOKENS,
    tenant: str = "",
    priority: int = 0,
    timeout_s: float | None = None,
    request_id: str = "",
    fingerprint: str = "ab" * 32,
    num_generated: int = 0,
    **generation: Any,
) -> UnreadPrefill:
    context = RequestContext(tenant=tenant, priority=priority, timeout_s=timeout_s)
    prompt = list(range(num_tokens - num_generated))
    generated = list(range(num_generated))
    start = WorkerStart(
        context=context,
        generation=Generation(prompt_token_ids=prompt, generated_token_ids=generated, **generation),
    )
    message = to_prefill_for_request(AskedPrefill(model_name="tiny", model_fingerprint=fingerprint, start=start))
    message.start.context.request_id = request_id
    return from_prefill_for_request(message)


async def settle() -> None:
    for _ in range(200):  # one begins in sixteen turns
        await asyncio.sleep(0)


async def test_prompts_that_wait_count_in_the_routers_memory_until_they_are_placed() -> None:
    scene, gate = Scene("decode-0"), asyncio.Event()
    scene.lose_prefill()
    prefill = scene.ask(tenant="acme")
    await settle()
    assert scene.fleet.prompts.num_bytes == PROMPT_BYTES
    assert (scene.prefills.num_queued, scene.prefills.num_running) == (1, 1)
    scene.fleet.hops.plan("prefill", Plan(gate=gate))
    scene.fleet.join("prefill-1")
    await scene.fleet.hops.hung.wait()
    assert scene.fleet.prompts.num_bytes == 0
    assert (scene.prefills.num_queued, scene.prefills.num_running) == (0, 1)
    gate.set()
    assert (await prefill).rank == Rank("prefill-1")
    scene.assert_nothing_left()


async def test_a_flood_of_long_prompts_refuses_its_own_tenant() -> None:
    scene = Scene("decode-0", max_bytes=3 * PROMPT_BYTES)
    scene.lose_prefill()
    flood = [scene.ask(tenant="flooder") for _ in range(3)]
    await settle()
    other = scene.ask(tenant="other")
    await settle()
    assert [prefill.done() for prefill in flood] == [False, False, True]
    with pytest.raises(QueueFullError, match="memory"):
        await flood[2]
    assert not other.done()
    for prefill in (*flood[:2], other):
        prefill.cancel()
    await asyncio.wait([*flood[:2], other])
    scene.assert_nothing_left()


async def test_a_tenant_pays_once_for_a_prefill_and_in_the_account_of_its_requests() -> None:
    scene = Scene("prefill-0", "prefill-1", "decode-0")
    share = scene.fleet.admission.share
    await scene.ask(tenant="acme")
    once = share.start("acme")
    assert once > share.start("other")
    scene.fleet.hops.plan("prefill", Plan(error=WorkerUnavailableError("away")))
    await scene.ask(tenant="failed-once")
    assert share.start("failed-once") == once
    scene.assert_nothing_left()


async def test_prompts_wait_here_and_not_at_a_worker_whose_room_is_promised() -> None:
    scene, gate = Scene("prefill-0", "decode-0"), asyncio.Event()  # a rank of 1,000 tokens
    scene.fleet.hops.plan("prefill", Plan(gate=gate), Plan(gate=gate))
    first = scene.ask(tenant="flooder")
    await scene.fleet.hops.hung.wait()
    second, other = scene.ask(tenant="flooder"), scene.ask(tenant="other", num_tokens=90)
    await settle()
    assert [len(call.start.generation.prompt_token_ids) for call in scene.fleet.hops.calls] == [900, 90]
    assert scene.prefills.num_queued == 1
    gate.set()
    await asyncio.gather(first, second, other)
    scene.assert_nothing_left()


async def test_an_attempt_that_failed_goes_on_elsewhere_with_the_same_hashes() -> None:
    scene = Scene("prefill-0", "prefill-1", "decode-0")
    scene.fleet.hops.plan("prefill", Plan(error=WorkerUnavailableError("away")))
    prefilled = await scene.ask(num_generated=10, timeout_s=20.0)
    first, second = scene.fleet.hops.calls
    assert {first.rank, second.rank} == {Rank("prefill-0"), Rank("prefill-1")}
    assert prefilled.rank == second.rank
    assert [0.0 < call.start.context.timeout_s < 20.0 for call in (first, second)] == [True, True]
    assert len(scene.policy.shown) == 2
    assert len(scene.policy.shown[0].sequence_hashes) == NUM_TOKENS // 10
    assert scene.policy.shown[0].sequence_hashes is scene.policy.shown[1].sequence_hashes
    assert len(scene.fleet.pauses) == 1
    scene.assert_nothing_left()


async def test_a_prompt_that_ends_workers_is_not_sent_to_all_of_them() -> None:
    scene = Scene("decode-0", *(f"prefill-{number}" for number in range(5)))
    fleet = scene.fleet
    fleet.hops.plan("prefill", *[Plan(error=EngineError("the engine is lost"))] * 5)
    fleet.on_pause = lambda: fleet.break_worker(fleet.hops.calls[-1].rank.worker_id)
    with pytest.raises(WorkersLostError):
        await scene.ask()
    assert len(fleet.hops.calls) == AttemptConfig.max_lost_workers
    scene.assert_nothing_left()


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"num_tokens": 2000}, PromptTooLongError, "start.generation.prompt_token_ids"),
        ({"num_tokens": 1001}, PromptTooLongError, "start.generation.prompt_token_ids"),
        ({"num_tokens": 2000, "num_generated": 1000}, PromptTooLongError, "start.generation.prompt_token_ids"),
        ({"cache_salt": "s" * (MAX_SALT_LENGTH + 1)}, InvalidRequestError, "start.generation.cache_salt"),
        ({"adapter": "unknown"}, UnsupportedFieldError, "start.generation.adapter"),
        ({"fingerprint": "cd" * 32}, ModelNotFoundError, "model_fingerprint"),
    ],
)
async def test_what_is_refused_is_not_read(changes: Mapping[str, Any], error: type[ServingError], field: str) -> None:
    scene = Scene("prefill-0", "decode-0")
    with pytest.raises(error) as refused:
        await scene.ask(**{"request_id": "no request's", **changes})
    assert (type(refused.value), refused.value.field) == (error, field)
    assert scene.fleet.prompts.num_bytes == 0
    # What is not refused is read in its turn, and is found to be malformed then.
    with pytest.raises(InvalidRequestError) as refused:
        await scene.ask(request_id="no request's")
    assert refused.value.field == "context.request_id"
    scene.assert_nothing_left()


async def test_a_grammar_that_cannot_be_followed_reaches_no_worker() -> None:
    fields = (*ALL_SAMPLING_FIELDS, *guided_fields((GrammarKind.LARK,)))
    scene = Scene("prefill-0", sampling_fields=fields)
    try:
        with pytest.raises(InvalidRequestError, match="unknown name"):
            await scene.ask(sampling=Sampling(guided=GuidedDecoding(GrammarKind.LARK, "start: nothing_like_this")))
    finally:
        scene.fleet.pipeline.context.grammars.close()
    assert scene.fleet.hops.calls == []
    scene.assert_nothing_left()


async def test_adapters_are_those_of_prefill_workers_where_none_decodes() -> None:
    scene = Scene("prefill-0", adapters=("mine",))
    assert (await scene.ask(adapter="mine")).rank == Rank("prefill-0")
    scene.assert_nothing_left()


async def test_workers_are_told_no_higher_priority_than_the_tenant_may_have() -> None:
    scene = Scene("prefill-0", tenants={"acme": TenantConfig(max_priority=3)})
    for tenant, priority in (("acme", 9), ("acme", 2), ("other", 9)):
        await scene.ask(tenant=tenant, priority=priority)
    assert [call.start.context.priority for call in scene.fleet.hops.calls] == [3, 2, 0]


async def test_one_line_is_logged_for_each_however_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="router.prefill_for")
    scene = Scene("prefill-0")
    await scene.ask(tenant="acme", request_id="0f" * 16)
    with pytest.raises(PromptTooLongError):
        await scene.ask(num_tokens=5000)
    well, ill = (record.quartet_fields for record in caplog.records)
    assert (well["request_id"], well["outcome"], well["tenant"]) == ("0f" * 16, "prefilled", "acme")
    assert (well["prefill_worker"], well["num_prompt_tokens"]) == ("prefill-0", NUM_TOKENS)
    assert (ill["outcome"], ill["num_prompt_tokens"]) == ("prompt_too_long", 5000)
    assert well["path"] == ill["path"] == "prefill_for"


async def test_a_prompt_that_no_model_here_takes_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_system(tmp_path, monkeypatch, "prefill-0", required_roles=(Role.PREFILL,)) as (_system, stub):
        message = router_pb2.PrefillForRequest(model="tiny")
        message.start.generation.prompt_token_ids = bytes(300 << 10)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.PrefillFor(message, timeout=TIMEOUT_S)
        assert isinstance(from_rpc_error(refused.value), MessageTooLargeError)


async def test_a_prefill_that_takes_too_long_ends() -> None:
    scene = Scene("decode-0")
    scene.lose_prefill()
    with pytest.raises(RequestTimeoutError):
        await scene.ask(timeout_s=0.0)
    scene.assert_nothing_left()


async def test_the_routers_limit_caps_what_a_prefill_asks_for() -> None:
    scene = Scene("decode-0", max_timeout_s=0.0)
    scene.lose_prefill()
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(RequestTimeoutError):
            await scene.ask(timeout_s=1000.0)
    scene.assert_nothing_left()


@pytest.mark.parametrize(("num_prompt_logprobs", "num_hashes"), [(None, NUM_TOKENS // 10), (0, 0)])
async def test_a_prompt_whose_log_probabilities_are_asked_for_is_not_looked_up(
    num_prompt_logprobs: int | None, num_hashes: int
) -> None:
    scene = Scene("prefill-0", sampling_fields=(*ALL_SAMPLING_FIELDS, "num_prompt_logprobs"))
    await scene.ask(output=OutputOptions(num_prompt_logprobs=num_prompt_logprobs))
    [shown] = scene.policy.shown
    assert len(shown.sequence_hashes) == num_hashes, "cached blocks have none"
    scene.assert_nothing_left()


# Who names a tenant, and who names namespaces.


class Recorder:
    """Takes prefills and keeps their tenants."""

    def __init__(self) -> None:
        self.tenants: list[str] = []

    async def run(self, asked: UnreadPrefill) -> PrefilledFor:
        self.tenants.append(asked.tenant)
        raise WorkerUnavailableError("it only keeps tenants")


def caller(identity: str | None) -> Any:
    """The context of a call of the holder of a certificate."""
    names = {"x509_subject_alternative_name": [f"quartet://{identity}".encode()]} if identity else {}
    return SimpleNamespace(auth_context=lambda: names, invocation_metadata=lambda: ())


def make_servicer(*, prefills: Any = None, **changes: Any) -> RouterServicer:
    settings = {"is_loopback": False, "has_tls": True, "namespace": "p0", **changes}
    unused: Any = None
    return RouterServicer(unused, unused, unused, stalled=StalledCalls(TIMEOUT_S), prefills=prefills, **settings)


BOUND = {"d0/bound": ("acme", "acme-*")}


@pytest.mark.parametrize(
    ("identity", "settings", "tenant"),
    [
        ("d0/router/r", {}, "acme"),
        ("d0/router/bound", {}, "acme"),
        ("p0/router/r", {}, "r"),
        ("p0/router/gateway", {}, "acme"),
        (None, {"has_tls": False, "is_loopback": True}, "acme"),
        (None, {"has_tls": False, "is_loopback": False}, ""),
    ],
)
async def test_routers_of_other_namespaces_name_tenants_and_others_only_where_they_may(
    identity: str | None, settings: Mapping[str, Any], tenant: str
) -> None:
    recorder = Recorder()
    servicer = make_servicer(prefills=recorder, names=TenantNames(("gateway",), BOUND), **settings)
    message = router_pb2.PrefillForRequest(model="tiny")
    message.start.context.tenant = "acme"
    with pytest.raises(WorkerUnavailableError):
        await servicer.PrefillFor(message, caller(identity))
    assert recorder.tenants == [tenant]


async def test_a_router_that_is_bound_to_tenants_names_no_other() -> None:
    servicer = make_servicer(prefills=Recorder(), names=TenantNames((), BOUND))
    message = router_pb2.PrefillForRequest(model="tiny")
    message.start.context.tenant = "initech"
    with pytest.raises(PermissionDeniedError) as refused:
        await servicer.PrefillFor(message, caller("d0/router/bound"))
    assert refused.value.field == "tenant"


@pytest.mark.parametrize("field", ["prefill_namespaces", "request_id"])
@pytest.mark.parametrize("identity", ["p0/client/c", "p0/operator/o", None])
async def test_with_certificates_only_routers_say_where_a_prompt_is_prefilled_and_what_it_is_called(
    field: str, identity: str | None
) -> None:
    message = router_pb2.PlaceRequest(start=router_pb2.GenerateStart(text="a"))
    if field == "request_id":
        message.request_id = "0f" * 16
    else:
        message.prefill_namespaces.append("p1")
    with pytest.raises(PermissionDeniedError) as refused:
        await make_servicer().Place(message, caller(identity))
    assert refused.value.field == field


async def test_namespaces_are_checked_before_anything_is_done() -> None:
    fleet = Fleet()  # it has no model
    relayed = Relayed(prefill_namespaces=("nowhere",))
    with pytest.raises(InvalidRequestError, match="prefill_pools have no nowhere") as refused:
        await fleet.pipeline.place(make_start(), relayed=relayed)
    assert refused.value.field == "prefill_namespaces"


# The router that asks.


class Neighbours:
    """Namespaces that fail as told, in order."""

    def __init__(self, errors: Mapping[str, ServingError]) -> None:
        self._errors = errors
        self.namespaces = errors.keys()
        self.asked: list[str] = []

    async def prefill(self, namespace: str, asked: AskedPrefill, *, timeout_s: float) -> PrefilledFor:
        self.asked.append(namespace)
        raise self._errors[namespace]


@pytest.mark.parametrize(
    "error", [PromptTooLongError("too long there"), UnsupportedFieldError("not there"), ModelNotFoundError("nor there")]
)
async def test_what_one_namespace_cannot_do_another_may(error: ServingError) -> None:
    fleet = Fleet("decode-0")
    neighbours: Any = Neighbours({"p0": error, "p1": WorkerUnavailableError("away")})
    fleet.pipeline = Pipeline(replace(fleet.pipeline.context, prefill_pools=neighbours))
    request = fleet.generate(make_start(), relayed=Relayed(prefill_namespaces=("p0", "p1")))
    answer = await collect(request)
    assert neighbours.asked == ["p0", "p1"]
    assert answer.finished
    fleet.assert_nothing_left()


async def test_each_attempt_has_its_spans_and_the_line_names_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="router.prefill_for")
    spans = SpanList()
    scene = Scene("prefill-0", "prefill-1", tracer=spans.tracer)
    scene.fleet.hops.plan("prefill", Plan(error=EngineError("broke")))
    await scene.ask(request_id="5e" * 16)
    assert spans.names == ["read", "queue", "prefill hop", "pause", "queue", "prefill hop", "prefill for"]
    first, second = [span for span in spans.spans if span.name == "prefill hop"]
    assert (first.error, second.error) == ("broke", "")
    contexts = [call.start.context for call in scene.fleet.hops.calls]
    assert [context.sent_at_unix_ns for context in contexts] == [first.begin_unix_ns, second.begin_unix_ns]
    assert [int(ids_of(context.traceparent)[1], 16) for context in contexts] == [first.span_id, second.span_id]
    [line] = [record.quartet_fields for record in caplog.records]
    assert (line["trace_id"], int(line["span_id"], 16)) == ("5e" * 16, spans.one("prefill for").span_id)


async def test_its_queue_says_which_worker_prefills_and_at_what_cost() -> None:
    spans = SpanList()
    scene = Scene("prefill-0", tracer=spans.tracer)
    await scene.ask()
    noted = spans.one("queue").attributes
    assert noted["quartet.prefill_worker"] == "prefill-0"
    assert "quartet.decode_worker" not in noted


@pytest.mark.parametrize(("end", "kind"), [("cancel", None), ("timeout", "timeout")])
async def test_a_prefill_that_is_late_has_failed_with_its_hop_and_one_that_is_cancelled_has_not(
    end: str, kind: str | None
) -> None:
    spans = SpanList()
    scene = Scene("prefill-0", tracer=spans.tracer)
    scene.fleet.hops.plan("prefill", Plan(hang_after=0))
    asking = scene.ask(timeout_s=10.0)
    await scene.fleet.hops.hung.wait()
    if end == "cancel":
        asking.cancel()
    else:
        pass_time(11.0)
    await asyncio.wait([asking])
    assert spans.names == ["read", "queue", "prefill hop", "prefill for"]
    assert [span.attributes.get("error.type") for span in spans.spans] == [None, None, kind, kind]


async def test_the_first_attempt_has_the_number_that_it_came_with() -> None:
    spans = SpanList()
    trace = spans.tracer.begin("prefill for", "", "5e" * 16)
    PrefillTrace(trace, RequestContext(request_id="5e" * 16, attempt=3), 1.0).end(None)
    assert spans.one("read").attributes["quartet.attempt"] == 3


async def test_a_prefill_that_is_refused_says_why_in_its_span() -> None:
    spans = SpanList()
    scene = Scene("prefill-0", tracer=spans.tracer)
    scene.fleet.hops.plan("prefill", Plan(error=InvalidRequestError("no")))
    with pytest.raises(InvalidRequestError):
        await scene.ask()
    assert spans.one("prefill for").attributes["error.type"] == "invalid_field"
