"""A worker that registers and then only waits to be killed: ``python -m tests.discovery.worker_process``.

Arguments: ``etcd <endpoint>`` or ``file <directory>``, then namespace and lease in seconds; the record is on stdin.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from quartet.discovery.base import Registry
from quartet.discovery.etcd import EtcdRegistry
from quartet.discovery.etcd_client import EtcdConfig
from quartet.discovery.file import FileConfig, FileRegistry
from quartet.discovery.record_json import from_json


def _registry(kind: str, where: str, namespace: str, ttl: str) -> Registry:
    if kind == "etcd":
        return EtcdRegistry(EtcdConfig(endpoints=(where,), namespace=namespace, lease_ttl_s=int(ttl)))
    return FileRegistry(FileConfig(directory=Path(where), namespace=namespace, ttl_s=float(ttl)))


async def _main() -> None:
    registry = _registry(*sys.argv[1:])
    await registry.register(from_json(sys.stdin.buffer.read()))
    print("registered", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
