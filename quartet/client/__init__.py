"""The Python client of Quartet: ``QuartetClient`` for asyncio, ``quartet.client.sync.SyncClient`` for the rest."""

from quartet.api.chat import ToolChoice
from quartet.api.fleet import Explanation, FleetState, FleetTotals, Model, RankOption, WorkerState, WorkerStatus
from quartet.api.request import (
    Accepted,
    AnswerPart,
    ChoiceFinished,
    ChoicePlacement,
    Delta,
    Placed,
    TimeBreakdown,
    Usage,
)
from quartet.client.client import QuartetClient
from quartet.client.request import GenerateFields, RequestPath, read_media
from quartet.client.stream import CompletedChoice, Completion, GenerateStream
from quartet.discovery.base import Rank
from quartet.engine.base import FinishReason
from quartet.engine.sampling import GrammarKind, GuidedDecoding, PromptLogprobs, Sampling, TokenLogprobs, guided_choice
from quartet.media.items import MediaFile, MediaKind, MediaPart, MediaUrl
from quartet.rpc.channels import TlsConfig
from quartet.streams.worker_client import DrainOutcome
from quartet.text.chat_message import ChatMessage, Tool, ToolCall
from quartet.text.json_object import JsonObject
from quartet.text.parsed import ToolCallDelta
from quartet.transfer.base import TransferWay

__all__ = [
    "Accepted",
    "AnswerPart",
    "ChatMessage",
    "ChoiceFinished",
    "ChoicePlacement",
    "CompletedChoice",
    "Completion",
    "Delta",
    "DrainOutcome",
    "Explanation",
    "FinishReason",
    "FleetState",
    "FleetTotals",
    "GenerateFields",
    "GenerateStream",
    "GrammarKind",
    "GuidedDecoding",
    "JsonObject",
    "MediaFile",
    "MediaKind",
    "MediaPart",
    "MediaUrl",
    "Model",
    "Placed",
    "PromptLogprobs",
    "QuartetClient",
    "Rank",
    "RankOption",
    "RequestPath",
    "Sampling",
    "TimeBreakdown",
    "TlsConfig",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "TransferWay",
    "Usage",
    "WorkerState",
    "WorkerStatus",
    "guided_choice",
    "read_media",
]
