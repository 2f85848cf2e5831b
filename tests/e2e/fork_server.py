"""Workers without the seconds of CPU that importing torch takes: forked from a process that has imported it.

They are processes as ``python -m services.decode --config FILE`` makes them: of a session, a log and an environment of
their own, killed and signalled alike. What a person starts, ``quartet up`` and ``python -m``, other tests start so.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from services.topology import guard

_REPOSITORY = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """What of ``subprocess.Popen`` is of use, for a process that the server has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._has_ended = threading.Event()

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that killed it; ``None`` while it runs."""
        return self._code

    def wait(self, timeout: float) -> int:
        """The same, once it has ended. Raises ``subprocess.TimeoutExpired``."""
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        """Send it, unless it has ended."""
        if self._code is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return  # the server knows, and is about to tell

    def ended(self, code: int) -> None:
        """The server says so."""
        self._code = code
        self._has_ended.set()


class ForkServer:
    """The server, for the process that starts it from its main thread and with which it dies. Use it with ``with``."""

    def __enter__(self) -> Self:
        self._lock = threading.Lock()
        self._forked: dict[int, ForkedProcess] = {}
        self._answer: ForkedProcess | None = None
        self._has_answer = threading.Event()
        command = [sys.executable, "-S", "-E", guard.__file__, str(os.getpid()), sys.executable, "-m", __name__]
        self._process = subprocess.Popen(
            command, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, name="fork server", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends, and what it forked with it
        self._process.wait(10)
        self._reader.join(10)

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedProcess:
        """``python -m ARGUMENTS`` in a new session, with this environment; its output is appended to ``log``."""
        request = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        assert self._process.stdin is not None
        with self._lock:
            self._has_answer.clear()
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            # The first has the imports to wait for.
            assert self._has_answer.wait(_START_TIMEOUT_S), "the fork server does not answer"
            assert self._answer is not None, "the fork server has ended"
            return self._answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            pid, code = json.loads(line)
            if code is None:
                self._answer = self._forked[pid] = ForkedProcess(pid)
                self._has_answer.set()
            else:
                self._forked.pop(pid).ended(code)
        self._answer = None
        self._has_answer.set()
        for process in self._forked.values():
            process.ended(-signal.SIGKILL)


def _serve() -> None:
    """Fork for each line of stdin; tell by lines on stdout who was forked, ``[pid, null]``, and who ended."""
    gc.disable()
    _import_workers()
    gc.freeze()
    # What a worker prints is not for whoever reads the answers.
    answers = os.dup(1)
    os.dup2(2, 1)

    def tell(pid: int, code: int | None) -> None:
        os.write(answers, json.dumps([pid, code]).encode() + b"\n")

    server, requests = os.getpid(), b""
    children: dict[int, int] = {}  # by pidfd
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if (pid := children.pop(key.fd, None)) is not None:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    tell(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    continue
                received = os.read(0, 1 << 16)
                if not received:
                    return
                *lines, requests = (requests + received).split(b"\n")
                for line in lines:
                    if (pid := os.fork()) == 0:
                        os.closerange(3, max(answers, selector.fileno(), *children) + 1)
                        _become(server, **json.loads(line))
                    selector.register(pidfd := os.pidfd_open(pid), selectors.EVENT_READ)
                    children[pidfd] = pid
                    tell(pid, None)


def _import_workers() -> None:
    for name in ("services.workers.process", "quartet.engine.torch.runner", "quartet.engine.torch.encoder_tower"):
        importlib.import_module(name)
    assert threading.active_count() == 1, "threads do not survive a fork"


def _become(server: int, arguments: Sequence[str], environment: Mapping[str, str], log: str) -> NoReturn:
    """Be the process that ``python -m ARGUMENTS`` would be."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    gc.enable()
    sys.argv = list(arguments)
    code: Any = 0
    try:
        if os.getppid() != server:
            sys.exit("the fork server died before its child began")
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter ends
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
    os._exit(0)  # unloading torch takes a second of CPU
