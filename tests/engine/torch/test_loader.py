"""Loading: refusals, damaged checkpoints, and no second copy of the weights."""

from __future__ import annotations

import json
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
from tests.engine.torch.checkpoints import VOCAB_SIZE, make_checkpoint, make_config
from tests.engine.torch.measure_loading import peak_growth_bytes

_MIB = 1 << 20

Checkpoints = Callable[[str], Path]


def config_for(path: Path, **changes: object) -> TorchEngineConfig:
    return TorchEngineConfig(**{"model_path": str(path), "num_blocks": 4, **changes})  # type: ignore[arg-type]


def edit_weights(source: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def edit_json(source: Path, target: Path, name: str, **changes: object) -> Path:
    shutil.copytree(source, target)
    file = target / name
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **changes}))
    return target


def test_a_checkpoint_keeps_its_dtype_unless_configured_otherwise(checkpoint: Checkpoints) -> None:
    loaded = load_model(config_for(checkpoint("llama")))
    assert (loaded.dtype, loaded.vocab_size, loaded.max_model_len) == ("float64", VOCAB_SIZE, 256)
    assert loaded.eos_token_ids == frozenset()
    assert load_model(config_for(checkpoint("llama"), dtype="bfloat16", max_model_len=99)).dtype == "bfloat16"


def test_end_of_sequence_ids_are_those_of_generate(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = edit_json(checkpoint("llama"), tmp_path / "many", "generation_config.json", eos_token_id=[5, 7, 100_000, -1])
    assert load_model(config_for(path)).eos_token_ids == {5, 7}
    path = edit_json(checkpoint("llama"), tmp_path / "one", "config.json", eos_token_id=9)
    (path / "generation_config.json").unlink()
    assert load_model(config_for(path)).eos_token_ids == {9}


def test_a_tensor_too_few_is_named(checkpoint: Checkpoints, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = edit_weights(checkpoint("llama"), tmp_path / "model", lambda tensors: tensors.pop(name))
    with pytest.raises(EngineError, match=rf"1 missing keys: {name}"):
        load_model(config_for(path))


def test_a_tensor_too_many_is_named(checkpoint: Checkpoints, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.surprise.weight"] = torch.zeros(3)

    path = edit_weights(checkpoint("llama"), tmp_path / "model", add)
    with pytest.raises(EngineError, match=r"1 unexpected keys: model\.layers\.1\.surprise\.weight"):
        load_model(config_for(path))


def test_a_tensor_of_another_shape_is_an_error(checkpoint: Checkpoints, tmp_path: Path) -> None:
    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(32)

    path = edit_weights(checkpoint("llama"), tmp_path / "model", shrink)
    with pytest.raises(EngineError):
        load_model(config_for(path))


def test_a_cut_off_file_is_an_error(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(10_000)
    with pytest.raises(EngineError):
        load_model(config_for(path))


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InvalidRequestError) as caught:
            load_model(config_for(path))
        assert caught.value.field == "model"


def test_code_from_the_checkpoint_is_never_run(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = edit_json(
        checkpoint("llama"),
        tmp_path / "model",
        "config.json",
        model_type="surprise",
        auto_map={"AutoConfig": "surprise.Surprise", "AutoModelForCausalLM": "surprise.Model"},
    )
    (path / "surprise.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(InvalidRequestError) as caught:
        load_model(config_for(path))
    assert caught.value.field == "model"


def test_a_sequence_longer_than_the_models_is_refused(checkpoint: Checkpoints) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        load_model(config_for(checkpoint("llama"), max_model_len=257))
    assert caught.value.field == "max_model_len"


def test_several_files_and_renamed_experts_load_like_one(checkpoint: Checkpoints, tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path / "sharded", make_config("qwen3_moe"), max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert any(".experts.0." in name for file in sharded.glob("*.safetensors") for name in load_file(file))
    one, many = (load_model(config_for(path)).model for path in (checkpoint("qwen3_moe"), sharded))
    for (name, expected), actual in zip(one.state_dict().items(), many.state_dict().values(), strict=True):
        assert torch.equal(expected, actual), name


def test_loading_makes_no_second_copy_of_the_weights(
    checkpoint: Checkpoints, tmp_path: Path, fork_server: ForkServer
) -> None:
    """Peak resident memory, of which the mapped file is one part: once as it is, and once more where converted.

    ``max_growth`` is in sizes of the bfloat16 file; float32 makes two of it beside the file, and a second copy four.
    """
    config = make_config(
        "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=7, vocab_size=4096, head_dim=256
    )
    big = make_checkpoint(tmp_path, config, torch.bfloat16)
    size_bytes = (big / "model.safetensors").stat().st_size
    assert size_bytes > 190 * _MIB
    for dtype, max_growth in (("auto", 1.5), ("float32", 3.5)):
        growth = peak_growth_bytes(fork_server, checkpoint("llama"), big, dtype, tmp_path / dtype) / size_bytes
        print(f"{dtype}: peak growth {growth:.2f} of {size_bytes // _MIB} MiB")
        assert growth < max_growth, dtype
