"""How long the adapter waits where TensorRT-LLM promises no time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrtllmTimes:
    """Bounds in seconds; tests have shorter ones.

    Attributes:
        warm_up_timeout_s: for the first request, during which TensorRT-LLM tunes its kernels.
        figures_timeout_s: for the first statistics after that; without them the adapter guesses the cache's size.
        canary_interval_s: after this long without output, the adapter sends a canary, a request of its own.
        canary_timeout_s: for the canary to come back, counted anew from any other output.
        encode_timeout_s: for a batch of pictures; an encoder that takes longer counts as hanging.
        watchdog_interval_s: between looks whether the executor has noted that it failed for good.
        check_interval_s: between checks whether the engine has died without a sign.
        abort_timeout_s: for the end of a request that was aborted.
        transfer_timeout_s: for the KV blocks of a cancelled request to come, where the arguments name no time.
        close_timeout_s: for the LLM to shut down.
    """

    warm_up_timeout_s: float = 900.0
    figures_timeout_s: float = 5.0
    canary_interval_s: float = 10.0
    canary_timeout_s: float = 30.0
    encode_timeout_s: float = 120.0
    watchdog_interval_s: float = 0.05
    check_interval_s: float = 1.0
    abort_timeout_s: float = 30.0
    transfer_timeout_s: float = 60.0
    close_timeout_s: float = 10.0
