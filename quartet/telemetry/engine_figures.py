"""What the worker's metrics read off an engine."""

from __future__ import annotations

from typing import Protocol


class EngineFigures(Protocol):
    """One data-parallel rank's figures; ``quartet.engine.base.EngineStats`` has them."""

    @property
    def num_running(self) -> int:
        """Requests in the running batch."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait for it."""
        ...

    @property
    def num_queued_prefill_tokens(self) -> int:
        """Prompt tokens not computed yet."""
        ...

    @property
    def num_in_use_blocks(self) -> int:
        """KV blocks that running requests use."""
        ...

    @property
    def num_held_blocks(self) -> int:
        """KV blocks held for hand-offs."""
        ...

    @property
    def num_cached_blocks(self) -> int:
        """KV blocks that nobody uses, kept for reuse."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Empty KV blocks."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps done; only grows, like all that follow."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Requests that gave their blocks up and were computed again."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens computed, not counting cached ones."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the cache."""
        ...
