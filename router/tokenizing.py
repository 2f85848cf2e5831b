"""The queue of long texts, which threads tokenize."""

from __future__ import annotations

from router.config import TokenizeConfig
from router.fair_queue import FairShare
from router.thread_queue import ThreadQueue, ThreadQueueConfig


class TokenizeQueue(ThreadQueue):
    """The router's ``ThreadQueue`` of texts, whose size is in characters."""

    def __init__(self, config: TokenizeConfig, share: FairShare) -> None:
        """``share`` orders the texts of tenants, by characters; it belongs to this queue alone."""
        bounds = ThreadQueueConfig(
            name="tokenize",
            num_threads=config.num_threads,
            max_waiting_size=config.max_queued_characters,
            refusal="too much text waits to be tokenized",
            retry_delay_s=config.retry_delay_s,
        )
        super().__init__(bounds, share)
