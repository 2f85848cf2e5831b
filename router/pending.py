"""What a policy is told of a request."""

from __future__ import annotations

from collections.abc import Sequence

from router.attempt_tools import AttemptConfig
from router.policy.base import Pending
from router.prepared import PreparedRequest
from router.retry import RetryHints


def make_pending(
    request: PreparedRequest, config: AttemptConfig, hints: RetryHints, generated_token_ids: Sequence[int] = ()
) -> Pending:
    """One choice of ``request``, after ``generated_token_ids``; what is cached of it is still to be said."""
    num_generated = len(generated_token_ids)
    num_tokens = len(request.prompt_token_ids) + num_generated
    num_left = min(request.max_output_tokens - num_generated, config.reserve_tokens)
    # The last token needs no room, as nothing attends to it.
    num_most_tokens = len(request.prompt_token_ids) + request.max_output_tokens - 1
    return Pending(
        num_tokens=num_tokens,
        num_reserved_tokens=min(num_tokens + num_left, num_most_tokens),
        num_most_tokens=num_most_tokens,
        adapter=request.start.adapter,
        avoid=frozenset(hints.avoid),
        prefer_prefill=hints.prefer_prefill,
        priority=request.start.priority,
        arrived_at=request.arrived_at,
        session_key=request.start.session_key,
        sequence_hashes=request.sequence_hashes(generated_token_ids),
    )
