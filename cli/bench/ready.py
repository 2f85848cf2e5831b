"""Waits until a deployment serves: routers that say so, a model with workers, and one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TypeVar

from cli.bench.run import BenchPlan
from cli.bench.workload import IntRange, make_workload
from cli.options import RouterOptions
from cli.output import describe
from quartet.client import QuartetClient, Sampling, WorkerState
from quartet.errors import PermissionDeniedError, ServingError
from quartet.rpc.channels import TlsConfig, is_serving
from quartet.rpc.errors import status_code

_POLL_INTERVAL_S = 0.2
# The request that asks whether it serves: an engine that compiles or tunes at its first request does it then.
_PROMPT_TOKENS, _OUTPUT_TOKENS = 16, 30
# With the plan's seed; loads have others, from 0 on.
_SEED = 2**31
_PASSING = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "NOT_FOUND")

ResultT = TypeVar("ResultT")


class NotReadyError(Exception):
    """The deployment did not serve in time; the message says what was missing last."""


class Wait:
    """The time that a deployment has to become ready, from the start of this object on."""

    def __init__(self, timeout_s: float, report: Callable[[str], None]) -> None:
        """``report`` gets what is missing, whenever that changes. Make it in the event loop that waits."""
        self._timeout_s = timeout_s
        self._end = asyncio.get_running_loop().time() + timeout_s
        self._report = report
        self._missing = ""

    async def find_routers(self, options: RouterOptions) -> list[str]:
        """The addresses of the routers, once one is announced. Raises ``NotReadyError`` and what can't pass."""
        return await self._retry(lambda: asyncio.to_thread(options.addresses))

    async def until_serving(
        self, client: QuartetClient, routers: list[str], tls: TlsConfig | None, plan: BenchPlan
    ) -> None:
        """Return when a router serves, the model has its workers, and a short request was answered.

        Raises ``NotReadyError``, and ``ServingError`` for what no wait mends.
        """
        while missing := await self._retry(lambda: _missing(client, routers, tls, plan.sender.model)):
            await self._pause(missing)
        await self._retry(lambda: self._ask(client, plan))

    async def _retry(self, attempt: Callable[[], Coroutine[None, None, ResultT]]) -> ResultT:
        while True:
            try:
                return await attempt()
            except ServingError as error:
                if status_code(error).name not in _PASSING:
                    raise
                await self._pause(describe(error))

    async def _pause(self, missing: str) -> None:
        if missing != self._missing:
            self._report(f"waiting: {missing}")
            self._missing = missing
        if asyncio.get_running_loop().time() + _POLL_INTERVAL_S > self._end:
            raise NotReadyError(f"not ready within {self._timeout_s:g} s: {missing}")
        await asyncio.sleep(_POLL_INTERVAL_S)

    async def _ask(self, client: QuartetClient, plan: BenchPlan) -> None:
        one_request = replace(
            plan.workload,
            trace=None,
            prompt_tokens=IntRange(_PROMPT_TOKENS, _PROMPT_TOKENS),
            output_tokens=IntRange(_OUTPUT_TOKENS, _OUTPUT_TOKENS),
        )
        request = next(make_workload(one_request, (plan.seed, _SEED)))
        stream = client.generate(
            request.text,
            token_ids=request.token_ids,
            path=plan.sender.path,
            model=plan.sender.model,
            sampling=Sampling(max_tokens=request.num_output_tokens, ignore_eos=True),
            timeout_s=max(self._end - asyncio.get_running_loop().time(), _POLL_INTERVAL_S),
        )
        async with stream:
            async for _ in stream:
                pass


async def _missing(client: QuartetClient, routers: list[str], tls: TlsConfig | None, name: str) -> str:
    """What the deployment lacks; empty: nothing that a router shows. Raises ``ServingError``."""
    models = [model for model in await client.list_models() if name in ("", model.name)]
    if not any(model.num_decode_workers for model in models):
        return f"a decode worker{f' of {name}' if name else ''} that is ready"
    if not any(await asyncio.gather(*(is_serving(address, tls) for address in routers))):
        return "a router that serves"
    try:
        workers = await client.list_workers(name)
    except PermissionDeniedError:
        return ""  # this client may only ask for answers
    return ", ".join(
        f"{worker.record.worker_id} ({worker.state})" for worker in workers if worker.state is WorkerState.JOINING
    )
