"""What TensorRT-LLM takes from the environment of a worker's process: the level of its log, and the ranks of a model.

``trtllm-llmapi-launch COMMAND``, started once for each rank by MPI or Slurm, runs COMMAND on rank 0 alone, without the
variables of MPI, and beside it a server for what COMMAND gives the ranks to do. On every other rank it runs a worker of
that server in place of COMMAND. (NVIDIA/TensorRT-LLM, tensorrt_llm/llmapi/trtllm-llmapi-launch and mgmn_*_node.py.)
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from typing import NoReturn

from quartet.errors import ConfigError
from quartet.telemetry.logging import LogLevel

logger = logging.getLogger(__name__)

_LOG_LEVEL = "TLLM_LOG_LEVEL"

# Set by the launcher, for every rank.
_IS_LAUNCHED, _NUM_RANKS = "TLLM_SPAWN_PROXY_PROCESS", "tllm_mpi_size"

# In the order in which the launcher looks.
_RANK = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_ID")

#: Programs of the package, which are run and never imported: to import them is to run them.
PROGRAMS = _LEADER, _OTHER = "tensorrt_llm.llmapi.mgmn_leader_node", "tensorrt_llm.llmapi.mgmn_worker_node"

# Arguments whose product is the number of ranks that a model takes; the backend _autodeploy has the last one alone.
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "world_size")


def set_log_level(level: LogLevel, variables: MutableMapping[str, str]) -> None:
    """Let TensorRT-LLM log from ``level`` on, unless a variable says otherwise. It reads that when it is imported."""
    variables.setdefault(_LOG_LEVEL, level.upper())


def is_other_rank(variables: Mapping[str, str]) -> bool:
    """Whether this process is a rank of the launcher's other than 0, which does not serve."""
    return variables.get(_IS_LAUNCHED) == "1" and _rank(variables) > 0


def become_other_rank(variables: Mapping[str, str]) -> NoReturn:
    """Go on as the process that the launcher itself runs on such a rank: it works for rank 0 until that has ended."""
    logger.info("rank %d does not serve: it works for rank 0", _rank(variables))
    logging.shutdown()
    os.execve(sys.executable, [sys.executable, "-m", _OTHER], dict(variables))


def num_ranks_of(arguments: Mapping[str, object]) -> int:
    """How many ranks, of one GPU each, a model takes with these ``arguments`` of ``tensorrt_llm.LLM``."""
    sizes = [arguments.get(name) for name in _SIZES]
    return math.prod(size for size in sizes if isinstance(size, int))


def check_ranks(arguments: Mapping[str, object], variables: Mapping[str, str]) -> None:
    """Refuse a model for another number of ranks than there are.

    Args:
        arguments: of ``tensorrt_llm.LLM``.
        variables: of the process that makes it.

    Raises:
        ConfigError: naming ``tensor_parallel_size``. TensorRT-LLM itself would wait for ranks that never come, or each
            of several ranks would load the whole model.
    """
    num_taken = num_ranks_of(arguments)
    takes = f"the model takes {num_taken} ranks (tensor times pipeline times context parallel size)"
    if variables.get(_IS_LAUNCHED) == "1":
        num_ranks = _number(variables.get(_NUM_RANKS, "1"))
        # A single rank starts the others itself, on its own host.
        if num_ranks not in (1, num_taken):
            raise ConfigError(f"tensor_parallel_size: {takes}, and trtllm-llmapi-launch was started for {num_ranks}")
    elif num_taken > 1 and (rank := _rank(variables)) > 0:
        raise ConfigError(
            f"tensor_parallel_size: {takes}, and this process is rank {rank} of several, of which one only may serve: "
            "start them by trtllm-llmapi-launch python -m services.ROLE ..."
        )


def end_other_ranks(variables: Mapping[str, str]) -> None:
    """Have the launcher's server and the other ranks end, as this process, which is rank 0, has failed.

    The launcher itself ends them after a command that succeeded. After one that failed its shell goes no further (``set
    -e``), so that they would wait for ever; newer launchers end them then, too. Returns at once: the server hears it
    when this process has let go of its connection.
    """
    if variables.get(_IS_LAUNCHED) == "1" and _number(variables.get(_NUM_RANKS, "1")) > 1 and not _rank(variables):
        subprocess.Popen([sys.executable, "-m", _LEADER, "--action", "stop"], env=dict(variables))


def _rank(variables: Mapping[str, str]) -> int:
    return next((_number(variables[name]) for name in _RANK if variables.get(name)), 0)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
