"""Finds the new tokens of an output that TensorRT-LLM changes in place: it grows, and sometimes loses its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quartet.engine.sampling import TokenLogprobs


class NewTokens(NamedTuple):
    """Tokens not given out before, with log probabilities; the first token is number ``position`` of the output."""

    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


class TokenCursor:
    """Reads one output (one ``index`` of a request), giving each token once."""

    def __init__(self, *, num_known: int, stop_ids: Sequence[int], num_top_logprobs: int | None) -> None:
        """Read from the beginning.

        Args:
            num_known: tokens at the beginning that prefill gave out.
            stop_ids: tokens that may end the output, the model's own end first.
            num_top_logprobs: alternatives wanted of each token; ``None``: no log probabilities.
        """
        self._num_known = num_known
        self._num_given = num_known
        self._last_id: int | None = None
        self._stop_ids = stop_ids
        self._num_top = num_top_logprobs
        self._num_without_logprobs: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the output so far, those at its beginning included."""
        return self._num_given

    def take(self, output: Any) -> NewTokens:
        """The tokens of ``output`` that were not given out before, with the stop id that ended it."""
        position = self._num_given
        new = tuple(output.token_ids[position:])
        if output.finish_reason == "stop":
            new += self._missing_stop_id(output, new)
        logprobs = () if self._num_top is None else self._logprobs(output, position, new)
        if new:
            self._num_given += len(new)
            self._last_id = new[-1]
        return NewTokens(position, new, logprobs)

    def _missing_stop_id(self, output: Any, new: tuple[int, ...]) -> tuple[int, ...]:
        """The id that stopped the output, if TensorRT-LLM trimmed it before it could be given out."""
        if self._num_given > len(output.token_ids):
            return ()  # it was given out, and TensorRT-LLM has trimmed it since
        last_id = new[-1] if new else self._last_id
        stop_id = output.stop_reason if isinstance(output.stop_reason, int) else None
        if stop_id is None and last_id not in self._stop_ids and self._stop_ids:
            stop_id = self._stop_ids[0]
        return () if stop_id is None or stop_id == last_id else (stop_id,)

    def _logprobs(self, output: Any, position: int, new: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
        entries = output.logprobs or ()
        if self._num_without_logprobs is None and new:
            # The log probabilities of decode's first tokens stayed with prefill.
            num_missing = position + len(new) - len(entries)
            self._num_without_logprobs = min(max(num_missing, 0), self._num_known)
        shift = self._num_without_logprobs or 0
        return tuple(
            self._entry(token_id, entries[number - shift] if 0 <= number - shift < len(entries) else None)
            for number, token_id in enumerate(new, start=position)
        )

    def _entry(self, token_id: int, entry: Any) -> TokenLogprobs:
        return token_logprobs(token_id, entry, self._num_top or 0)


def token_logprobs(token_id: int, entry: Any, num_top: int) -> TokenLogprobs:
    """One position's log probabilities, from TensorRT-LLM's dict by token or its bare number; NaN if it has none."""
    if not isinstance(entry, Mapping):
        return TokenLogprobs(token_id, math.nan if entry is None else float(entry))
    own = entry.get(token_id)
    best = sorted(entry.items(), key=lambda item: -item[1].logprob)[:num_top]
    return TokenLogprobs(
        token_id,
        math.nan if own is None else float(own.logprob),
        tuple(top_id for top_id, _ in best),
        tuple(float(top.logprob) for _, top in best),
    )
