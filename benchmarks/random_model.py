"""Models without weights, for ``engine.load_format: random``: a config.json, and the tiny model's tokenizer.

Prompts are token ids. A tokenizer is only needed because workers serve its files; ids that it lacks have no text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quartet.kvcache.layout import KvLayout
from services.topology.topology import DEFAULT_MODEL_PATH

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """A model of the family Qwen3.

    Attributes:
        dtype: of weights and KV cache.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    dtype: str

    def block_size_bytes(self, block_size: int) -> int:
        """Bytes of the KV of ``block_size`` tokens."""
        layout = KvLayout(
            model_fingerprint="",
            dtype=self.dtype,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
        )
        return layout.piece_size_bytes

    def write(self, directory: Path) -> None:
        """Write the files that a worker needs."""
        (directory / "config.json").write_text(json.dumps(self._config), encoding="utf-8")
        for name in _TOKENIZER_FILES:
            shutil.copyfile(DEFAULT_MODEL_PATH / name, directory / name)

    @property
    def _config(self) -> Mapping[str, object]:
        # As Qwen/Qwen3-8B says it.
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_model_len,
            "model_type": "qwen3",
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


QWEN3_8B = RandomModel(
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_model_len=40960,
    dtype="bfloat16",
)
#: Computes in milliseconds on a CPU.
TINY = RandomModel(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=2048,
    max_model_len=4096,
    dtype="float32",
)
