"""Services without the seconds of CPU that their imports take: forked from a process that has imported torch and gRPC.

They are processes as ``python -m services.decode --config FILE`` makes them: of a session, a log and an environment of
their own, killed and signalled alike. So is the command ``quartet``, where it starts services that are forked. What a
person starts, ``quartet up`` and ``python -m``, other tests start so.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import select
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from services.topology import guard
from tests.e2e import forked_python

_REPOSITORY = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
_MAX_REQUEST_BYTES = 1 << 17
#: Runs the command ``quartet`` with a Python of one's choice for the services that it starts.
_QUARTET = "tests.e2e.quartet_with"
#: What services and commands import. It must start no thread: threads do not survive a fork.
_IMPORTED = (
    "services.workers.process",
    "quartet.engine.torch.runner",
    "quartet.engine.torch.encoder_tower",
    "router.process",
    "cli.up",
    "cli.generate",
    "cli.workers",
    "cli.bench.command",
)


class ForkedProcess:
    """What of ``subprocess.Popen`` is of use, for a process that the server has forked. It dies with this object."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that killed it; ``None`` while it runs."""
        return forked_python.exit_code(self._connection) if self._has_ended(0) else None

    def wait(self, timeout: float) -> int:
        """The same, once it has ended. Raises ``subprocess.TimeoutExpired``."""
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return forked_python.exit_code(self._connection)

    def send_signal(self, number: int) -> None:
        """Send it, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the server is about to report it
                os.kill(self.pid, number)

    def _has_ended(self, timeout_s: float) -> bool:
        readable = select.poll()
        readable.register(self._connection, select.POLLIN)
        return bool(readable.poll(timeout_s * 1000))


class ForkServer:
    """The server, for the process that starts it from its main thread and with which it dies. Use it with ``with``.

    Attributes:
        python: a program that runs as ``sys.executable`` does, but has services forked here: for ``quartet up``.
        quartet: the ``quartet`` beside it, where printed lines expect one; it is forked too, and starts services so.
    """

    def __enter__(self) -> Self:
        self._name = f"quartet-fork-server-{os.getpid()}"
        self._directory = tempfile.TemporaryDirectory(prefix="quartet-fork-server-")
        self.python = self._write_python(Path(self._directory.name))
        self.quartet = self._write_quartet()
        command = [sys.executable, "-S", "-E", guard.__file__, str(os.getpid()), sys.executable, "-m", __name__]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(forked_python.address(self._name))
            listener.listen(64)  # those who come during its imports wait
            self._process = subprocess.Popen(
                [*command, str(listener.fileno())],
                cwd=_REPOSITORY,
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[listener.fileno()],
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends, and what it forked with it
        self._process.wait(10)
        self._directory.cleanup()

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedProcess:
        """``python -m ARGUMENTS`` in a new session, with this environment; its output is appended to ``log``."""
        with log.open("ab") as file:
            outputs = [file.fileno()] * 2
            forked = forked_python.fork(self._name, list(arguments), dict(environment), str(_REPOSITORY), outputs)
        return ForkedProcess(*forked)

    def _write_python(self, directory: Path) -> Path:
        real = f"exec {shlex.quote(sys.executable)}"
        forked = f"{real} -S -E {shlex.quote(forked_python.__file__)} {self._name}"
        program = directory / "python"
        program.write_text(
            f'#!/bin/sh\ncase "$1 $2" in\n"-m services."*|"-m router"|"-m {_QUARTET}") {forked} "$@" ;;\n'
            f'*) {real} "$@" ;;\nesac\n'
        )
        program.chmod(0o755)
        return program

    def _write_quartet(self) -> Path:
        python = shlex.quote(str(self.python))
        program = self.python.with_name("quartet")
        program.write_text(f'#!/bin/sh\nexec {python} -m {_QUARTET} {python} "$@"\n')
        program.chmod(0o755)
        return program


class _Server:
    """Forks for each request on a connection of ``listener``; answers the process id, and its code when it ends."""

    def __init__(self, listener: socket.socket) -> None:
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._on(0, lambda: os._exit(0))  # the tests are over; unloading torch would take a second of CPU
        self._on(listener.fileno(), self._accept)

    def run(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _on(self, descriptor: int, act: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        request, outputs, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 2)
        if not request:
            connection.close()
            return
        if (pid := os.fork()) == 0:
            _become(self._pid, outputs, **json.loads(request))
        for output in outputs:
            os.close(output)
        process = os.pidfd_open(pid)
        connection.send(json.dumps(pid).encode())
        self._on(process, lambda: self._ended(pid, process, connection))
        self._on(connection.fileno(), lambda: self._abandoned(process, connection))

    def _ended(self, pid: int, process: int, connection: socket.socket) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._selector.unregister(process)
        os.close(process)
        if connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection.fileno())
            with suppress(BrokenPipeError):
                connection.send(json.dumps(code).encode())
        connection.close()

    def _abandoned(self, process: int, connection: socket.socket) -> None:
        if connection.fileno() >= 0:  # else it has ended just now
            self._selector.unregister(connection.fileno())
            signal.pidfd_send_signal(process, signal.SIGKILL)


def _become(
    server: int, outputs: Sequence[int], arguments: Sequence[str], environment: Mapping[str, str], directory: str
) -> NoReturn:
    """Be the process that ``python -m ARGUMENTS`` would be."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for source, target in zip((os.open(os.devnull, os.O_RDONLY), *outputs), (0, 1, 2), strict=True):
        os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:1] = [directory, *(path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path)]
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
    logging.shutdown()  # as the interpreter does
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _main() -> None:
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    assert threading.active_count() == 1, "threads do not survive a fork"
    gc.freeze()
    _Server(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    _main()
