"""Starts as messages of their own; the clients write them into a request's message."""

from __future__ import annotations

from quartet.streams.convert.messages import put_start
from quartet.streams.messages import WorkerStart
from quartet.v1 import decode_pb2, prefill_pb2


def decode_start(slot: int, start: WorkerStart) -> decode_pb2.DecodeStart:
    """The start of a decode."""
    message = decode_pb2.DecodeStart()
    put_start(message, slot, start)
    return message


def prefill_start(slot: int, start: WorkerStart) -> prefill_pb2.PrefillStart:
    """The start of a prefill."""
    message = prefill_pb2.PrefillStart()
    put_start(message, slot, start)
    return message
