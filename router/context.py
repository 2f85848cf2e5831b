"""What a router's requests run on: one object for the whole process."""

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
class RouterContext:
    """What requests run on.

    Attributes:
        router_id: names this router to workers.
        config: bounds of each choice's attempts.
        max_timeout_s: caps the time of each request.
        signer: signs what is placed for clients; ``None``: nothing is.
        sleep: pauses between attempts, in seconds.
    """

    router_id: str
    table: WorkerTable
    texts: ModelTexts
    admission: Admission
    hops: Hops
    media: MediaTools
    metrics: RouterMetrics
    config: AttemptConfig
    max_timeout_s: float
    signer: Signer | None = None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
