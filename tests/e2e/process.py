"""One service as a real process: started, killed, frozen, asked for its metrics, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.fork_server import ForkedProcess, ForkServer

_POLL_S = 0.05
_SCRAPE_TIMEOUT_S = 90.0
_LOG_TAIL_CHARS = 4000


def wait_until(condition: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    """Look until ``condition`` holds. Raises ``TimeoutError`` with ``what()``, which says how things stand."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what()}")
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class Metrics:
    """One scrape, of which only what is asked for is parsed: a whole one takes 3 to 7 ms of CPU, and tests poll."""

    text: str

    def value(self, name: str, **labels: str) -> float:
        """One sample's value; 0 where it does not exist yet."""
        return self.samples(name).get(frozenset(labels.items()), 0.0)

    def samples(self, name: str) -> Mapping[frozenset[tuple[str, str]], float]:
        """Values of one name, by labels."""
        starts = f"{name}{{", f"{name} "
        lines = "".join(f"{line}\n" for line in self.text.splitlines() if line.startswith(starts))
        families = text_string_to_metric_families(lines)
        return {frozenset(sample.labels.items()): sample.value for family in families for sample in family.samples}


class ServiceProcess:
    """``python -m MODULE --config FILE``, in a session of its own, with its output in a file."""

    def __init__(
        self,
        name: str,
        module: str,
        config: Path,
        *,
        grpc_address: str,
        http_address: str,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        fork_server: ForkServer,
    ) -> None:
        """It runs with ``environment`` beside ours; a ``launcher`` is a module that runs the module that it is given.

        It is forked by ``fork_server``, and dies with that.
        """
        self.name = name
        self.grpc_address = grpc_address
        self.http_address = http_address
        self.log = config.with_suffix(".log")
        self.config = config
        self._arguments: Sequence[str] = (*launcher, module, "--config", str(config))
        self._environment = dict(environment or {})
        self._fork_server = fork_server
        self._process: ForkedProcess | None = None

    @property
    def pid(self) -> int:
        """Its process id, also its session's."""
        assert self._process is not None, f"{self.name} was never spawned"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was spawned and has not ended."""
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Start it, without waiting for anything."""
        assert not self.is_running, f"{self.name} runs already"
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        env |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "GRPC_VERBOSITY": "ERROR"}
        env |= self._environment
        self._process = self._fork_server.spawn(self._arguments, env, self.log)

    def kill(self) -> None:
        """``kill -9`` to it and whatever it started. Nothing happens where it has ended."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):  # it leads no group yet
                os.killpg(self.pid, signal.SIGKILL)
            self.signal(signal.SIGKILL)
            self.wait(60)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Its exit code, once it has ended. Raises ``TimeoutError``."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self.name} runs after {timeout_s:g} s:\n{self.log_tail()}") from error

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until /readyz says so. Raises ``TimeoutError`` or, where it ended, ``RuntimeError`` with its log."""
        wait_until(self._is_ready_or_raise, timeout_s, lambda: f"{self.name} is ready\n{self.log_tail()}")

    def is_ready(self) -> bool:
        """Whether /readyz answers that requests are welcome."""
        with contextlib.suppress(OSError):
            return self._get("/readyz") is not None
        return False

    def metrics(self) -> Metrics:
        """What /metrics says now. Raises ``OSError`` where it does not answer."""
        return Metrics(self._get("/metrics") or "")

    def log_tail(self) -> str:
        """The end of its output."""
        return f"--- {self.log}\n{self.log.read_text(errors='replace')[-_LOG_TAIL_CHARS:]}" if self.log.exists() else ""

    def _is_ready_or_raise(self) -> bool:
        if not self.is_running:
            raise RuntimeError(f"{self.name} ended with {self.wait(60)} before it was ready\n{self.log_tail()}")
        return self.is_ready()

    def _get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://{self.http_address}{path}", timeout=_SCRAPE_TIMEOUT_S) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError:
            return None
