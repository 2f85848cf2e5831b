"""What the processes' own counters say of a phase: was work done twice, and who had to wait?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.scrape import Metrics

_FIRST_ATTEMPT = "first"
# A bucket's bound of the router's histogram: who waited longer did not pass straight through.
_WAITED_OVER_S = "0.01"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Sums over one phase that began and ended with nothing in flight.

    Attributes:
        hand_offs: that ended at the prefill worker, by outcome.
        hand_offs_expired: of these, those that expired.
        preemptions: requests that lost their blocks, at either worker.
        attempts: that the router began, by cause; all but ``first`` are retries.
        prompts_prefilled: prompts that the prefill worker was given.
        prompts_prefilled_twice: of these, those beyond the first attempts at requests.
        tokens_computed_again: tokens prefilled (computed or found in the cache, at either worker) beyond once each; a
            taken-over prompt's one token that decode computes by itself does not count. Tokens of requests that
            ended badly count in.
        tokens_cached: prompt tokens that the prefill worker found in its cache.
        requests_waited: attempts that waited in the router for over 10 ms.
        mean_wait_s: wait for room, over all attempts.
    """

    hand_offs: Mapping[str, int]
    hand_offs_expired: int
    preemptions: int
    attempts: Mapping[str, int]
    prompts_prefilled: int
    prompts_prefilled_twice: int
    tokens_computed_again: int
    tokens_cached: int
    requests_waited: int
    mean_wait_s: float


def collect_evidence(router: Metrics, prefill: Metrics, decode: Metrics, *, prompt_tokens_sent: int) -> Evidence:
    """Read it off what each process's counters grew by; ``prompt_tokens_sent``: of requests that ended well."""
    hand_offs = _counts(prefill, "quartet_worker_hand_offs_total", "outcome")
    attempts = _counts(router, "quartet_router_attempts_total", "cause")
    prompts_prefilled = round(prefill.total("quartet_worker_requests_total"))
    tokens_cached = round(prefill.total("quartet_worker_cached_tokens_total"))
    tokens_prefilled = round(prefill.total("quartet_worker_prompt_tokens_total")) + tokens_cached
    tokens_of_decode = round(decode.total("quartet_worker_prompt_tokens_total"))
    num_taken_over = round(decode.total("quartet_worker_requests_total"))
    num_waits = router.total("quartet_router_queue_seconds_count")
    return Evidence(
        hand_offs=hand_offs,
        hand_offs_expired=hand_offs.get("expired", 0),
        preemptions=round(sum(worker.total("quartet_worker_preemptions_total") for worker in (prefill, decode))),
        attempts=attempts,
        prompts_prefilled=prompts_prefilled,
        prompts_prefilled_twice=max(0, prompts_prefilled - attempts.get(_FIRST_ATTEMPT, 0)),
        tokens_computed_again=tokens_prefilled - prompt_tokens_sent + tokens_of_decode - num_taken_over,
        tokens_cached=tokens_cached,
        requests_waited=round(
            num_waits - router.total("quartet_router_queue_seconds_bucket", le=_WAITED_OVER_S),
        ),
        mean_wait_s=router.total("quartet_router_queue_seconds_sum") / num_waits if num_waits else 0.0,
    )


def _counts(metrics: Metrics, name: str, by: str) -> dict[str, int]:
    return {key: round(value) for key, value in metrics.by_label(name, by).items() if value}
