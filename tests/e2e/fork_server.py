"""Services without the seconds of CPU that their imports take: forked from a process that has imported torch and gRPC.

They are processes as ``python -m services.decode --config FILE`` makes them: of a session, a log and an environment of
their own, killed and signalled alike. So is the command ``quartet``, where it starts services that are forked. What a
person starts, ``quartet up`` and ``python -m``, other tests start so.
"""

from __future__ import annotations

import ctypes
import errno
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
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from tests.e2e import forked_python

_REPOSITORY = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
_MAX_REQUEST_BYTES = 1 << 17
#: For the imports, on a busy machine; what the time limit of a test leaves.
_JOIN_TIMEOUT_S = 170.0
#: What who needs the server sends, and its answer.
_HOLD = b"hold"
#: Runs the command ``quartet`` with a Python of one's choice for the services that it starts.
_QUARTET = "tests.e2e.quartet_with"
#: Looks at what TensorRT-LLM has.
_DOCTOR = "quartet.engine.trtllm.doctor"
#: What services and commands import. It must start no thread: threads do not survive a fork.
_IMPORTED = (
    "services.workers.process",
    "quartet.engine.torch.runner",
    "quartet.engine.torch.encoder_tower",
    "router.process",
    "router.global_router.process",
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
    """The server, for a test process; processes that name it alike share it. Use it with ``with``.

    The first of them starts it, and it ends with the last. What it has forked dies with who asked for that.

    Attributes:
        python: a program that runs as ``sys.executable`` does, but has services and what benchmarks start forked here.
        quartet: the ``quartet`` beside it, where printed lines expect one; it is forked too, and starts services so.
    """

    def __init__(self, name: str) -> None:
        self._name = f"quartet-fork-server-{name}"

    def __enter__(self) -> Self:
        self._hold = self._join_or_start()
        self._directory = tempfile.TemporaryDirectory(prefix="quartet-fork-server-")
        self.python = self._write_python(Path(self._directory.name))
        self.quartet = self._write_quartet()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hold.close()  # it ends, and what it forked with it, unless others hold it
        self._directory.cleanup()

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedProcess:
        """``python -m ARGUMENTS`` in a new session, with this environment; its output is appended to ``log``."""
        with log.open("ab") as file, open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), file.fileno(), file.fileno()]
            forked = forked_python.fork(self._name, list(arguments), dict(environment), str(_REPOSITORY), streams)
        return ForkedProcess(*forked)

    def _join_or_start(self) -> socket.socket:
        """A connection that keeps the server alive."""
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                try:
                    listener.bind(forked_python.address(self._name))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                        raise
                else:
                    return _start(listener)
            if (hold := _join(self._name)) is not None:
                return hold

    def _write_python(self, directory: Path) -> Path:
        real = f"exec {shlex.quote(sys.executable)}"
        forked = f"{real} -S -E {shlex.quote(forked_python.__file__)} {self._name}"
        program = directory / "python"
        program.write_text(
            '#!/bin/sh\ncase "$1 $2" in\n'
            '"-m services."*|"-m benchmarks."*|"-m router"|"-m router.global_router"|'
            f'"-m {_DOCTOR}"|"-m {_QUARTET}") {forked} "$@" ;;\n'
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


def _start(listener: socket.socket) -> socket.socket:
    """Start the server that accepts from ``listener``. Returns a connection that keeps it alive."""
    listener.listen(64)  # those who come during its imports wait
    ours, its = socket.socketpair()
    with its:
        subprocess.run(
            [sys.executable, "-m", __name__, str(listener.fileno())],
            cwd=_REPOSITORY,
            stdin=its,
            start_new_session=True,
            pass_fds=[listener.fileno()],
            check=True,
            timeout=_JOIN_TIMEOUT_S,
        )
    return ours


def _join(name: str) -> socket.socket | None:
    """A connection that keeps the running server alive; ``None`` if it is about to end, or not listening yet."""
    hold = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hold.settimeout(_JOIN_TIMEOUT_S)
    try:
        hold.connect(forked_python.address(name))
        hold.send(_HOLD)
        if hold.recv(len(_HOLD)) == _HOLD:
            return hold
    except ConnectionError:
        pass
    hold.close()
    return None


class _Server:
    """Forks for each request on a connection of ``listener``; answers the process id, and its code when it ends.

    It ends when nobody holds it: its standard input or a connection on which ``_HOLD`` came, until that is closed.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._num_holders = 0
        self._hold(0)
        self._on(listener.fileno(), self._accept)

    def run(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _hold(self, holder: int) -> None:
        self._num_holders += 1
        self._on(holder, lambda: self._let_go(holder))

    def _let_go(self, holder: int) -> None:
        self._selector.unregister(holder)
        self._num_holders -= 1
        if not self._num_holders:
            os._exit(0)  # the tests are over; unloading torch would take a second of CPU

    def _on(self, descriptor: int, act: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        request, streams, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 3)
        if not request:
            connection.close()
            return
        if request == _HOLD:
            with suppress(BrokenPipeError):
                connection.send(_HOLD)
            self._hold(connection.detach())
            return
        if (pid := os.fork()) == 0:
            _become(self._pid, streams, **json.loads(request))
        for stream in streams:
            os.close(stream)
        process = os.pidfd_open(pid)
        with suppress(BrokenPipeError):  # who asked has gone: `_abandoned` ends the process
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
    server: int, streams: Sequence[int], arguments: Sequence[str], environment: Mapping[str, str], directory: str
) -> NoReturn:
    """Be the process that ``python -m ARGUMENTS`` would be."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for source, target in zip(streams, (0, 1, 2), strict=True):
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


def _load_a_model() -> None:
    """Fill what transformers and torch keep for the next model, or each worker takes a third longer for its own."""
    from quartet.engine.torch.config import TorchEngineConfig
    from quartet.engine.torch.runner import TorchRunner
    from tests import tiny

    TorchRunner(TorchEngineConfig(model_path=str(tiny.CHECKPOINT), num_blocks=1)).close()


def _main() -> None:
    if os.fork():
        os._exit(0)  # it outlives who starts it, if others hold it
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    _load_a_model()
    assert threading.active_count() == 1, "threads do not survive a fork"
    gc.freeze()
    _Server(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    _main()
