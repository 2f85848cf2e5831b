"""The topologies that come along, started with ``quartet up`` as a person does it, but forked.

Other tests start each process with a Python of its own: ``test_terminal`` of disagg, ``test_mock_fleet`` of mock_fleet.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from quartet.client import ChatMessage, Delta, QuartetClient, Sampling
from quartet.errors import ServingError
from tests import tiny
from tests.e2e import placed
from tests.e2e.fork_server import ForkServer
from tests.e2e.grpcurl import parse_messages
from tests.e2e.oracle import Oracle, one_oracle
from tests.e2e.up import CONFIGS, Up
from tests.etcd_server import EtcdServer
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.usefixtures("etcd_binary")

#: Of topologies for text; tests/e2e/test_multimodal.py has most of the others, and the rest are below.
WORKER_IDS = {
    "agg": {"decode-0"},
    "agg_router": {"decode-0", "decode-1"},
    "disagg": {"prefill-0", "decode-0"},
    "disagg_router": {"prefill-0", "prefill-1", "decode-0", "decode-1"},
    "gpt_oss_disagg": {"prefill-0", "decode-0"},
    "mock_fleet": {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "decode-3"},
}
#: What the commands of these processes hold.
PARTS = {"prefill-0": "-m services.prefill", "router": "-m router", "etcd": "--data-dir="}
FREE_PORT = ("--set", "router.port=0")
#: Of tests that need no more: a start takes the memory of all blocks, the most of what it costs.
FEW_BLOCKS = ("--set", "engine.num_blocks=160")
ENDLESS = Sampling(ignore_eos=True, max_tokens=3000)
NUM_TOKENS = 32  # asked for by the lines to paste
NUM_PASTES = 3  # at most
MIN_SHARE = 0.9
#: Of tokens alone where every process waits for a CPU; an answer that is kept until its end has 1 / NUM_TOKENS.
MIN_SHARE_OVERLOADED = 0.2
#: They differ from others by their workers alone: what is printed for them is what is printed for those.
LIKE_OTHERS = ("agg_router", "disagg_router", "gpt_oss_disagg")
NUM_GREEDY_TOKENS = 12
PROMPTS = [tuple(random.Random(seed).choices(tiny.PLAIN_IDS, k=40 + 25 * seed)) for seed in range(4)]
ALL_GONE_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory that has what a checkout has of models, and nothing else."""
    made = tmp_path_factory.mktemp("up")
    (made / "models").symlink_to(CONFIGS.parent / "models", target_is_directory=True)
    return made


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with one_oracle() as oracle:
        yield oracle


def config(name: str) -> str:
    return str(CONFIGS / f"{name}.yaml")


def modules(up: Up) -> list[str]:
    """Of its services."""
    found = (re.search(r" -m (router|services\.\w+)", command) for command in up.processes().values())
    return sorted(match[1] for match in found if match)


def one(up: Up, part: str) -> int:
    """The one process of ``up`` with ``part`` in its command."""
    [pid] = [pid for pid, command in up.processes().items() if part in command]
    return pid


def is_own_etcd(command: str) -> bool:
    return "--data-dir=" in command


async def begin_endless(client: QuartetClient, held: list[object]) -> None:
    """Start an answer that does not end by itself, and return once it streams; ``held`` keeps it alive."""
    stream = client.generate("The river", sampling=ENDLESS)
    async for event in stream:
        if isinstance(event, Delta):
            break
    held.append(stream)


async def check_it_serves(up: Up, name: str, grpcurl: Path | None, *, is_mock: bool) -> None:
    """Paste every line that was printed."""
    generated = await up.paste("quartet generate ")
    assert generated.code == 0, generated.err
    assert generated.out.strip()
    workers = await up.paste("quartet workers")
    rows = {line.split("│")[1].strip(): line for line in workers.out.splitlines() if line.startswith("│")}
    assert rows.keys() == WORKER_IDS[name]
    assert all(" ready " in row for row in rows.values())
    await asyncio.to_thread(check_it_places, up.router_address)
    if not is_mock:
        await check_it_answers(up.router_address)
    if grpcurl is not None:
        await check_tokens_come_one_by_one(up)


async def check_it_answers(router_address: str) -> None:
    """The model that comes along knows some arithmetic."""
    async with QuartetClient(router_address) as client:
        sampling, question = Sampling(temperature=0.0), ChatMessage("user", "What is 17 plus 25?")
        assert (await client.complete(messages=[question], model=tiny.NAME, sampling=sampling)).text == "42"


def check_it_places(router_address: str) -> None:
    """It needs a signing key, which ``quartet up`` drew."""
    with grpc.insecure_channel(router_address) as router:
        choice, expected = placed.place(router), placed.generate(router)
    with grpc.insecure_channel(choice.stream.address) as worker:
        assert [*choice.token_ids, *placed.decode(worker, placed.signed_start(choice.stream)).token_ids] == expected


async def check_tokens_come_one_by_one(up: Up) -> None:
    """Tokens that wait come together where the machine stalls: not each time, then, unless it always does."""
    shares, stalled_shares = [], []
    for _ in range(NUM_PASTES):
        stopwatch = Stopwatch()
        shares.append(await share_of_tokens_alone(up))
        stalled_shares.append(stopwatch.stalled_share)
        if shares[-1] >= MIN_SHARE:
            return
    is_overloaded = min(stalled_shares) > 0.5
    assert max(shares) >= (MIN_SHARE_OVERLOADED if is_overloaded else MIN_SHARE), (shares, stalled_shares)


async def share_of_tokens_alone(up: Up) -> float:
    """Paste the line with grpcurl; deltas for each token that came. 1.0 is one by one."""
    streamed = await up.paste("grpcurl ")
    assert streamed.code == 0, streamed.err
    messages = parse_messages(streamed.out)
    deltas, finished = [message["delta"] for message in messages if "delta" in message], messages[-1]["finished"]
    # The last may bring text alone: that of a character whose bytes never came.
    nums_tokens = [len(delta["token_ids"]) for delta in deltas if "token_ids" in delta]
    num_tokens = sum(nums_tokens)
    assert num_tokens == finished["usage"]["num_output_tokens"]
    # A drawn story may be shorter.
    assert num_tokens == NUM_TOKENS or finished["reason"] == "FINISH_REASON_STOP_ID"
    return len(nums_tokens) / max(num_tokens, 1)


async def check_greedy_ids(up: Up, oracle: Oracle) -> None:
    """All at once, and each again when its prefix is cached."""
    sampling = Sampling(temperature=0.0, max_tokens=NUM_GREEDY_TOKENS, ignore_eos=True)
    expected = [oracle.generate(prompt, NUM_GREEDY_TOKENS) for prompt in PROMPTS]
    async with QuartetClient(up.router_address) as client:
        for _ in range(2):
            asked = (client.complete(token_ids=prompt, sampling=sampling, timeout_s=120) for prompt in PROMPTS)
            answers = await asyncio.gather(*asked)
            assert [answer.choices[0].token_ids for answer in answers] == expected


@pytest.mark.parametrize("name", sorted(WORKER_IDS))
async def test_a_topology_serves_what_it_prints_and_ends_whole(
    name: str, directory: Path, grpcurl_if_any: Path | None, oracle: Oracle, fork_server: ForkServer
) -> None:
    is_mock = name == "mock_fleet"
    options = (*FREE_PORT, *FEW_BLOCKS) if name in LIKE_OTHERS else FREE_PORT
    async with Up(directory, config(name), *options, python=fork_server.python) as up:
        await up.wait_ready()
        expected = sorted(["router", *(f"services.{worker_id.partition('-')[0]}" for worker_id in WORKER_IDS[name])])
        assert modules(up) == expected
        assert sum(map(is_own_etcd, up.processes().values())) == 1
        if name not in LIKE_OTHERS:
            await check_it_serves(up, name, grpcurl_if_any, is_mock=is_mock)
        if not is_mock:
            await check_greedy_ids(up, oracle)
        assert await up.end(signal.SIGINT) < ALL_GONE_WITHIN_S
        assert "stacktrace" not in up.log
    assert list((directory / ".run").iterdir()) == []


async def test_an_etcd_that_runs_already_is_used_and_left_alone_and_answers_do_not_hold_up_the_end(
    directory: Path, etcd: EtcdServer, grpcurl_if_any: Path | None, fork_server: ForkServer
) -> None:
    # The mock's steps only wait: eight answers that go on until a drain's end took four seconds of CPU with a model.
    options = ("--engine", "mock", *FREE_PORT)
    variables = {"ETCD_ENDPOINTS": etcd.endpoint}
    async with Up(directory, config("disagg"), *options, variables=variables, python=fork_server.python) as up:
        await up.wait_ready()
        assert not any(map(is_own_etcd, up.processes().values()))
        await check_it_serves(up, "disagg", grpcurl_if_any, is_mock=True)
        async with QuartetClient(up.router_address) as client:
            running = [asyncio.create_task(client.complete("The sea", sampling=ENDLESS)) for _ in range(8)]
            await begin_endless(client, [])
            assert await up.end(signal.SIGTERM) < ALL_GONE_WITHIN_S
            for answer in running:
                with pytest.raises(ServingError):
                    await answer
    assert etcd.revision() > 1


async def test_ctrl_c_ends_what_streams_and_a_second_one_at_once(directory: Path, fork_server: ForkServer) -> None:
    held: list[object] = []
    async with Up(directory, config("disagg"), "--engine", "mock", *FREE_PORT, python=fork_server.python) as up:
        await up.wait_ready()
        async with QuartetClient(up.router_address) as client:
            await begin_endless(client, held)
            stopwatch = Stopwatch()
            up.send(signal.SIGINT)
            await up.wait_logged("stopping")
            up.send(signal.SIGINT)
            await up.exit_code()
            # Sooner than the drain's end.
            assert stopwatch.seconds < 2.5
            assert up.processes() == {}


async def test_a_process_that_dies_is_started_again_and_a_dead_up_takes_all_along(
    directory: Path, fork_server: ForkServer
) -> None:
    async with Up(directory, config("disagg"), *FREE_PORT, *FEW_BLOCKS, python=fork_server.python) as up:
        await up.wait_ready()
        before = up.processes()
        killed = {name: one(up, part) for name, part in PARTS.items()}
        for pid in killed.values():
            os.kill(pid, signal.SIGKILL)
        for name in killed:
            await up.wait_logged(f"{name} was killed by SIGKILL")
            await up.wait_logged(f"starting {name} again in 1 s")
        await up.wait_logged("prefill-0 serves again")
        await up.wait_logged("router serves again")
        # Commands are the same: ports, data, names.
        assert {one(up, part) for part in PARTS.values()}.isdisjoint(killed.values())
        assert sorted(up.processes().values()) == sorted(before.values())
        await check_it_answers(up.router_address)

        descriptors = [os.pidfd_open(pid) for pid in up.processes()]
        up.send(signal.SIGKILL)
        await up.exit_code()
        stopwatch = Stopwatch()
        await asyncio.gather(*(readable(descriptor) for descriptor in descriptors))
        assert stopwatch.seconds < ALL_GONE_WITHIN_S
        assert up.processes() == {}


async def test_ctrl_c_ends_it_while_one_waits_to_be_started_again(directory: Path, fork_server: ForkServer) -> None:
    async with Up(directory, config("agg"), "--engine", "mock", *FREE_PORT, python=fork_server.python) as up:
        await up.wait_ready()
        os.kill(one(up, "services.decode"), signal.SIGKILL)
        await up.wait_logged("starting decode-0 again in 1 s")
        assert await up.end(signal.SIGINT) < ALL_GONE_WITHIN_S


async def test_with_fail_fast_a_process_that_dies_ends_all_and_is_named(
    directory: Path, fork_server: ForkServer
) -> None:
    options = ("--engine", "mock", "--fail-fast", *FREE_PORT)
    async with Up(directory, config("agg"), *options, python=fork_server.python) as up:
        await up.wait_ready()
        os.kill(one(up, "services.decode"), signal.SIGKILL)
        assert await up.exit_code() == 1
        assert up.processes() == {}
    after = up.log.partition("quartet: decode-0 was killed by SIGKILL\n")[2]
    assert "decode decode-0 serves on" in after, up.log


async def test_a_topology_for_gpus_runs_on_a_laptop_with_another_engine_and_model(
    directory: Path, fork_server: ForkServer
) -> None:
    options = ("--engine", "torch", "--model", "models/tiny", *FREE_PORT, *FEW_BLOCKS)
    async with Up(directory, config("trtllm/disagg"), *options, python=fork_server.python) as up:
        await up.wait_ready()
        assert "workers[0].gpus: left out" in up.log
        await check_it_answers(up.router_address)
        assert await up.end(signal.SIGTERM) < ALL_GONE_WITHIN_S


async def test_a_process_that_dies_at_the_start_ends_it_all_and_says_why(
    directory: Path, free_port: Callable[[], int], fork_server: ForkServer
) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        async with Up(directory, config("agg"), "--router-port", str(port), python=fork_server.python) as up:
            assert await up.exit_code() == 1
            assert up.processes() == {}
    assert "quartet: router ended with exit code 1" in up.log
    assert f"cannot listen on 127.0.0.1:{port}" in up.log.partition("quartet: router ended")[2]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.path=/no/such/model", "there is no folder /no/such/model"),
        ("engine.num_blocs=3", "engine.num_blocs: unknown; did you mean num_blocks"),
        ("router.overrides.polizy=x", "router.overrides.polizy: unknown; did you mean policy"),
        ("router.port=-1", "router.port: must be in"),
    ],
)
async def test_an_impossible_topology_is_reported_before_anything_runs(
    directory: Path, assignment: str, message: str, fork_server: ForkServer
) -> None:
    async with Up(directory, config("agg"), "--set", assignment, python=fork_server.python) as up:
        assert await up.exit_code() == 1
    assert message in up.log
    assert "starting decode" not in up.log


async def readable(descriptor: int) -> None:
    """Wait until a process that a pidfd stands for has ended."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)
