"""Runs a program that is killed when its parent process ends, even if the parent is killed itself.

    python services/topology/guard.py PARENT_PID PROGRAM ARGUMENT...

It starts before every child process, so it imports little, and only from the standard library.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Make this process end with its parent, then execute the program."""
    parent_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        # It survives exec. Other systems have no such call: there the program ends only if the parent ends it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent_pid):
        sys.exit("the parent died before its child began")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
