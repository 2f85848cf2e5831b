"""Runs checks at the same time, each bounded: one that hangs is a finding, and keeps nobody else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from cli.doctor.finding import Finding, wrong

Check: TypeAlias = Callable[[], Awaitable[Sequence[Finding]]]

_log = logging.getLogger(__name__)


async def check_up(checks: Mapping[str, Check], *, timeout_s: float) -> list[Finding]:
    """What ``checks`` find, in their order, in little more than ``timeout_s`` seconds."""
    findings = await asyncio.gather(*(_run(name, check, timeout_s) for name, check in checks.items()))
    return [finding for some in findings for finding in some]


async def _run(name: str, check: Check, timeout_s: float) -> Sequence[Finding]:
    try:
        async with asyncio.timeout(timeout_s):
            return await check()
    except TimeoutError:
        return [
            wrong(name, f"no answer within {timeout_s:g} s", "what it asked hangs: look at the kernel's log (dmesg)")
        ]
    except Exception as error:  # noqa: BLE001 - a check ends here; the others' findings must not go with it
        _log.exception("the check of %s failed", name)
        return [wrong(name, f"the check itself failed: {error!r}", "report it: that is a fault of `quartet doctor`")]
