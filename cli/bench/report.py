"""The JSON: what was run, of which code, where, when, against what, and what came out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from cli.bench.result import PointResult
from cli.bench.run import BenchPlan
from quartet.client import Model
from quartet.telemetry.provenance import read_commit, read_machine, read_versions

_PACKAGES = ("quartet", "grpcio", "protobuf", "uvloop", "numpy")


class BenchReport:
    """One command's run, from its construction to ``finish``."""

    def __init__(self, command: str, plan: BenchPlan, *, trace: str | None) -> None:
        """Begin the clock; ``trace`` names the file of the workload's trace."""
        self._command = command
        self._plan = plan
        self._trace = trace
        self._started_at = datetime.now(UTC)
        self._began = time.monotonic()

    def finish(self, model: Model, results: Sequence[PointResult]) -> Mapping[str, object]:
        """The whole report; docs/bench.md tells its keys, which stay."""
        return {
            "benchmark": "bench",
            "command": self._command,
            "started_at": self._started_at.isoformat(timespec="seconds"),
            "duration_s": time.monotonic() - self._began,
            "commit": asdict(read_commit()),
            "versions": read_versions(_PACKAGES),
            "machine": asdict(read_machine()),
            "model": {
                "name": model.name,
                "fingerprint": model.fingerprint,
                "num_prefill_workers": model.num_prefill_workers,
                "num_decode_workers": model.num_decode_workers,
            },
            "path": self._plan.sender.path.value,
            "workload": self._workload(),
            "limits": asdict(self._plan.limits),
            "is_interrupted": any(result.is_interrupted for result in results),
            "points": [asdict(result) for result in results],
        }

    def _workload(self) -> Mapping[str, object]:
        workload = self._plan.workload
        has_lengths = workload.trace is None
        return {
            "prompt_tokens": str(workload.prompt_tokens) if has_lengths else None,
            "output_tokens": str(workload.output_tokens) if has_lengths else None,
            "trace": self._trace,
            "is_text": workload.is_text,
            "temperature": self._plan.sender.temperature,
            "seed": self._plan.seed,
        }
