"""Traces of a fleet: what every path spends until its first token has a name, and attempts are in one trace."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from quartet.client import (
    Accepted,
    ChatMessage,
    ChoiceFinished,
    Delta,
    GenerateFields,
    QuartetClient,
    Sampling,
    read_media,
)
from quartet.client.request import RequestPath
from services.topology.launch import free_port
from tests.e2e.conftest import StartStack
from tests.e2e.fork_server import ForkServer
from tests.e2e.process import wait_until
from tests.e2e.stack import LOCAL_PREFILL, REMOTE_PREFILL, Stack, StackConfig
from tests.e2e.test_multimodal import PICTURE
from tests.e2e.up import CONFIGS, START_TIMEOUT_S, Up
from tests.otlp_receiver import OtlpReceiver, ReceivedTrace

pytestmark = pytest.mark.usefixtures("etcd_binary")

PROMPT = "The moon is bright. " * 12
SHORT = Sampling(max_tokens=6, ignore_eos=True)
ROUTERS = ("router", "router-local")
PATHS = tuple(RequestPath)
PARENT_ID = "b7ad" * 4
# Of an answer that is disturbed: by a model that computes, and by an engine that waits.
NUM_COMPUTED_TOKENS, NUM_WAITED_TOKENS = 120, 300
# Of configs/global.yaml: which pools get it.
TO_FAST: GenerateFields = {"ttft_target_s": 0.1, "itl_target_s": 0.01}
TO_SLOW: GenerateFields = {"ttft_target_s": 0.9, "itl_target_s": 0.04}
WAIT_S = 60.0
# Of the time to a first token.
MAX_UNCOVERED_SHARE = 0.01
ASKED = [f"{name} {path}" for name in ROUTERS for path in (*PATHS, "media")]
LEAVES = frozenset(
    "read resume tokenize media queue sign send reply pull compute generate encode pause".split(),
) | {"take up"}


@dataclass(frozen=True)
class Fleet:
    """What a fleet did and said, now that it has ended.

    Attributes:
        traces: by their ids, which requests without a client's trace share with them.
        asked: by what was asked, the id of its trace.
        logs: lines by process.
    """

    traces: Mapping[str, ReceivedTrace]
    asked: Mapping[str, str]
    logs: Mapping[str, list[Mapping[str, object]]]

    def trace(self, name: str) -> ReceivedTrace:
        return self.traces[self.asked[name]]


@pytest.fixture(scope="module")
def fleet(start_stack: StartStack) -> Fleet:
    """Each path was taken once, at a router that prefills remotely and at one that does so where it decodes."""
    with OtlpReceiver() as receiver:
        traced = {"tracing.enabled": True, "tracing.endpoint": receiver.endpoint, "log.json": True}
        port = free_port()
        routers = {"router": {**REMOTE_PREFILL, **traced, "http.port": port}, "router-local": LOCAL_PREFILL | traced}
        config = StackConfig(
            num_encode=1, num_decode=2, worker=traced, routers=routers, environment={"OTEL_BSP_SCHEDULE_DELAY": "50"}
        )
        stack = start_stack(config)
        asked = asyncio.run(ask_all(stack, f"http://127.0.0.1:{port}"))
        # What a killed worker has not sent is lost.
        num_decoded = sum(not name.endswith("00") for name in asked)
        wait_until(
            lambda: sum(span.name == "decode" for span in receiver.spans) >= num_decoded,
            WAIT_S,
            lambda: f"the spans of {num_decoded} decodes come",
        )
        asked["migration"] = asyncio.run(migrate(stack))
        ending = [process for process in stack.processes.values() if process.is_running]
        for process in ending:
            process.signal(signal.SIGTERM)
        for process in ending:
            process.wait(WAIT_S)
        logs = {name: lines_of(process.log) for name, process in stack.processes.items()}
        return Fleet(receiver.traces(), asked, logs)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Fleet:
    """As ``fleet``, of pools behind a global router: prompts are prefilled in one, and decoded in another."""
    with OtlpReceiver() as receiver:
        return asyncio.run(ask_pools(tmp_path_factory.mktemp("pools"), fork_server, receiver))


async def ask_pools(directory: Path, fork_server: ForkServer, receiver: OtlpReceiver) -> Fleet:
    arguments = (str(CONFIGS / "global.yaml"), "--router-port", "0", "--otel", receiver.endpoint)
    variables = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    async with Up(directory, *arguments, variables=variables, python=fork_server.python) as up:
        await up.wait_ready()
        asked: dict[str, str] = {}
        async with QuartetClient(up.router_address) as client, asyncio.timeout(START_TIMEOUT_S):
            for path in PATHS:
                completion = await client.complete(PROMPT, path=path, sampling=SHORT, **TO_FAST)
                asked[f"pools {path}"] = completion.accepted.request_id
            asked["pools move"] = await move(up, client)
        await up.end(signal.SIGINT)
    return Fleet(receiver.traces(), asked, {})


async def move(up: Up, client: QuartetClient) -> str:
    """The pool of a request is killed once its answer has begun."""
    request_id, is_killed = "", False
    async for part in client.generate(PROMPT, sampling=long(NUM_WAITED_TOKENS), **TO_SLOW):
        match part:
            case Accepted(request_id=request_id):
                pass
            case Delta(token_offset=offset) if offset and not is_killed:
                is_killed = True
                up.kill("router-decode-slow", "decode-1")
            case ChoiceFinished(usage=usage):
                assert usage.num_output_tokens == NUM_WAITED_TOKENS
    return request_id


def long(num_tokens: int) -> Sampling:
    return Sampling(max_tokens=num_tokens, ignore_eos=True)


def lines_of(log: Path) -> list[Mapping[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


async def ask_all(stack: Stack, url: str) -> dict[str, str]:
    asked: dict[str, str] = {}
    for name in ROUTERS:
        async with QuartetClient(stack.processes[name].grpc_address) as client:
            for path in PATHS:
                completion = await client.complete(PROMPT, path=path, sampling=SHORT)
                asked[f"{name} {path}"] = completion.accepted.request_id
            message = ChatMessage("user", (read_media(PICTURE), "Describe the picture."))
            completion = await client.complete(messages=[message], sampling=SHORT)
            asked[f"{name} media"] = completion.accepted.request_id
    for flags in ("01", "00"):
        for path in PATHS:
            asked[f"{path} {flags}"] = await ask_by_client(stack, path, flags)
        asked[f"http {flags}"] = await ask_by_http(url, flags)
    return asked


def trace_id_of(number: int) -> str:
    return f"{number:032x}"


async def ask_by_client(stack: Stack, path: RequestPath, flags: str) -> str:
    trace_id = trace_id_of(100 + 10 * PATHS.index(path) + int(flags))
    async with QuartetClient(stack.router_address) as client:
        await client.complete(PROMPT, path=path, sampling=SHORT, traceparent=f"00-{trace_id}-{PARENT_ID}-{flags}")
    return trace_id


async def ask_by_http(url: str, flags: str) -> str:
    trace_id = trace_id_of(200 + int(flags))
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "stream": True}
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-{flags}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200
        await response.read()
    return trace_id


async def migrate(stack: Stack) -> str:
    """The decode worker of a request is killed once its answer has begun."""
    request_id = worker = ""
    async with QuartetClient(stack.processes["router-local"].grpc_address) as client:
        async for part in client.generate(PROMPT, sampling=long(NUM_COMPUTED_TOKENS)):
            match part:
                case Accepted(request_id=request_id, choices=[placement]):
                    worker = placement.decode.worker_id
                case Delta() if worker:
                    stack.kill(worker)
                    worker = ""
                case ChoiceFinished(usage=usage):
                    assert (usage.num_output_tokens, usage.num_attempts) == (NUM_COMPUTED_TOKENS, 2)
    return request_id


@pytest.mark.parametrize("name", [*ASKED, "session 01", "http 01", "migration"])
def test_leaf_spans_cover_the_time_to_the_first_token(fleet: Fleet, name: str) -> None:
    trace = fleet.trace(name)
    assert trace.uncovered_share() <= MAX_UNCOVERED_SHARE, trace.show()
    # The hop is that of a worker which was killed before it sent its spans.
    known = LEAVES | {"decode hop"} if name == "migration" else LEAVES
    assert {leaf.name for leaf in trace.leaves} <= known, trace.show()


@pytest.mark.parametrize("name", [*ASKED, "migration"])
def test_each_span_lies_below_the_request(fleet: Fleet, name: str) -> None:
    trace = fleet.trace(name)
    ids = {span.span_id for span in trace.spans}
    assert [span.name for span in trace.spans if span.parent_id not in ids] == ["request"], trace.show()
    assert len(ids) == len(trace.spans)
    request = trace.one("request")
    assert request.attributes["gen_ai.response.id"] == fleet.asked[name]
    if name in ("router generate", "router-local session"):
        assert request.attributes["gen_ai.usage.output_tokens"] == SHORT.max_tokens
        assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]


@pytest.mark.parametrize("name", [*PATHS, "http"])
def test_the_clients_trace_context_names_the_parent_and_says_whether_there_are_spans(fleet: Fleet, name: str) -> None:
    assert fleet.trace(f"{name} 01").one("request").parent_id == PARENT_ID
    assert fleet.asked[f"{name} 00"] not in fleet.traces


def test_a_remote_prefill_says_what_was_moved_and_where(fleet: Fleet) -> None:
    trace = fleet.trace("router generate")
    [queue] = [span for span in trace.named("queue") if span.service == "quartet-router"]
    assert queue.attributes["quartet.prefill_worker"] == "prefill-0"
    assert queue.attributes["quartet.cost"] >= 0
    assert {span.service: span.name for span in trace.spans if span.name in ("prefill", "decode")} == {
        "quartet-prefill": "prefill",
        "quartet-decode": "decode",
    }
    pull = trace.one("pull").attributes
    assert (pull["quartet.source_worker"], pull["quartet.transfer_way"]) == ("prefill-0", "shm")
    assert pull["quartet.transfer_bytes"] > 0


def test_attempts_are_in_one_trace(fleet: Fleet) -> None:
    first, second = fleet.trace("migration").named("decode hop")
    assert [hop.attributes["quartet.attempt"] for hop in (first, second)] == [0, 1]
    assert first.is_error and not second.is_error
    assert first.attributes["quartet.worker_id"] != second.attributes["quartet.worker_id"]
    assert fleet.trace("migration").one("decode").parent_id == second.span_id


@pytest.mark.parametrize("name", [*(f"pools {path}" for path in PATHS), "pools move"])
def test_leaf_spans_cover_it_behind_a_global_router(pools: Fleet, name: str) -> None:
    trace = pools.trace(name)
    assert trace.uncovered_share() <= MAX_UNCOVERED_SHARE, trace.show()
    # The relay is that of a router which was killed before it sent its spans.
    known = LEAVES | {"relay hop"} if name == "pools move" else LEAVES
    assert {leaf.name for leaf in trace.leaves} <= known, trace.show()


def test_attempts_at_two_pools_are_in_one_trace(pools: Fleet) -> None:
    trace = pools.trace("pools move")
    first, second = trace.named("relay hop")
    assert [hop.attributes["quartet.namespace"] for hop in (first, second)] == ["decode-slow", "decode-fast"]
    assert first.attributes["quartet.attempt"] < second.attributes["quartet.attempt"]
    assert first.is_error and not second.is_error
    [asked, continued] = trace.named("request")
    assert (asked.parent_id, first.parent_id, continued.parent_id) == ("", asked.span_id, second.span_id)
    # The first token came from the first pool.
    assert first.begin < asked.events["first token"] < first.end and "first token" not in continued.events


@pytest.mark.parametrize("path", PATHS)
def test_each_router_and_worker_of_the_pools_has_its_span(pools: Fleet, path: str) -> None:
    trace = pools.trace(f"pools {path}")
    ids = {span.span_id for span in trace.spans}
    assert [span.name for span in trace.spans if span.parent_id not in ids] == ["request"], trace.show()
    assert len(trace.named("request")) == 2
    prefill, decode = trace.one("prefill"), trace.one("decode")
    assert trace.one("prefill for").begin < prefill.begin < decode.begin
    num_tokens = decode.attributes["gen_ai.usage.output_tokens"]
    assert num_tokens == SHORT.max_tokens - 1, "the first token is the prefill worker's"
    if path != "direct":
        assert trace.one("decode hop").attributes["gen_ai.usage.output_tokens"] == num_tokens


def test_the_line_of_a_request_names_its_span(fleet: Fleet) -> None:
    trace = fleet.trace("router generate")
    for process, name in (("router", "request"), ("prefill-0", "prefill")):
        [line] = [line for line in fleet.logs[process] if line.get("trace_id") == fleet.asked["router generate"]]
        assert line["message"] == "request finished"
        assert line["span_id"] == trace.one(name).span_id
