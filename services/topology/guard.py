"""Runs a program that is killed when its parent process ends, even if the parent is killed itself.

    python services/topology/guard.py PARENT_PID CPUS MEMORY PROGRAM ARGUMENT...

The program and all that it starts run on the CPUs only, as in ``0,3``, and each of their processes allocates at most so
many bytes of private memory; ``-``: any. It starts before every child process, so it imports little, and only from the
standard library.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

_ANY = "-"


def main() -> None:
    """Make this process end with its parent, then execute the program."""
    parent_pid, cpus, memory_bytes, *command = sys.argv[1:]
    if sys.platform == "linux":
        # It survives exec. Other systems have no such call: there the program ends only if the parent ends it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent_pid):
        sys.exit("the parent died before its child began")
    _limit(cpus, memory_bytes)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


def _limit(cpus: str, memory_bytes: str) -> None:
    if cpus != _ANY:
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    if memory_bytes != _ANY:
        import resource  # here, as few processes have such a limit

        # Not RLIMIT_AS: a process that uses CUDA reserves more addresses than any host has memory.
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), int(memory_bytes)))


if __name__ == "__main__":
    main()
