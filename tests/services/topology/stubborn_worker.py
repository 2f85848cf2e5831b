"""A worker's process that does not end on SIGTERM, beside one of its own in another session."""

from __future__ import annotations

import signal
import subprocess
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    below = subprocess.Popen(command, start_new_session=True)
    print(f"started {below.pid}", flush=True)
    below.wait()
