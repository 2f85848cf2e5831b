"""How many blocks a pool gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quartet.engine.torch import TorchEngineConfig, create_runner
from quartet.engine.torch import runner as runner_module
from quartet.engine.torch.pool import KvPool, num_pool_blocks
from quartet.engine.torch.sampler import Sampler
from quartet.errors import ConfigError, InvalidRequestError
from quartet.kvcache.layout import KvLayout

LAYOUT = KvLayout(model_fingerprint="model", dtype="bfloat16", num_layers=2, num_kv_heads=4, head_dim=64, block_size=32)


def config(**settings: object) -> TorchEngineConfig:
    return TorchEngineConfig(**{"model_path": "model", "device": "cuda:0", **settings})  # type: ignore[arg-type]


def never() -> int:
    raise AssertionError("the pool's size is given")


@pytest.mark.parametrize(("fraction", "num_blocks"), [(0.5, 50), (0.999, 99), (0.0101, 1)])
def test_the_share_of_what_is_free_is_filled_with_whole_blocks(fraction: float, num_blocks: int) -> None:
    free = 100 * LAYOUT.piece_size_bytes
    assert num_pool_blocks(config(free_gpu_memory_fraction=fraction), LAYOUT, lambda: free) == num_blocks


def test_what_graphs_take_is_no_part_of_what_is_shared() -> None:
    size = LAYOUT.piece_size_bytes
    share = config(free_gpu_memory_fraction=0.5)
    assert num_pool_blocks(share, LAYOUT, lambda: 100 * size, reserved_size_bytes=20 * size) == 40
    with pytest.raises(InvalidRequestError) as caught:
        num_pool_blocks(share, LAYOUT, lambda: 5 << 20, reserved_size_bytes=7 << 20)
    assert "0.5 of the 5 MiB that are free on cuda:0, but for 7 MiB that CUDA graphs and sampling take" in str(
        caught.value
    )
    assert "engine.max_batch_size" in str(caught.value)


def test_what_sampling_takes_is_no_part_of_what_is_shared(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = create_runner(TorchEngineConfig(model_path=str(checkpoint("llama")), num_blocks=1))
    reserved: list[int] = []

    def note(_config: TorchEngineConfig, _layout: KvLayout, *, reserved_size_bytes: int) -> int:
        reserved.append(reserved_size_bytes)
        return 2

    monkeypatch.setattr(runner_module, "num_pool_blocks", note)
    monkeypatch.setattr(runner, "_sampler", SimpleNamespace(size_bytes=lambda num_rows: 100 * num_rows))
    share = config(free_gpu_memory_fraction=0.5, max_num_seqs=7)
    runner._pool = runner._resize(share, runner._pool, 1000)
    assert (reserved, runner._pool.num_blocks) == ([1700], 2)
    runner.close()


def test_what_all_graphs_take_is_no_part_of_what_is_shared(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernels:
        """Computes nothing; graphs of decode steps take 1,000 bytes."""

        repeated_logits = None

        def graph_bounds(self, *_: object) -> SimpleNamespace:
            return SimpleNamespace(max_batch_size=16)

        def graphs_size_bytes(self, _bounds: object) -> int:
            return 1000

        def over(self, pool: KvPool) -> Kernels:
            self.pool = pool
            return self

        def capture(self, _bounds: object) -> None:
            pass

    class DrawsByGraphs(Sampler):
        def graphs_size_bytes(self, logits: torch.Tensor, num_rows: int, max_num_seqs: int) -> int:
            assert (num_rows, logits.dtype) == (16, torch.float64)
            return 10 * max_num_seqs

    runner = create_runner(TorchEngineConfig(model_path=str(checkpoint("llama")), num_blocks=1, dtype="float64"))
    reserved: list[int] = []

    def note(_config: TorchEngineConfig, _layout: KvLayout, *, reserved_size_bytes: int) -> int:
        reserved.append(reserved_size_bytes)
        return 2

    monkeypatch.setattr(runner_module, "num_pool_blocks", note)
    monkeypatch.setattr(runner, "_try_kernels", lambda *_: Kernels())
    monkeypatch.setattr(runner, "_sampler", DrawsByGraphs())
    share = config(free_gpu_memory_fraction=0.5, max_num_seqs=7)
    forward: Any = runner._choose_forward(share, None, runner._pool, torch.zeros(3, 5, dtype=torch.float64))  # type: ignore[arg-type]
    runner._pool = forward.pool
    assert (reserved, runner._pool.num_blocks) == ([1070], 2)
    runner.close()


def test_a_share_that_holds_no_block_is_refused_by_name() -> None:
    free = LAYOUT.piece_size_bytes
    with pytest.raises(InvalidRequestError, match="hold no block") as caught:
        num_pool_blocks(config(free_gpu_memory_fraction=0.9), LAYOUT, lambda: free)
    assert caught.value.field == "free_gpu_memory_fraction"


def test_a_number_is_taken_as_it_is() -> None:
    assert num_pool_blocks(config(num_blocks=7), LAYOUT, never) == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "num_blocks: must be at least 1"),
        ({"num_blocks": 4, "free_gpu_memory_fraction": 0.5}, "num_blocks: free_gpu_memory_fraction says it"),
        ({"free_gpu_memory_fraction": 1.0}, r"free_gpu_memory_fraction: must be in \(0, 1\)"),
        ({"free_gpu_memory_fraction": 0.5, "device": "cpu"}, "free_gpu_memory_fraction: the device cpu"),
    ],
)
def test_a_pool_size_that_is_missing_doubled_or_out_of_range_is_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        config(**settings)


def test_a_model_that_takes_media_can_be_configured_to_take_none(checkpoint: Callable[[str], Path]) -> None:
    model_path = str(checkpoint("llava_clip_llama"))
    takes = create_runner(TorchEngineConfig(model_path=model_path, num_blocks=4, num_embedding_blocks=4))
    takes_none = create_runner(TorchEngineConfig(model_path=model_path, num_blocks=4, takes_media=False))
    try:
        assert takes.embeddings is not None
        assert takes.placeholder_id is not None
        assert takes_none.embeddings is None
        assert takes_none.placeholder_id is None
        assert takes.layout == takes_none.layout, "blocks of text may still be exchanged"
    finally:
        takes.close()
        takes_none.close()
