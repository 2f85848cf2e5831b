"""A worker's process from its command line to its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import NoReturn

import uvloop

from quartet.config import build
from quartet.discovery.base import Role
from quartet.errors import ConfigError, ServingError
from quartet.telemetry.logging import configure
from services.workers.config import WorkerConfig
from services.workers.engines import EngineFactory
from services.workers.flags import CommandLine
from services.workers.process import WorkerProcess

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005


def main(role: Role, engine_factory: EngineFactory | None = None) -> None:
    """Run one worker from the command line; exits with 1 and one line where it can't start or its engine died.

    ``engine_factory`` puts another engine in the place of the one that the configuration names.
    """
    command_line = CommandLine(f"python -m services.{role}", f"Serve the {role} phase.", sys.argv[1:])
    try:
        config = build(WorkerConfig, command_line.settings())
        configure(config.log)
        # The engine's thread runs Python too: with the default of 5 ms the loop lags behind it.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        uvloop.run(_run(config, role, engine_factory))
    except (ConfigError, ServingError) as error:
        logger.error("%s: %s", role, command_line.named(_with_field(error)))
        _leave(1)
    _leave(0)


def _with_field(error: ConfigError | ServingError) -> str:
    field = error.field if isinstance(error, ServingError) else None
    return str(error) if field is None else f"{field}: {error}"


def _leave(code: int) -> NoReturn:
    # Everything of ours is closed. Unloading torch and a model, as an orderly exit does, takes a second of CPU. An
    # engine that could not be closed in time has said so, and its processes are for whoever started this one to find.
    logging.shutdown()
    os._exit(code)


async def _run(config: WorkerConfig, role: Role, engine_factory: EngineFactory | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await WorkerProcess(config, role, engine_factory).run(stop)
