"""The runner as the engine's thread sees it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.runner import ModelRunner
from quartet.engine.torch import TorchEngineConfig, create_runner
from quartet.errors import ConfigError, InvalidRequestError
from quartet.kvcache.layout import KvLayout

Checkpoints = Callable[[str], Path]


def test_the_pool_is_memory_that_a_transfer_can_read(checkpoint: Checkpoints) -> None:
    path = checkpoint("qwen3")
    runner = create_runner(
        TorchEngineConfig(model_path=str(path), dtype="bfloat16", num_blocks=6, block_size=8, num_threads=1)
    )
    typed: ModelRunner = runner
    assert typed.layout == KvLayout(
        model_fingerprint=model_fingerprint(path, "bfloat16"),
        dtype="bfloat16",
        num_layers=3,
        num_kv_heads=2,
        head_dim=16,
        block_size=8,
    )
    assert runner.memory is not None
    assert runner.memory.piece_size_bytes == typed.layout.piece_size_bytes == 3 * 2 * 8 * 2 * 16 * 2
    assert runner.memory.num_blocks == typed.num_blocks == 6
    runner._pool.tensor[4] = torch.arange(3 * 2 * 8 * 2 * 16).view(3, 2, 8, 2, 16)
    seen = torch.frombuffer(runner.memory.piece(4), dtype=torch.bfloat16)
    assert torch.equal(seen, torch.arange(3 * 2 * 8 * 2 * 16).bfloat16())
    assert typed.run([]) == []
    fd = runner.memory.fd
    runner.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_device_that_is_not_here_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        create_runner(TorchEngineConfig(model_path=str(checkpoint("llama")), num_blocks=4, device="cuda:99"))
    assert caught.value.field == "device"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("device", "cuda"),
        ("device", "tpu:0"),
        ("num_blocks", 0),
        ("block_size", 0),
        ("max_model_len", 0),
        ("num_threads", 0),
        ("num_embedding_blocks", 0),
        ("cuda_graph_max_batch_size", -1),
    ],
)
def test_impossible_settings_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: must be"):
        TorchEngineConfig(**{"model_path": "model", "num_blocks": 4, field: value})  # type: ignore[arg-type]
