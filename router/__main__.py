"""Run the router: ``python -m router --config FILE [--set NAME.NAME=VALUE ...]``."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import uvloop

from quartet.config import build, load_yaml, override
from quartet.errors import ConfigError, ServingError
from quartet.rpc.channels import yielding_poller
from quartet.supervision import TaskEndedError, end_process_within
from quartet.telemetry.logging import configure
from router.config import RouterConfig
from router.process import RouterProcess
from router.reload import ConfigFile

logger = logging.getLogger("router")

ConfigT = TypeVar("ConfigT")

# `M_MMAP_THRESHOLD` of glibc's `mallopt`, and its own value for it.
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 128 << 10

# Reference counts free most of what requests make, so the garbage collector finds little. With the default threshold of
# 700 new objects it takes 5 % of the router's CPU time under load, with this threshold half of that.
_COLLECTED_AT_NUM_OBJECTS = 10_000

# A router that failed has its drain and this long to close everything.
_CLOSE_TIMEOUT_S = 20.0
# Threads lay out long chats in Python. With the default of 5 ms the event loop waits that long at each turn.
_SWITCH_INTERVAL_S = 0.0005


def main() -> None:
    """Run one router from the command line; if it can't start, print one line and exit with 1."""
    parser = argparse.ArgumentParser(prog="python -m router", description="Place requests and stream answers.")
    parser.add_argument("--config", type=Path, help="the router's YAML file; without one, all defaults")
    parser.add_argument("--set", action="append", default=[], metavar="NAME.NAME=VALUE", help="change one setting")
    arguments = parser.parse_args()

    def load() -> RouterConfig:
        settings = {} if arguments.config is None else load_yaml(arguments.config)
        for assignment in arguments.set:
            settings = override(settings, assignment)
        return build(RouterConfig, settings)

    run_router(load, lambda config: config, RouterProcess, arguments.config)


def run_router(
    load: Callable[[], ConfigT],
    router_of: Callable[[ConfigT], RouterConfig],
    make_process: Callable[[ConfigT, Callable[[], None]], RouterProcess],
    path: Path | None,
) -> None:
    """Run the process that ``make_process`` makes of what ``load`` reads; if it can't start, exit with 1.

    ``router_of`` gives the part of the configuration that all routers have. What may change of it in the file at
    ``path`` is taken over when that changes.
    """
    try:
        config = load()
        router = router_of(config)
        configure(router.log)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        return_freed_prompts()
        limit_s = router.drain_timeout_s + _CLOSE_TIMEOUT_S
        uvloop.run(
            _run(
                lambda: make_process(config, lambda: end_process_within(limit_s)),
                None if path is None else ConfigFile(path, config, load, router_of),
            )
        )
    except (ConfigError, ServingError, TaskEndedError) as error:
        logger.error("%s", error)
        _fail()
    except Exception:  # the process ends here
        logger.exception("ended by an unexpected error")
        _fail()


def return_freed_prompts() -> None:
    """Make glibc give the memory of each freed block of over 128 KiB back at once: a long prompt is such a block.

    By itself it raises that threshold to the largest block that was ever freed, and then keeps what is not at the end
    of the heap: a router kept 300 MB after a flood. Mapping a block afresh costs less than a tenth of what reading a
    prompt of its size does. Another C library lacks the function.
    """
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        set_option(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


async def _run(make_process: Callable[[], RouterProcess], config_file: ConfigFile[Any] | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if config_file is not None:
        loop.add_signal_handler(signal.SIGHUP, config_file.ask)
    # The modules' some 90,000 objects stay for ever. One walk over them stops all tokens for 30 ms.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTED_AT_NUM_OBJECTS)
    with yielding_poller():
        await make_process().run(stop, config_file)


def _fail() -> NoReturn:
    # An orderly exit waits for threads, and one of them may hang.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
