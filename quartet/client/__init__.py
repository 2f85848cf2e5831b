"""The Python client of Quartet: ``QuartetClient`` for asyncio, ``quartet.client.sync.SyncClient`` for the rest."""

from quartet.client.client import QuartetClient
from quartet.client.completion import CompletedChoice, Completion
from quartet.client.media import read_media
from quartet.client.path import RequestPath
from quartet.client.request import GenerateFields
from quartet.client.stream import GenerateStream
from quartet.discovery.place import Place
from quartet.engine.base import FinishReason
from quartet.engine.sampling import Sampling, TokenLogprobs
from quartet.media.items import MediaFile, MediaKind, MediaPart, MediaUrl
from quartet.rpc.edge import (
    Accepted,
    AnswerPart,
    ChoiceFinished,
    ChoicePlacement,
    Delta,
    Placed,
    TimeBreakdown,
    Usage,
)
from quartet.rpc.explanation import Explanation, PlaceOption
from quartet.rpc.fleet import Model, WorkerState, WorkerStatus
from quartet.text.chat_message import ChatMessage

__all__ = [
    "Accepted",
    "AnswerPart",
    "ChatMessage",
    "ChoiceFinished",
    "ChoicePlacement",
    "CompletedChoice",
    "Completion",
    "Delta",
    "Explanation",
    "FinishReason",
    "GenerateFields",
    "GenerateStream",
    "MediaFile",
    "MediaKind",
    "MediaPart",
    "MediaUrl",
    "Model",
    "Place",
    "PlaceOption",
    "Placed",
    "QuartetClient",
    "RequestPath",
    "Sampling",
    "TimeBreakdown",
    "TokenLogprobs",
    "Usage",
    "WorkerState",
    "WorkerStatus",
    "read_media",
]
