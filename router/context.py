"""What all requests of a router share: one object for the whole process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from quartet.telemetry.metrics import RouterMetrics
from quartet.telemetry.tracing import Tracer
from router.admission import Admission
from router.config import AttemptConfig
from router.fleet import Hops, ModelTexts
from router.guides import GrammarChecks
from router.hand_offs import HandOffWatch
from router.intake import Intake
from router.media.request import MediaTools
from router.prefill_pools import PrefillPools
from router.prompt_memory import PromptMemory
from router.rate_limits import RateLimits
from router.signing import Signer
from router.tenants import Tenants
from router.thread_queue import TokenizeQueue
from router.untaken import UntakenBudgets
from router.usage_log import UsageLog
from router.workers import PoolKey, WorkerTable


@dataclass(frozen=True, kw_only=True)
class RouterContext:
    """What all requests share.

    Attributes:
        router_id: identifies this router to workers.
        config: limits of each choice's attempts.
        max_timeout_s: upper limit of each request's time.
        untaken: what each tenant's placements may hold before their clients take them up.
        signer: signs starts that are placed for clients; ``None``: the router places none.
        sleep: pauses between attempts, in seconds.
        tenants: what is configured for each tenant.
        limits: how much tenants and API keys may ask for in a minute.
        usage: writes what each request used; ``None``: nothing does.
        prompts: counts the prompts that wait.
        grammars: checks those of requests.
        hand_offs: sees which workers hand over to which.
        prefill_pools: other namespaces that prefill for this one.
        tracer: traces requests; ``None``: nothing does.
    """

    router_id: str
    table: WorkerTable
    texts: ModelTexts
    intake: Intake
    admission: Admission
    hops: Hops
    media: MediaTools
    tokenizing: TokenizeQueue
    metrics: RouterMetrics
    config: AttemptConfig
    max_timeout_s: float
    untaken: UntakenBudgets[PoolKey]
    signer: Signer | None = None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    tenants: Tenants = field(default_factory=Tenants)
    limits: RateLimits = field(default_factory=RateLimits)
    usage: UsageLog | None = None
    prompts: PromptMemory = field(default_factory=PromptMemory)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    hand_offs: HandOffWatch = field(default_factory=HandOffWatch)
    prefill_pools: PrefillPools = field(default_factory=lambda: PrefillPools({}, None))
    tracer: Tracer | None = None
