"""Run a consolidator: ``python -m services.consolidator --source vllm=tcp://127.0.0.1:5557``, or ``--config FILE``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop

from quartet.config import Value, build, load_yaml, override, with_value
from quartet.errors import ConfigError
from quartet.supervision import TaskEndedError, end_process_within
from quartet.telemetry.logging import configure
from services.consolidator.config import ENABLE, ConsolidatorConfig, settings_of_environment
from services.consolidator.process import ConsolidatorProcess

logger = logging.getLogger("consolidator")

# A consolidator that failed has this long to close everything.
_CLOSE_TIMEOUT_S = 10.0


def main() -> None:
    """Run one consolidator from the command line; if it can't start, print one line and exit with 1."""
    arguments = parse(sys.argv[1:])
    try:
        config = build(ConsolidatorConfig, read_settings(arguments, os.environ))
        configure(config.log)
        if not config.is_enabled:
            logger.info("is not enabled (is_enabled, %s)", ENABLE)
            return
        uvloop.run(_run(config))
    except (ConfigError, TaskEndedError) as error:
        logger.error("%s", error)
        sys.exit(1)


def read_settings(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Value]:
    """The settings: of the variables, then the file, then the flags; later values win. Raises ``ConfigError``."""
    settings = settings_of_environment(environment)
    file = {} if arguments.config is None else load_yaml(arguments.config)
    for name, value in file.items():
        if isinstance(value, Mapping):  # such as `output`, of which a file may say a part
            for below, part in value.items():
                settings = with_value(settings, f"{name}.{below}", part)
        else:
            settings[name] = value
    if arguments.source:
        settings["sources"] = [_source(text) for text in arguments.source]
    if arguments.address is not None:
        settings = with_value(settings, "output.address", arguments.address)
    if arguments.replay_port is not None:
        settings = with_value(settings, "output.replay_port", arguments.replay_port)
    for assignment in arguments.set:
        settings = override(settings, assignment)
    return settings


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line."""
    return _parser().parse_args(arguments)


def _source(text: str) -> dict[str, Value]:
    kind, equals, endpoints = text.partition("=")
    if not equals:
        raise ConfigError(f"--source: {text!r} must have the form KIND=ENDPOINT or KIND=ENDPOINT,REPLAY_ENDPOINT")
    endpoint, _, replay_endpoint = endpoints.partition(",")
    return {"kind": kind, "endpoint": endpoint, "replay_endpoint": replay_endpoint}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services.consolidator", description="Make one feed of several sources' KV events."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="KIND=ENDPOINT[,REPLAY_ENDPOINT]",
        help="a feed to read, of quartet, vllm, trtllm or kvbm; may be given several times",
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="where the one feed is published")
    parser.add_argument("--replay-port", type=int, metavar="PORT", help="where its last batches can be asked for")
    parser.add_argument("--set", action="append", default=[], metavar="NAME.NAME=VALUE", help="change one setting")
    return parser


async def _run(config: ConsolidatorConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await ConsolidatorProcess(config, on_failure=lambda: end_process_within(_CLOSE_TIMEOUT_S)).run(stop)


if __name__ == "__main__":
    main()
