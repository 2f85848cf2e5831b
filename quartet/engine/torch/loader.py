"""Loads a Hugging Face checkpoint: checked on the meta device first, then its tensors straight into place.

``from_pretrained`` of transformers 5 builds the model on ``meta`` and materialises tensor by tensor from the mapped
files, renaming and fusing keys (experts) as the architecture wants. In the checkpoint's own dtype, on the CPU, weights
*are* the mapped file; in another dtype only the converted tensors are new memory. Measured on 212 MB in float32: 2 MB
of own memory as it is, 105 MB in bfloat16, no second copy at any time. Of a LLaVA, only the tensors of its language
model are read. Experts in MXFP4 are dequantized one weight at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config

from quartet.engine.fingerprint import weight_files
from quartet.engine.torch.attention import PAGED_ATTENTION
from quartet.engine.torch.config import TorchEngineConfig, TorchModelConfig
from quartet.engine.torch.language_model import LanguageModel, find_language_model
from quartet.engine.torch.mxfp4 import check_mxfp4, is_mxfp4
from quartet.engine.torch.random_weights import make_random
from quartet.engine.torch.support import AttentionShape, check_config, probe_attention
from quartet.errors import EngineError, InvalidRequestError

_LOG = logging.getLogger(__name__)
_MAX_NAMED_KEYS = 5
#: Of random weights whose configuration does not say it: transformers' own default.
_DEFAULT_STD = 0.02


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, and what the engine must know of it.

    Attributes:
        dtype: of weights and KV cache, by its PyTorch name.
        eos_token_ids: tokens that end an output.
        max_model_len: tokens of prompt and output together.
        hidden_size: elements of a token's embedding.
        placeholder_id: the token that stands for media in prompts; ``None``: it takes text only.
    """

    model: PreTrainedModel
    shape: AttentionShape
    dtype: str
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    hidden_size: int
    placeholder_id: int | None


def load_model(config: TorchEngineConfig) -> LoadedModel:
    """Load the checkpoint that ``config`` names onto its device. Runs no code from the checkpoint, downloads nothing.

    Raises:
        InvalidRequestError: field ``model``: this engine can't run it; ``max_model_len``: the model allows less.
        EngineError: files are missing or damaged, or their tensors are not the model's.
    """
    started_at = time.monotonic()
    found = find_language_model(read_model_config(config))
    check_config(found.config)
    shape = probe_attention(found.config)
    max_model_len = _max_model_len(config, found.config)
    model = _load_language_model(config, found)
    model.train(False)
    model.to(torch.device(config.device))  # type: ignore[arg-type]  # its decorator hides the parameters
    _LOG.info("loaded %s in %.1f s", config.model_path, time.monotonic() - started_at)
    return LoadedModel(
        model=model,
        shape=shape,
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=_eos_token_ids(model, found.config.vocab_size),
        vocab_size=found.config.vocab_size,
        max_model_len=max_model_len,
        hidden_size=found.config.hidden_size,
        placeholder_id=found.placeholder_id,
    )


def read_model_config(model: TorchModelConfig) -> PretrainedConfig:
    """The configuration of a checkpoint. Raises ``InvalidRequestError``, field ``model``: it can't be used."""
    directory = Path(model.model_path)
    if not (directory / "config.json").is_file():
        raise InvalidRequestError(f"{directory} holds no config.json", field="model")
    if model.random_seed is None and not weight_files(directory):
        raise InvalidRequestError(f"{directory} holds no .safetensors files beside its config.json", field="model")
    try:
        auto: Any = AutoConfig  # whose methods are not typed
        config: PretrainedConfig = auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise InvalidRequestError(f"{directory}: config.json cannot be used: {error}", field="model") from error
    return config


def check_device(device: str) -> None:
    """Raise ``InvalidRequestError``, field ``device``, if this machine does not have it."""
    if device != "cpu" and torch.device(device).index not in range(torch.cuda.device_count()):
        raise InvalidRequestError(f"there is no {device} here", field="device")


def load_weights(
    from_pretrained: Callable[..., tuple[PreTrainedModel, Mapping[str, Any]]],
    config: TorchModelConfig,
    model_config: PretrainedConfig,
    leaves_out: Callable[[str], bool] = lambda _key: False,
    **options: Any,
) -> PreTrainedModel:
    """The model of ``model_config`` with its weights; weights that ``leaves_out`` names may be left over.

    Raises:
        EngineError: files are damaged, or weights are missing, left over or of another size; names the first few.
    """
    # Logs of servers are not read on a terminal.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, report = from_pretrained(
            config.model_path,
            config=model_config,
            dtype=config.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report names them, and they are refused below
            use_safetensors=True,
            local_files_only=True,
            **options,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise EngineError(f"{config.model_path}: weights cannot be loaded: {error}") from error
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if keys := sorted(key for key in map(str, report.get(fault, ())) if not leaves_out(key)):
            named = ", ".join(keys[:_MAX_NAMED_KEYS])
            raise EngineError(f"{config.model_path}: {len(keys)} {fault.replace('_', ' ')}: {named}")
    return model


def random_weights(
    from_config: Callable[..., PreTrainedModel],
    config: TorchModelConfig,
    model_config: PretrainedConfig,
    **options: Any,
) -> PreTrainedModel:
    """The model of ``model_config`` with weights from ``config.random_seed``, on its device.

    Raises:
        InvalidRequestError: field ``dtype``: neither ``config`` nor ``model_config`` says it.
    """
    assert config.random_seed is not None, "the configuration asks for it"
    dtype = model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    if dtype is None:
        raise InvalidRequestError("config.json does not say the dtype of the weights", field="dtype")
    std = getattr(model_config, "initializer_range", None) or _DEFAULT_STD
    make = partial(from_config, model_config, dtype=dtype, **options)
    model = make_random(make, config.random_seed, std, torch.device(config.device))
    file = Path(config.model_path) / GENERATION_CONFIG_NAME
    if file.is_file():
        model.generation_config = GenerationConfig.from_pretrained(file.parent, local_files_only=True)
    return model


def _load_language_model(config: TorchEngineConfig, found: LanguageModel) -> PreTrainedModel:
    model = _read_language_model(config, found) if config.random_seed is None else _draw_language_model(config, found)
    if model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # the default, grouped_mm, has no float64
    return model


def _draw_language_model(config: TorchEngineConfig, found: LanguageModel) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM  # whose methods are not typed
    return random_weights(
        auto.from_config, config, found.config, attn_implementation=PAGED_ATTENTION, trust_remote_code=False
    )


def _read_language_model(config: TorchEngineConfig, found: LanguageModel) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM  # whose methods are not typed
    options: dict[str, Any] = {}
    if is_mxfp4(found.config):
        check_mxfp4(Path(config.model_path), found.config)
        _LOG.info("%s: dequantizing its experts, which are in MXFP4", config.model_path)
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    # Silence its table of left-over weights if some are left out on purpose.
    with _quiet_transformers() if found.key_mapping else nullcontext():
        return load_weights(
            auto.from_pretrained,
            config,
            found.config,
            found.leaves_out,
            key_mapping=dict(found.key_mapping) or None,
            attn_implementation=PAGED_ATTENTION,
            trust_remote_code=False,
            **options,
        )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _max_model_len(config: TorchEngineConfig, model_config: PretrainedConfig) -> int:
    own: int | None = getattr(model_config, "max_position_embeddings", None)
    wanted = config.max_model_len or own
    if wanted is None:
        raise InvalidRequestError("the model does not say its longest sequence", field="max_model_len")
    if own is not None and wanted > own:
        raise InvalidRequestError(f"the model was made for {own} tokens, not {wanted}", field="max_model_len")
    return wanted


def _eos_token_ids(model: PreTrainedModel, vocab_size: int) -> frozenset[int]:
    """The ids that ``generate`` takes: from generation_config.json, else config.json; those that the model can say."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    if eos is None:
        eos = model.config.eos_token_id
    ids = eos if isinstance(eos, list | tuple) else [] if eos is None else [int(eos)]
    # Any other would be no column of logits where a step masks them.
    return frozenset(token_id for token_id in ids if 0 <= token_id < vocab_size)
