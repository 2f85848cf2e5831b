"""A fleet of mock engines under a trace: real processes, routing and hand-offs, and not a byte of torch."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.traces.format import BLOCK_SIZE, read_trace, write_trace
from cli.traces.generate import SessionConfig, TraceConfig, generate
from quartet.client import QuartetClient, Sampling
from quartet.engine.mock.model import StepTiming
from quartet.errors import RateLimitedError
from tests import tiny
from tests.e2e.up import CONFIGS, QUARTET, Up

pytestmark = pytest.mark.usefixtures("etcd_binary")

NUM_REQUESTS = 24
COMMAND_TIMEOUT_S = 90.0
SESSIONS = SessionConfig(
    num_turns=2, think_time_s=1, message_tokens=300, output_tokens=12, system_tokens=1100, num_system_prompts=1
)


async def bench(up: Up, trace: Path) -> dict[str, object]:
    """Send the trace's requests one after the other; the one load's figures."""
    [point] = (await report_of("bench", up, "--trace", str(trace), "--concurrency", "1"))["points"]
    assert isinstance(point, dict)
    return point


async def report_of(name: str, up: Up, *options: str) -> Any:
    """What a command that asks the router writes as JSON."""
    command = (QUARTET, name, "--router", up.router_address, *options, "--json", "-")
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    async with asyncio.timeout(COMMAND_TIMEOUT_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def test_a_trace_is_answered_in_full_with_its_prefixes_reused_and_no_torch_in_any_process(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    write_trace(generate(TraceConfig(sessions=SESSIONS, max_requests=NUM_REQUESTS)), trace)
    requests = read_trace(trace)
    # Every worker gets its share: kv_aware would send what is the same to one rank.
    policy = ("--set", "router.overrides.policy.name=round_robin")
    model = ("--set", f"model.path={tiny.CHECKPOINT}")
    options = ("--set", "router.port=0", "--set", "engine.mock.speed_up=20", *model, *policy)
    file = tmp_path / "topology.yaml"
    file.write_text((CONFIGS / "mock_fleet.yaml").read_text())
    async with Up(tmp_path, str(file), *options) as up:
        await up.wait_ready()
        point = await bench(up, trace)
        assert point["requests"] == {"sent": NUM_REQUESTS, "finished": NUM_REQUESTS, "failed": 0, "cut_off": 0}
        assert point["prompt_tokens"] == sum(request.num_input_tokens for request in requests)
        assert point["output_tokens"] == sum(request.num_output_tokens for request in requests)
        # Each of the two prefill workers computes the one system prompt once at most.
        shared_ids = frozenset.intersection(*(frozenset(request.hash_ids) for request in requests))
        assert shared_ids
        cached_tokens = point["cached_tokens"]
        assert isinstance(cached_tokens, int)
        assert cached_tokens >= (NUM_REQUESTS - 2) * len(shared_ids) * BLOCK_SIZE
        await check_answers_are_the_same_everywhere(up)
        await check_it_can_be_planned_with_what_it_has_measured(up, trace)
        await check_its_router_takes_over_tenants_of_a_changed_file(up, file)
        assert not any(map(has_torch, workers(up)))
        await up.end(signal.SIGINT)


async def check_answers_are_the_same_everywhere(up: Up) -> None:
    """As many at once as there are decode workers, and more."""
    async with QuartetClient(up.router_address) as client:
        sampling = Sampling(max_tokens=20)
        answers = await asyncio.gather(*(client.complete("The sea", sampling=sampling, seed=7) for _ in range(12)))
    [token_ids] = {answer.choices[0].token_ids for answer in answers}
    assert len(token_ids) == 20
    places = {answer.accepted.choices[0].decode.worker_id for answer in answers}
    assert len(places) > 1


async def check_it_can_be_planned_with_what_it_has_measured(up: Up, trace: Path) -> None:
    options = ("--from-fleet", "--ttft-p95", "1e6", "--max-workers", "2")
    plan = await report_of("plan", up, str(trace), *options)
    assert plan["steps"] == "measured by the running fleet"
    assert (plan["fleet"]["engine"]["num_blocks"], plan["fleet"]["engine"]["block_size"]) == (16384, 32)
    timing, default = plan["fleet"]["engine"]["timing"], StepTiming()
    assert timing["decode_base"] != default.decode_base
    assert timing["prefill_base"] + 1000 * timing["prefill_linear"] > 0
    assert plan["chosen"] == {"num_prefill": 0, "num_decode": 1}
    assert plan["start"] is None, "its topology is not known"
    assert plan["start_otherwise"].endswith("--replicas prefill=0 --replicas decode=1")


async def check_its_router_takes_over_tenants_of_a_changed_file(up: Up, file: Path) -> None:
    limit_tenants(file)
    await up.wait_logged("tenants, identity_tenants and trusted_gateways are as in")
    async with QuartetClient(up.router_address) as client:
        with pytest.raises(RateLimitedError):
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                while True:  # the second, unless a stalled machine lets the minute pass in which one is allowed
                    await client.complete("The sea", sampling=Sampling(max_tokens=1))


def limit_tenants(file: Path) -> None:
    settings = yaml.safe_load(file.read_text())
    settings["router"].setdefault("overrides", {})["tenants"] = {"*": {"requests_per_minute": 1}}
    file.write_text(yaml.safe_dump(settings))


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def workers(up: Up) -> list[int]:
    found = [pid for pid, command in up.processes().items() if "-m services." in command]
    assert len(found) == 6
    return found
