"""gRPC's thread that polls for what its operations came to, started so that it lets the event loop go on."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from grpc.aio import init_grpc_aio, shutdown_grpc_aio

logger = logging.getLogger(__name__)


@contextmanager
def yielding_poller() -> Iterator[None]:
    """Run gRPC, whose poller does not interrupt other threads when it wakes up; within an event loop.

    For each message it wakes up to tell the event loop, and by default the kernel lets it do so at the price of whoever
    runs on that core, mostly the event loop itself, in the middle of its next message. As SCHED_BATCH it waits until
    there is a free core, and then tells of all that has ended at once. A process that runs under another policy than
    the default is left as it is.
    """
    is_default = sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER
    if is_default:
        _schedule(os.SCHED_BATCH)
    try:
        init_grpc_aio()  # the thread has its parent's policy
    finally:
        if is_default:
            _schedule(os.SCHED_OTHER)
    try:
        yield
    finally:
        shutdown_grpc_aio()


def _schedule(policy: int) -> None:
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError as error:  # a sandbox may forbid it
        logger.debug("the scheduling policy stays as it is: %s", error)
