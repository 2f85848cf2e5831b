"""Measures the memory that loading a checkpoint takes, in a process of its own.

python -m tests.engine.torch.measure_loading SMALL BIG DTYPE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import quartet.engine.torch.loader as loader
from quartet.engine.torch import TorchEngineConfig
from tests.e2e.fork_server import ForkServer


def peak_growth_bytes(fork_server: ForkServer, small: Path, big: Path, dtype: str, log: Path) -> int:
    """Peak resident memory while ``big`` loads and is read, beyond what is needed once: that to load ``small``."""
    arguments = [__name__, str(small), str(big), dtype]
    environment = {"OMP_NUM_THREADS": "1"}
    assert fork_server.spawn(arguments, environment, log).wait(50) == 0, log.read_text()
    return int(log.read_text().splitlines()[-1])


def main() -> None:
    """Print it."""
    torch.set_num_threads(1)
    small, big, dtype = sys.argv[1:]
    loader.load_model(TorchEngineConfig(model_path=small, num_blocks=1))
    before = _status_bytes("VmRSS")
    model = loader.load_model(TorchEngineConfig(model_path=big, num_blocks=1, dtype=dtype)).model
    sum(float(parameter.float().sum()) for parameter in model.parameters())  # every weight is read
    print(_status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
