"""The names by which a result's ``metrics_dict`` is keyed."""

from __future__ import annotations

from enum import Enum


class MetricNames(Enum):
    """What is measured of a request; only its ``value`` is a string."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"
    REQUEST_QUEUE_TIME = "request_queue_time"
