"""A worker with the mock engine: what it imports, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quartet.config import build
from quartet.engine.base import RequestKind
from quartet.engine.step_engine import ALL_SAMPLING_FIELDS
from quartet.errors import ConfigError
from services.workers.config import WorkerConfig
from services.workers.parts import create_engine
from tests import tiny
from tests.engine.fakes import FakePuller

# A whole answer of an engine, in a process that has imported all that a worker process does.
PROGRAM = """
import asyncio, sys
import services.decode.__main__, services.prefill.__main__
from pathlib import Path
from quartet.config import build
from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.engine.sampling import Sampling
from services.workers.config import WorkerConfig
from services.workers.parts import create_engine

async def answer():
    settings = {"model_path": sys.argv[1], "engine": {"kind": "mock", "mock": {"speed_up": 100}}}
    engine = create_engine(build(WorkerConfig, settings), RequestKind.DECODE, None)
    await engine.start()
    generation = Generation(prompt_token_ids=range(300, 340), sampling=Sampling(max_tokens=5))
    engine.submit(EngineRequest(id=1, kind=RequestKind.DECODE, generation=generation))
    async for output in engine.outputs():
        if output.finished:
            break
    await engine.close()
    return output.finished[0].num_output_tokens

print(asyncio.run(answer()))
print(*sorted({"torch", "transformers", "safetensors"} & set(sys.modules)))
"""


def worker_config(model_path: Path, kind: str, **engine: object) -> WorkerConfig:
    return build(WorkerConfig, {"model_path": str(model_path), "engine": {"kind": kind, **engine}})


def test_a_worker_with_it_answers_and_imports_no_torch() -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny.CHECKPOINT)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    assert ended.stdout.split() == ["5"]


async def test_it_offers_all_that_the_torch_engine_does_but_log_probabilities() -> None:
    config = worker_config(tiny.CHECKPOINT, "mock", num_blocks=8, max_model_len=100)
    engine = create_engine(config, RequestKind.PREFILL, FakePuller())
    try:
        await engine.start()
        capabilities = engine.capabilities
        assert capabilities.kinds == {RequestKind.PREFILL}
        assert capabilities.sampling_fields == ALL_SAMPLING_FIELDS - {"logprobs", "num_prompt_logprobs"}
        assert (capabilities.num_blocks, capabilities.block_size, capabilities.max_model_len) == (8, 32, 100)
    finally:
        await engine.close()


@pytest.mark.parametrize("kind", ["mock", "torch"])
def test_a_setting_out_of_range_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"block_size: must be at least 1"):
        create_engine(worker_config(tmp_path, kind, block_size=0), RequestKind.DECODE, FakePuller())
