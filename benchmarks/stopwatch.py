"""Time that something took for reasons of its own: a machine that has other work does not count."""

from __future__ import annotations

import time
from pathlib import Path

_PRESSURE = Path("/proc/pressure/cpu")


class Stopwatch:
    """Runs from the moment it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._stalled_s = _stalled_s()

    @property
    def seconds(self) -> float:
        """How long it has run, without the time in which some process of the machine waited for a CPU.

        Where the kernel does not report that (Linux since 4.20 does), all of the time.
        """
        return time.monotonic() - self._began - (_stalled_s() - self._stalled_s)

    @property
    def stalled_share(self) -> float:
        """What part of its time some process waited for a CPU; 0 where the kernel does not report that."""
        return (_stalled_s() - self._stalled_s) / (time.monotonic() - self._began)


def _stalled_s() -> float:
    # https://docs.kernel.org/accounting/psi.html: "some avg10=0.00 avg60=0.00 avg300=0.00 total=<microseconds>"
    try:
        return int(_PRESSURE.read_text().split("\n", 1)[0].rpartition("total=")[2]) / 1e6
    except OSError:
        return 0.0
