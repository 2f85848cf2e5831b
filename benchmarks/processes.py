"""CPU time of processes and of the whole machine, as Linux counts it: who was busy, and who disturbed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# What clock_getcpuclockid(3), which Python lacks, makes of a process id: include/linux/posix-timers_types.h.
_CPU_CLOCK_BITS, _CPU_CLOCK_SCHED = 3, 2
# Fields of the line ``cpu`` of /proc/stat that mean that a core worked, or was taken by another guest.
_BUSY = (0, 1, 2, 5, 6, 7)


@dataclass(frozen=True, kw_only=True)
class CpuUse:
    """What was used over some time.

    Attributes:
        duration_s: that time.
        cpu_s: CPU seconds by process.
        share: CPU seconds by process for each second: 1 is a whole core.
        others_share: the same of everything else on the machine: what the measurement was disturbed by.
    """

    duration_s: float
    cpu_s: Mapping[str, float]
    share: Mapping[str, float]
    others_share: float


class CpuMeter:
    """Measures from its construction on."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """Watch the processes ``pids``, by name; all of them must outlive the measurement."""
        self._pids = dict(pids)
        self._began = time.monotonic()
        self._before = self._read()
        self._machine_before = machine_cpu_s()

    def read(self) -> CpuUse:
        """The use until now."""
        duration_s = time.monotonic() - self._began
        cpu_s = {name: value - self._before[name] for name, value in self._read().items()}
        others_s = machine_cpu_s() - self._machine_before - sum(cpu_s.values())
        return CpuUse(
            duration_s=duration_s,
            cpu_s=cpu_s,
            share={name: value / duration_s for name, value in cpu_s.items()},
            others_share=max(0.0, others_s / duration_s),
        )

    def _read(self) -> dict[str, float]:
        return {name: process_cpu_s(pid) for name, pid in self._pids.items()}


def process_cpu_s(pid: int) -> float:
    """CPU seconds that the process and its threads used so far, to the nanosecond; /proc counts in ticks of 10 ms.

    Raises:
        OSError: it is gone.
    """
    return time.clock_gettime(~pid << _CPU_CLOCK_BITS | _CPU_CLOCK_SCHED)


def machine_cpu_s() -> float:
    """CPU seconds that all cores together worked since the machine started."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0].split()[1:]
    return sum(int(fields[index]) for index in _BUSY) * _TICK_S
