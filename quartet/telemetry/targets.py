"""Where Prometheus finds the processes of a deployment: the answer of an ``http_sd`` endpoint.

https://prometheus.io/docs/prometheus/latest/http_sd/: a JSON list of groups, each with targets and labels.
"""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

logger = logging.getLogger(__name__)

#: Where routers answer.
TARGETS_PATH = "/prometheus/targets"

# Prometheus asks every minute; an answer of so many takes some 0.1 s of CPU and 1 MiB.
_MAX_TARGETS = 4096


@dataclass(frozen=True, kw_only=True)
class Target:
    """A process that has metrics.

    Attributes:
        address: ``host:port`` of its metrics.
        role: what it does.
        worker_id: its name within ``namespace``; of a router its router id.
        model: the name that it serves; empty: several, or none.
    """

    address: str
    role: str
    worker_id: str
    namespace: str
    model: str = ""


#: The processes, for one who asks; called on a thread. Its argument says whether who asks is on this host.
ListTargets: TypeAlias = Callable[[bool], Sequence[Target]]


def is_near(peer: str, own: str) -> bool:
    """Whether a connection comes from this host; by the IP addresses of its two ends."""
    return peer == own or ipaddress.ip_address(peer.partition("%")[0]).is_loopback


def render_targets(targets: Sequence[Target]) -> bytes:
    """The answer; of more than 4096 targets the first."""
    if len(targets) > _MAX_TARGETS:
        logger.warning("Prometheus is told of %d targets of %d", _MAX_TARGETS, len(targets))
    groups = [{"targets": [target.address], "labels": _labels(target)} for target in targets[:_MAX_TARGETS]]
    return json.dumps(groups).encode()


def _labels(target: Target) -> dict[str, str]:
    values = {
        "role": target.role,
        "worker_id": target.worker_id,
        "namespace": target.namespace,
        "model": target.model,
    }
    return {f"__meta_quartet_{name}": value for name, value in values.items() if value}
