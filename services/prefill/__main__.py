"""Run a Prefill worker: ``python -m services.prefill --model MODEL``, or ``--config FILE``."""

from quartet.discovery.base import Role
from services.workers.process import main

if __name__ == "__main__":
    main(Role.PREFILL)
