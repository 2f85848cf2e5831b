"""What a checkpoint's small files say of its media."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from quartet.engine.media_config import read_media_config
from tests.tiny import CHECKPOINT


def test_the_placeholder_of_a_worker_is_that_of_prompts(tmp_path: Path) -> None:
    for path in CHECKPOINT.iterdir():
        shutil.copy(path, tmp_path / path.name)
    config = {**json.loads((CHECKPOINT / "config.json").read_text()), "image_token_index": 9}
    for model_type, expected in (("llava", 9), ("llama4", 7)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
        read = read_media_config(str(tmp_path))
        assert read is not None
        assert read.placeholder_id == expected
