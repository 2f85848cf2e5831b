"""Disaggregation on one GPU, on two, and on a GPU and a CPU: Prefill and Decode in processes of their own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from quartet.client import Completion, QuartetClient, Rank, Sampling, TransferWay, WorkerState
from tests import tiny
from tests.e2e.oracle import Oracle, one_oracle
from tests.e2e.process import wait_until
from tests.e2e.stack import REMOTE_PREFILL, Stack, StackConfig
from tests.e2e.up import CONFIGS, Up

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 32
# Around the block size, and prompts of many blocks.
LENGTHS = (1, 31, 32, 33, 64, 300, 1000)
#: Blocks enough for a hand-off to take a moment.
SOME_LENGTHS = (64, 300, 1000)
NUM_TOKENS = 24
#: Pools large enough that one kept for a dead worker shows.
NUM_BLOCKS = 16384
FIXED_POOL = {"engine.num_blocks": NUM_BLOCKS}
#: Twice this share would not fit if both took it of what is free before either has its pool.
SHARED_POOL = {"engine.num_blocks": "null", "engine.free_gpu_memory_fraction": 0.6}
SLACK = 256 << 20
WAIT_S = 90.0
#: From the seed of prompts that are asked while a process is killed to that of those asked when it is back.
AGAIN = 100
DEVICE = "cuda:0"
WAYS = ("cuda_ipc", "staged")


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with one_oracle() as oracle:
        yield oracle


@asynccontextmanager
async def running(
    directory: Path,
    overrides: dict[str, dict[str, object]] | None = None,
    *,
    pool: Mapping[str, object] = FIXED_POOL,
    topology_name: str = "disagg",
    gpus: Mapping[str, int] | None = None,
) -> AsyncIterator[tuple[Up, QuartetClient]]:
    """A topology whose workers are all on the GPU; ``overrides``: other settings, by role.

    ``gpus``: by role, the only one that a worker sees; ``None``: nothing restricts it.
    """
    records = directory / "records"
    records.mkdir()
    settings = {
        "discovery.kind": "file",
        "discovery.file.directory": records,
        "engine.device": DEVICE,
        **pool,
    }
    options = [option for name, value in settings.items() for option in ("--set", f"{name}={value}")]
    topology = yaml.safe_load((CONFIGS / f"{topology_name}.yaml").read_text())
    for worker in topology["workers"]:
        worker["overrides"] = (overrides or {}).get(worker["role"], {})
        if gpus is not None:
            worker["gpus"] = [[gpus[worker["role"]]]]
    file = directory / "topology.yaml"
    file.write_text(yaml.safe_dump(topology))
    async with Up(CONFIGS.parent, str(file), "--router-port", "0", *options, python=Path(sys.executable)) as up:
        await up.wait_ready()
        async with QuartetClient(up.router_address) as client:
            yield up, client


async def complete(client: QuartetClient, prompt: tuple[int, ...]) -> Completion:
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return await client.complete(token_ids=prompt, sampling=sampling, timeout_s=60)


def answers(oracle: Oracle, seed: int, lengths: Sequence[int]) -> None:
    """Have the oracle know what ``check`` will ask it."""
    for length in lengths:
        oracle.generate(prompt_of(length, seed), NUM_TOKENS)


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(f"gpu {seed} {length}").choices(tiny.PLAIN_IDS, k=length))


async def pulled_bytes(client: QuartetClient, way: str, worker_id: str = "decode-0") -> float:
    """What a worker says that it pulled."""
    [address] = [w.record.http_address for w in await client.list_workers() if w.record.worker_id == worker_id]
    url = f"http://{address}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    name = f'quartet_worker_transfer_bytes_total{{way="{way}"}}'
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


async def way_told(client: QuartetClient, seed: int) -> TransferWay | None:
    """By which way an answer says that its blocks came."""
    time = (await complete(client, prompt_of(700, seed))).choices[0].finished.time
    print(f"{time.transfer_bytes} bytes by {time.transfer_way}, {time.transfer_gb_per_s} GB/s")
    return time.transfer_way


async def until_back(client: QuartetClient, epoch: int, worker_id: str = "prefill-0") -> int:
    """Wait for another epoch of a worker than this one, and return it."""
    async with asyncio.timeout(WAIT_S):
        async for workers in client.watch_workers():
            for worker in workers:
                record = worker.record
                is_new = record.worker_id == worker_id and record.epoch != epoch
                if is_new and worker.state is WorkerState.READY:
                    return record.epoch
    raise AssertionError("the router went away")


async def check(
    client: QuartetClient,
    oracle: Oracle,
    seed: int,
    *,
    is_prefilled_apart: bool = True,
    lengths: Sequence[int] = LENGTHS,
) -> list[Completion]:
    """Ask all at once; the answers, which are the oracle's."""
    prompts = [prompt_of(length, seed) for length in lengths]
    completions = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.choices[0].token_ids == oracle.generate(prompt, NUM_TOKENS), f"prompt of {len(prompt)} tokens"
        if is_prefilled_apart:
            assert [placed.prefill for placed in completion.accepted.choices] == [Rank("prefill-0")]
    return completions


async def test_blocks_go_from_prefill_to_decode_on_the_gpu(tmp_path: Path, oracle: Oracle) -> None:
    async with running(tmp_path) as (_up, client):
        workers = await client.list_workers()
        assert {worker.record.worker_id: worker.record.transfer_ways for worker in workers} == {
            "prefill-0": WAYS,
            "decode-0": WAYS,
        }
        await check(client, oracle, seed=1)
        assert await pulled_bytes(client, WAYS[0]) > 0
        await check(client, oracle, seed=1)  # from what is cached, too
        assert await way_told(client, seed=2) is TransferWay.CUDA_IPC


async def test_two_processes_that_take_a_share_of_one_gpu_each_both_fit(tmp_path: Path, oracle: Oracle) -> None:
    async with running(tmp_path, pool=SHARED_POOL) as (up, client):
        assert "decode-0 waits for prefill-0 on the same GPU" in up.log
        await check(client, oracle, seed=1)
        assert await pulled_bytes(client, WAYS[0]) > 0


async def test_blocks_go_through_host_memory_where_the_gpu_can_not_be_reached_directly(
    tmp_path: Path, oracle: Oracle
) -> None:
    """All topologies at a time: it is their processes' start that takes long."""
    cases: list[dict[str, dict[str, object]]] = [
        {"decode": {"engine": {"device": "cpu", "num_blocks": 512}}},
        {"prefill": {"engine": {"device": "cpu", "num_blocks": 512}}},
        {"decode": {"transfer": {"ways": ["shm", "grpc"]}}},
        {"prefill": {"transfer": {"ways": ["grpc"]}}},
    ]

    async def stage(number: int, overrides: dict[str, dict[str, object]]) -> None:
        directory = tmp_path / str(number)
        directory.mkdir()
        try:
            async with running(directory, overrides) as (_up, client):
                await check(client, oracle, seed=20)
                assert await pulled_bytes(client, "staged") > 0
                assert await way_told(client, seed=21) is TransferWay.STAGED
                assert await pulled_bytes(client, "cuda_ipc") == 0
        except Exception as error:
            error.add_note(f"with {overrides}")
            raise

    async with asyncio.TaskGroup() as group:
        for number, overrides in enumerate(cases):
            group.create_task(stage(number, overrides))


async def test_a_killed_prefill_worker_that_is_started_again_costs_no_token_and_no_memory(
    tmp_path: Path, oracle: Oracle
) -> None:
    """By ``quartet up``; ten restarts are below."""
    async with running(tmp_path) as (up, client):
        await check(client, oracle, seed=2)
        free, epoch = free_size_bytes(), await until_back(client, 0)
        asking = asyncio.create_task(check(client, oracle, seed=3, is_prefilled_apart=False))
        await asyncio.sleep(0.02)
        kill(up, "prefill")
        await asking
        await until_back(client, epoch)
        await check(client, oracle, seed=10)
        await until_free(free)


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
#: Each worker sees its own GPU only; or both see both and name their own.
APART: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "gpus": {"gpus": {"prefill": 0, "decode": 1}},
    "device": {"overrides": {"decode": {"engine": {"device": "cuda:1"}}}},
}


@needs_two_gpus
@pytest.mark.parametrize("apart_by", APART)
async def test_blocks_go_from_one_gpu_to_another_and_kills_cost_no_token_and_no_memory_of_either(
    tmp_path: Path, oracle: Oracle, apart_by: str
) -> None:
    unused = [free_size_bytes(device) for device in range(2)]
    async with running(tmp_path, **APART[apart_by]) as (up, client):
        await check(client, oracle, seed=1)
        assert await pulled_bytes(client, WAYS[0]) > 0
        assert await way_told(client, seed=30) is TransferWay.CUDA_IPC
        free = [free_size_bytes(device) for device in range(2)]
        for role, seed, again in (("prefill", 2, 10), ("decode", 3, 20)):
            epoch = await until_back(client, 0, f"{role}-0")
            is_asked = role == "prefill"  # there is no other decode worker that would go on
            asking = asyncio.create_task(check(client, oracle, seed, is_prefilled_apart=False))
            await asyncio.wait({asking}, timeout=0.02 if is_asked else None)
            kill(up, role)
            await asking
            await until_back(client, epoch, f"{role}-0")
            await check(client, oracle, again)
        assert await way_told(client, seed=31) is TransferWay.CUDA_IPC
        for device in range(2):
            await until_free(free[device], device)
    for device in range(2):
        await until_free(unused[device], device)


class Programs:
    """Starts each process by itself, as ``ForkServer`` forks it: a process with CUDA can't be forked."""

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """``python -m ARGUMENTS``; its output is appended to ``log``."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=CONFIGS.parent,
                env=dict(environment),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )


READERS = ("decode-0", "decode-1")


@contextmanager
def two_readers(directory: Path, readers_device: str = DEVICE) -> Iterator[Stack]:
    """A Prefill worker on the first GPU and two Decode workers that pull from it in turn, each at an address for life.

    ``readers_device``: the GPU of the Decode workers.
    """
    records = directory / "records"
    records.mkdir()
    discovery = {"discovery.kind": "file", "discovery.file.directory": str(records)}
    worker = {**discovery, "engine.device": DEVICE, "engine.num_blocks": NUM_BLOCKS, "transfer.hand_off_ttl_s": 5.0}
    router = {**discovery, **REMOTE_PREFILL, "policy.name": "round_robin"}
    roles = {"decode": {"engine.device": readers_device}}
    config = StackConfig(num_decode=len(READERS), worker=worker, roles=roles, routers={"router": router})
    stack = Stack(config, directory, directory / "no-etcd", Programs())  # type: ignore[arg-type]
    try:
        for name in stack.processes:
            stack.spawn(name)
        stack.wait_ready(WAIT_S)
        yield stack
    finally:
        stack.close()


async def kill_while_it_is_asked(stack: Stack, name: str, client: QuartetClient, oracle: Oracle, seed: int) -> None:
    """Kill a process in the middle of answers, another moment for each seed, and start it again at its address.

    Then ask again.
    """
    asking = asyncio.create_task(check(client, oracle, seed, is_prefilled_apart=False, lengths=SOME_LENGTHS))
    await asyncio.sleep(0.01 * (seed % 10))
    await asyncio.to_thread(stack.kill, name)
    stack.spawn(name)
    await asking
    await ask_when_it_is_back(stack, client, oracle, seed)


async def kill_in_the_middle_of_pulls(
    stack: Stack, name: str, client: QuartetClient, oracle: Oracle, seed: int
) -> None:
    """Kill a process when every reader has begun pulls and the source can't end them; start it again at its address.

    The readers are stopped until the source holds all that they will pull, the source from then until the kill. Then
    ask again.
    """
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in SOME_LENGTHS)
    stack.freeze(*READERS)
    asking = asyncio.create_task(check(client, oracle, seed, is_prefilled_apart=False, lengths=SOME_LENGTHS))
    try:
        await until(lambda: stack.load("prefill-0").num_held_blocks >= num_blocks, "the source holds what was computed")
        stack.freeze("prefill-0")
        stack.thaw(*READERS)
        await until(lambda: all(stack.load(reader).num_running for reader in READERS), "all readers pull")
        await asyncio.to_thread(stack.kill, name)
    finally:
        stack.thaw("prefill-0", *READERS)
    stack.spawn(name)
    completions = await asking
    num_attempts = [completion.choices[0].finished.usage.num_attempts for completion in completions]
    assert max(num_attempts) > 1, "no pull was on its way"
    await ask_when_it_is_back(stack, client, oracle, seed)


async def ask_when_it_is_back(stack: Stack, client: QuartetClient, oracle: Oracle, seed: int) -> None:
    """While the process starts, which takes longest, the oracle answers too."""
    await asyncio.gather(
        asyncio.to_thread(stack.wait_ready, WAIT_S),
        asyncio.to_thread(answers, oracle, seed + AGAIN, SOME_LENGTHS),
    )
    await check(client, oracle, seed + AGAIN, lengths=SOME_LENGTHS)


async def test_a_prefill_worker_restarted_ten_times_and_readers_killed_leave_the_gpu_and_the_pools_as_they_were(
    tmp_path: Path, oracle: Oracle
) -> None:
    unused = free_size_bytes()
    with two_readers(tmp_path) as stack:
        async with QuartetClient(stack.router_address) as client:
            await check(client, oracle, seed=1)
            free = free_size_bytes()
            for number in range(10):
                await kill_while_it_is_asked(stack, "prefill-0", client, oracle, seed=100 + number)
            for name in READERS:
                assert stack.metrics(name).value("quartet_worker_transfer_bytes_total", way="cuda_ipc") > 0
            await kill_while_it_is_asked(stack, "decode-0", client, oracle, seed=300)
            await kill_in_the_middle_of_pulls(stack, "decode-1", client, oracle, seed=301)
            await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=WAIT_S)
            await until_free(free)
    await until_free(unused)


@needs_two_gpus
async def test_a_reader_and_its_source_on_another_gpu_killed_in_the_middle_of_pulls_leave_all_as_it_was(
    tmp_path: Path, oracle: Oracle
) -> None:
    unused = [free_size_bytes(device) for device in range(2)]
    with two_readers(tmp_path, "cuda:1") as stack:
        async with QuartetClient(stack.router_address) as client:
            await check(client, oracle, seed=1)  # both readers open the source's pool
            assert await way_told(client, seed=40) is TransferWay.CUDA_IPC
            free = [free_size_bytes(device) for device in range(2)]
            for name, seed in (("decode-0", 400), ("prefill-0", 401)):
                await kill_in_the_middle_of_pulls(stack, name, client, oracle, seed)
                await asyncio.to_thread(stack.wait_blocks_returned, timeout_s=WAIT_S)
            assert await way_told(client, seed=41) is TransferWay.CUDA_IPC
            for device in range(2):
                await until_free(free[device], device)
    for device in range(2):
        await until_free(unused[device], device)


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, WAIT_S, lambda: f"not so: {what}")


def kill(up: Up, role: str) -> None:
    """Kill the workers of a role, which ``quartet up`` starts again."""
    for pid, command in up.processes().items():
        if f"-m services.{role}" in command:
            os.kill(pid, signal.SIGKILL)


async def until_free(size_bytes: int, device: int = 0) -> None:
    """Wait until so much of the GPU's memory is free, or little less."""
    async with asyncio.timeout(30):
        while free_size_bytes(device) < size_bytes - SLACK:  # noqa: ASYNC110  # the driver tells nobody
            await asyncio.sleep(0.1)


def free_size_bytes(device: int = 0) -> int:
    """Of the GPU's memory."""
    return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else 0
