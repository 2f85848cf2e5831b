"""Prompts are prefilled in one namespace and decoded in another."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from quartet.api.answer import Answer
from quartet.api.request import Accepted, GenerateStart, Resume, TokenPrompt
from quartet.client import Delta, QuartetClient, Sampling
from quartet.discovery.base import Rank
from quartet.rpc.channels import create_channel
from quartet.telemetry.tracing import Span
from quartet.v1 import router_pb2 as pb
from router import process as router_process
from router.policy.base import Pending
from services.workers import process as worker_process
from tests.router.global_router.scene import Scene, Stub, running_pools
from tests.router.global_router.test_aggregated import PROMPT, start
from tests.router.session_reader import SessionReader
from tests.router.system import TIMEOUT_S, expected
from tests.span_list import SpanList

SETTINGS: dict[str, Any] = {
    "num_prefill_pools": 2,
    "num_decode_pools": 2,
    "prefill_pool_dynamo_namespaces": ["p0", "p1"],
    "decode_pool_dynamo_namespaces": ["d0", "d1"],
    "prefill_pool_selection_strategy": {
        "ttft_min": 0,
        "ttft_max": 1000,
        "ttft_resolution": 2,
        "isl_min": 0,
        "isl_max": 100,
        "isl_resolution": 2,
        "prefill_pool_mapping": [[0, 1], [0, 0]],
    },
    "decode_pool_selection_strategy": {
        "itl_min": 0,
        "itl_max": 100,
        "itl_resolution": 2,
        "context_length_min": 0,
        "context_length_max": 100,
        "context_length_resolution": 1,
        "decode_pool_mapping": [[0, 1]],
    },
}
WORKERS = {"p0": ["prefill-0"], "p1": ["prefill-0"], "d0": ["decode-0"], "d1": ["decode-0"]}


@dataclass
class Ran:
    """Where a request ran, its tokens, and the bytes of blocks that were moved for it."""

    prefill: str = ""
    decode: str = ""
    tokens: list[int] = field(default_factory=list)
    num_moved_bytes: int = 0


async def run(stub: Stub, *, ttft_ms: int, itl_ms: int) -> Ran:
    """Ask for eight tokens with these targets."""
    message = start(8)
    message.ttft_target.FromMilliseconds(ttft_ms)
    message.itl_target.FromMilliseconds(itl_ms)
    call, ran = stub.Generate(timeout=TIMEOUT_S), Ran()
    await call.write(pb.GenerateRequest(start=message))
    await call.done_writing()
    async for response in call:
        if response.HasField("accepted"):
            [placement] = response.accepted.choices
            ran.prefill, ran.decode = placement.prefill.worker_id, placement.decode.worker_id
        ran.tokens += response.delta.token_ids
        ran.num_moved_bytes += response.finished.time.transfer_bytes
    return ran


def num_prefills(scene: Scene) -> dict[str, int]:
    """Prompts that each prefill worker has computed."""
    return {name: pool.runners["prefill-0"].num_steps for name, pool in scene.pools.items() if name.startswith("p")}


@pytest.mark.parametrize("with_tls", [False, True])
async def test_each_phase_runs_in_the_pool_that_its_target_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_tls: bool
) -> None:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, with_tls=with_tls) as (scene, stub):
        tokens = expected(PROMPT, 8)
        hasty = await run(stub, ttft_ms=100, itl_ms=10)
        assert (hasty.prefill, hasty.decode, hasty.tokens) == ("p0", "d0.decode-0", tokens)
        assert hasty.num_moved_bytes > 0
        counts = num_prefills(scene)
        assert counts["p0"] > 0 and counts["p1"] == 0
        patient = await run(stub, ttft_ms=900, itl_ms=90)
        assert (patient.prefill, patient.decode, patient.tokens) == ("p1", "d1.decode-0", tokens)
        assert num_prefills(scene)["p1"] > 0


@pytest.mark.parametrize("with_tls", [False, True])
async def test_clients_stream_from_the_pool_where_they_are_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_tls: bool
) -> None:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, with_tls=with_tls) as (scene, _):
        tls = None if scene.certificates is None else scene.certificates.client
        async with QuartetClient(scene.address, tls=tls) as client, asyncio.timeout(TIMEOUT_S):
            whole = await client.complete(
                token_ids=PROMPT, path="direct", ttft_target_s=0.1, itl_target_s=0.01, sampling=Sampling(max_tokens=8)
            )
        [placement] = whole.accepted.choices
        assert placement.prefill is not None
        assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p0", "d0.decode-0")
        assert list(whole.choices[0].token_ids) == expected(PROMPT, 8)


async def test_each_router_knows_a_request_by_one_name_and_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="router")
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, with_tls=True) as (scene, _):
        assert scene.certificates is not None
        async with create_channel(scene.address, scene.certificates.client) as channel:
            await run(Stub(channel), ttft_ms=100, itl_ms=10)
    names = ("router.request_log", "router.prefill_for")
    lines = [record.quartet_fields for record in caplog.records if record.name in names]
    # Of the router that prefills, of the one that decodes, and of the global one.
    assert [line.get("path") for line in lines] == ["prefill_for", "generate", "generate"]
    assert len({line["request_id"] for line in lines}) == 1
    assert {line["tenant"] for line in lines} == {"client"}


def test_a_prompt_that_another_pool_prefills_leaves_its_rank_nothing_to_compute() -> None:
    rank = Rank("decode-0")
    pending = Pending(num_tokens=100, num_reserved_tokens=200, num_most_tokens=300)
    assert pending.num_missing_tokens(rank) == 100
    assert replace(pending, is_handed_in=True).num_missing_tokens(rank) == 1


async def test_a_pool_that_does_not_trust_the_other_prefills_nothing_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted_by = {"p0": ["global"]}
    running = running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, with_tls=True, trusted_by=trusted_by)
    async with running as (scene, stub):
        ran = await run(stub, ttft_ms=100, itl_ms=10)
        assert (ran.decode, ran.tokens) == ("d0.decode-0", expected(PROMPT, 8))
        counts = num_prefills(scene)
        assert counts["p0"] == 0 and counts["p1"] > 0


async def test_blocks_that_a_pool_may_not_pull_come_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The router of p0 prefills for d0, but p0's worker lets nobody of d0 pull.
    trusting = running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, with_tls=True, workers_trust={"p0": ["global"]})
    async with trusting as (scene, stub):
        ran = await run(stub, ttft_ms=100, itl_ms=10)
        assert (ran.decode, ran.tokens) == ("d0.decode-0", expected(PROMPT, 8))
        counts = num_prefills(scene)
        assert counts["p0"] > 0 and counts["p1"] > 0


async def test_where_no_pool_prefills_the_decode_pool_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS) as (scene, stub):
        for name in ("p0", "p1"):
            router = scene.pools[name].router
            assert router is not None
            await router.end()
        # Whether the global router knows that yet or not.
        first = await run(stub, ttft_ms=100, itl_ms=10)
        await scene.wait_ready("d0.decode-0", "d1.decode-0")
        second = await run(stub, ttft_ms=100, itl_ms=10)
        assert first.tokens == second.tokens == expected(PROMPT, 8)
        assert (second.prefill, second.num_moved_bytes) == ("", 0)


async def test_a_request_goes_on_where_its_decode_pool_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, gated=["d1"]) as (scene, _):
        pool = scene.pools["d1"]
        pool.gates["decode-0"].release(3)
        tokens = list[int]()
        async with QuartetClient(scene.address) as client, asyncio.timeout(TIMEOUT_S):
            async for part in client.generate(
                token_ids=PROMPT, itl_target_s=0.09, sampling=Sampling(max_tokens=20), path="session"
            ):
                if isinstance(part, Delta):
                    tokens += part.token_ids
                    # The first token comes from the prefill.
                    if len(tokens) > 1 and pool.router is not None and not pool.router.task.done():
                        pool.router.task.cancel()
        assert tokens == expected(PROMPT, 20)


@pytest.mark.parametrize("is_placed", [False, True])
async def test_what_was_generated_before_counts_as_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_placed: bool
) -> None:
    by_length = {
        **SETTINGS["decode_pool_selection_strategy"],
        "context_length_resolution": 2,
        "decode_pool_mapping": [[0, 0], [1, 1]],
    }
    settings = {**SETTINGS, "decode_pool_selection_strategy": by_length}
    async with running_pools(tmp_path, monkeypatch, WORKERS, settings) as (scene, _):
        pipeline, answer, tokens = scene.pipeline, Answer(), expected(PROMPT, 68)
        assert pipeline is not None
        asked = GenerateStart(prompt=TokenPrompt(tuple(PROMPT)), sampling=Sampling(max_tokens=68), seed=0)
        given = Resume(request_id="ab" * 16, attempt=1, seed=0, generated_token_ids=tokens[:60], num_text_bytes=0)
        async with asyncio.timeout(TIMEOUT_S):
            if is_placed:
                [placed] = (await pipeline.place(asked, resume=given)).choices
                assert placed.placement is not None and placed.placement.decode.worker_id == "d1.decode-0"
                return
            pipeline.generate(asked, answer, resume=given)
            parts = [part async for part in answer.parts()]
        assert [part.choices[0].decode.worker_id for part in parts if isinstance(part, Accepted)] == ["d1.decode-0"]
        assert [token for part in parts if isinstance(part, Delta) for token in part.token_ids] == tokens[60:]


async def test_a_namespace_that_the_router_does_not_know_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS) as (scene, _):
        async with grpc.aio.insecure_channel(scene.pools["d0"].address) as channel:
            session = SessionReader(Stub(channel))
            await session.start(3, start(), prefill_namespaces=["p0", "nowhere"])
            await session.half_close()
            await session.read_all()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await Stub(channel).Place(pb.PlaceRequest(start=start(), prefill_namespaces=["nowhere"]))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        failure = session.received[3].failure
        assert failure is not None and (failure.reason, failure.field) == ("INVALID_FIELD", "prefill_namespaces")


async def test_only_routers_may_have_prompts_prefilled_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS, with_tls=True) as (scene, _stub):
        assert scene.certificates is not None
        worker = scene.certificates.issue("p0", "worker", "prefill-0")
        async with create_channel(scene.pools["p0"].address, worker) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await Stub(channel).PrefillFor(pb.PrefillForRequest(model="tiny"), timeout=TIMEOUT_S)
        assert failed.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_all_routers_and_workers_put_a_request_into_one_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = SpanList()
    for module in (router_process, worker_process):
        monkeypatch.setattr(module, "open_tracer", lambda *_arguments, **_names: spans.tracer)
    async with running_pools(tmp_path, monkeypatch, WORKERS, SETTINGS) as (scene, stub):
        await run(stub, ttft_ms=100, itl_ms=10)
        async with QuartetClient(scene.address) as client, asyncio.timeout(TIMEOUT_S):
            await client.complete(token_ids=PROMPT, path="direct", ttft_target_s=0.1, sampling=Sampling(max_tokens=8))
    by_trace: dict[int, list[Span]] = defaultdict(list)
    for span in spans.spans:
        by_trace[span.trace_id].append(span)
    for trace in by_trace.values():
        [asked] = (span for span in trace if not span.parent_id)
        [reply] = (span for span in trace if span.name == "reply" and span.parent_id == asked.span_id)
        assert [at for _, at, _ in asked.events] == [reply.end_unix_ns]
    relayed, placed = sorted(
        map(lines_of, by_trace.values()), key=lambda lines: "request>relay hop>request>sign" in lines
    )
    assert relayed == RELAYED
    assert placed == PLACED


PREFILLED = "request>relay hop>request>prefill hop"
COMMON = [
    "request",
    "request>read",
    "request>relay hop",
    "request>relay hop>request",
    "request>relay hop>request>queue",
    "request>relay hop>request>read",
    "request>relay hop>request>reply",
    "request>relay hop>send",
    "request>reply",
    PREFILLED,
    f"{PREFILLED}>prefill for",
    f"{PREFILLED}>prefill for>prefill hop",
    f"{PREFILLED}>prefill for>prefill hop>prefill",
    f"{PREFILLED}>prefill for>prefill hop>prefill>compute",
    f"{PREFILLED}>prefill for>prefill hop>prefill>queue",
    f"{PREFILLED}>prefill for>prefill hop>send",
    f"{PREFILLED}>prefill for>queue",
    f"{PREFILLED}>prefill for>read",
    f"{PREFILLED}>send",
]
DECODED = ("decode", "decode>generate", "decode>pull", "decode>queue", "send")
RELAYED = {*COMMON, "request>relay hop>request>decode hop"} | {
    f"request>relay hop>request>decode hop>{one}" for one in DECODED
}
PLACED = {*COMMON, "request>relay hop>request>sign"} | {
    f"request>relay hop>request>{'take up' if one == 'send' else one}" for one in DECODED
}


def lines_of(trace: list[Span]) -> set[str]:
    """The spans of a trace, each by the names on its way from the root; repeated ones once."""
    known = {span.span_id: span for span in trace}

    def path(span: Span) -> str:
        return f"{path(known[span.parent_id])}>{span.name}" if span.parent_id else span.name

    return {path(span) for span in trace}
