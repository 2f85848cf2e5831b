"""What tests know of the model that comes along."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parents[1] / "models" / "tiny" / "checkpoint"
#: What requests call it in tests and in the topologies that come along.
NAME = "tiny"
EOS_ID = 1
VOCAB_SIZE = 2048
#: Tokens of prompt and answer together.
MAX_MODEL_LEN = 4608
#: Any token but the special ones.
PLAIN_IDS = range(8, VOCAB_SIZE)
