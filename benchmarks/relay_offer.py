"""Asks the servers whether they offer a way to the tokens, before a load is put on it."""

from __future__ import annotations

import random
from typing import Any, TypeAlias

import grpc

from benchmarks.paced_clock import MAX_STREAMS
from benchmarks.relay_job import Job, Way
from benchmarks.relay_messages import describe, make_start
from quartet.rpc.channels import create_channel
from quartet.v1 import router_pb2, router_pb2_grpc

_TIMEOUT_S = 10.0
# Not built, or not set up.
_ABSENT_CODES = frozenset({grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION})

_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"


async def find_absence(job: Job) -> str | None:
    """What the router says when it doesn't offer the job's way; ``None``: it does.

    Raises:
        grpc.aio.AioRpcError: it fails in any other way.
    """
    async with create_channel(job.router_address, None) as channel:
        router = router_pb2_grpc.RouterServiceStub(channel)
        try:
            if job.way is Way.SESSION:
                call: _Call = router.Session(timeout=_TIMEOUT_S)
                await call.done_writing()
                await call.read()
            elif job.way is not Way.GENERATE:
                await router.Place(_place(), timeout=_TIMEOUT_S)  # nobody takes it up: it ends by itself
        except grpc.aio.AioRpcError as error:
            if error.code() not in _ABSENT_CODES:
                raise
            return describe(error)
    return None


def _place() -> router_pb2.PlaceRequest:
    start = make_start(random.Random(0), seed=MAX_STREAMS, num_prompt_tokens=1, num_output_tokens=1, with_text=False)
    return router_pb2.PlaceRequest(start=start)
