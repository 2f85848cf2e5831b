"""What a policy is told of a request."""

from __future__ import annotations

from collections.abc import Sequence

from router.admission import Ticket
from router.attempt_tools import AttemptConfig, AttemptTools
from router.policy.base import Pending
from router.prepared import PreparedRequest
from router.retry import RetryHints
from router.validation import max_sequence_tokens

_NO_MEDIA = frozenset[str]()


def draw_ticket(request: PreparedRequest, num_choices: int, tools: AttemptTools) -> Ticket:
    """The standing in the queue of ``request``, of which ``num_choices`` choices run."""
    num_output_tokens = min(request.max_output_tokens, tools.config.reserve_tokens)
    return tools.admission.ticket(
        request.pool.key,
        priority=request.start.priority,
        tenant=request.start.tenant,
        num_tokens=request.num_prompt_tokens + num_output_tokens,
        num_choices=num_choices,
        deadline=request.deadline,
    )


def make_pending(
    request: PreparedRequest,
    config: AttemptConfig,
    hints: RetryHints,
    generated_token_ids: Sequence[int] = (),
    *,
    is_placed: bool = False,
) -> Pending:
    """One choice of ``request``, after ``generated_token_ids``; what is cached of it is still to be said.

    ``is_placed``: its client goes on with it alone.
    """
    num_generated = len(generated_token_ids)
    # The last token needs no room, as nothing attends to it.
    num_most_tokens = request.num_prompt_tokens + request.max_output_tokens - 1
    num_tokens = request.num_prompt_tokens + num_generated
    if request.num_unknown_tokens:
        num_most_tokens = min(num_most_tokens, max_sequence_tokens(request.pool) - 1)
        num_tokens = _cap_unknown(request, num_generated, num_most_tokens)
    num_left = min(request.max_output_tokens - num_generated, config.reserve_tokens)
    return Pending(
        num_tokens=num_tokens,
        num_reserved_tokens=min(num_tokens + num_left, num_most_tokens),
        num_most_tokens=num_most_tokens,
        adapter=request.start.adapter,
        needs_media=_NO_MEDIA if request.media is None else request.media.needs,
        # A seal protects no media: they are not held for as long as a client may take.
        is_remote=is_placed and request.media is not None,
        avoid=frozenset(hints.avoid),
        prefer_prefill=hints.prefer_prefill,
        priority=request.start.priority,
        arrived_at=request.arrived_at,
        session_key=request.start.session_key,
        sequence_hashes=request.sequence_hashes(generated_token_ids),
    )


def _cap_unknown(request: PreparedRequest, num_generated: int, num_most_tokens: int) -> int:
    """Tokens to prefill at most: of a prompt that may be too long for every place, those of one that is not."""
    pool, num_least_tokens = request.pool, len(request.prompt_token_ids) + num_generated
    num_tokens = min(request.num_prompt_tokens + num_generated, num_most_tokens)
    if pool.num_prefill_tokens:
        num_tokens = min(num_tokens, pool.num_prefill_tokens)
    return max(num_tokens, num_least_tokens)
