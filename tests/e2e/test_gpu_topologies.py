"""The files of ``configs/gpu`` as ``quartet up`` starts them, with random weights in a small shape."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.random_model import RandomModel
from quartet.client import ChatMessage, Completion, QuartetClient, Sampling, TransferWay
from services.topology.launch import find_etcd
from tests import tiny
from tests.e2e.test_gpu_hand_off import WAIT_S, WAYS, free_size_bytes, until_free
from tests.e2e.up import CONFIGS, Up

pytestmark = pytest.mark.gpu

#: Heads and blocks of KV like those of Qwen3-8B, whose number in a whole GPU is bounded then; the rest is small.
MODEL = RandomModel(
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=8,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=tiny.VOCAB_SIZE,
    max_model_len=8192,
    dtype="bfloat16",
)
#: By file: its workers.
WORKER_IDS = {
    "agg": ("decode-0",),
    "disagg": ("decode-0", "prefill-0"),
    "disagg_2p2d": ("decode-0", "decode-1", "prefill-0", "prefill-1"),
}
NUM_TOKENS = 32
#: So many prompts at once that more than one worker prefills: of few, a Decode worker that is idle computes each.
NUM_PROMPTS, NUM_PROMPT_TOKENS = 32, 4000
MAX_NUM_TURNS = 10


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small-qwen3")
    MODEL.write(directory)
    shutil.copyfile(tiny.CHECKPOINT / "chat_template.jinja", directory / "chat_template.jinja")
    return directory


def discovery_of(directory: Path) -> list[str]:
    """Settings by which workers find each other where there is no etcd, or no client of it."""
    if find_etcd() is not None and importlib.util.find_spec("aetcd") is not None:
        return []
    return ["--set", "discovery.kind=file", "--set", f"discovery.file.directory={directory}"]


async def ask_at_once(client: QuartetClient, turn: int) -> list[Completion]:
    """Prompts that have no prefix in common."""
    sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    draw = random.Random(f"topologies {turn}")
    prompts = [tuple(draw.choices(tiny.PLAIN_IDS, k=NUM_PROMPT_TOKENS)) for _ in range(NUM_PROMPTS)]
    return await asyncio.gather(
        *(client.complete(token_ids=prompt, sampling=sampling, timeout_s=WAIT_S) for prompt in prompts)
    )


def pulled_at(completions: Sequence[Completion]) -> set[str]:
    """Workers that pulled blocks for one of these, all by ``cuda_ipc``."""
    found = set()
    for completion in completions:
        [placed], [choice] = completion.accepted.choices, completion.choices
        assert len(choice.token_ids) == NUM_TOKENS
        if placed.prefill is not None:
            assert choice.finished.time.transfer_way is TransferWay.CUDA_IPC
            found.add(placed.decode.worker_id)
    return found


async def until_pulled(client: QuartetClient) -> set[str]:
    """Ask until blocks have been pulled, and wait until those workers have reported it; their ids."""
    for turn in range(MAX_NUM_TURNS):
        if pulled := pulled_at(await ask_at_once(client, turn)):
            break
    else:
        pytest.fail("every prompt was computed where it was decoded")
    async with asyncio.timeout(WAIT_S):
        async for workers in client.watch_workers():
            if pulled <= {worker.record.worker_id for worker in workers if worker.load and worker.load.transfers}:
                break
    return pulled


async def shown_workers(router_address: str) -> dict[str, list[str]]:
    """What ``quartet workers`` shows: cells by worker id."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.e2e.quartet_with", sys.executable, "workers", "--router", router_address),
        cwd=CONFIGS.parent,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    rows = [line.split("│")[1:-1] for line in output.decode().splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells] for cells in rows}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                torch.cuda.device_count() < len(worker_ids), reason=f"needs a GPU for each of {len(worker_ids)} workers"
            ),
        )
        for name, worker_ids in WORKER_IDS.items()
    ],
)
async def test_a_file_starts_and_answers_and_blocks_go_from_gpu_to_gpu(
    name: str, model_path: Path, tmp_path: Path
) -> None:
    unused = [free_size_bytes(device) for device in range(len(WORKER_IDS[name]))]
    file = CONFIGS / "gpu" / f"{name}.yaml"
    options = ("--model", str(model_path), "--set", "engine.load_format=random", "--router-port", "0")
    found_here = {"PATH": os.environ["PATH"]}  # etcd, and the compiler that Triton needs
    async with Up(
        CONFIGS.parent,
        str(file),
        *options,
        *discovery_of(tmp_path),
        variables=found_here,
        python=Path(sys.executable),
    ) as up:
        await up.wait_ready()
        async with QuartetClient(up.router_address) as client:
            sampling = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            question = ChatMessage("user", "What is 17 plus 25?")
            answer = await client.complete(messages=[question], sampling=sampling, timeout_s=WAIT_S)
            assert len(answer.choices[0].token_ids) == NUM_TOKENS
            pulled = await until_pulled(client) if len(WORKER_IDS[name]) > 1 else set()
        shown = await shown_workers(up.router_address)
    assert sorted(shown) == sorted(WORKER_IDS[name])
    for worker_id, cells in shown.items():
        print(cells)
        assert "ready" in cells
        assert ", ".join(WAYS) in cells
        assert any(re.fullmatch(r"cuda_ipc [\d.,]+ GB/s", cell) for cell in cells) == (worker_id in pulled)
    for device, size_bytes in enumerate(unused):
        await until_free(size_bytes, device)
