"""Run a Prefill worker on the stub engine: ``python -m benchmarks.stub_engine.prefill --config FILE``."""

from benchmarks.stub_engine.runner import create_engine
from quartet.discovery.base import Role
from services.workers.process import main

if __name__ == "__main__":
    main(Role.PREFILL, create_engine)
