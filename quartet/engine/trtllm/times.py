"""How long the adapter waits for what TensorRT-LLM promises no time for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrtllmTimes:
    """Bounds in seconds; tests have shorter ones.

    Attributes:
        warm_up_timeout_s: for the first request, with which kernels are tuned.
        figures_timeout_s: for its first statistics, after that; without them the size of its cache is guessed.
        canary_interval_s: without anything coming out for so long, a request of the adapter's own is sent.
        canary_timeout_s: within which that has to come back, unless anything else does.
        encode_timeout_s: for a batch of pictures; what takes longer hangs.
        look_interval_s: between looks at whether the engine has died without saying so.
        abort_timeout_s: for the end of a request that was aborted.
        transfer_timeout_s: for the KV blocks of a cancelled request to come, where the arguments name no time.
        close_timeout_s: for the LLM to shut down.
    """

    warm_up_timeout_s: float = 900.0
    figures_timeout_s: float = 5.0
    canary_interval_s: float = 10.0
    canary_timeout_s: float = 30.0
    encode_timeout_s: float = 120.0
    look_interval_s: float = 1.0
    abort_timeout_s: float = 30.0
    transfer_timeout_s: float = 60.0
    close_timeout_s: float = 10.0
