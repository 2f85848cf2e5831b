"""What a worker's process and TensorRT-LLM tell each other by variables: the level of logs, and ranks."""

from __future__ import annotations

import re

import pytest

from quartet.engine.trtllm.environment import check_ranks, is_other_rank, set_log_level
from quartet.errors import ConfigError
from quartet.telemetry.logging import LogLevel

#: As the launcher leaves them on rank 0 of four.
LAUNCHED = {"TLLM_SPAWN_PROXY_PROCESS": "1", "tllm_mpi_size": "4"}


@pytest.mark.parametrize("level", LogLevel)
def test_the_level_of_the_log_is_that_of_the_worker_unless_it_is_set(level: LogLevel) -> None:
    variables: dict[str, str] = {}
    set_log_level(level, variables)
    assert variables == {
        "TLLM_LOG_LEVEL": {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR"}[level]
    }
    variables = {"TLLM_LOG_LEVEL": "TRACE"}
    set_log_level(level, variables)
    assert variables == {"TLLM_LOG_LEVEL": "TRACE"}


@pytest.mark.parametrize(
    ("variables", "is_other"),
    [
        ({}, False),
        (LAUNCHED, False),
        ({"SLURM_PROCID": "1"}, False),
        ({**LAUNCHED, "SLURM_PROCID": "1"}, True),
        ({**LAUNCHED, "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "1"}, False),
        ({**LAUNCHED, "SLURM_PROCID": "", "OMPI_COMM_WORLD_RANK": "3"}, True),
        ({**LAUNCHED, "PMI_RANK": "2"}, True),
        ({**LAUNCHED, "PMI_ID": "2"}, True),
    ],
)
def test_a_rank_of_the_launcher_other_than_0_does_not_serve(variables: dict[str, str], *, is_other: bool) -> None:
    assert is_other_rank(variables) is is_other


@pytest.mark.parametrize(
    ("sizes", "variables"),
    [
        ({}, {}),
        ({"tensor_parallel_size": 4}, {}),
        ({"tensor_parallel_size": 4}, LAUNCHED),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, LAUNCHED),
        ({"tensor_parallel_size": 2, "context_parallel_size": 2, "pipeline_parallel_size": None}, LAUNCHED),
        ({"tensor_parallel_size": 4}, {**LAUNCHED, "tllm_mpi_size": "1"}),
        ({"tensor_parallel_size": 4}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}),
        ({"backend": "_autodeploy", "world_size": 4}, LAUNCHED),
        ({}, {"SLURM_PROCID": "3"}),  # workers of one GPU each, started by srun
    ],
)
def test_as_many_ranks_as_the_model_takes_may_serve_it(sizes: dict[str, object], variables: dict[str, str]) -> None:
    check_ranks(sizes, variables)


@pytest.mark.parametrize(
    ("sizes", "variables", "message"),
    [
        ({}, LAUNCHED, "takes 1 ranks (tensor times pipeline times context parallel size), and trtllm-llmapi-launch"),
        ({"tensor_parallel_size": 8}, LAUNCHED, "and trtllm-llmapi-launch was started for 4"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, LAUNCHED, "takes 8 ranks"),
        ({"tensor_parallel_size": 4}, {**LAUNCHED, "tllm_mpi_size": "?"}, "was started for 0"),
        ({"tensor_parallel_size": 4}, {"OMPI_COMM_WORLD_RANK": "2"}, "this process is rank 2 of several"),
    ],
)
def test_another_number_of_ranks_is_refused_by_field(
    sizes: dict[str, object], variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^tensor_parallel_size: .*{re.escape(message)}"):
        check_ranks(sizes, variables)
