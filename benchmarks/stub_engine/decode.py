"""Run a Decode worker on the stub engine: ``python -m benchmarks.stub_engine.decode --config FILE``."""

from benchmarks.stub_engine.runner import create_engine
from quartet.discovery.base import Role
from services.workers.process import main

if __name__ == "__main__":
    main(Role.DECODE, create_engine)
