"""What the pipeline needs of others: hops to workers, and the text side of models."""

from __future__ import annotations

from typing import Protocol

from quartet.discovery.place import Place
from quartet.kvcache.layout import HandOff
from quartet.rpc.inner import DecodeProgress, InnerStart, PrefillOutcome
from quartet.text.model_text import ModelText
from router.worker import PoolKey


class PrefillHop(Protocol):
    """One prefill under way."""

    async def outcome(self) -> PrefillOutcome:
        """Wait for its output. A caller that is cancelled here leaves nothing behind.

        Raises:
            ServingError: it ended badly.
        """
        ...


class DecodeHop(Protocol):
    """One decode under way."""

    async def next(self) -> DecodeProgress:
        """Wait for more; the last one has ``finished`` set. Raises ``ServingError`` when it ended badly."""
        ...

    def cancel(self) -> None:
        """End it early; harmless when it has ended."""
        ...


class Hops(Protocol):
    """The ways to workers. Nothing here waits."""

    def prefill(self, place: Place, start: InnerStart) -> PrefillHop:
        """Start a prefill. Raises ``WorkerUnavailableError`` when the worker is gone."""
        ...

    def decode(self, place: Place, start: InnerStart) -> DecodeHop:
        """Start a decode. Raises ``WorkerUnavailableError`` when the worker is gone."""
        ...

    def drop(self, hand_off: HandOff) -> None:
        """Let the source of a hand-off know that nobody will take it; harmless when somebody did."""
        ...


class ModelTexts(Protocol):
    """The text side of models."""

    async def model_text(self, pool: PoolKey) -> ModelText:
        """Tokenizer and chat template of a pool.

        Raises:
            WorkerUnavailableError: no worker gave the files in time.
            ModelFilesError: the files make no sense.
        """
        ...
