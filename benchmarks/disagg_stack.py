"""What `benchmarks.disagg` compares: one Decode worker that prefills too, and a Prefill worker before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from benchmarks.stack import Stack
from quartet.config import build
from services.topology.topology import DEFAULT_MODEL_PATH, ProcessPlan, Topology

#: Tokens of a block.
BLOCK_SIZE = 32

# Room for the longest prompt and some; what it has of earlier prompts is evicted, as in a worker that runs for long.
_NUM_BLOCKS = 288
_MAX_MODEL_LEN = 4608  # the tiny model's
_DTYPE, _DTYPE_BYTES = "float32", 4
_LOGS = Path(".run")


class Side(StrEnum):
    """Which of the two."""

    AGG = "agg"
    DISAGG = "disagg"


class EngineName(StrEnum):
    """What the workers compute with: nothing at all, or the tiny model in PyTorch."""

    STUB = "stub"
    TINY = "tiny"


@dataclass(frozen=True)
class StackMaker:
    """Makes both sides' stacks; workers find each other in ``discovery_directory``."""

    discovery_directory: Path
    on_progress: Callable[[str], None]

    def make(self, engine: EngineName, side: Side) -> Stack:
        """A stack, not started yet."""
        topology = build(Topology, self._settings(engine, side))
        adapt = _stub_plan if engine is EngineName.STUB else _same_plan
        log = _LOGS / f"benchmark-disagg-{engine}-{side}.log"
        return Stack(topology, log, self.on_progress, adapt=adapt)

    def _settings(self, engine: EngineName, side: Side) -> Mapping[str, object]:
        quiet = {"log": {"level": "warning"}}
        roles = ("prefill", "decode") if side is Side.DISAGG else ("decode",)
        return {
            "namespace": f"{engine}-{side}",
            "discovery": {"kind": "file", "file": {"directory": str(self.discovery_directory)}},
            "engine": {
                "num_threads": 1,
                "dtype": _DTYPE,
                "block_size": BLOCK_SIZE,
                "num_blocks": _NUM_BLOCKS,
                "max_model_len": _MAX_MODEL_LEN,
            },
            "router": {"overrides": {**quiet, "policy": {"local_prefill_max_tokens": 0}}},
            "workers": [{"role": role, "overrides": quiet} for role in roles],
            "drain_timeout_s": 0.5,
        }


def tiny_block_bytes() -> int:
    """Bytes of one block of the tiny model's KV cache."""
    config = json.loads((DEFAULT_MODEL_PATH / "config.json").read_text(encoding="utf-8"))["text_config"]
    num_values = config["num_hidden_layers"] * 2 * BLOCK_SIZE * config["num_key_value_heads"] * config["head_dim"]
    return int(num_values * _DTYPE_BYTES)


def _same_plan(plan: ProcessPlan) -> ProcessPlan:
    return plan


def _stub_plan(plan: ProcessPlan) -> ProcessPlan:
    return replace(plan, module=plan.module.replace("services.", "benchmarks.stub_engine."))
