"""Ranks that ``trtllm-llmapi-launch`` has started, as `LLM` finds them."""

from __future__ import annotations

import os


def check_launch(world_size: int) -> None:
    """Refuse a model of ``world_size`` ranks if the launcher has started another number of them, more than one."""
    if os.environ.get("TLLM_SPAWN_PROXY_PROCESS") != "1":
        return
    num_ranks = int(os.environ.get("tllm_mpi_size") or 1)  # noqa: SIM112 - the launcher writes it so
    if num_ranks > 1 and num_ranks != world_size:
        raise RuntimeError(f"{num_ranks} ranks were started for a model of {world_size}")
    if num_ranks > 1 and not os.environ.get("TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"):
        raise RuntimeError("nothing says where the ranks' server is")
