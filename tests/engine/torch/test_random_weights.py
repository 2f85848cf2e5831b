"""Weights from a seed: the same wherever they are made, and the model with them says what ``generate`` says."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quartet.engine.torch import TorchEncoderConfig, TorchEngineConfig
from quartet.engine.torch.loader import load_model
from quartet.engine.torch.random_weights import make_random
from quartet.engine.torch.vision_loader import load_vision
from quartet.errors import InvalidRequestError
from tests import tiny
from tests.engine.torch.checkpoints import FAMILIES, make_config
from tests.engine.torch.driving import run_all, torch_engine
from tests.engine.torch.oracle import Oracle
from tests.engine.torch.test_oracle import NUM_TOKENS, greedy, ragged_prompts

_STD = 0.1  # of ``make_config``
_KEPT = ("norm.weight", "_layernorm.weight", "bias")
_TEXT = ("config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json", "processor_config.json")

Shapes = Callable[[str], Path]


@pytest.fixture
def shape(tmp_path: Path) -> Shapes:
    """A directory with a family's config.json and nothing else."""

    def make(family: str) -> Path:
        make_config(family, dtype="float64").save_pretrained(tmp_path / family)
        return tmp_path / family

    return make


@pytest.fixture
def tiny_shape(tmp_path: Path) -> Path:
    """The tiny model without its weights."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    for name in _TEXT:
        shutil.copy(tiny.CHECKPOINT / name, directory)
    return directory


def weights(path: Path, seed: int, dtype: str = "auto") -> dict[str, torch.Tensor]:
    config = TorchEngineConfig(model_path=str(path), num_blocks=4, random_seed=seed, dtype=dtype)
    return load_model(config).model.state_dict()


def first_values(seed: int, name: str, num: int, std: float) -> Iterator[float]:
    """By SplitMix64 on Python's integers."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little")
    mask = 2**64 - 1
    for i in range(1, num + 1):
        bits = (key + i * 0x9E3779B97F4A7C15) & mask
        bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & mask
        yield (((bits ^ bits >> 31) >> 40) / 2**23 - 1) * std * math.sqrt(3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_makes_all_weights(family: str, shape: Shapes) -> None:
    path = shape(family)
    made, again, other = weights(path, 3), weights(path, 3), weights(path, 4)
    assert made.keys() == again.keys()
    for name, tensor in made.items():
        assert torch.equal(tensor, again[name]), name
        if name.endswith(_KEPT) and "router" not in name:
            assert len(tensor.unique()) == 1, name
        else:
            assert not torch.equal(tensor, other[name]), name
            assert float(tensor.abs().max()) <= _STD * math.sqrt(3), name
            if tensor.numel() > 1000:
                assert float(tensor.mean()) == pytest.approx(0, abs=0.2 * _STD), name
                assert float(tensor.std()) == pytest.approx(_STD, rel=0.1), name


# Tied weights and a scaled RoPE, buffers of Gemma, biases, and both kinds of experts.
@pytest.mark.parametrize("family", ["llama3_rope", "gemma3", "qwen2", "qwen3_moe", "gpt_oss"])
async def test_it_says_what_generate_says_with_the_same_weights(family: str, shape: Shapes, tmp_path: Path) -> None:
    path = shape(family)
    prompts = ragged_prompts()[-4:]
    async with torch_engine(path, random_seed=3) as engine:
        outcomes = await run_all(engine, [greedy(prompt) for prompt in prompts])
    load_model(TorchEngineConfig(model_path=str(path), num_blocks=4, random_seed=3)).model.save_pretrained(tmp_path)
    oracle = Oracle(tmp_path)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        oracle.check(prompt, outcome.token_ids, NUM_TOKENS)
    assert len({token_id for outcome in outcomes for token_id in outcome.token_ids}) > 1


async def test_the_tiny_model_needs_no_weights_of_its_own(tiny_shape: Path, tmp_path: Path) -> None:
    prompts = [[0, 300, 301, 302], list(range(400, 440))]
    async with torch_engine(tiny_shape, random_seed=0, dtype="float64") as engine:
        assert engine.capabilities.placeholder_id == 7
        outcomes = await run_all(engine, [greedy(prompt) for prompt in prompts])
    loaded = load_model(TorchEngineConfig(model_path=str(tiny_shape), num_blocks=4, random_seed=0, dtype="float64"))
    assert loaded.eos_token_ids == {tiny.EOS_ID}
    loaded.model.save_pretrained(tmp_path / "drawn")
    oracle = Oracle(tmp_path / "drawn")
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        oracle.check(prompt, outcome.token_ids, NUM_TOKENS)


def test_the_values_are_splitmix64s_whatever_the_dtype(shape: Shapes) -> None:
    path, name = shape("llama"), "model.layers.1.mlp.up_proj.weight"
    expected = torch.tensor([*first_values(7, name, 9, _STD)], dtype=torch.float64)
    in_float32 = weights(path, 7, "float32")[name]
    torch.testing.assert_close(in_float32.view(-1)[:9].double(), expected, rtol=1e-6, atol=0)
    for dtype in ("bfloat16", "float64"):
        assert torch.equal(weights(path, 7, dtype)[name], in_float32.to(getattr(torch, dtype)))


def test_a_large_tensor_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> torch.Tensor:
        model = make_random(lambda: torch.nn.Linear(100, 70), 5, 0.02, torch.device("cpu"))  # type: ignore[arg-type,return-value]
        return model.weight.detach()

    whole = draw()
    monkeypatch.setattr("quartet.engine.torch.random_weights._NUM_ON_CPU", 64)
    assert torch.equal(draw(), whole)
    assert len(whole.unique()) > 0.99 * whole.numel()


def test_a_vision_tower_is_drawn_as_well(tiny_shape: Path) -> None:
    first, again = (
        load_vision(TorchEncoderConfig(model_path=str(tiny_shape), random_seed=5)).model.state_dict() for _ in range(2)
    )
    assert first["multi_modal_projector.linear_1.weight"].dtype == torch.bfloat16
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert tensor.isfinite().all(), name


def test_a_config_without_a_dtype_needs_one(tmp_path: Path) -> None:
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(InvalidRequestError, match="does not say the dtype") as caught:
        weights(tmp_path, 0)
    assert caught.value.field == "dtype"
    assert weights(tmp_path, 0, "float32")


def test_without_a_seed_weights_are_missed(shape: Shapes) -> None:
    with pytest.raises(InvalidRequestError, match=r"holds no \.safetensors files") as caught:
        load_model(TorchEngineConfig(model_path=str(shape("llama")), num_blocks=4))
    assert caught.value.field == "model"
