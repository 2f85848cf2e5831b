"""An encoder that keeps what it encodes itself, without a model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from quartet.engine.encoder import EncodedState, EncodeTimes
from quartet.errors import EngineError, InvalidMediaError
from quartet.media.items import MediaFile, MediaKind


def state_of(file: MediaFile) -> bytes:
    """The opaque state that another engine of its kind gets."""
    return b"\x00\xffstate of " + file.data


@dataclass(eq=False)
class FakeStates:
    """A ``StateEncoder`` that encodes when it is let.

    Attributes:
        held: by holder.
        taken, dropped: holders whose items were taken, and those whose items were never taken.
    """

    may_encode: asyncio.Event = field(default_factory=asyncio.Event)
    held: dict[int, MediaFile] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    num_waiting: int = 0
    num_extra_bytes: int = 0
    kinds: frozenset[MediaKind] = frozenset({MediaKind.IMAGE})

    async def encode(self, holder: int, file: MediaFile) -> EncodedState:
        self.num_waiting += 1
        try:
            await self.may_encode.wait()
        finally:
            self.num_waiting -= 1
        if b" broken" in file.data:
            raise InvalidMediaError("nothing is behind its header", field="file")
        if b" other" in file.data:
            raise EngineError("it became something else")
        assert holder not in self.held
        self.held[holder] = file
        return EncodedState(state_of(file) + bytes(self.num_extra_bytes), EncodeTimes(0.25, 0.125))

    def release(self, holder: int, *, was_taken: bool) -> None:
        del self.held[holder]
        (self.taken if was_taken else self.dropped).append(holder)
