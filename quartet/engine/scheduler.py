"""Decides what a step computes."""

from quartet.engine.running import RequestState as RequestState
from quartet.engine.running import RunningRequest as RunningRequest
from quartet.engine.running import ScheduledChunk as ScheduledChunk
