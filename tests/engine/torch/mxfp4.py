"""Makes checkpoints of gpt-oss as published, with experts in MXFP4, and the same model in plain numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.torch.checkpoints import make_checkpoint, make_config

# The sizes of an E2M1 number by its low three bits; the fourth is its sign.
_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_GROUP_SIZE = 32
_BIAS = 127
# As published.
_QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def make_mxfp4_checkpoint(directory: Path) -> tuple[Path, Path]:
    """A tiny gpt-oss with random weights in two folders: as published, and in plain numbers, the rest in bfloat16.

    The published form says no dtype, and scales lie in another file than blocks.
    """
    plain = make_checkpoint(directory / "plain", make_config("gpt_oss"), torch.bfloat16)
    tensors = load_file(plain / "model.safetensors")
    experts = [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]
    blocks, scales = {}, {}
    for name in experts:
        blocks[f"{name}_blocks"], scales[f"{name}_scales"] = quantize(tensors[name].transpose(1, 2))
        weight = dequantize(blocks[f"{name}_blocks"], scales[f"{name}_scales"]).transpose(1, 2)
        tensors[name] = weight.to(torch.bfloat16).contiguous()
        assert torch.equal(tensors[name].double(), weight), "bfloat16 holds every product"
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    rest = {name: tensor for name, tensor in tensors.items() if name not in experts}
    config = json.loads((plain / "config.json").read_text())
    del config["dtype"]
    published = directory / "published"
    _write(published, {**config, "quantization_config": _QUANTIZATION}, {**rest, **blocks}, scales)
    return published, plain


def make_large_mxfp4_checkpoint(directory: Path, **changes: Any) -> tuple[Path, int]:
    """One whose experts are random bytes and all else zeros, in no time; and its size in bytes in bfloat16."""
    config = make_config("gpt_oss", **changes)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in auto.from_config(config).named_parameters()}
    rest, blocks, scales = {}, {}, {}
    for name, shape in shapes.items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            num_experts, num_inputs, num_outputs = shape
            groups = (num_experts, num_outputs, num_inputs // _GROUP_SIZE)
            blocks[f"{name}_blocks"] = torch.randint(256, (*groups, _GROUP_SIZE // 2), dtype=torch.uint8)
            scales[f"{name}_scales"] = torch.full(groups, _BIAS, dtype=torch.uint8)
        else:
            rest[name] = torch.zeros(shape, dtype=torch.bfloat16)
    _write(directory, {**config.to_dict(), "quantization_config": _QUANTIZATION}, {**rest, **blocks}, scales)
    return directory, 2 * sum(shape.numel() for shape in shapes.values())


def quantize(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., n]`` as blocks ``[..., n / 32, 16]`` and scales ``[..., n / 32]``, each to the nearest number."""
    groups = weights.double().unflatten(-1, (-1, _GROUP_SIZE))
    # The largest of a group becomes more than 3, and at most 6.
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / 6))
    scaled = groups / torch.exp2(exponents)[..., None]
    nearest = (scaled.abs()[..., None] - _SIZES).abs().argmin(-1)
    numbers = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return numbers[..., 0::2] + 16 * numbers[..., 1::2], (exponents + _BIAS).to(torch.uint8)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What ``quantize`` made, ``[..., n]`` in float64."""
    numbers = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2).long()
    values = (1 - 2 * (numbers // 8)) * _SIZES[numbers % 8]
    return (values * torch.exp2(scales.double() - _BIAS)[..., None]).flatten(-2)


def _write(directory: Path, config: dict[str, Any], *files: dict[str, torch.Tensor]) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for i, tensors in enumerate(files, 1):
        name = f"model-{i:05}-of-{len(files):05}.safetensors"
        save_file(tensors, directory / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
