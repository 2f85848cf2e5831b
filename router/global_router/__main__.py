"""Run the global router: ``python -m router.global_router --config FILE [--set NAME.NAME=VALUE ...]``."""

from __future__ import annotations

import argparse
from pathlib import Path

from router.__main__ import run_router
from router.global_router.config import GlobalRouterConfig, load_config
from router.global_router.process import GlobalRouterProcess


def main() -> None:
    """Run one global router from the command line; if it can't start, print one line and exit with 1."""
    parser = argparse.ArgumentParser(
        prog="python -m router.global_router", description="Choose pools for requests and stream answers."
    )
    parser.add_argument("--config", type=Path, required=True, help="pools and grids, as YAML or JSON")
    parser.add_argument("--set", action="append", default=[], metavar="NAME.NAME=VALUE", help="change one setting")
    arguments = parser.parse_args()

    def load() -> GlobalRouterConfig:
        return load_config(arguments.config, arguments.set)

    run_router(load, lambda config: config.router, GlobalRouterProcess, arguments.config)


if __name__ == "__main__":
    main()
