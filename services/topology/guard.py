"""Runs a program that dies with the process that started it, however that one dies.

    python services/topology/guard.py PARENT_PID PROGRAM ARGUMENT...

It runs before anything of ours is imported: the standard library only, and little of that.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent's life, then become the program."""
    parent_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        # Survives exec. Other systems have nothing like it: there, only an orderly end takes the program along.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent_pid):
        sys.exit("the parent died before its child began")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
