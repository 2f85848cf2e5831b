"""Loading the language model of a LLaVA: all of it, under whichever names, and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from quartet.engine.torch import create_runner
from quartet.engine.torch.decoder import Decoder
from quartet.engine.torch.language_model import find_language_model
from quartet.engine.torch.loader import load_model
from quartet.errors import EngineError, InvalidRequestError
from tests.e2e.fork_server import ForkServer
from tests.engine.torch.checkpoints import (
    PLACEHOLDER_ID,
    SEEING_FAMILIES,
    VOCAB_SIZE,
    make_checkpoint,
    make_config,
    make_seeing_config,
)
from tests.engine.torch.measure_loading import peak_growth_bytes
from tests.engine.torch.test_loader import config_for, edit_json, edit_weights

LLAVA, TIED, NEXT = "llava_clip_llama", "vipllava_llama3_rope", "llava_next_mistral"
ONEVISION = "llava_onevision_qwen2"

Checkpoints = Callable[[str], Path]
Weights = dict[str, torch.Tensor]


def to_new_names(weights: Weights) -> None:
    """Rename what ``save_pretrained`` writes, the names of old, to those of transformers' modules."""
    for name in list(weights):
        if name.startswith("language_model.lm_head."):
            weights[name.removeprefix("language_model.")] = weights.pop(name)
        elif name.startswith("language_model.model."):
            weights[f"model.{name.replace('language_model.model.', 'language_model.')}"] = weights.pop(name)
        else:
            weights[f"model.{name}"] = weights.pop(name)


def whole_model(path: Path) -> Any:
    auto: Any = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(path)


@pytest.mark.parametrize("family", [LLAVA, TIED, NEXT, ONEVISION])
@pytest.mark.parametrize("has_new_names", [False, True])
def test_the_language_model_is_loaded_under_both_kinds_of_names(
    family: str, has_new_names: bool, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoint(family)
    assert "language_model.model.norm.weight" in load_file(path / "model.safetensors")
    if has_new_names:
        path = edit_weights(path, tmp_path / "model", to_new_names)
        assert "model.language_model.norm.weight" in load_file(path / "model.safetensors")
    loaded = load_model(config_for(path))
    assert (loaded.dtype, loaded.vocab_size, loaded.max_model_len) == ("float64", VOCAB_SIZE, 256)
    assert (loaded.placeholder_id, loaded.hidden_size) == (PLACEHOLDER_ID, 64)
    whole = whole_model(path)
    expected = {f"model.{name}": value for name, value in whole.model.language_model.state_dict().items()}
    expected["lm_head.weight"] = whole.lm_head.weight
    actual: Any = loaded.model
    assert actual.state_dict().keys() == expected.keys(), "the tower is left out"
    for name, value in actual.state_dict().items():
        assert torch.equal(value, expected[name]), name
    is_tied = actual.lm_head.weight is actual.model.embed_tokens.weight
    assert is_tied == (whole.lm_head.weight is whole.get_input_embeddings().weight) == (family == TIED)


@pytest.mark.parametrize("has_new_names", [False, True])
def test_a_language_weight_too_few_is_named(has_new_names: bool, checkpoint: Checkpoints, tmp_path: Path) -> None:
    def edit(weights: Weights) -> None:
        del weights["language_model.model.layers.1.mlp.up_proj.weight"]
        if has_new_names:
            to_new_names(weights)

    path = edit_weights(checkpoint(LLAVA), tmp_path / "model", edit)
    with pytest.raises(EngineError, match=r"1 missing keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(config_for(path))


def test_a_head_that_is_not_tied_must_be_there(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = edit_weights(
        checkpoint(LLAVA), tmp_path / "model", lambda weights: weights.pop("language_model.lm_head.weight")
    )
    with pytest.raises(EngineError, match=r"1 missing keys: lm_head\.weight"):
        load_model(config_for(path))


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.1.surprise.weight",
        "model.language_model.surprise",
        "surprise.weight",
        "model.vision_towers.weight",
    ],
)
def test_a_weight_that_belongs_nowhere_is_named(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = edit_weights(checkpoint(LLAVA), tmp_path / "model", lambda weights: weights.update({name: torch.zeros(3)}))
    with pytest.raises(EngineError, match=r"1 unexpected keys: \S*(surprise|vision_towers)"):
        load_model(config_for(path))


def test_a_language_weight_of_another_shape_is_named(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = edit_weights(
        checkpoint(LLAVA),
        tmp_path / "model",
        lambda weights: weights.update({"language_model.model.norm.weight": torch.ones(32)}),
    )
    with pytest.raises(EngineError, match=r"1 mismatched keys: .*model\.norm\.weight"):
        load_model(config_for(path))


def test_the_language_model_loads_without_the_towers_weights(checkpoint: Checkpoints, tmp_path: Path) -> None:
    def edit(weights: Weights) -> None:
        for name in [name for name in weights if name.startswith(("vision_tower", "multi_modal_projector"))]:
            del weights[name]

    path = edit_weights(checkpoint(LLAVA), tmp_path / "model", edit)
    assert load_model(config_for(path)).placeholder_id == PLACEHOLDER_ID


@pytest.mark.parametrize("has_generation_config", [False, True])
@pytest.mark.parametrize("of_whole", [None, 5])
@pytest.mark.parametrize("of_text", [None, 6])
def test_end_of_sequence_ids_are_those_of_generate_on_the_whole(
    has_generation_config: bool, of_whole: int | None, of_text: int | None, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    text = json.loads((checkpoint(LLAVA) / "config.json").read_text())["text_config"]
    path = edit_json(
        checkpoint(LLAVA),
        tmp_path / "model",
        "config.json",
        eos_token_id=of_whole,
        text_config={**text, "eos_token_id": of_text},
    )
    if has_generation_config:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    else:
        (path / "generation_config.json").unlink(missing_ok=True)
    expected = whole_model(path).generation_config.eos_token_id
    ids = [] if expected is None else expected if isinstance(expected, list) else [expected]
    assert load_model(config_for(path)).eos_token_ids == set(ids)


@pytest.mark.parametrize("of_whole", [None, "bfloat16"])
@pytest.mark.parametrize("of_text", [None, "float32"])
def test_the_dtype_is_the_wholes(
    of_whole: str | None, of_text: str | None, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    text = json.loads((checkpoint(LLAVA) / "config.json").read_text())["text_config"]
    path = edit_json(
        checkpoint(LLAVA), tmp_path / "model", "config.json", dtype=of_whole, text_config={**text, "dtype": of_text}
    )
    auto: Any = transformers.AutoModelForImageTextToText
    whole = auto.from_pretrained(path, dtype="auto")
    assert load_model(config_for(path)).dtype == str(whole.dtype).removeprefix("torch.")


def test_the_table_of_left_out_weights_stays_out_of_the_log(
    checkpoint: Checkpoints, capfd: pytest.CaptureFixture[str]
) -> None:
    before = transformers.logging.get_verbosity()
    load_model(config_for(checkpoint(LLAVA)))
    assert transformers.logging.get_verbosity() == before
    said = capfd.readouterr()
    assert "vision_tower" not in said.out + said.err


@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_layers_are_run_by_hand_where_those_of_the_language_model_would_be(
    family: str, checkpoint: Checkpoints
) -> None:
    runner = create_runner(config_for(checkpoint(family), num_embedding_blocks=3))
    assert isinstance(runner._compute, Decoder) == (family != "llava_clip_gemma3")
    assert runner.placeholder_id == PLACEHOLDER_ID
    assert runner.embeddings is not None
    assert runner.embeddings.memory.num_blocks == 3
    layout = runner.embeddings.layout
    assert (layout.dtype, layout.hidden_size, layout.block_size) == ("float64", 64, 32)
    assert layout.model_fingerprint == runner.layout.model_fingerprint
    fd = runner.embeddings.memory.fd
    runner.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_model_of_text_has_no_pool_of_embeddings(checkpoint: Checkpoints) -> None:
    runner = create_runner(config_for(checkpoint("llama")))
    assert (runner.embeddings, runner.placeholder_id) == (None, None)
    runner.close()


def test_a_language_model_whose_head_does_more_than_the_wholes_is_refused(tmp_path: Path) -> None:
    config = make_seeing_config(LLAVA, text_config=make_config("gemma2"))
    path = make_checkpoint(tmp_path / "model", config)
    with pytest.raises(InvalidRequestError, match="Gemma2ForCausalLM inside a LLaVA") as caught:
        create_runner(config_for(path))
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (transformers.Qwen2VLConfig(), "qwen2_vl"),
        (transformers.PaliGemmaConfig(), "paligemma"),
        (transformers.Mistral3Config(), "mistral3"),
        (make_seeing_config(LLAVA, quantization_config={"quant_method": "fp8"}), r"checkpoint \(fp8 of llava\)"),
        (
            make_seeing_config(
                LLAVA, text_config=make_config("gpt_oss", quantization_config={"quant_method": "mxfp4"})
            ),
            r"checkpoint \(mxfp4 of gpt_oss\)",
        ),
        (make_seeing_config(LLAVA, image_token_index=VOCAB_SIZE), f"placeholder {VOCAB_SIZE}"),
        (make_seeing_config(LLAVA, text_config=transformers.T5Config()), "t5, which is not a causal language model"),
    ],
    ids=lambda item: item.model_type if isinstance(item, transformers.PretrainedConfig) else "",
)
def test_other_models_that_see_are_refused_by_name(config: transformers.PretrainedConfig, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as caught:
        find_language_model(config)
    assert caught.value.field == "model"


def test_the_tower_takes_no_memory(checkpoint: Checkpoints, tmp_path: Path, fork_server: ForkServer) -> None:
    tower = transformers.CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=8,
        image_size=16,
        patch_size=4,
    )
    big = make_checkpoint(tmp_path, make_seeing_config(LLAVA, vision_config=tower), torch.bfloat16)
    size_bytes = (big / "model.safetensors").stat().st_size
    assert size_bytes > 90 << 20
    growth = peak_growth_bytes(fork_server, checkpoint("llama"), big, "auto", tmp_path / "log")
    assert growth < size_bytes / 5
