"""A mock worker that says one text, and another one once a tool's result has come.

``python -m tests.e2e.answers_after_calls MODULE --config FILE`` is ``python -m MODULE --config FILE`` whose
``engine.mock.says`` holds both texts, with ``THEN`` between them. The chat template begins a user's message with
``QUESTION`` and a result with ``RESULT``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from quartet.engine.mock import runner
from quartet.engine.mock.model import MockModel
from quartet.text.model_files import read_text_files
from quartet.text.model_text import ModelText

THEN = "<then>"
QUESTION, RESULT = "<|user|>", "<|tool|>"


def _answer_after_calls() -> None:
    load, walk = MockModel.load, runner._Walk

    def load_both(directory: Path, says: str = "") -> MockModel:
        first, then = (load(directory, part) for part in says.split(THEN))
        tokenizer = ModelText.from_files(read_text_files(directory)).tokenizer

        def begin(running: Any, word_ids: Any, script: Any) -> Any:
            prompt = tokenizer.decode(running.request.generation.prompt_token_ids, skip_special_tokens=False)
            return walk(running, word_ids, then.script if RESULT in prompt.rpartition(QUESTION)[2] else script)

        runner._Walk = begin  # type: ignore[assignment, misc]
        return first

    MockModel.load = load_both  # type: ignore[assignment, method-assign]


def _main() -> None:
    module, *arguments = sys.argv[1:]
    _answer_after_calls()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
