"""``python -m tests.e2e.quartet_with PYTHON ARGUMENT...`` is ``quartet ARGUMENT...`` whose services PYTHON runs."""

from __future__ import annotations

import sys

from cli.app import main

if __name__ == "__main__":
    sys.executable = sys.argv.pop(1)
    main()
