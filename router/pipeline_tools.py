"""What the router's requests run on."""

from __future__ import annotations

from dataclasses import dataclass

from router.attempt_tools import AttemptTools
from router.hops import ModelTexts
from router.media_run import MediaTools
from router.sealing import Sealer
from router.worker_table import WorkerTable


@dataclass(frozen=True, kw_only=True)
class PipelineTools:
    """What requests run on.

    Attributes:
        max_timeout_s: caps the time of each.
        sealer: seals what is placed for clients; ``None``: nothing is.
    """

    table: WorkerTable
    texts: ModelTexts
    attempts: AttemptTools
    media: MediaTools
    max_timeout_s: float
    sealer: Sealer | None = None
