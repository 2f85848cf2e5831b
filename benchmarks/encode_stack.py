"""What `benchmarks.encode` asks: an Encode, a Prefill and a Decode worker with the tiny model, behind a Router."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.stack import Stack
from quartet.config import build
from services.topology.topology import Topology

#: The Encode worker's id.
ENCODE = "encode-0"
#: Tokens of a block, of KV and of embeddings.
BLOCK_SIZE = 32

_LOG = Path(".run/benchmark-encode.log")


def make_stack(discovery_directory: Path, on_progress: Callable[[str], None], *, log: Path = _LOG) -> Stack:
    """A stack, not started yet: workers find each other in that directory, output goes to the file ``log``."""
    quiet = {"log": {"level": "warning"}}
    settings = {
        "namespace": "encode",
        "discovery": {"kind": "file", "file": {"directory": str(discovery_directory)}},
        "engine": {"dtype": "float32", "num_threads": 1, "block_size": BLOCK_SIZE},
        "router": {"overrides": {**quiet, "policy": {"local_prefill_max_tokens": 0}}},
        "workers": [{"role": role, "overrides": quiet} for role in ("encode", "prefill", "decode")],
        "drain_timeout_s": 0.5,
    }
    return Stack(build(Topology, settings), log, on_progress)
