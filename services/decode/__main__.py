"""Run a Decode worker: ``python -m services.decode --model MODEL``, or ``--config FILE``."""

from quartet.discovery.base import Role
from services.workers.process import main

if __name__ == "__main__":
    main(Role.DECODE)
