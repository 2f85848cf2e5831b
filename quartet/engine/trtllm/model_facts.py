"""Facts about a model from its files, read before TensorRT-LLM loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.settings import EngineKind
from quartet.engine.trtllm.arguments import LlmArguments
from quartet.errors import ConfigError, ModelFilesError
from quartet.text.model_files import max_position_embeddings, read_text_files
from quartet.text.model_text import ModelText


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model as requests know it.

    Attributes:
        eos_token_ids: any of them ends an output, the model's own first.
        max_model_len: tokens of prompt and output together.
        adapters: folders of LoRA adapters, by the name that requests use.
    """

    fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    adapters: Mapping[str, str]

    @classmethod
    def read(cls, model_path: str, arguments: LlmArguments) -> ModelFacts:
        """Read the files of ``model_path``, which takes a while the first time: weights are digested.

        Raises:
            ModelFilesError, InvalidRequestError: files are missing or malformed, or don't say how long a sequence may
                be and ``arguments`` don't, either.
            ConfigError: two adapters have one name.
        """
        files = read_text_files(Path(model_path))
        text = ModelText.from_files(files)
        max_model_len = arguments.max_seq_len or max_position_embeddings(files)
        if max_model_len is None:
            raise ModelFilesError("set max_model_len: config.json has no max_position_embeddings")
        return cls(
            fingerprint=pool_fingerprint(model_path, arguments.kv_dtype),
            vocab_size=text.vocab_size,
            eos_token_ids=text.eos_token_ids,
            max_model_len=max_model_len,
            adapters=_adapters(arguments) if arguments.has_lora else {},
        )


def pool_fingerprint(model_path: str, kv_dtype: str) -> str:
    """The identity of a model within TensorRT-LLM. Other engines, which can't take its hand-offs, have another.

    Raises:
        InvalidRequestError: field ``model``; ``model_path`` is no directory, or lacks something that a model needs.
    """
    return model_fingerprint(model_path, f"{EngineKind.TRTLLM} {kv_dtype}")


def _adapters(arguments: LlmArguments) -> dict[str, str]:
    """The configured folders, by the last part of their paths."""
    config = arguments.values.get("lora_config")
    given = config.get("lora_dir") if isinstance(config, Mapping) else None
    folders = [given] if isinstance(given, str | Path) else given if isinstance(given, list | tuple) else []
    adapters: dict[str, str] = {}
    for folder in map(str, folders):
        name = Path(folder).name
        if name in adapters:
            raise ConfigError(f"lora_config.lora_dir: two adapters are named {name}")
        adapters[name] = folder
    return adapters
