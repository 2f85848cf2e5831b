"""What a worker owes one Prefill stream: an output a slot, until the stream takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quartet.engine.base import Generation, Prefilled
from quartet.errors import RequestCancelledError, ServingError
from quartet.kvcache.layout import HandOff
from quartet.rpc import convert
from quartet.rpc.errors import to_failure
from quartet.rpc.outbox import ENTRY_BYTES, ROOM_BYTES
from quartet.v1 import prefill_pb2


class PrefillOutbox:
    """Pending outputs of a Prefill stream."""

    def __init__(self, withdraw: Callable[[int], None]) -> None:
        """Start with nothing pending; ``withdraw`` ends the hand-off of an engine id that nobody was told of."""
        self.ready = asyncio.Event()
        self._withdraw = withdraw
        self._outputs: dict[int, prefill_pb2.PrefillOutput] = {}
        self._holders: dict[int, int] = {}
        self._being_written: list[int] = []

    @property
    def num_ended(self) -> int:
        """Outputs that are here, not taken yet."""
        return len(self._outputs)

    def owes(self, slot: int) -> bool:
        """Whether the output of ``slot`` is here, not taken yet."""
        return slot in self._outputs

    def prefilled(
        self, slot: int, prefilled: Prefilled, hand_off: HandOff | None, expanded: Generation | None = None
    ) -> None:
        """Give ``slot`` its good end; ``expanded`` has its prompt where that is not as it came."""
        result = convert.to_prefill_result(prefilled, hand_off, expanded)
        self._outputs[slot] = prefill_pb2.PrefillOutput(slot=slot, result=result)
        if hand_off is not None:
            self._holders[slot] = prefilled.id
        self.ready.set()

    def failed(self, slot: int, error: ServingError) -> None:
        """Give ``slot`` its bad end."""
        self._outputs[slot] = prefill_pb2.PrefillOutput(slot=slot, failure=to_failure(error))
        self.ready.set()

    def recall(self, slot: int) -> None:
        """Drop the hand-off of ``slot`` if it was not sent yet; the slot fails then."""
        holder = self._holders.pop(slot, None)
        if holder is not None:
            self._withdraw(holder)
            self.failed(slot, RequestCancelledError("cancelled by the caller"))

    def take(self) -> prefill_pb2.PrefillResponse | None:
        """The next message."""
        self._being_written = []
        if not self._outputs:
            self.ready.clear()
            return None
        message = prefill_pb2.PrefillResponse()
        room = ROOM_BYTES
        for output in self._outputs.values():
            # One that is too long by itself was refused when it was offered.
            room -= output.ByteSize() + ENTRY_BYTES
            if message.outputs and room < 0:
                break
            message.outputs.append(output)
        for output in message.outputs:
            del self._outputs[output.slot]
            if output.slot in self._holders:
                self._being_written.append(self._holders.pop(output.slot))
        return message

    def close(self) -> None:
        """The stream is gone: end the hand-offs that nobody was told of."""
        for holder in (*self._being_written, *self._holders.values()):
            self._withdraw(holder)
        self._being_written = []
        self._holders.clear()
        self._outputs.clear()
