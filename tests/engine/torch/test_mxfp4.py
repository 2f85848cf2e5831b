"""gpt-oss as published: experts in MXFP4 become the weights that they stand for, and damaged ones are named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quartet.engine.torch import TorchEngineConfig
from quartet.engine.torch.loader import load_model
from quartet.errors import EngineError, InvalidRequestError
from tests.e2e.fork_server import ForkServer
from tests.engine.torch.driving import run_all, torch_engine
from tests.engine.torch.measure_loading import peak_growth_bytes
from tests.engine.torch.mxfp4 import dequantize, make_large_mxfp4_checkpoint, make_mxfp4_checkpoint, quantize
from tests.engine.torch.oracle import Oracle
from tests.engine.torch.test_oracle import NUM_TOKENS, greedy, ragged_prompts

_EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model as published, and in plain numbers."""
    return make_mxfp4_checkpoint(tmp_path_factory.mktemp("gpt_oss"))


def config_for(path: Path, dtype: str = "auto") -> TorchEngineConfig:
    return TorchEngineConfig(model_path=str(path), num_blocks=4, dtype=dtype)


def test_numbers_are_written_as_the_specification_says() -> None:
    """By hand: E2M1 from the low bits up, and a scale of 2 to the power of -3."""
    numbers = [0.5, -6.0, 1.0, 1.5, -2.0, 3.0, 4.0, -0.5] + 24 * [0.0]
    blocks, scales = quantize(torch.tensor(numbers) / 8)
    assert blocks[0, :5].tolist() == [0xF1, 0x32, 0x5C, 0x96, 0x00]
    assert scales.tolist() == [127 - 3]
    assert dequantize(blocks, scales).tolist() == [number / 8 for number in numbers]


@pytest.mark.parametrize("dtype", ["auto", "float32", "float64"])
def test_experts_become_the_weights_that_they_stand_for(dtype: str, forms: tuple[Path, Path]) -> None:
    published, plain = (load_model(config_for(path, dtype)) for path in forms)
    assert published.dtype == plain.dtype == ("bfloat16" if dtype == "auto" else dtype)
    weights = plain.model.state_dict()
    assert published.model.state_dict().keys() == weights.keys()
    for name, weight in published.model.state_dict().items():
        assert weight.dtype == weights[name].dtype and torch.equal(weight, weights[name]), name


async def test_tokens_are_those_of_generate_on_the_dequantized_weights(forms: tuple[Path, Path]) -> None:
    published, plain = forms
    oracle, prompts = Oracle(plain), ragged_prompts()
    async with torch_engine(published, dtype="float32", max_num_batched_tokens=40) as engine:
        outcomes = await run_all(engine, [greedy(prompt) for prompt in prompts])
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.token_ids == list(oracle.generate(prompt, NUM_TOKENS).token_ids)


def test_dequantizing_makes_no_second_copy_of_the_weights(
    forms: tuple[Path, Path], tmp_path: Path, fork_server: ForkServer
) -> None:
    """At the peak there are the weights, the mapped files of a quarter of their size, and what one weight takes."""
    big, size_bytes = make_large_mxfp4_checkpoint(
        tmp_path / "big",
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=24,
        layer_types=["full_attention"] * 24,
    )
    growth = peak_growth_bytes(fork_server, forms[0], big, "auto", tmp_path / "log") / size_bytes
    print(f"peak growth {growth:.2f} of {size_bytes >> 20} MiB")
    assert growth < 1.9


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("down_proj_scales", None, "missing, not U8 [4, 64, 3]"),
        ("gate_up_proj_blocks", None, "missing, not U8 [4, 192, 2, 16]"),
        ("down_proj_blocks", lambda tensor: tensor[:, :, :2].clone(), "U8 [4, 64, 2, 16], not U8 [4, 64, 3, 16]"),
        ("gate_up_proj_scales", torch.Tensor.float, "F32 [4, 192, 2], not U8 [4, 192, 2]"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    name: str,
    damage: Callable[[torch.Tensor], torch.Tensor] | None,
    complaint: str,
    forms: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    path = Path(shutil.copytree(forms[0], tmp_path / "model"))
    name = f"{_EXPERTS}.{name}"
    [file] = [file for file in path.glob("*.safetensors") if name in load_file(file)]
    tensors = load_file(file)
    tensor = tensors.pop(name)
    save_file(tensors if damage is None else {**tensors, name: damage(tensor)}, file, {"format": "pt"})
    with pytest.raises(EngineError, match=re.escape(f"1 tensors in MXFP4 cannot be used: {name} is {complaint}")):
        load_model(config_for(path))


def test_a_cut_off_file_is_an_error(forms: tuple[Path, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(forms[0], tmp_path / "model"))
    with (path / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(EngineError, match="weights cannot be loaded"):
        load_model(config_for(path))


def test_an_expert_that_was_left_as_it_is_is_loaded_so(forms: tuple[Path, Path], tmp_path: Path) -> None:
    published, plain = forms
    path = Path(shutil.copytree(published, tmp_path / "model"))
    name = f"{_EXPERTS}.down_proj"
    for i, part in ((1, "blocks"), (2, "scales")):
        file = path / f"model-0000{i}-of-00002.safetensors"
        tensors = load_file(file)
        del tensors[f"{name}_{part}"]
        save_file(tensors, file, {"format": "pt"})
    weights = load_file(plain / "model.safetensors")
    save_file({name: weights[name]}, path / "rest.safetensors", {"format": "pt"})
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = "rest.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load_model(config_for(path)).model.get_parameter(name), weights[name])


def test_sizes_that_are_no_whole_groups_are_refused(forms: tuple[Path, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(forms[0], tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(
        InvalidRequestError, match="MXFP4 of intermediate_size 40, which is no multiple of 32"
    ) as caught:
        load_model(config_for(path))
    assert caught.value.field == "model"
