"""The fleet in domain terms: what a router tells of its workers and of the models that they serve."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from quartet.discovery.base import WorkerRecord
from quartet.events.load import WorkerLoad


class WorkerState(StrEnum):
    """Whether requests are placed at a worker."""

    JOINING = "joining"  # known, but has not answered yet
    READY = "ready"  # requests are placed there
    SUSPECT = "suspect"  # its stream broke, its heartbeats are silent, or it is unwell
    DRAINING = "draining"  # it lets its work run out


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A worker as a router sees it.

    Attributes:
        load: its last report; ``None``: none came yet.
        load_age_s: age of that report in seconds.
        num_requests: requests of this router that are there now.
    """

    record: WorkerRecord
    state: WorkerState
    load: WorkerLoad | None
    load_age_s: float | None
    num_requests: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and the pool that serves it.

    Attributes:
        fingerprint: hex SHA-256 of everything that decides its tokens.
        max_model_len: tokens of prompt and output together.
        num_prefill_workers: ready now.
        num_decode_workers: ready now.
        sampling_fields: fields of ``Sampling`` and ``OutputOptions`` that all of its workers honour.
        media: kinds that it takes.
    """

    name: str
    fingerprint: str
    max_model_len: int
    num_prefill_workers: int
    num_decode_workers: int
    sampling_fields: tuple[str, ...]
    media: tuple[str, ...]
    adapters: tuple[str, ...]
    has_chat_template: bool
