"""Statistics of one step, as upstream's JSON has them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorrt_llm._stand_in.ranks import Rank
from tensorrt_llm._stand_in.request import Request, RequestState
from tensorrt_llm._stand_in.switches import SWITCHES


@dataclass
class StepRecord:
    """What one step did."""

    number: int
    num_requests: int
    num_context: int = 0
    num_context_tokens: int = 0
    num_generating: int = 0

    def as_dict(self, args: Any, left: Sequence[Request], ranks: Sequence[Rank], latency_ms: float) -> dict[str, Any]:
        """Return the record; `left` are the requests that haven't ended."""
        num_queued = sum(request.state is RequestState.QUEUED for request in left)
        sizes = {"Static": args.max_batch_size, "TunerRecommended": 0, "Runtime": args.max_batch_size}
        tokens = {"Static": args.max_num_tokens, "TunerRecommended": 0, "Runtime": args.max_num_tokens}
        record: dict[str, Any] = {
            "iter": self.number,
            "timestamp": datetime.datetime.now(tz=datetime.UTC).strftime("%m-%d-%Y %H:%M:%S.%f"),
            "iterLatencyMS": latency_ms,
            "newActiveRequestsQueueLatencyMS": 0.0,
            "numNewActiveRequests": self.num_context,
            "numActiveRequests": len(left) - num_queued,
            "numQueuedRequests": num_queued,
            "numCompletedRequests": self.num_requests - len(left),
            "maxNumActiveRequests": args.max_batch_size,
            **{f"maxBatchSize{name}": value for name, value in sizes.items()},
            **{f"maxNumTokens{name}": value for name, value in tokens.items()},
            "gpuMemUsage": 0,
            "cpuMemUsage": 0,
            "pinnedMemUsage": 0,
            "inflightBatchingStats": {
                "numScheduledRequests": self.num_context + self.num_generating,
                "numContextRequests": self.num_context,
                "numGenRequests": self.num_generating,
                "numPausedRequests": 0,
                "numCtxTokens": self.num_context_tokens,
                "microBatchId": 0,
                "avgNumDecodedTokensPerIter": 1.0 if self.num_generating else 0.0,
            },
        }
        if not SWITCHES.no_kv_cache_stats:
            record["kvCacheStats"] = ranks[0].kv_stats()
        if args.enable_iter_req_stats:
            record["requestStats"] = [{"id": request.request_id, "stage": request.state.name} for request in left]
        return record
