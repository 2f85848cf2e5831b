"""A worker on the stand-in of TensorRT-LLM that a test holds and disturbs from outside of its process.

``python -m tests.e2e.stand_in_worker MODULE --config FILE`` is ``python -m MODULE --config FILE`` with a socket beside
``FILE``, which takes the commands of ``StandIn``, and in a decode worker with a hasty canary.
"""

from __future__ import annotations

import json
import runpy
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quartet.engine.trtllm.times import TrtllmTimes

CANARY_INTERVAL_S, CANARY_TIMEOUT_S = 0.5, 3.0
#: Longer than any gate of the stand-in holds.
_CALL_TIMEOUT_S = 100.0


class StandIn:
    """The engine in one worker's process, in a test's hands. Its methods block."""

    def __init__(self, config: Path) -> None:
        """Of the worker that was started with ``config``."""
        self._address = _address(config)

    @property
    def counts(self) -> dict[str, int]:
        """What the engine itself has: ``running``, ``held``, ``used`` (blocks), ``steps``, ``calls``."""
        counts: dict[str, int] = self._call("counts")
        return counts

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs there and no blocks are in use."""
        counts = self.counts
        return counts["running"] == counts["held"] == counts["used"] == 0

    def hold(self, gate: str) -> None:
        """Close the gate ``steps`` or ``transfers``."""
        self._call("hold", gate)

    def wait_reached(self, gate: str) -> None:
        """Return once the engine waits there."""
        self._call("wait_reached", gate)

    def let_through(self, gate: str, num_passes: int) -> None:
        """Let so many pass, and hold the others."""
        self._call("let_through", gate, num_passes)

    def go_on(self, gate: str) -> None:
        """Open the gate."""
        self._call("go_on", gate)

    def die(self) -> None:
        """End the engine as a crash does, and not its process."""
        self._call("die")

    def lose_events(self, num_events: int) -> None:
        """Number the next KV events, and drop them."""
        self._call("lose_events", num_events)

    def fail_next_request(self, message: str) -> None:
        """Fail the next one that starts."""
        self._call("fail_next_request", message)

    def time_out_requests(self) -> None:
        """Let all that run reach the engine's limit of time."""
        self._call("time_out_requests")

    def _call(self, name: str, *arguments: object) -> Any:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(_CALL_TIMEOUT_S)
            peer.connect(self._address)
            peer.sendall(json.dumps([name, *arguments]).encode() + b"\n")
            with peer.makefile() as answers:
                answer = json.loads(answers.readline())
        assert "error" not in answer, f"{name}: {answer}"
        return answer["result"]


class _Server:
    """Answers ``StandIn`` on threads of its own."""

    def __init__(self, config: Path) -> None:
        address = Path(_address(config))
        address.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(address))
        self._socket.listen()

    def start(self) -> None:
        """Answer until the process ends."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            peer, _ = self._socket.accept()
            # One that waits must not keep the next from opening the gate.
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rw") as stream:
            name, *arguments = json.loads(stream.readline())
            try:
                answer = {"result": _COMMANDS[name](*arguments)}
            except Exception as error:  # noqa: BLE001 - the caller gets the error
                answer = {"error": repr(error)}
            stream.write(json.dumps(answer) + "\n")


def _engine() -> Any:
    from tensorrt_llm._stand_in.control import control  # found with a worker's path only

    return control.engines[-1]


def _counts() -> dict[str, int]:
    engine = _engine()
    has_blocks = hasattr(engine.llm._executor, "ranks")
    return {
        "running": engine.num_running,
        "held": engine.num_held,
        "used": engine.num_used_blocks() if has_blocks else 0,
        "steps": engine.num_steps,
        "calls": len(engine.calls),
    }


_COMMANDS: dict[str, Callable[..., object]] = {
    "counts": _counts,
    "hold": lambda gate: getattr(_engine(), gate).close(),
    "wait_reached": lambda gate: getattr(_engine(), gate).wait_reached(),
    "let_through": lambda gate, num_passes: getattr(_engine(), gate).let_through(num_passes),
    "go_on": lambda gate: getattr(_engine(), gate).open(),
    "die": lambda: _engine().die(),
    "lose_events": lambda num_events: _engine().lose_events(num_events),
    "fail_next_request": lambda message: _engine().fail_next_request(message),
    "time_out_requests": lambda: _engine().time_out_requests(),
}


def _address(config: Path) -> str:
    return str(config.with_suffix(".socket"))


def _main() -> None:
    module, _, config = sys.argv[1:]
    # Not in an encode worker, whose tower a late canary ends for good: on a busy machine it may come late.
    if module == "services.decode":
        defaults: Any = TrtllmTimes.__init__.__kwdefaults__
        defaults.update({"canary_interval_s": CANARY_INTERVAL_S, "canary_timeout_s": CANARY_TIMEOUT_S})
    _Server(Path(config)).start()
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
