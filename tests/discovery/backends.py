"""The three registries behind one interface, so that one suite can test them all."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Protocol

from quartet.discovery.base import Registry, WorkerKey, WorkerRecord
from quartet.discovery.etcd import EtcdRegistry
from quartet.discovery.etcd_client import EtcdClient, EtcdConfig
from quartet.discovery.file import FileConfig, FileRegistry
from quartet.discovery.record_json import to_json
from tests.discovery.records import TIMEOUT_S
from tests.fakes.memory_registry import MemoryRegistry, MemoryStore

# etcd grants no lease shorter than this with its usual election timeout.
LEASE_S = 2


class Backend(Protocol):
    """One store, and handles on it as separate processes would have."""

    def registry(self, namespace: str = "default") -> Registry:
        """A new handle."""
        ...

    async def store(self, key: WorkerKey, value: bytes) -> None:
        """Put raw bytes where a record belongs, in the default namespace."""
        ...

    async def start_worker(self, record: WorkerRecord) -> None:
        """Register ``record`` in the default namespace from a process that can be killed."""
        ...

    async def kill_worker(self) -> None:
        """Kill that process: it gets no chance to say good-bye."""
        ...

    async def close(self) -> None:
        """Close every handle, and whatever else was started."""
        ...


class MemoryBackend:
    def __init__(self) -> None:
        self._store = MemoryStore()
        self._registries: list[MemoryRegistry] = []
        self._victim: WorkerRecord | None = None

    def registry(self, namespace: str = "default") -> Registry:
        self._registries.append(MemoryRegistry(self._store, namespace=namespace))
        return self._registries[-1]

    async def store(self, key: WorkerKey, value: bytes) -> None:
        self._store.put("default", key, value)

    async def start_worker(self, record: WorkerRecord) -> None:
        self._victim = record
        await self.registry().register(record)

    async def kill_worker(self) -> None:
        # No process can be killed alone here; the end of its lease is what the others would see.
        assert self._victim is not None
        self._store.delete("default", self._victim.key)

    async def close(self) -> None:
        for registry in self._registries:
            await registry.close()


def touch_for_good(path: Path) -> None:
    """Let the file live on as if its worker kept touching it."""
    os.utime(path, (time.time() + 3600, time.time() + 3600))


class FileBackend:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._registries: list[Registry] = []
        self._worker = WorkerProcess("file", str(directory), "default")

    def registry(self, namespace: str = "default") -> Registry:
        config = FileConfig(directory=self._directory, namespace=namespace, ttl_s=LEASE_S, poll_interval_s=0.02)
        self._registries.append(FileRegistry(config))
        return self._registries[-1]

    async def store(self, key: WorkerKey, value: bytes) -> None:
        path = self._directory / "default" / f"{key.role}.{key.worker_id}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
        touch_for_good(path)

    async def start_worker(self, record: WorkerRecord) -> None:
        await self._worker.start(record)

    async def kill_worker(self) -> None:
        await self._worker.kill()

    async def close(self) -> None:
        await self._worker.kill()
        for registry in self._registries:
            await registry.close()


class EtcdBackend:
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        # The server is shared between tests: this one's namespaces are its own.
        self._scope = secrets.token_hex(4)
        self._registries: list[Registry] = []
        self._client = EtcdClient(EtcdConfig(endpoints=(endpoint,)))
        self._worker = WorkerProcess("etcd", endpoint, f"{self._scope}.default")

    def registry(self, namespace: str = "default") -> Registry:
        namespace = f"{self._scope}.{namespace}"
        config = EtcdConfig(endpoints=(self._endpoint,), namespace=namespace, lease_ttl_s=LEASE_S)
        self._registries.append(EtcdRegistry(config))
        return self._registries[-1]

    async def store(self, key: WorkerKey, value: bytes) -> None:
        await self._client.put(f"/quartet/{self._scope}.default/{key.role}/{key.worker_id}", value, lease_id=0)

    async def start_worker(self, record: WorkerRecord) -> None:
        await self._worker.start(record)

    async def kill_worker(self) -> None:
        await self._worker.kill()

    async def close(self) -> None:
        await self._worker.kill()
        for registry in self._registries:
            await registry.close()
        await self._client.close()


class WorkerProcess:
    """One run of ``worker_process``."""

    def __init__(self, kind: str, where: str, namespace: str) -> None:
        module = ("-m", "tests.discovery.worker_process")
        self._arguments = (sys.executable, *module, kind, where, namespace, str(LEASE_S))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, record: WorkerRecord) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*self._arguments, stdin=pipe, stdout=pipe)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(to_json(record))
        self._process.stdin.close()
        async with asyncio.timeout(TIMEOUT_S):
            assert await self._process.stdout.readline() == b"registered\n"

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None
