"""The HTTP server itself: who may call, how many, how large, how slowly, and its end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import HttpVersion11, web
from grpc import StatusCode

from quartet.errors import ConfigError, MediaTooLargeError, MessageTooLargeError, UnauthenticatedError
from quartet.rpc.certificate_end import certificate_end
from quartet.rpc.channels import TlsConfig, check_pair
from quartet.rpc.errors import STATUS as GRPC_CODES
from quartet.rpc.server import ServerConfig
from quartet.telemetry.targets import Target
from router.client_address import client_address
from router.config import RouterConfig
from router.http import keys as keys_module
from router.http.config import HttpConfig, HttpTlsConfig
from router.http.connections import Connections
from router.http.errors import STATUS, http_code, to_parameter
from router.http.events import EventStream, EventWriter
from router.http.keys import ApiKeys, Certificates
from tests.certificates import CertificateAuthority
from tests.router.fakes import TIMEOUT_S, Plan
from tests.router.http.face import Face, open_face, until

ACME, GLOBEX = "acme-key-0123456789", "globex-key-0123456789"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def write_keys(path: Path, *lines: str) -> Path:
    path.touch(mode=0o600)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


async def raw(face: Face, sent: bytes) -> bytes:
    """What the server answers to bytes, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(TIMEOUT_S):
            return await reader.read()
    finally:
        writer.close()


async def test_a_key_names_the_tenant_and_without_one_only_health_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="router.request_log")
    keys = write_keys(tmp_path / "keys", "# who", "", f"acme {ACME}", f"globex {GLOBEX}")
    async with open_face(config=HttpConfig(keys_file=keys)) as face:
        for headers in ({}, {"Authorization": "Bearer nope"}, {"Authorization": f"Basic {ACME}"}):
            status, answer = await face.post("/v1/chat/completions", CHAT, **headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
            assert answer["error"]["code"] == "invalid_api_key"
        assert (await face.get("/v1/models"))[0] == 401
        assert (await face.get("/health"))[0] == (await face.get("/version"))[0] == 200
        assert (await face.get("/metrics"))[0] == 401
        for tenant, key in (("acme", ACME), ("globex", GLOBEX)):
            status, _ = await face.post("/v1/chat/completions", CHAT, Authorization=f"Bearer {key}")
            assert status == 200
            assert caplog.records[-1].quartet_fields["tenant"] == tenant
        # Many wrong keys have come from this address.
        face.server._refusals._paid_at["127.0.0.1"] = time.monotonic() + 3_600
        unknown = asyncio.create_task(face.get("/v1/models", Authorization="Bearer nope"))
        await until(lambda: bool(face.server._refusals._num_unread))
        assert (await face.get("/v1/models", Authorization=f"Bearer {ACME}"))[0] == 200
        assert not unknown.done()
        unknown.cancel()
        write_keys(keys, f"acme {GLOBEX}")
        status, _ = await face.post("/v1/chat/completions", CHAT, Authorization=f"Bearer {GLOBEX}")
        assert status == 200


def test_keys_are_read_again_when_they_change_and_kept_while_they_are_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    path = write_keys(tmp_path / "keys", f"acme {ACME}", "hashed sha256:" + "0" * 64)
    counted: list[bool] = []
    keys = ApiKeys(path, clock=lambda: now[0], count=counted.append)
    assert keys.find(f"bearer  {ACME}").tenant == "acme"
    write_keys(path, f"globex {GLOBEX}")
    assert keys.find(f"Bearer {ACME}").tenant == "acme"  # not looked at again yet
    now[0] = 2.0
    assert keys.find(f"Bearer {GLOBEX}").tenant == "globex"
    write_keys(path, f"acme {ACME}", "broken")
    now[0] = 4.0
    with caplog.at_level(logging.WARNING):
        assert keys.find(f"Bearer {GLOBEX}").tenant == "globex"
    assert "line 2" in caplog.text and ACME not in caplog.text
    write_keys(path, "# nobody for now")
    now[0] = 6.0
    with pytest.raises(UnauthenticatedError):
        keys.find(f"Bearer {GLOBEX}")
    assert counted == [True, False, True]


def test_a_key_that_was_just_added_is_known_sooner_than_one_that_was_taken_out_is_forgotten(tmp_path: Path) -> None:
    now = [0.0]
    path = write_keys(tmp_path / "keys", f"acme {ACME}")
    keys = ApiKeys(path, clock=lambda: now[0])
    write_keys(path, f"globex {GLOBEX}")
    now[0] = 0.1
    assert keys.find(f"Bearer {ACME}").tenant == "acme"
    assert keys.find(f"Bearer {GLOBEX}").tenant == "globex"


@pytest.mark.parametrize(
    "lines", [["acme short"], [], ["acme a b"], [f"a {ACME}", f"b {ACME}"], ["x" * 300 + f" {ACME}"]]
)
def test_impossible_key_files_are_refused_without_a_word_of_the_keys(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"http\.keys_file") as refusal:
        ApiKeys(write_keys(tmp_path / "keys", *lines))
    assert ACME not in str(refusal.value)


def test_a_key_file_that_everybody_can_read_is_refused(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", f"acme {ACME}")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        ApiKeys(path)


async def test_certificates_are_replaced_while_it_serves(tmp_path: Path) -> None:
    first, second = CertificateAuthority(tmp_path / "one"), CertificateAuthority(tmp_path / "two")
    files = HttpTlsConfig(cert_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem")

    def install(authority: CertificateAuthority, days: int) -> ssl.SSLContext:
        issued = authority.issue("router", "quartet://default/router/router-0", valid=timedelta(days=days))
        files.cert_file.write_bytes(issued.cert_file.read_bytes())
        files.key_file.write_bytes(issued.key_file.read_bytes())
        return ssl.create_default_context(cafile=str(issued.ca_file))

    trust = install(first, 10)
    counted: list[bool] = []
    certificates = Certificates(files, count=counted.append)
    async with open_face(config=HttpConfig(tls=files)) as face:
        async with face.session.get("/health", ssl=trust) as response:
            assert response.status == 200
        first_end = face.server.certificate_end()
        assert first_end is not None
        other = install(second, 300)
        assert face.server._certificates is not None
        assert face.server.certificate_end() == first_end, "it has not looked yet"
        face.server._certificates.refresh()
        second_end = face.server.certificate_end()
        assert second_end == certificate_end(files.cert_file.read_bytes()) != first_end
        async with aiohttp.ClientSession(f"https://127.0.0.1:{face.port}") as session:
            async with session.get("/health", ssl=other) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get("/version", ssl=trust, headers={"Connection": "close"})
        files.cert_file.write_bytes(first.issue("router", "quartet://default/router/router-1").cert_file.read_bytes())
        face.server._certificates.refresh()  # the certificate is new already, its key is not
        assert face.server.certificate_end() == second_end
        async with (
            aiohttp.ClientSession(f"https://127.0.0.1:{face.port}") as session,
            session.get("/health", ssl=other) as response,
        ):
            assert response.status == 200
    files.key_file.write_text("half")
    certificates.refresh()  # logs, and goes on
    assert counted == [False]


def test_certificates_that_change_while_they_are_checked_are_loaded_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = CertificateAuthority(tmp_path / "one")
    files = HttpTlsConfig(cert_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem")

    def install(name: str) -> None:
        issued = authority.issue(name, f"quartet://default/router/{name}")
        files.cert_file.write_bytes(issued.cert_file.read_bytes())
        files.key_file.write_bytes(issued.key_file.read_bytes())

    install("first")
    counted: list[bool] = []
    certificates = Certificates(files, count=counted.append)
    install("second")

    def check_then_replace(*given: Any) -> None:
        check_pair(*given)
        install("third")
        monkeypatch.setattr(keys_module, "check_pair", check_pair)

    monkeypatch.setattr(keys_module, "check_pair", check_then_replace)
    certificates.refresh()
    assert counted == []
    certificates.refresh()
    certificates.refresh()
    assert counted == [True]


def test_http_is_no_way_round_what_grpc_asks_of_callers(tmp_path: Path) -> None:
    tls = TlsConfig(ca_file=tmp_path, cert_file=tmp_path, key_file=tmp_path)
    with pytest.raises(ConfigError, match=r"http\.host"):
        RouterConfig(http=HttpConfig(port=8000, host="0.0.0.0"))
    with pytest.raises(ConfigError, match=r"http\.keys_file"):
        RouterConfig(http=HttpConfig(port=8000), server=ServerConfig(tls=tls), events_key_file=tmp_path / "key")
    RouterConfig(http=HttpConfig(host="0.0.0.0"))  # it is off


async def test_it_listens_on_an_ipv6_address_in_brackets() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    async with (
        open_face(config=HttpConfig(host="[::1]")) as face,
        aiohttp.ClientSession() as session,
        session.get(f"http://[::1]:{face.port}/health") as response,
    ):
        assert response.status == 200


async def test_connections_beyond_the_bounds_are_refused_and_make_room_when_they_end() -> None:
    async with open_face(config=HttpConfig(max_connections_of_address=2)) as face:
        held = [await asyncio.open_connection("127.0.0.1", face.port) for _ in range(2)]
        await until(lambda: len(face.server._connections) == 2)
        refusal = await raw(face, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert refusal.startswith(b"HTTP/1.1 503 ") and b"max_connections_of_address" in refusal
        for _, writer in held:
            writer.close()
        await until(lambda: not len(face.server._connections))
        assert (await face.get("/health"))[0] == 200


async def test_events_of_a_stream_do_not_wait_for_the_acknowledgement_of_those_before() -> None:
    async with open_face() as face:
        _, writer = await asyncio.open_connection("127.0.0.1", face.port)
        await until(lambda: len(face.server._connections) == 1)
        [connection] = face.server._connections._open
        assert connection._io is not None
        accepted = connection._io.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


async def test_a_tenant_has_a_bound_of_requests(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", f"acme {ACME}", f"globex {GLOBEX}")
    async with open_face(config=HttpConfig(keys_file=keys, max_requests_of_tenant=1)) as face:
        face.fleet.hops.plan("decode", Plan(hang_after=1))
        headers = {"Authorization": f"Bearer {ACME}"}
        async with face.session.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers):
            status, answer = await face.post("/v1/chat/completions", CHAT, **headers)
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            status, _ = await face.post("/v1/chat/completions", CHAT, Authorization=f"Bearer {GLOBEX}")
            assert status == 200
        await face.until_nothing_left()
        assert (await face.post("/v1/chat/completions", CHAT, **headers))[0] == 200


async def test_slow_or_endless_requests_end_in_time() -> None:
    config = HttpConfig(idle_timeout_s=0.3, body_timeout_s=0.3)
    async with open_face(config=config) as face:
        assert await raw(face, b"") == b""  # says nothing
        assert await raw(face, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nA: ") == b""  # half a head
        late = await raw(face, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert late.startswith(b"HTTP/1.1 504 ") and b"did not come" in late
        face.server._bodies._enter = lambda *_arguments: asyncio.Event().wait()  # its turn never comes
        status, answer = await face.post("/v1/completions", {"prompt": "a" * 50_000})
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert not face.server._bodies._num_held


async def test_a_client_that_takes_nothing_of_its_answer_is_cut() -> None:
    async with open_face(stall_timeout_s=0.2) as face:
        tending = asyncio.create_task(face.server.tend())
        reader, writer = await asyncio.open_connection("127.0.0.1", face.port, limit=1)
        request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.transport.pause_reading()
        try:
            await until(lambda: _ask_again(writer, request) or not len(face.server._connections))
        finally:
            writer.close()
            tending.cancel()
            del reader


class FakeTransport:
    """A connection's transport: what waits to be taken is set by hand.

    Attributes:
        unread: bytes that wait.
        is_cut: it was aborted.
    """

    def __init__(self) -> None:
        self.unread = 0
        self.is_cut = False

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 5) if name == "peername" else None

    def is_closing(self) -> bool:
        return self.is_cut

    def write(self, data: bytes) -> None:
        self.unread += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.is_cut = True


@pytest.fixture
async def watched() -> tuple[Connections, FakeTransport]:
    """Connections that are cut after 4 looks without progress, or 10 while an answer is not taken; and one of them."""
    connections = Connections(HttpConfig(body_timeout_s=10.0), stall_timeout_s=4.0)

    async def serve(_request: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError("nothing is asked")

    transport = FakeTransport()
    protocol = connections.protocol(web.Server(serve))()
    protocol.connection_made(transport)  # type: ignore[arg-type]
    return connections, transport


async def test_a_client_that_takes_a_whole_answer_in_drips_is_cut_in_time(
    watched: tuple[Connections, FakeTransport],
) -> None:
    connections, transport = watched
    for num_looks in range(1, 12):
        transport.unread = 1_000_000 - num_looks
        connections.look()
        assert transport.is_cut == (num_looks > 10)


async def test_a_client_that_takes_each_answer_in_time_is_kept(watched: tuple[Connections, FakeTransport]) -> None:
    connections, transport = watched
    for _ in range(5):
        for left in range(8, -1, -1):
            transport.unread = left * 10_000
            connections.look()
    assert not transport.is_cut


@pytest.mark.parametrize("num_taken", [0, 100])
async def test_a_stream_whose_client_takes_less_than_comes_is_kept_and_one_that_takes_nothing_is_cut(
    watched: tuple[Connections, FakeTransport], num_taken: int
) -> None:
    connections, transport = watched
    request: Any = SimpleNamespace(version=HttpVersion11)
    stream = EventStream(request, EventWriter(), max_unread_bytes=1 << 20)
    stream.transport = transport  # type: ignore[assignment]
    connections.watch(stream)
    for _ in range(20):
        stream.send("x" * 1_000)
        stream.write()
        transport.unread -= num_taken
        connections.look()
    assert transport.is_cut == (not num_taken)


async def test_a_long_answer_that_is_taken_in_drips_ends_before_it_is_whole() -> None:
    config = HttpConfig(body_timeout_s=0.4)
    async with open_face(config=config, stall_timeout_s=0.2, max_model_len=60_000, num_blocks=20_000) as face:
        body = json.dumps({"prompt": [72] * 40_000, "return_token_strs": True}).encode()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        tending = asyncio.create_task(face.server.tend())
        try:
            await loop.sock_connect(client, ("127.0.0.1", face.port))
            await until(lambda: len(face.server._connections) == 1)
            [connection] = face.server._connections._open
            connection._io.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
            head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            await loop.sock_sendall(client, head + body)
            async with asyncio.timeout(TIMEOUT_S):
                while face.server._connections:
                    await loop.sock_recv(client, 2_048)
                    await asyncio.sleep(0.005)  # the client is slow
            await until(lambda: not face.server._num_running)
        finally:
            client.close()
            tending.cancel()


def _ask_again(writer: asyncio.StreamWriter, request: bytes) -> bool:
    writer.write(request * 20)
    return False


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 100 + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 20_000 + b"\r\n\r\n", 400),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Encoding: gzip\r\n\r\nxx", 415),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    ],
)
async def test_what_is_no_http_or_too_much_of_it_is_refused(sent: bytes, code: int) -> None:
    async with open_face(config=HttpConfig(idle_timeout_s=0.5)) as face:
        answer = await raw(face, sent)
        assert re.match(rb"HTTP/1\.[01] %d " % code, answer), answer
        assert b"\r\nServer: quartet\r\n" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2].split(b"HTTP/1.1")[0])["error"]["message"]
        face.fleet.assert_nothing_left()


async def test_what_is_no_json_is_refused_without_a_word_of_python() -> None:
    data = b'{"n": ' + b"1" * 5_000 + b"}"
    async with open_face() as face, face.session.post("/v1/completions", data=data) as response:
        assert (response.status, "too many digits" in await response.text()) == (400, True)


async def test_bodies_that_are_being_read_have_a_bound_in_all_and_of_one_caller() -> None:
    config = HttpConfig(max_held_body_bytes=400_000, max_body_bytes=390_000)
    async with open_face(config=config) as face:
        big = b'{"prompt": "' + b"x" * 300_000
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        _, first = await asyncio.open_connection("127.0.0.1", face.port)
        first.write(head % (len(big) + 10) + big)
        await until(lambda: face.server._bodies._num_held >= len(big))
        status, answer = await face.post("/v1/completions", big + b'"}')
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        first.close()
        await until(lambda: not face.server._bodies._num_held)
        status, answer = await face.post("/v1/completions", big + b'"}')
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        status, answer = await face.post("/v1/completions", b"x" * 390_001)
        assert status == 413


async def test_a_chat_of_long_messages_pays_for_its_bytes_in_few_turns() -> None:
    async with open_face() as face:
        enter, works = face.server._bodies._enter, list[int]()

        async def note(tenant: str, work: int) -> None:
            works.append(work)
            await enter(tenant, work)

        face.server._bodies._enter = note
        for num_messages, most_turns in ((100, 3), (4_000, 70)):
            body = json.dumps({"messages": [{"role": "user", "content": "x" * 2_000}] * num_messages, "n": 0}).encode()
            works.clear()
            status, answer = await face.post("/v1/chat/completions", body)
            assert (status, answer["error"]["param"]) == (400, "n")
            assert len(works) <= most_turns and sum(works) <= len(body) // 8


async def test_one_caller_holds_half_of_the_memory_for_bodies_at_most(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", f"acme {ACME}", f"globex {GLOBEX}")
    async with open_face(config=HttpConfig(keys_file=keys, max_held_body_bytes=800_000)) as face:
        big = b'{"prompt": "' + b"x" * 300_000
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n"
        _, first = await asyncio.open_connection("127.0.0.1", face.port)
        first.write(head % (ACME.encode(), len(big) + 10) + big)
        await until(lambda: face.server._bodies._num_held >= len(big))
        codes = {}
        for key in (ACME, GLOBEX):
            _, answer = await face.post("/v1/completions", big + b'"}', Authorization=f"Bearer {key}")
            codes[key] = answer["error"]["type"], answer["error"]["code"]
        assert codes[ACME][0] == "rate_limit_error"
        assert codes[GLOBEX][1] == "context_length_exceeded", "it was read"
        first.close()


async def test_curls_expect_header_is_answered() -> None:
    async with open_face() as face:
        reader, writer = await asyncio.open_connection("127.0.0.1", face.port)
        body = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode())
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_drain_lets_running_requests_end_and_takes_no_new_ones() -> None:
    async with open_face() as face:
        gate = asyncio.Event()
        face.fleet.join("prefill-0")
        face.fleet.hops.plan("prefill", Plan(gate=gate))
        body = {"prompt": list(range(10, 30)), "max_tokens": 2}
        running = asyncio.create_task(face.post("/v1/completions", body))
        await until(lambda: bool(face.fleet.hops.calls))
        reader, writer = await asyncio.open_connection("127.0.0.1", face.port)  # a connection that stands
        draining = asyncio.create_task(face.server.drain(TIMEOUT_S))
        await until(lambda: face.server._is_draining)
        request = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"prompt":"hi"}'
        writer.write(request)
        async with asyncio.timeout(TIMEOUT_S):
            refusal = await reader.read()
        assert refusal.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in refusal
        gate.set()
        assert (await running)[0] == 200
        await draining
        assert not len(face.server._connections)


async def test_health_says_what_is_ready() -> None:
    async with open_face("prefill-0", "decode-0", "decode-1") as face:
        status, shown = await face.get("/health")
        assert (status, shown["status"], shown["roles"]) == (200, "healthy", {"encode": 0, "prefill": 1, "decode": 2})
        assert shown["endpoints"] == [
            "quartet://here/decode/decode-0",
            "quartet://here/decode/decode-1",
            "quartet://here/prefill/prefill-0",
        ]
        assert shown["models"] == [{"name": "tiny", "encode": 0, "prefill": 1, "decode": 2}]
        async with face.session.head("/health") as response:
            assert (response.status, await response.read()) == (200, b"")
        face.is_ready = False
        assert (await face.get("/health"))[0] == 503


async def test_a_head_is_bounded_as_a_whole_also_before_it_is_whole() -> None:
    fields = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 8_000) for number in range(6))
    async with open_face() as face:
        for head in (fields, fields + b"\r\n"):
            refused = await raw(face, b"GET /version HTTP/1.1\r\nHost: x\r\n" + head)
            assert refused.startswith(b"HTTP/1.1 431 "), refused
        # However long a body is, the next head begins after it.
        body = b'{"prompt": "hi"' + b" " * 100_000 + b', "max_tokens": 1}'
        request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert (await raw(face, request + request + last)).count(b"HTTP/1.1 200 OK") == 3


async def test_with_keys_only_operators_see_what_all_tenants_do(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", f"acme {ACME}", f"globex {GLOBEX}")
    async with open_face(config=HttpConfig(keys_file=keys, operators=("globex",))) as face:
        status, refused = await face.get("/metrics", Authorization=f"Bearer {ACME}")
        assert status == 403 and "http.operators" in refused["error"]["message"]
        for headers in ({}, {"Authorization": f"Bearer {ACME}"}):
            status, shown = await face.get("/health", **headers)
            assert (status, shown["endpoints"]) == (200, []) and shown["models"]
        operator = {"Authorization": f"Bearer {GLOBEX}"}
        assert (await face.get("/health", **operator))[1]["endpoints"]
        async with face.session.get("/metrics", headers=operator) as response:
            assert "quartet_router_" in await response.text()
        status, refused = await face.get("/prometheus/targets", Authorization=f"Bearer {ACME}")
        assert status == 403 and "http.operators" in refused["error"]["message"]
        async with face.session.get("/prometheus/targets", headers=operator) as response:
            assert (response.content_type, await response.json()) == ("application/json", [])
        near = Target(address="127.0.0.1:1", role="decode", worker_id="decode-0", namespace="here")
        face.server._targets = lambda is_near: [near] if is_near else []
        async with face.session.get("/prometheus/targets", headers=operator) as response:
            assert [group["targets"] for group in await response.json()] == [["127.0.0.1:1"]]
    with pytest.raises(ConfigError, match="operators: "):
        HttpConfig(operators=("globex",))


async def test_paths_that_read_no_body_wait_for_their_turn_and_the_open_ones_have_one_for_all() -> None:
    async with open_face() as face:
        entered: list[str] = []
        enter = face.server._context.intake.enter

        async def noted(tenant: str, num_tokens: int) -> None:
            entered.append(tenant)
            await enter(tenant, num_tokens)

        face.server._context.intake.enter = noted  # type: ignore[method-assign]
        for path in ("/version", "/health", "/v1/models", "/v1/models/tiny"):
            assert (await face.get(path))[0] == 200
        async with face.session.get("/metrics") as response:
            assert response.status == 200
        assert entered == ["/", "/", "", "", ""]


async def test_models_and_their_tokenizers_are_shown() -> None:
    async with open_face(adapters=("poet",)) as face:
        _, models = await face.get("/v1/models")
        assert [(one["id"], one["parent"]) for one in models["data"]] == [("tiny", None), ("poet", "tiny")]
        assert (await face.get("/v1/models/tiny"))[1]["max_model_len"] == models["data"][0]["max_model_len"]
        assert (await face.get("/v1/models/huge"))[0] == (await face.get("/v1/models/"))[0] == 404
        _, missing = await face.post("/detokenize", {})
        assert missing["error"]["message"] == "tokens: is missing"
        _, counted = await face.post("/tokenize", {"prompt": "hello there", "return_token_strs": True})
        assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
        _, bare = await face.post("/tokenize", {"prompt": "hello there", "add_special_tokens": False})
        assert counted["tokens"][1:] == bare["tokens"]
        _, text = await face.post("/detokenize", {"tokens": counted["tokens"]})
        assert text["prompt"].endswith("hello there")
        _, adapter = await face.get("/v1/models/poet")
        assert adapter == models["data"][1] and adapter["id"] == "poet"
        assert (await face.post("/tokenize", {"prompt": "hello there", "model": "poet"}))[1]["tokens"] == counted[
            "tokens"
        ]
        assert (await face.post("/detokenize", {"tokens": counted["tokens"], "model": "poet"}))[1] == text
        status, _ = await face.post("/v1/completions", {"model": "poet", "prompt": "hi", "max_tokens": 1})
        assert status == 200 and face.fleet.hops.calls[-1].start.generation.adapter == "poet"
        async with face.session.get("/metrics") as response:
            assert "quartet_router" in await response.text()


@pytest.mark.parametrize(
    ("host", "counted"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::2", "2001:db8::/64"),
        ("2001:db8:0:0:1:2:3:4", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
    ],
)
def test_connections_of_one_network_count_as_one_clients(host: str, counted: str) -> None:
    class Transport(asyncio.BaseTransport):
        pass

    assert client_address(Transport({"peername": (host, 1234, 0, 0)})) == counted


def test_a_refused_picture_is_named_as_its_client_named_it() -> None:
    assert to_parameter("chat.messages[2].parts[0].media.url") == "messages[2].content[0].image_url.url"
    assert to_parameter("chat.messages[2].parts[0].media") == "messages[2].content[0].image_url"


def test_every_code_of_grpc_has_one_of_http() -> None:
    wanted = {
        StatusCode.CANCELLED: 499,
        StatusCode.UNKNOWN: 500,
        StatusCode.INVALID_ARGUMENT: 400,
        StatusCode.DEADLINE_EXCEEDED: 504,
        StatusCode.NOT_FOUND: 404,
        StatusCode.ALREADY_EXISTS: 409,
        StatusCode.PERMISSION_DENIED: 403,
        StatusCode.UNAUTHENTICATED: 401,
        StatusCode.RESOURCE_EXHAUSTED: 429,
        StatusCode.FAILED_PRECONDITION: 400,
        StatusCode.ABORTED: 500,
        StatusCode.OUT_OF_RANGE: 400,
        StatusCode.UNIMPLEMENTED: 404,
        StatusCode.INTERNAL: 500,
        StatusCode.UNAVAILABLE: 503,
        StatusCode.DATA_LOSS: 500,
    }
    assert wanted.keys() == set(StatusCode) - {StatusCode.OK}
    assert {code: STATUS.get(code.name, STATUS["INTERNAL"])[0] for code in wanted} == wanted
    too_large = {MessageTooLargeError: 413, MediaTooLargeError: 413}
    assert {kind: http_code(kind("no")) for kind in GRPC_CODES} == {
        kind: too_large.get(kind, wanted[code]) for kind, code in GRPC_CODES.items()
    }
