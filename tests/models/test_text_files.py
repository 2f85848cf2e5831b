"""A model's text files without its weights, for engines that need none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quartet.text.model_files import read_text_files
from quartet.text.model_text import ModelText


def test_without_weights_all_else_is_the_same_and_neither_torch_nor_safetensors_is_needed(
    random_model_dir: Path, tmp_path: Path
) -> None:
    # A None in sys.modules makes its import fail.
    program = (
        "import runpy, sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'safetensors'])); "
        f"sys.argv = ['random_llama', '--no-weights', '--out', {str(tmp_path)!r}]; "
        "runpy.run_module('models.random_llama', run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", program], timeout=50, check=True)
    names = {path.name for path in random_model_dir.iterdir()} - {"model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert read_text_files(tmp_path) == read_text_files(random_model_dir)
    assert ModelText.from_files(read_text_files(tmp_path)).chat_template is not None
