"""How tests reach into the stand-in: gates that hold it, and faults that end it. No sleeps are needed anywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorrt_llm._stand_in.engine import StandInEngine

#: Nothing in a test is held for longer; a gate that was forgotten fails loudly.
WAIT_S = 90.0


class Gate:
    """A gate that threads pass; a test may close it, let some through, and see whether a thread waits."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._passes: int | None = None
        self._num_waiting = 0
        self._listeners: list[Callable[[], None]] = []

    def close(self) -> None:
        """Hold every thread that comes from here on."""
        self._set(0)

    def open(self) -> None:
        """Let all threads pass, those that wait and later ones."""
        self._set(None)

    def let_through(self, num_passes: int = 1) -> None:
        """Let ``num_passes`` pass, now or later; the gate stays closed behind them."""
        with self._condition:
            self._set((self._passes or 0) + num_passes)

    def wait_reached(self) -> None:
        """Return once a thread waits here, or was turned away."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._num_waiting > 0, WAIT_S):
                raise TimeoutError("no thread came to the gate")

    def pass_through(self) -> None:
        """Wait until the gate lets this thread pass."""
        with self._condition:
            self._num_waiting += 1
            self._condition.notify_all()
            try:
                if not self._condition.wait_for(self._take, WAIT_S):
                    raise TimeoutError("the gate was never opened")
            finally:
                self._num_waiting -= 1

    def try_pass(self) -> bool:
        """Pass if the gate is open; a thread that is turned away counts as reached until the gate changes."""
        with self._condition:
            if self._take():
                return True
            self._num_waiting = max(self._num_waiting, 1)
            self._condition.notify_all()
            return False

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever more may pass."""
        with self._condition:
            self._listeners.append(listener)

    def _take(self) -> bool:
        if self._passes is None:
            return True
        if self._passes == 0:
            return False
        self._passes -= 1
        return True

    def _set(self, passes: int | None) -> None:
        with self._condition:
            self._passes = passes
            self._num_waiting = 0 if passes != 0 and self._listeners else self._num_waiting
            self._condition.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


@dataclass
class Faults:
    """What shall go wrong in one engine.

    Attributes:
        death: the engine's thread ends with it at its next step; every request gets it.
        failures: the next requests fail, one message each, as `RequestError`.
        num_lost_events: so many KV events are numbered, but never delivered.
        expire_transfers: what prefill holds is released as if its time were over.
        time_out_requests: all running requests reach the engine's time limit.
    """

    death: BaseException | None = None
    failures: list[str] = field(default_factory=list)
    num_lost_events: int = 0
    expire_transfers: bool = False
    time_out_requests: bool = False


@dataclass(frozen=True)
class Call:
    """One request as the API was given it: `arguments` by name, sampling parameters copied before they were changed."""

    request_id: int
    arguments: dict[str, Any]


class EngineControl:
    """One live engine, in a test's hands.

    Attributes:
        llm: the object that the adapter made.
        args: what it was made with.
        steps: passed once a step; closed, a step hangs.
        transfers: passed once for each pull of KV by this engine; closed, pulls take their time and others run on.
        calls: all requests so far.
    """

    def __init__(self, llm: Any, engine: StandInEngine) -> None:
        self.llm, self.args = llm, llm.args
        self.steps, self.transfers = engine.steps, engine.transfers
        self.calls: list[Call] = []
        self._engine = engine

    @property
    def num_steps(self) -> int:
        """Steps that ended."""
        return self._engine.num_steps

    @property
    def num_held(self) -> int:
        """Prompts (of an encoder: embeddings) that wait to be pulled, whose memory is in use until then."""
        return self._engine.num_held

    @property
    def num_running(self) -> int:
        """Requests that were taken and haven't ended."""
        return self._engine.num_running

    def num_used_blocks(self, rank: int = 0) -> int:
        """Blocks of KV that requests, and prompts waiting to be pulled, hold."""
        return self._engine.num_used_blocks(rank)

    def die(self, error: BaseException | None = None) -> None:
        """End the engine as a crash does."""
        self._engine.inject(
            death=error or Exception("Executor worker returned error: CUDA error: an illegal memory access")
        )

    def lose_rank(self, error: BaseException | None = None) -> None:
        """A rank's process has died: the executor notes that it is done for, and its requests hang."""
        self._engine.note_death_of_rank(error or RuntimeError("MPI worker rank 0 exited unexpectedly"))

    def fail_next_request(self, message: str = "KV cache transfer failed") -> None:
        """The next request that starts fails; later ones don't."""
        self._engine.faults.failures.append(message)

    def lose_events(self, num_events: int) -> None:
        """Number the next events, and drop them."""
        self._engine.inject(num_lost_events=num_events)

    def expire_transfers(self) -> None:
        """Release all that waits to be pulled, as ``kv_transfer_timeout_ms`` does; return when it is done."""
        self._engine.inject(expire_transfers=True)
        self.wait_until(lambda: not self._engine.faults.expire_transfers)

    def time_out_requests(self) -> None:
        """Let all running requests end with ``timeout``."""
        self._engine.inject(time_out_requests=True)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds, which is checked after each round of the engine's loop."""
        self._engine.wait_until(condition, WAIT_S)


class Control:
    """The stand-in in this process.

    Attributes:
        loads: passed by each `LLM(...)` before its weights are there; closed, loading takes its time.
        engines: all engines that loaded, oldest first; ended ones too, until `reset`.
    """

    def __init__(self) -> None:
        self.loads = Gate()
        self.engines: list[EngineControl] = []
        self._load_errors: list[BaseException] = []

    def fail_next_load(self, error: BaseException) -> None:
        """Let the next `LLM(...)` raise ``error`` instead of loading."""
        self._load_errors.append(error)

    def of(self, llm: Any) -> EngineControl:
        """Return the control of ``llm``."""
        return next(engine for engine in self.engines if engine.llm is llm)

    def reset(self) -> None:
        """Shut down what still runs, and forget it and all faults."""
        self.loads.open()
        self._load_errors.clear()
        for engine in self.engines:
            engine.steps.open()
            engine.transfers.open()
            engine.llm.shutdown()
        self.engines.clear()

    def pass_load(self) -> None:
        """Load, as far as a test lets it (called by `LLM`)."""
        self.loads.pass_through()
        if self._load_errors:
            raise self._load_errors.pop(0)


control = Control()
