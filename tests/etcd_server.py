"""A real etcd process for tests: started on free ports, and killed, wiped or compacted at will."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.topology.launch import free_port

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.02


Post = Callable[[str, dict[str, Any]], object]


def add_user(post: Post, user: str, password: str, prefix: str, permission: str = "READWRITE") -> None:
    """A user of an etcd who has ``permission`` on all below ``prefix``; ``post`` calls a method of its JSON gateway."""
    _add(post, user, password)
    begin, end = prefix.encode(), prefix[:-1].encode() + bytes([ord(prefix[-1]) + 1])
    keys = {"key": b64encode(begin).decode(), "range_end": b64encode(end).decode()}
    post("auth/role/grant", {"name": user, "perm": {"permType": permission, **keys}})


def enable_auth(post: Post, user: str, password: str, prefix: str) -> None:
    """Have an etcd ask for a user, as ``EtcdServer.enable_auth``."""
    add_user(post, user, password, prefix)
    _add(post, "root", password)
    post("auth/enable", {})


def _add(post: Post, user: str, password: str) -> None:
    post("auth/user/add", {"name": user, "password": password})
    post("auth/role/add", {"name": user})
    post("auth/user/grant", {"user": user, "role": user})


class EtcdServer:
    """One single-member etcd on loopback that keeps its ports and its data over restarts.

    Every method blocks until what it promises is true: in a running event loop, call those that wait
    (``start``, ``stop``, ``restart``) with ``asyncio.to_thread`` if the loop has to turn meanwhile.

    Args:
        binary: the etcd program.
        directory: where data and log go; created if absent.
        options: more options of the program, without their dashes.
    """

    def __init__(self, binary: Path, directory: Path, options: Mapping[str, str] | None = None) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._binary = binary
        self._options = options or {}
        self._data_dir = directory / "data"
        self._log = directory / "etcd.log"
        self._peer = f"http://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start the server, on its old data if there is any, and wait until it serves.

        Raises:
            RuntimeError: it ended, or did not serve in 20 s; the message ends with its log.
        """
        assert self._process is None, "already started"
        # etcd reads every option from ETCD_* variables too, and ETCD_ENDPOINTS may be ours.
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, env=env)
        try:
            self._await_health()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End the server in an orderly way. Nothing happens if it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server as a crash would. Nothing happens if it does not run."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Crash and start again on the same data."""
        self.kill()
        self.start()

    def wipe(self) -> None:
        """Crash, lose all data, and start again at the same address: revisions begin at 1."""
        self.kill()
        shutil.rmtree(self._data_dir)
        self.start()

    def pause(self) -> None:
        """Freeze the process: connections stay open and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen process go on."""
        self._signal(signal.SIGCONT)

    def revision(self) -> int:
        """Return the store's current revision."""
        header = self._post("kv/range", {"key": "AA==", "count_only": True})["header"]
        return int(header["revision"])

    def compact(self, revision: int | None = None) -> None:
        """Drop all history before ``revision`` (default: the current one) and wait until it is gone."""
        self._post("kv/compaction", {"revision": str(revision or self.revision()), "physical": True})

    def put(self, key: bytes, value: bytes) -> None:
        """Store any bytes under any bytes, as no client of ours would."""
        self._post("kv/put", {"key": b64encode(key).decode(), "value": b64encode(value).decode()})

    def enable_auth(self, user: str, password: str, prefix: str) -> None:
        """Ask every caller for a user from now on; ``user`` may read and write what is below ``prefix``."""
        enable_auth(self._post, user, password, prefix)

    def add_reader(self, user: str, password: str, prefix: str) -> None:
        """A user who may read what is below ``prefix``; before ``enable_auth``."""
        add_user(self._post, user, password, prefix, "READ")

    def _command(self) -> list[str]:
        client = f"http://{self.endpoint}"
        options = {
            "name": "test",
            "data-dir": str(self._data_dir),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": self._peer,
            "initial-advertise-peer-urls": self._peer,
            "initial-cluster": f"test={self._peer}",
            "heartbeat-interval": "40",  # ms; with the next one a lone member is its leader in a fifth of a second
            "election-timeout": "200",
            "logger": "zap",
            "log-level": "error",
            **self._options,
        }
        return [str(self._binary), *(f"--{name}={value}" for name, value in options.items())]

    def _await_health(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._is_healthy():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"etcd at {self.endpoint} does not serve:\n{self._log.read_text()[-2000:]}")
            time.sleep(_POLL_S)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.endpoint}/health", timeout=1) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError, KeyError):  # not yet listening, or 503 without a leader
            return False

    def _post(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call etcd's JSON gateway, so that this file needs no client of the kind under test."""
        request = urllib.request.Request(f"http://{self.endpoint}/v3/{method}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=_STOP_TIMEOUT_S) as answer:
            reply: dict[str, Any] = json.load(answer)
        return reply

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)  # a frozen process would not end on SIGTERM
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_TIMEOUT_S)
