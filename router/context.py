"""What the router's requests run on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from quartet.telemetry.metrics import RouterMetrics
from router.admission import Admission
from router.config import AttemptConfig
from router.fleet import Hops, ModelTexts
from router.media.request import MediaTools
from router.signing import Signer
from router.workers import WorkerTable


@dataclass(frozen=True, kw_only=True)
class PipelineTools:
    """What requests run on.

    Attributes:
        max_timeout_s: caps the time of each.
        signer: signs what is placed for clients; ``None``: nothing is.
    """

    table: WorkerTable
    texts: ModelTexts
    attempts: AttemptTools
    media: MediaTools
    max_timeout_s: float
    signer: Signer | None = None


# Bounds of attempts, and what they are made with.


@dataclass(frozen=True, kw_only=True)
class AttemptTools:
    """What attempts are made with; the same for all requests of a router.

    Attributes:
        sleep: pauses between attempts, in seconds.
    """

    router_id: str
    admission: Admission
    hops: Hops
    config: AttemptConfig
    metrics: RouterMetrics
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
