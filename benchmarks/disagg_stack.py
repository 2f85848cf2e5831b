"""What `benchmarks.disagg` compares: one Decode worker that prefills too, and a Prefill worker before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from benchmarks.stack import Stack
from models.random_llama import LlamaShape, write_random_llama
from quartet.config import build
from services.plan import ProcessPlan
from services.topology import Topology

#: Tokens of a block.
BLOCK_SIZE = 32

# Room for the longest prompt and some; what it has of earlier prompts is evicted, as in a worker that runs for long.
_NUM_BLOCKS = 288
_MAX_MODEL_LEN = 8192
_MODEL = Path(".run/models/random-llama-8k")
_LOGS = Path(".run")


class Side(StrEnum):
    """Which of the two."""

    AGG = "agg"
    DISAGG = "disagg"


class EngineName(StrEnum):
    """What the workers compute with: nothing at all, or the small random model in PyTorch."""

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
            "model": {"path": str(_MODEL)},
            "engine": {
                "num_threads": 1,
                "block_size": BLOCK_SIZE,
                "num_blocks": _NUM_BLOCKS,
                "max_model_len": _MAX_MODEL_LEN,
            },
            "router": {"overrides": {**quiet, "policy": {"local_prefill_max_tokens": 0}}},
            "workers": [{"role": role, "overrides": quiet} for role in roles],
            "drain_timeout_s": 0.5,
        }


def make_model() -> None:
    """Write the small random model, made for longer prompts than usual, where it is not there yet."""
    if not (_MODEL / "model.safetensors").is_file():
        write_random_llama(_MODEL, shape=LlamaShape(max_position_embeddings=_MAX_MODEL_LEN))


def _same_plan(plan: ProcessPlan) -> ProcessPlan:
    return plan


def _stub_plan(plan: ProcessPlan) -> ProcessPlan:
    return replace(plan, module=plan.module.replace("services.", "benchmarks.stub_engine."))
