"""A benchmark that ends as its options say: its results, if any, are those of another benchmark."""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--like", default="", help="whose results to write")
    parser.add_argument("--exit-code", type=int, default=0)
    parser.add_argument(
        "--hangs", action="store_true", help="and so does a process that it started, whose id it writes"
    )
    arguments = parser.parse_args()
    if arguments.hangs:
        child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
        arguments.json.with_suffix(".pid").write_text(str(child.pid))
        threading.Event().wait()
    if arguments.like:
        arguments.json.write_text((RESULTS / f"{arguments.like}.json").read_text())
    return int(arguments.exit_code)


if __name__ == "__main__":
    sys.exit(main())
