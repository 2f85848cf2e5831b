"""A Hugging Face Hub of one repository, over real HTTP: whole files and ranges, and connections that break."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPOSITORY = "org/name"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the Hub has, and what it was asked.

    Attributes:
        break_after: file name to a number of bytes after which the next answer with it breaks off, once.
        hang_after: file name to a number of bytes after which the next answer with it stops, until its reader is gone.
        has_hung: set once one did.
        damaged: names of files whose next answer has a wrong byte, once.
        ranges: file name and ``Range`` header of each download.
        refusal: status and error code of every answer; ``None``: it answers.
    """

    files: dict[str, bytes]
    break_after: dict[str, int] = field(default_factory=dict)
    hang_after: dict[str, int] = field(default_factory=dict)
    has_hung: threading.Event = field(default_factory=threading.Event)
    damaged: set[str] = field(default_factory=set)
    ranges: list[tuple[str, str | None]] = field(default_factory=list)
    refusal: tuple[int, str] | None = None
    url: str = ""

    def variables(self, home: Path) -> dict[str, str]:
        """The environment of a process that uses this Hub and keeps its cache in ``home``."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }


@contextmanager
def serve_hub(folder: Path) -> Iterator[Hub]:
    """Serve the files of ``folder``; safetensors are large ones, whose digest is a SHA-256."""
    hub = Hub({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self._answer(has_body=False)

    def do_GET(self) -> None:
        """Answer."""
        self._answer(has_body=True)

    def log_message(self, *_: object) -> None:
        """Be silent."""

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        api, files = f"/api/models/{REPOSITORY}", f"/{REPOSITORY}/resolve/{COMMIT}/"
        if self.served.refusal is not None:
            status, code = self.served.refusal
            self._json({"error": "refused"}, status, code)
        elif path == f"{api}/revision/main":
            self._json({"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self._files]})
        elif path == f"{api}/tree/{COMMIT}":
            self._json([self._entry(name) for name in self._files])
        elif path.startswith(files) and path.removeprefix(files) in self._files:
            self._file(path.removeprefix(files), has_body=has_body)
        else:
            self._json({"error": "not found"}, 404, "RepoNotFound")

    @property
    def _files(self) -> dict[str, bytes]:
        return self.served.files

    def _json(self, value: Any, status: int = 200, error_code: str | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        if error_code is not None:
            self.send_header("X-Error-Code", error_code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _entry(self, name: str) -> dict[str, Any]:
        content = self._files[name]
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _git_digest(content)}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": _etag(name, content), "size": len(content), "pointerSize": 134}
        return entry

    def _file(self, name: str, *, has_body: bool) -> None:
        content, asked = self._files[name], self.headers.get("Range")
        first = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{_etag(name, content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if not has_body:
            return
        self.served.ranges.append((name, asked))
        body = content[first:]
        if name in self.served.damaged:
            self.served.damaged.remove(name)
            body = body[:-1] + bytes([body[-1] ^ 1])
        end = self.served.break_after.pop(name, None)
        if name in self.served.hang_after:
            self.wfile.write(body[: self.served.hang_after.pop(name)])
            self.served.has_hung.set()
            self.rfile.read(1)
            self.close_connection = True
            return
        self.wfile.write(body[:end])
        self.close_connection = end is not None


def _etag(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if name.endswith(".safetensors") else _git_digest(content)


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
