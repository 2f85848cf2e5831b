"""A router's process that takes longer to end than a drain, and then says so in the file named by its settings."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import yaml

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # it waits for its turn, however early it comes
    settings = yaml.safe_load(Path(sys.argv[2]).read_text())
    print("started", flush=True)
    signal.sigwait({signal.SIGTERM})
    time.sleep(settings["late_s"])
    Path(settings["usage_log"]).write_text("written")
