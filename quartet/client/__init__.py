"""The Python client of Quartet: ``QuartetClient`` for asyncio, ``quartet.client.sync.SyncClient`` for the rest."""

from quartet.client.client import QuartetClient
from quartet.client.events import (
    Accepted,
    ChatMessage,
    ChoicePlacement,
    CompletedChoice,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Model,
    TimeBreakdown,
    Usage,
    WorkerState,
    WorkerStatus,
)
from quartet.client.request import GenerateFields, GenerateOptions
from quartet.client.stream import GenerateStream
from quartet.engine.sampling import Sampling, TokenLogprobs

__all__ = [
    "Accepted",
    "ChatMessage",
    "ChoicePlacement",
    "CompletedChoice",
    "Completion",
    "Delta",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateFields",
    "GenerateOptions",
    "GenerateStream",
    "Model",
    "QuartetClient",
    "Sampling",
    "TimeBreakdown",
    "TokenLogprobs",
    "Usage",
    "WorkerState",
    "WorkerStatus",
]
