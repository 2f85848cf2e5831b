"""A worker that prints on which CPUs it runs, and ends."""

import os

print(sorted(os.sched_getaffinity(0)))
