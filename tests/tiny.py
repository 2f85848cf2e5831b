"""What tests know of the model that comes along."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlavaConfig

CHECKPOINT = Path(__file__).parents[1] / "models" / "tiny" / "checkpoint"
#: What requests call it in tests and in the topologies that come along.
NAME = "tiny"
EOS_ID = 1
VOCAB_SIZE = 2048
#: Tokens of prompt and answer together.
MAX_MODEL_LEN = 4608
#: Any token but the special ones.
PLAIN_IDS = range(8, VOCAB_SIZE)


def narrow_config() -> LlavaConfig:
    """The model's configuration with two narrow layers of each kind in place of six wide ones.

    Training has the same weights to move, by name and kind: a step takes 0.1 s of CPU in place of 15 s.
    """
    from models.tiny.architecture import llava_config

    config = llava_config()
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 64, 96, 2
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = 4, 2, 16
    vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers = 48, 64, 2
    return config
