"""The same engine on a CUDA device: the same tokens as on the CPU."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch.nn import functional

from quartet.engine.base import EngineRequest
from quartet.engine.sampling import Sampling
from quartet.engine.torch import TorchEngineConfig, create_runner
from quartet.engine.torch.loader import load_model
from quartet.engine.torch.pool import KvPool
from quartet.engine.torch.sampler import gumbel_noise, noise_key
from quartet.kvcache.layout import KvLayout
from quartet.media.items import MediaFile, MediaKind
from quartet.transfer.base import PoolMemory, TransferWay
from quartet.transfer.cuda import memory as cuda_memory
from quartet.transfer.cuda.memory import DeviceMemory
from tests.engine.fakes import make_request
from tests.engine.torch.checkpoints import FAMILIES, SEEING_FAMILIES, make_config
from tests.engine.torch.driving import Outcome, run_all, torch_engine
from tests.engine.torch.oracle import Oracle
from tests.engine.torch.seeing import Album, SeeingOracle
from tests.engine.torch.seeing_encoder import encoded, encoder_config, running_encoder
from tests.engine.torch.test_oracle import NUM_TOKENS, greedy, ragged_prompts
from tests.engine.torch.test_seeing_oracle import ragged_prompts as prompts_with_pictures
from tests.engine.torch.vision_checkpoints import Reference, image_file, make_picture, make_vision_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Checkpoints = Callable[[str], Path]


def run_on(
    device: str, model_path: Path, requests: Sequence[EngineRequest], dtype: str = "float64", **settings: Any
) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with torch_engine(
            model_path, device=device, dtype=dtype, max_num_batched_tokens=64, **settings
        ) as engine:
            return [outcome.token_ids for outcome in await run_all(engine, requests)]

    return asyncio.run(run())


def test_the_pool_lies_on_the_device(checkpoint: Checkpoints) -> None:
    runner = create_runner(TorchEngineConfig(model_path=str(checkpoint("llama")), num_blocks=4, device="cuda:0"))
    assert isinstance(runner.memory, DeviceMemory)
    assert runner.memory.ways == (TransferWay.CUDA_IPC, TransferWay.SHM, TransferWay.GRPC)
    pool = runner._pool.tensor
    assert (pool.device, pool.data_ptr()) == (torch.device("cuda:0"), runner.memory.address)
    runner.close()


def test_a_pool_beyond_what_32_bits_and_64_gib_reach_is_written_and_read_at_its_end() -> None:
    layout = KvLayout(
        model_fingerprint="f" * 64, dtype="bfloat16", num_layers=36, num_kv_heads=8, head_dim=128, block_size=16
    )
    num_blocks = (66 << 30) // layout.piece_size_bytes
    before, _ = torch.cuda.mem_get_info()
    if before < 70 << 30:
        pytest.skip("needs 70 GiB of free GPU memory")
    pool = KvPool(layout, num_blocks, torch.device("cuda:0"))
    assert pool.tensor.numel() > 1 << 31
    last_row = (num_blocks * layout.num_layers - 1) * 2  # of the last block's last layer, its keys
    slots = torch.tensor([[last_row * layout.block_size + 3], [(last_row + 1) * layout.block_size + 3]], device="cuda")
    keys_values = torch.randn(2, 1, layout.num_kv_heads, layout.head_dim, dtype=torch.bfloat16, device="cuda")
    pool.write(slots, keys_values)
    read = pool.gather(torch.tensor([last_row, last_row + 1], device="cuda"), 1)
    assert torch.equal(read.keys[0, :, 3], keys_values[0, 0])
    assert torch.equal(read.values[0, :, 3], keys_values[1, 0])
    assert not pool.tensor[-2].any()
    del read
    pool.close()
    assert torch.cuda.mem_get_info()[0] > before - (1 << 30)  # all but what PyTorch keeps for its own


def test_the_pool_takes_its_share_of_what_is_free_beside_the_weights(checkpoint: Checkpoints) -> None:
    device = torch.device("cuda:0")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    runner = create_runner(
        TorchEngineConfig(model_path=str(checkpoint("llama")), free_gpu_memory_fraction=0.25, device="cuda:0")
    )
    pool = runner._pool.tensor
    size_bytes = pool.element_size() * pool.nelement()
    assert pool.shape[0] == runner.num_blocks
    assert size_bytes == runner.num_blocks * runner.layout.piece_size_bytes
    # The weights of the tiny model are nothing beside it.
    assert 0.2 * free < size_bytes <= 0.25 * free
    runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_equals_generate(family: str, checkpoint: Checkpoints, oracle: Callable[[str], Oracle]) -> None:
    prompts = ragged_prompts()
    for prompt, token_ids in zip(
        prompts, run_on("cuda:0", checkpoint(family), [greedy(prompt) for prompt in prompts]), strict=True
    ):
        oracle(family).check(prompt, token_ids, NUM_TOKENS)


def check_pictures(oracle: SeeingOracle, model_path: Path, memory_type: type) -> None:
    """That prompts with pictures get the tokens of ``generate``, on the device, from a pool of this type."""
    prompts = prompts_with_pictures(oracle)

    async def run() -> list[Outcome]:
        async with torch_engine(model_path, device="cuda:0", max_num_batched_tokens=30) as engine:
            assert engine.embeddings is not None
            assert isinstance(engine.embeddings.memory, memory_type)
            album = Album(oracle, engine)
            return await run_all(engine, [album.request(prompt, NUM_TOKENS) for prompt in prompts])

    for prompt, outcome in zip(prompts, asyncio.run(run()), strict=True):
        oracle.check(prompt, outcome, NUM_TOKENS)


@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_pictures_in_the_devices_memory_are_seen(
    family: str, checkpoint: Checkpoints, seeing_oracle: Callable[[str], SeeingOracle]
) -> None:
    check_pictures(seeing_oracle(family), checkpoint(family), DeviceMemory)


def test_pictures_in_host_memory_are_seen_from_a_device_whose_driver_pins_none(
    checkpoint: Checkpoints, seeing_oracle: Callable[[str], SeeingOracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_memory, "pinned_kind", lambda _driver: None)
    check_pictures(seeing_oracle("llava_clip_llama"), checkpoint("llava_clip_llama"), PoolMemory)


def test_embeddings_have_their_memory_before_the_pool_takes_its_share(checkpoint: Checkpoints) -> None:
    config = TorchEngineConfig(
        model_path=str(checkpoint("llava_clip_llama")), free_gpu_memory_fraction=0.5, device="cuda:0"
    )
    runner = create_runner(config)
    assert runner.embeddings is not None
    piece_size_bytes = runner.embeddings.layout.piece_size_bytes
    runner.close()
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    # Both shares together are more than there is: the pool's is one of what the embeddings leave.
    num_blocks = int(0.4 * free) // piece_size_bytes
    runner = create_runner(dataclasses.replace(config, free_gpu_memory_fraction=0.9, num_embedding_blocks=num_blocks))
    left = free - num_blocks * piece_size_bytes
    assert 0.8 * left < runner.num_blocks * runner.layout.piece_size_bytes <= 0.9 * left
    runner.close()


@pytest.mark.parametrize("name", ["llava_clip", "llava_next_clip"])
async def test_a_tower_on_the_device_leaves_a_pictures_embeddings_there(name: str, tmp_path: Path) -> None:
    picture = make_picture(200, 150)
    model_path = make_vision_checkpoint(tmp_path, name)
    async with running_encoder(encoder_config(model_path, device="cuda:0")) as encoder:
        assert isinstance(encoder.embeddings.memory, DeviceMemory)
        rows = await encoded(encoder, image_file(picture), range(20, 0, -1))
        assert rows.device == torch.device("cuda:0")
        given = torch.randn(13, rows.shape[1])
        file = MediaFile(MediaKind.EMBEDDINGS, save({"embeddings": given}))
        assert torch.equal((await encoded(encoder, file, [21, 30])).cpu(), given)
    # Not TF32, which would be 1e-3 off.
    torch.testing.assert_close(rows.cpu(), Reference(model_path).features(picture), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_runs(family: str, checkpoint: Checkpoints) -> None:
    prompts = ragged_prompts()
    outputs = run_on("cuda:0", checkpoint(family), [greedy(prompt) for prompt in prompts], dtype="bfloat16")
    assert all(len(token_ids) == NUM_TOKENS for token_ids in outputs)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_experts_are_multiplied_by_grouped_mm_on_the_device_and_as_on_the_cpu(
    dtype: str, tolerance: float, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One product of all experts at a time. Float64 has none, so the exact tokens above are not computed by it.

    Without CUDA graphs, whose replays call nothing here.
    """
    grouped_mm = functional.grouped_mm
    products: list[tuple[torch.Tensor, ...]] = []

    def noted(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor, **options: Any) -> torch.Tensor:
        result = grouped_mm(rows, weights, offs=offs, **options)
        if rows.is_cuda:  # a model is tried without weights first
            products.append((rows.clone(), weights.clone(), offs.clone(), result.clone()))
        return result

    monkeypatch.setattr(functional, "grouped_mm", noted)
    model_path, prompts = checkpoint("qwen3_moe"), ragged_prompts()
    requests = [greedy(prompt) for prompt in prompts]
    ours = run_on("cuda:0", model_path, requests, dtype, cuda_graph_max_batch_size=0)
    num_layers = make_config("qwen3_moe").num_hidden_layers
    assert products
    assert len(products) % (2 * num_layers) == 0, "up and down, in each layer of each step"
    for product in products:
        rows, weights, ends, result = (tensor.cpu() for tensor in product)
        assert result.dtype == getattr(torch, dtype)
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        parts = zip(torch.split(rows.double(), sizes), weights.double(), strict=True)
        expected = torch.cat([part @ weight for part, weight in parts])
        assert float((result - expected).abs().max()) <= tolerance * float(expected.abs().max())
    if dtype == "float32":
        theirs = run_on("cpu", model_path, [greedy(prompt) for prompt in prompts], dtype)
        num_equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
        assert num_equal >= len(prompts) - 1, "two tokens nearly tie nowhere near as often"


@pytest.mark.parametrize("dtype", ["float64", "float32"])  # by PyTorch's operations, and by our kernels
def test_seeded_tokens_are_those_of_the_cpu(dtype: str, checkpoint: Checkpoints) -> None:
    samplings = [
        Sampling(max_tokens=NUM_TOKENS),
        Sampling(top_p=0.9, top_k=50, temperature=1.3, max_tokens=NUM_TOKENS),
        Sampling(min_p=0.05, repetition_penalty=1.2, presence_penalty=0.3, max_tokens=NUM_TOKENS),
        Sampling(logit_bias={3: 2.0}, frequency_penalty=0.3, min_tokens=5, stop_token_ids=(4,), max_tokens=NUM_TOKENS),
    ]

    def requests() -> list[EngineRequest]:
        drawn = [
            make_request(prompt, sampling=samplings[i % len(samplings)]) for i, prompt in enumerate(ragged_prompts())
        ]
        return [
            dataclasses.replace(item, generation=dataclasses.replace(item.generation, seed=i))
            for i, item in enumerate(drawn)
        ]

    model_path = checkpoint("llama")
    assert run_on("cuda:0", model_path, requests(), dtype) == run_on("cpu", model_path, requests(), dtype)


def test_random_weights_are_those_of_the_cpu(checkpoint: Checkpoints) -> None:
    config = TorchEngineConfig(model_path=str(checkpoint("gpt_oss")), num_blocks=4, dtype="bfloat16", random_seed=3)
    on_cpu = load_model(config).model
    on_device = load_model(dataclasses.replace(config, device="cuda:0")).model.state_dict()
    assert all(tensor.device.type == "cuda" for tensor in on_device.values())
    for name, tensor in on_cpu.state_dict().items():
        assert torch.equal(on_device[name].cpu(), tensor), name


def test_noise_is_that_of_the_cpu() -> None:
    keys = torch.tensor([noise_key(seed, 1, 7) for seed in range(8)])
    token_ids = torch.arange(50_000)
    on_device = gumbel_noise(keys.cuda(), token_ids.cuda()).cpu()
    torch.testing.assert_close(on_device, gumbel_noise(keys, token_ids), rtol=1e-12, atol=1e-12)
