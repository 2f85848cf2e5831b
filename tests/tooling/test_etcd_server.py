"""The etcd of the tests does what its methods promise: other tests rest on it."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request

import pytest

from tests.etcd_server import EtcdServer


def call(server: EtcdServer, method: str, **body: object) -> dict[str, object]:
    request = urllib.request.Request(f"http://{server.endpoint}/v3/{method}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        reply: dict[str, object] = json.load(answer)
    return reply


def put(server: EtcdServer, key: bytes) -> None:
    call(server, "kv/put", key=base64.b64encode(key).decode(), value="")


def count(server: EtcdServer, key: bytes) -> int:
    return int(str(call(server, "kv/range", key=base64.b64encode(key).decode()).get("count", 0)))


def test_a_restart_keeps_the_data_and_a_wipe_loses_it(etcd: EtcdServer) -> None:
    put(etcd, b"kept")
    etcd.restart()
    assert count(etcd, b"kept") == 1
    etcd.wipe()
    assert count(etcd, b"kept") == 0
    assert etcd.revision() == 1


def test_history_before_a_compaction_cannot_be_read(etcd: EtcdServer) -> None:
    put(etcd, b"a")
    put(etcd, b"b")
    etcd.compact()
    with pytest.raises(urllib.error.HTTPError) as caught:
        call(etcd, "kv/range", key=base64.b64encode(b"a").decode(), revision=str(etcd.revision() - 1))
    assert b"compacted" in caught.value.read()


def test_a_killed_server_answers_no_client_and_a_frozen_one_can_be_stopped(etcd: EtcdServer) -> None:
    etcd.kill()
    with pytest.raises(OSError, match="refused"):
        etcd.revision()
    etcd.start()
    etcd.pause()
    etcd.stop()
