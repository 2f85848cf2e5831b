"""What decides about a request's pool, and which pools it tries one after another."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from quartet.api.placement import PlacedChoice
from quartet.api.request import ChoicePlacement
from quartet.errors import (
    DrainingError,
    ModelUnavailableError,
    OutOfBlocksError,
    QueueFullError,
    RouterUnavailableError,
    ServingError,
    WorkerUnavailableError,
)
from quartet.streams.client import pause_s
from router.context import RouterContext
from router.global_router.config import GlobalRouterConfig
from router.global_router.pools import Chosen, Pool, Pools, Wish, rank_within
from router.prepare import (
    RouterRequest,
    check_chat_of_model,
    check_generated,
    check_pool,
    find_pool,
    max_sequence_tokens,
    num_output_tokens,
    tokenize_request,
)

# The pool is gone, or can't take requests now: another one may.
_LOST = (RouterUnavailableError, DrainingError, ModelUnavailableError, WorkerUnavailableError)
# The pool refused it for lack of room.
_REFUSED = (QueueFullError, OutOfBlocksError)
_MAX_ATTEMPTS = 8


async def prepare_to_relay(request: RouterRequest, context: RouterContext) -> None:
    """Find the request's model, and count its tokens: these decide about its pool. Its media are the pool's matter.

    Raises:
        ServingError: as it would be refused by the pool's router.
    """
    start, resume = request.start, request.resume
    pool = request.pool = find_pool(start, context.table, resume)
    check_pool(start, pool)
    text = request.text = await context.texts.model_text(pool.key)
    check_chat_of_model(start, pool, text)
    token_ids = await tokenize_request(request, context)
    num_output_tokens(start, len(token_ids), pool)
    if resume is not None:
        # They are what its client has so far, in metrics and records, even if every pool refuses them.
        check_generated(resume, text.vocab_size, max_sequence_tokens(pool) - len(token_ids))
        request.resume = resume.read()
    # It is tokenized again where it runs: a chat's answer is parsed only of a chat.
    request.start = replace(start, model=pool.key.model_name, tenant=request.asked.tenant)


def left_s(request: RouterRequest) -> float:
    """Seconds until the request's deadline; always above 0."""
    return max(request.deadline - time.monotonic(), 0.001)


class PoolChooser:
    """Chooses pools for requests, by their targets or the configured ones."""

    def __init__(self, pools: Pools, config: GlobalRouterConfig) -> None:
        """Choose among ``pools``."""
        self._pools = pools
        self._config = config

    @property
    def pools(self) -> Pools:
        """The pools."""
        return self._pools

    def choose(self, request: RouterRequest, num_generated: int = 0, failed: Collection[str] = ()) -> Chosen:
        """Choose pools for ``request``, which was prepared. Raises ``ModelUnavailableError``.

        ``num_generated`` tokens are known beside its prompt; pools of the namespaces in ``failed`` have failed it.
        """
        start, config = request.start, self._config
        wish = Wish(
            model=request.pool.key,
            num_tokens=len(request.prompt_token_ids) + num_generated,
            ttft_ms=config.default_ttft_target_ms if start.ttft_target_s is None else 1000 * start.ttft_target_s,
            itl_ms=config.default_itl_target_ms if start.itl_target_s is None else 1000 * start.itl_target_s,
            priority=start.priority,
        )
        return self._pools.choose(wish, failed)


@dataclass
class Tries:
    """What was tried for a choice, or for all of them while they go together.

    Attributes:
        failed: namespaces of pools that are not to be asked again.
        refused: namespaces of pools that had no room; others come first.
        num_lost: by namespace, how often a router of it was lost.
        num_failed: how often pools were asked in vain.
        refusal_pause_s: seconds after which pools that had no room may have some.
    """

    failed: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    num_lost: Counter[str] = field(default_factory=Counter)
    num_failed: int = 0
    refusal_pause_s: float = 0.0

    @property
    def avoided(self) -> frozenset[str]:
        """Namespaces of pools that failed it or had no room."""
        return frozenset(self.failed | self.refused)

    def copy(self) -> Tries:
        """For a choice that goes on alone."""
        return replace(self, failed=set(self.failed), refused=set(self.refused), num_lost=self.num_lost.copy())

    def note(self, error: ServingError, pool: Pool, *, goes_on_if_refused: bool) -> None:
        """Note that ``pool`` failed the request. Raises ``error`` if no other may go on.

        With ``goes_on_if_refused`` another may if the pool had no room.
        """
        is_refused = isinstance(error, _REFUSED) and goes_on_if_refused
        self.num_failed += 1
        if not (isinstance(error, _LOST) or is_refused) or self.num_failed >= _MAX_ATTEMPTS:
            raise error
        if is_refused:
            self.refused.add(pool.namespace)
            self.refusal_pause_s = pause_s(error, self.num_failed)
            return
        # Another router of the pool may answer where one was lost.
        self.num_lost[pool.namespace] += 1
        if not isinstance(error, RouterUnavailableError) or self.num_lost[pool.namespace] >= len(pool.links):
            self.failed.add(pool.namespace)


@dataclass(frozen=True)
class Namer:
    """Gives workers of one pool the names that they have among all.

    Attributes:
        is_prefilled_elsewhere: ranks that prefill have theirs already.
    """

    namespace: str
    is_prefilled_elsewhere: bool

    def named(self, placement: ChoicePlacement) -> ChoicePlacement:
        """``placement`` with these names."""
        prefill = placement.prefill
        if prefill is not None and not self.is_prefilled_elsewhere:
            prefill = rank_within(self.namespace, prefill)
        return replace(placement, prefill=prefill, decode=rank_within(self.namespace, placement.decode))

    def placed(self, choice: PlacedChoice) -> PlacedChoice:
        """The same of a choice that is placed."""
        return choice if choice.placement is None else replace(choice, placement=self.named(choice.placement))
