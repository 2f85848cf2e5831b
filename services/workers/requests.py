"""What a worker asks of whatever runs its requests, and of whatever computes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quartet.engine.base import EngineStats, StepOutput
from quartet.events.load import PlacementProgress


class Computing(Protocol):
    """An engine, as far as a worker's life depends on it."""

    @property
    def is_alive(self) -> bool:
        """False once it has died; nothing comes out any more."""
        ...

    def outputs(self) -> AsyncIterator[StepOutput]:
        """What it brings, in order, for one consumer. Ends when it is closed; raises ``EngineError`` when it died."""
        ...


@dataclass(frozen=True)
class Progress:
    """Steps done, ever, and work that is to bring more of them."""

    num_steps: int
    num_in_flight: int


class Requests(Protocol):
    """The requests of one worker's streams."""

    @property
    def num_running(self) -> int:
        """Requests whose end is still to come."""
        ...

    @property
    def progress(self) -> Progress:
        """Whether something moves."""
        ...

    @property
    def router_progress(self) -> Mapping[str, int]:
        """By router, the last request number up to which ``stats`` counts everything in."""
        ...

    @property
    def router_arrivals(self) -> Mapping[str, int]:
        """By router, the last request number that arrived."""
        ...

    @property
    def placements(self) -> Mapping[str, PlacementProgress]:
        """By router, what became lately of the starts that it placed for clients: all that is still known."""
        ...

    def placement_news(self) -> Mapping[str, PlacementProgress]:
        """As much of it as the next load is to tell; call ``placements_told`` once that is out."""
        ...

    def placements_told(self) -> None:
        """The load with the last ``placement_news`` is out."""
        ...

    def stats(self) -> Sequence[EngineStats]:
        """The load now, an entry a data-parallel rank. May be called on any thread, and does not block."""
        ...

    def route(self, step: StepOutput) -> None:
        """Bring one step's outputs to their streams."""
        ...

    def drain(self) -> None:
        """Take nothing new from now on."""
        ...

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs; False if something still does after ``timeout_s`` seconds."""
        ...

    def cancel_all(self) -> int:
        """End everything early, and say how many requests that was."""
        ...


class NoPlacements:
    """Of requests that no router places for clients, and whose outputs find their streams by themselves."""

    @property
    def placements(self) -> Mapping[str, PlacementProgress]:
        """None."""
        return {}

    def placement_news(self) -> Mapping[str, PlacementProgress]:
        """None."""
        return {}

    def placements_told(self) -> None:
        """Nothing was."""

    def route(self, step: StepOutput) -> None:
        """Nothing of it is a stream's."""
