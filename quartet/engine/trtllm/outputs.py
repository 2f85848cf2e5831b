"""Gathers what all handles bring in one turn of the event loop, and hands it on as one output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from quartet.engine.base import Failed, Finished, Prefilled, Started, StepLogprobs, StepOutput
from quartet.engine.sampling import TokenLogprobs
from quartet.engine.trtllm.token_cursor import NewTokens


@dataclass
class _Tokens:
    offset: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class OutputCollector:
    """What came since the last ``StepOutput``. Lives on the event loop that reads the handles."""

    def __init__(self, deliver: Callable[[StepOutput], None]) -> None:
        """``deliver`` is called on this loop, at most once in a turn of it, after the handles that woke up in it."""
        self._deliver = deliver
        self._is_due = False
        self._clear()

    def start(self, started: Started) -> None:
        """A request has its first output."""
        self._started.append(started)
        self._touch()

    def tokens(self, id: int, offset: int, new: NewTokens) -> None:
        """Tokens of a request, the first of which is its output token number ``offset``."""
        if not new.token_ids:
            return
        # One entry a request, also where several steps of it came at once.
        tokens = self._tokens.setdefault(id, _Tokens(offset))
        tokens.token_ids += new.token_ids
        tokens.logprobs += new.logprobs
        self._touch()

    def finish(self, finished: Finished) -> None:
        """A generation ended well."""
        self._finished.append(finished)
        self._touch()

    def prefill(self, prefilled: Prefilled) -> None:
        """A prefill is complete."""
        self._prefilled.append(prefilled)
        self._touch()

    def fail(self, failed: Failed) -> None:
        """A request ended badly."""
        self._failed.append(failed)
        self._touch()

    def _touch(self) -> None:
        if not self._is_due:
            self._is_due = True
            # Behind all tasks that are ready now.
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        tokens = self._tokens
        output = StepOutput(
            ids=list(tokens),
            num_tokens=[len(item.token_ids) for item in tokens.values()],
            token_offsets=[item.offset for item in tokens.values()],
            token_ids=[token_id for item in tokens.values() for token_id in item.token_ids],
            logprobs=[StepLogprobs(id, tuple(item.logprobs)) for id, item in tokens.items() if item.logprobs],
            started=self._started,
            finished=self._finished,
            prefilled=self._prefilled,
            failed=self._failed,
        )
        self._clear()
        self._deliver(output)

    def _clear(self) -> None:
        # New lists each time: the consumer keeps the old ones.
        self._tokens: dict[int, _Tokens] = {}
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._prefilled: list[Prefilled] = []
        self._failed: list[Failed] = []
