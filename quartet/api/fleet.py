"""The fleet in domain terms: what a router reports of its workers and of the models that they serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from quartet.discovery.base import Rank, Role, WorkerRecord
from quartet.events.load import WorkerLoad


class WorkerState(StrEnum):
    """Whether a router places requests at a worker."""

    JOINING = "joining"  # known, but has not answered yet
    READY = "ready"  # requests are placed there
    SUSPECT = "suspect"  # its stream broke, its heartbeats are silent, or it is unwell
    DRAINING = "draining"  # it only finishes its present work
    INCOMPATIBLE = "incompatible"  # the router does not speak its contract version


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A worker as a router sees it.

    Attributes:
        load: its last report; ``None``: none has come yet.
        load_age_s: age of that report in seconds.
        num_requests: requests of this router that are at the worker now.
    """

    record: WorkerRecord
    state: WorkerState
    load: WorkerLoad | None
    load_age_s: float | None
    num_requests: int


@dataclass(frozen=True, kw_only=True)
class FleetTotals:
    """What a router has counted since its start, of all models together, and what it has now.

    Attributes:
        policy: name of the router's policy.
        outcomes: choices that ended, by finish reason, or by the error's reason, in lower case.
        num_failed: of these, choices that failed.
        num_prompt_tokens: of requests that were placed; ``num_cached_tokens`` of them had their KV cached.
        num_output_tokens: that requests have given, those that still run included.
        ttft_bounds_s: upper bounds of the buckets of ``ttft_counts``, which has one more, without a bound, or none.
        num_without_room: waits for room that ended because the queue was full or they took too long.
        num_kv_gaps: times that KV events of a worker were lost.
        num_queued: requests that wait for room now.
        num_running: requests between arrival and end now.
    """

    router_id: str
    policy: str
    outcomes: Mapping[str, int]
    num_failed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_bounds_s: tuple[float, ...]
    ttft_counts: tuple[int, ...]
    num_without_room: int
    num_kv_gaps: int
    num_queued: int
    num_running: int


@dataclass(frozen=True, kw_only=True)
class FleetState:
    """The workers that a router knows, by role and id, and what it has counted.

    ``totals`` is ``None`` if the router is of a version that does not send them.
    """

    workers: tuple[WorkerStatus, ...]
    totals: FleetTotals | None


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and the pool that serves it.

    Attributes:
        fingerprint: hex SHA-256 of everything that decides its tokens.
        max_model_len: tokens of prompt and output together that at least half of its decode workers take.
        num_prefill_workers: prefill workers that are ready now.
        num_decode_workers: decode workers that are ready now.
        sampling_fields: fields of ``Sampling`` and ``OutputOptions`` that at least one of its decode workers honours.
        media: kinds of media that it takes.
        reasoning_parser, tool_call_parser: how its answers to chats are parsed; empty: such parts stay in the text.
        chat_features: what chats may have beside messages: ``tools``, ``reasoning``.
        template_arguments: variables that its chat template reads.
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
    reasoning_parser: str = ""
    tool_call_parser: str = ""
    chat_features: tuple[str, ...] = ()
    template_arguments: tuple[str, ...] = ()


# Why a request goes where it goes, in domain terms.


@dataclass(frozen=True, kw_only=True)
class RankOption:
    """One rank, as a router's policy sees it for one request.

    Attributes:
        role: role of its worker; a decode rank may prefill itself.
        is_chosen: the request would go there in the present state.
        num_matched_tokens: prompt tokens cached on the rank.
        cost: cost of the request there, in ``cost_unit``; ``None``: the policy has no costs, or it can't go there.
        terms: the figures that the policy used; each name ends with its unit.
        obstacle: why the request can't go there now; empty: it can.
        reason: why it would go there, or why elsewhere; empty: the cost says it.
    """

    rank: Rank
    role: Role
    is_chosen: bool = False
    num_matched_tokens: int = 0
    cost: float | None = None
    cost_unit: str = ""
    terms: Mapping[str, float] = field(default_factory=dict)
    obstacle: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Where a request would go now.

    Attributes:
        policy: the router's policy.
        model, model_fingerprint: the model that would answer.
        num_waiting: choices that wait in the router's queue for this model; ``options`` are as if none did.
        options: every rank of the model, the chosen ones first, then by cost.
        wait_s: seconds for which the router would keep the request before sending it to the chosen ranks, if nothing
            changed; ``None``: it goes at once, or there is no room.
        num_held_tokens: the most prompt tokens that any one rank of the model has cached.
        num_foreign_tokens: more of them that a rank of another model has cached.
        num_unsalted_tokens: more of them that a rank of the model has cached without the request's salt.
    """

    policy: str
    model: str
    model_fingerprint: str
    num_prompt_tokens: int
    num_waiting: int
    options: tuple[RankOption, ...]
    wait_s: float | None = None
    num_held_tokens: int = 0
    num_foreign_tokens: int = 0
    num_unsalted_tokens: int = 0
