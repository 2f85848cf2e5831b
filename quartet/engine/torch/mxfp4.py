"""Checkpoints of gpt-oss as published, whose experts' weights are in MXFP4.

Such a weight of the model is two tensors in the files: ``X_blocks``, with two E2M1 numbers in a byte, the low four bits
first, and ``X_scales``, with one power of two (E8M0, bias 127) for each 32 numbers. All else is bfloat16. transformers
makes the weights of them, one after the other, in the dtype that the model is loaded in, by operations of PyTorch that
any device has. bfloat16 holds every such product as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from quartet.engine.fingerprint import weight_files
from quartet.engine.torch.support import quantization_method, refusal
from quartet.errors import EngineError

_BLOCKS = "_blocks"
_SCALES = "_scales"
_DTYPE = "U8"
_GROUP_SIZE = 32  # numbers that share a scale
_GROUP_BYTES = 16
_MAX_NAMED_FAULTS = 5


def is_mxfp4(config: PretrainedConfig) -> bool:
    """Whether a checkpoint with this configuration, which ``check_config`` took, holds MXFP4."""
    return quantization_method(config) == "mxfp4"


def check_mxfp4(directory: Path, config: PretrainedConfig) -> None:
    """Check that the files hold each expert's weight of gpt-oss in full; reads their headers only.

    A weight may also be there as it is, which is how ``modules_to_not_convert`` leaves it.

    Raises:
        InvalidRequestError: field ``model``; weights of these sizes are no whole groups.
        EngineError: a file is damaged, or tensors are missing or of another shape or dtype; names the first few.
    """
    expected = dict(_expected_tensors(config))
    try:
        found = _read_headers(directory)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{directory}: weights cannot be loaded: {error}") from error
    faults = []
    for name, tensor in expected.items():
        if _weight_of(name) not in found and found.get(name) != tensor:
            faults.append(f"{name} is {found.get(name, 'missing')}, not {tensor}")
    if faults:
        named = ", ".join(faults[:_MAX_NAMED_FAULTS])
        raise EngineError(f"{directory}: {len(faults)} tensors in MXFP4 cannot be used: {named}")


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def _expected_tensors(config: PretrainedConfig) -> Iterator[tuple[str, _Tensor]]:
    num_experts, hidden, intermediate = config.num_local_experts, config.hidden_size, config.intermediate_size
    for size, name in ((hidden, "hidden_size"), (intermediate, "intermediate_size")):
        if size % _GROUP_SIZE:
            raise refusal(f"MXFP4 of {name} {size}, which is no multiple of {_GROUP_SIZE}")
    # Outputs, then groups of inputs.
    projections = {
        "gate_up_proj": (num_experts, 2 * intermediate, hidden // _GROUP_SIZE),
        "down_proj": (num_experts, hidden, intermediate // _GROUP_SIZE),
    }
    for layer in range(config.num_hidden_layers):
        for projection, shape in projections.items():
            weight = f"model.layers.{layer}.mlp.experts.{projection}"
            yield weight + _BLOCKS, _Tensor(_DTYPE, (*shape, _GROUP_BYTES))
            yield weight + _SCALES, _Tensor(_DTYPE, shape)


def _weight_of(name: str) -> str:
    return name.removesuffix(_BLOCKS).removesuffix(_SCALES)


def _read_headers(directory: Path) -> dict[str, _Tensor]:
    found = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                tensor = opened.get_slice(name)
                found[name] = _Tensor(tensor.get_dtype(), tuple(tensor.get_shape()))
    return found
