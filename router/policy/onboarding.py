"""Whether a rank loads what it has of a prompt below the device, or computes it: whichever is sooner, as workers do."""

from __future__ import annotations

from typing import NamedTuple

from router.policy.base import Candidate, Pending


class Start(NamedTuple):
    """How a prompt begins at a rank.

    Attributes:
        num_cached_tokens: its leading tokens that are not computed there.
        onboard_s: seconds until those of them are on the device that lie below it.
    """

    num_cached_tokens: int
    onboard_s: float = 0.0


def start_at(candidate: Candidate, pending: Pending) -> Start:
    """The sooner one of loading all that lies below the device, what comes before the disk's part, and nothing.

    What takes an unknown time counts as on the device. Until steps' times are known, workers load all.
    """
    if pending.is_handed_in:
        return Start(pending.num_tokens - 1)
    num_cached = pending.num_cached_tokens.get(candidate.rank, 0)
    lower = pending.lower_tokens.get(candidate.rank)
    if lower is None:
        return Start(num_cached)
    host_s = lower.num_host * candidate.onboard_time.host_s_per_token
    load_all = Start(num_cached, host_s + lower.num_disk * candidate.onboard_time.disk_s_per_token)
    if not candidate.is_measured:
        return load_all
    load_host = Start(num_cached - lower.num_disk, host_s)
    compute = Start(load_host.num_cached_tokens - lower.num_host)

    def ready_in_s(start: Start) -> float:
        num_missing = max(pending.num_tokens - start.num_cached_tokens, 1)
        prefill_s = candidate.step_time.prefill_in_steps_s(num_missing, candidate.max_step_tokens, 0.0)
        return start.onboard_s + prefill_s

    return min(load_all, load_host, compute, key=ready_in_s)
