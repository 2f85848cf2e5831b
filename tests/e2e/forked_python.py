"""Stands in for ``python -m MODULE ARGUMENTS``: the module runs in a process that the fork server forks.

    python -S -E tests/e2e/forked_python.py SERVER -m MODULE ARGUMENTS...

To its parent it is that process: it passes SIGTERM and SIGINT on, input, output and the end are the forked process's,
and SIGKILL ends both. But SIGSTOP stops this one only, and its CPU time and memory are not the forked one's. It starts
often, so it imports little, and only from the standard library.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

_MAX_REQUEST_BYTES = 1 << 17


def fork(
    server: str, arguments: list[str], environment: dict[str, str], directory: str, streams: list[int]
) -> tuple[socket.socket, int]:
    """Have ``server`` run ``python -m ARGUMENTS`` in ``directory``, with ``streams`` as stdin, stdout and stderr.

    Returns:
        The connection, from which ``exit_code`` reads, and whose end kills the process; and the process's id.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address(server))
    request = {"arguments": arguments, "environment": environment, "directory": directory}
    socket.send_fds(connection, [json.dumps(request).encode()], streams)
    return connection, json.loads(connection.recv(_MAX_REQUEST_BYTES))


def exit_code(connection: socket.socket) -> int:
    """The code, or minus the signal, with which the process ended. Blocks until then; may be called again."""
    answer = connection.recv(_MAX_REQUEST_BYTES, socket.MSG_PEEK)
    # The server ended, and took the process along.
    return json.loads(answer) if answer else -signal.SIGKILL


def address(server: str) -> str:
    """Of its socket."""
    return f"\0{server}"


def main() -> None:
    """Run until the forked process has ended, and end as it did."""
    server, _, *arguments = sys.argv[1:]
    connection, pid = fork(server, arguments, dict(os.environ), os.getcwd(), [0, 1, 2])

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)

    passed_on = (signal.SIGTERM, signal.SIGINT)
    for number in passed_on:
        signal.signal(number, pass_on)
    code = exit_code(connection)
    if code < 0:
        for number in passed_on:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
