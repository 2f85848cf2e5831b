"""The servers of the relay benchmarks: a Router and one Decode worker on the paced engine, as processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from benchmarks.paced_clock import CLOCK_VARIABLE, PacedClock
from benchmarks.paced_engine import PERIOD
from benchmarks.relay_load import Way
from benchmarks.stack import Stack
from quartet.config import build
from services.topology.topology import ProcessPlan, Topology

ROUTER, DECODE = "router", "decode"
#: The router of the pool behind a global router.
POOL_ROUTER = "router-pool"

_WORKER_ID = "decode-0"
# Room for every request: the benchmark does not measure admission.
_POOL = "pool"
_GLOBAL_ROUTER = {
    "mode": "agg",
    "num_agg_pools": 1,
    "agg_pool_dynamo_namespaces": [_POOL],
    "agg_pool_selection_strategy": {
        **{"ttft_min": 0, "ttft_max": 1000, "ttft_resolution": 1, "itl_min": 0, "itl_max": 1000, "itl_resolution": 1},
        "agg_pool_mapping": [[0]],
    },
}
_NUM_BLOCKS, _MAX_MODEL_LEN = 1 << 20, 1 << 20


class RelayStack(Stack):
    """Both processes, started on entry and ended on exit. Discovery is a directory, so nothing else runs beside them.

    Attributes:
        clock: when the engine emitted which token; ``clock_path`` is its file.
        pids: ``router`` and ``decode``, and with a pool its router, within ``async with``.
    """

    def __init__(
        self, log: Path, on_progress: Callable[[str], None], *, period: int = PERIOD, with_pool: bool = False
    ) -> None:
        """Start nothing before entry. Output goes to the file ``log``; streams get a token every ``period`` steps.

        ``with_pool``: ``router`` is a global router, and the worker is in a pool behind it.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="quartet-relay-"))
        self.clock_path = self._directory / "clock"
        self.clock = PacedClock(self.clock_path, create=True)
        self.clock.set_period(period)
        topology = _topology(self._directory / "workers", with_pool=with_pool)
        super().__init__(topology, log, on_progress, adapt=self._adapt_plan)

    async def __aenter__(self) -> RelayStack:
        """Start both, and wait until the router has all workers. Raises as ``Stack`` does."""
        await super().__aenter__()
        pool = {POOL_ROUTER: self.pids[POOL_ROUTER]} if POOL_ROUTER in self.pids else {}
        self.pids = {ROUTER: self.pids[ROUTER], DECODE: self.pids[_WORKER_ID], **pool}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End both."""
        await super().__aexit__(kind, error, traceback)
        shutil.rmtree(self._directory, ignore_errors=True)

    def address(self, way: Way) -> str:
        """``host:port`` where the router takes requests that come by ``way``."""
        return self.http_address if way is Way.HTTP else self.router_address

    def _adapt_plan(self, plan: ProcessPlan) -> ProcessPlan:
        variables = {**plan.environment, CLOCK_VARIABLE: str(self.clock_path)}
        return replace(plan, module="benchmarks.paced_engine", environment=variables)


def _topology(discovery_directory: Path, *, with_pool: bool) -> Topology:
    settings: dict[str, object] = {
        "namespace": "relay",
        "discovery": {"kind": "file", "file": {"directory": str(discovery_directory)}},
        "engine": {"num_threads": 1, "num_blocks": _NUM_BLOCKS, "max_model_len": _MAX_MODEL_LEN},
        "workers": [{"role": "decode"}],
        "router": {"port": 0, "http_port": 1},  # free ones
        "drain_timeout_s": 0.2,
    }
    if with_pool:
        settings |= {"workers": [{"role": "decode", "pool": _POOL}], "global_router": _GLOBAL_ROUTER}
    return build(Topology, settings)
