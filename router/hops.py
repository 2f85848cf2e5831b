"""What the pipeline needs of others: hops to workers, and the text side of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quartet.discovery.place import Place
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaSize
from quartet.rpc.encode import EncodeStart
from quartet.rpc.inner import DecodeFinished, DecodeSink, InnerStart, PrefillOutcome
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

    @property
    def heard_at(self) -> float | None:
        """When the worker last said something of it, monotonic seconds; ``None`` before its first word."""
        ...

    async def outcome(self) -> DecodeFinished | None:
        """Wait for its end; ``None``: the sink wanted no more. Raises ``ServingError`` when it ended badly."""
        ...

    def cancel(self) -> None:
        """End it early; harmless when it has ended."""
        ...


class EncodeHop(Protocol):
    """One request's media on their way into embeddings."""

    async def sizes(self) -> Sequence[MediaSize]:
        """Wait for the size of each item, in order. Raises ``ServingError``: it ended badly before."""
        ...

    async def hand_offs(self) -> Sequence[HandOff]:
        """Wait for the hand-off of each item, in order; they are the caller's then.

        Raises:
            ServingError: it ended badly; nothing is held then.
        """
        ...

    def cancel(self) -> None:
        """End it early and let go of what nobody took; harmless when that was taken."""
        ...


class KeptHandOff(Protocol):
    """A hand-off whose lease is renewed."""

    def stop(self) -> None:
        """Renew no more; what is left of the lease is left. May be called twice."""
        ...


class Hops(Protocol):
    """The ways to workers. Nothing here waits."""

    def encode(self, place: Place, start: EncodeStart, on_encoded: Callable[[HandOff], None]) -> EncodeHop:
        """Start to encode; ``on_encoded`` hears of each hand-off as it comes.

        Raises ``WorkerUnavailableError`` when the worker is gone.
        """
        ...

    def prefill(self, place: Place, start: InnerStart) -> PrefillHop:
        """Start a prefill. Raises ``WorkerUnavailableError`` when the worker is gone."""
        ...

    def decode(self, place: Place, start: InnerStart, sink: DecodeSink) -> DecodeHop:
        """Start a decode, whose outputs go to ``sink``. Raises ``WorkerUnavailableError`` when the worker is gone."""
        ...

    def keep(self, hand_off: HandOff) -> KeptHandOff:
        """Renew the lease of a hand-off until told to stop. Raises ``TransferError`` when this is closing."""
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
