"""Logits processors: code of the deployment's own that changes the scores of the next token, for every request.

``engine.logits_processors`` names them: ``module:function``, or the name of an entry point of the group
``quartet.logits_processors``. Each is a function ``(token_ids, logits) -> None``, or a class of which every request
gets an instance that is called so. ``token_ids`` are those of the prompt and of the output so far. ``logits`` is a
tensor [vocabulary] on the engine's device, to be changed in place.

TensorRT-LLM pickles them to the process of each rank, so that they must be found there by their names.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from quartet.errors import ConfigError

GROUP = "quartet.logits_processors"

#: Changes the logits of one sequence, in place.
Processor = Callable[[Sequence[int], Any], None]


class LogitsProcessors:
    """The processors of one worker, loaded at its start."""

    def __init__(self, names: Sequence[str]) -> None:
        """Import what ``names`` say. Raises ``ConfigError`` for a name that leads to no processor."""
        self._found = [(name, _find(name)) for name in names]

    def for_request(self) -> list[Any] | None:
        """What ``SamplingParams.logits_processor`` is for a new request; ``None``: there are none."""
        if not self._found:
            return None
        # TensorRT-LLM's base class is imported with the package.
        from quartet.engine.trtllm.logits_adapter import LogitsAdapter

        return [LogitsAdapter(name, found() if isinstance(found, type) else found) for name, found in self._found]


def _find(name: str) -> Any:
    try:
        found = _load(name)
    except Exception as error:  # an import runs code of the deployment's, which may raise anything
        raise ConfigError(f"logits_processors: {name!r} can't be imported: {error!r}") from error
    if not callable(found):
        raise ConfigError(f"logits_processors: {name!r} is neither a function nor a class")
    try:
        pickle.dumps(found)
    except Exception as error:
        raise ConfigError(f"logits_processors: {name!r} can't be sent to the engine's ranks: {error!r}") from error
    return found


def _load(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if colon:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found
    entries = tuple(entry_points(group=GROUP, name=name))
    if not entries:
        raise LookupError(f"it is no module:function, and no entry point of the group {GROUP}")
    return entries[0].load()
