"""What clients and servers of gRPC share: channels, TLS from files, addresses, message limits and the poller's thread.

A channel notices a dead host and soon finds a restarted one.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc.aio import init_grpc_aio, shutdown_grpc_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.errors import ConfigError
from quartet.rpc.certificate_end import certificate_end
from quartet.rpc.secret_file import file_signature

logger = logging.getLogger(__name__)

#: Bytes of the largest message that a client may send, and of the prompt or the media files of one start.
MAX_API_MESSAGE_BYTES = 64 << 20

#: Bytes of the largest message on a long-lived stream: of sessions, of worker streams in either direction, of pulls.
#: Clients in other languages take 4 MiB by default: a message of 5 MiB would end the stream with all its requests. And
#: nothing of a message can be taken back that a slow reader has not read.
MAX_STREAM_MESSAGE_BYTES = 1 << 20

#: A host that answers no ping for ``KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS`` is dead.
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

_CERTIFICATE = "-----BEGIN CERTIFICATE-----"

# Of what comes down a stream and the reader has not asked for, so much may be on the way.
_WINDOW_BYTES = 4096

# Of every channel; without pings a host that lost power would hang every request on it, idle streams included.
_OPTIONS: Mapping[str, int | str] = {
    "grpc.keepalive_time_ms": KEEPALIVE_TIME_MS,
    "grpc.keepalive_timeout_ms": KEEPALIVE_TIMEOUT_MS,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.max_receive_message_length": MAX_API_MESSAGE_BYTES,
    "grpc.max_send_message_length": -1,
    # The default backs off to two minutes: far longer than a server takes to restart.
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.min_reconnect_backoff_ms": 1_000,
    "grpc.max_reconnect_backoff_ms": 2_000,
    # Workers are peers on one network; a proxy meant for the way out must not get in between.
    "grpc.enable_http_proxy": 0,
}


def create_channel(address: str, tls: TlsConfig | None, *, is_bulk: bool = False) -> grpc.aio.Channel:
    """A channel to a server of ours at ``address`` (``host:port``); it connects at the first call and after each loss.

    ``is_bulk``: large amounts may come down quickly. Else at most 4 KiB a stream are on the way that the reader
    has not taken, or one message.

    Raises:
        ConfigError: a file of ``tls`` can't be used; names the setting.
    """
    return open_channel(address, None if tls is None else channel_credentials(tls), _our_options(tls, is_bulk=is_bulk))


class Dialer:
    """Opens channels as ``create_channel`` does, for as long as a process runs, each with a connection of its own.

    gRPC lets equal channels of a process share a connection, and the pause after a failed try. A new channel must
    connect at its first call, whatever became of those to processes that served at its address before.

    A channel gets the files of ``tls`` as they are when it is opened, so renewed certificates count. While a file is
    missing or half written, or they don't fit each other, the last good ones are used, and the log says so: it must end
    no task that meets a new worker just then, and the channel keeps what it gets.
    """

    def __init__(self, tls: TlsConfig | None) -> None:
        """Raises ``ConfigError`` if a file of ``tls`` can't be used; names the setting."""
        self._tls = tls
        self._files = None if tls is None else TlsFiles(tls, "dialling")
        self._content = None if self._files is None else self._files.current()
        self._credentials = None if self._content is None else _channel_credentials(self._content)
        # Of each channel that may still connect: when the certificate ends that it has.
        self._ends: weakref.WeakKeyDictionary[grpc.aio.Channel, float] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # of these, which a scrape reads

    def open(self, address: str, *, is_bulk: bool = False) -> grpc.aio.Channel:
        """A channel to ``address``; see ``create_channel``."""
        if self._files is not None and (content := self._files.current()) is not self._content:
            self._content, self._credentials = content, _channel_credentials(content)
        options = {**_our_options(self._tls, is_bulk=is_bulk), "grpc.use_local_subchannel_pool": 1}
        channel = open_channel(address, self._credentials, options)
        if self._content is not None:
            with self._lock:
                self._ends[channel] = self._content.end
        return channel

    def certificate_end(self) -> float | None:
        """Unix time at which the first certificate ends that a channel has, or that a new one would get.

        ``None``: there is no TLS. Any thread may ask.
        """
        if self._files is None:
            return None
        with self._lock:
            ends = list(self._ends.values())
        return min([*ends, self._files.current().end])


def _our_options(tls: TlsConfig | None, *, is_bulk: bool) -> dict[str, int | str]:
    options: dict[str, int | str] = {}
    if not is_bulk:
        # By default a stream's window grows to megabytes: seconds of tokens, each in a message of its own. While they
        # wait at the sender instead, it merges them into few messages.
        options["grpc.http2.bdp_probe"] = 0
        options["grpc.http2.lookahead_bytes"] = _WINDOW_BYTES
    if tls is not None and tls.server_name is not None:
        options["grpc.ssl_target_name_override"] = tls.server_name
    return options


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Mapping[str, int | str]
) -> grpc.aio.Channel:
    """A channel to any gRPC server; ``options`` go before those that all channels have. No ``credentials``: no TLS."""
    merged = list({**_OPTIONS, **options}.items())
    if credentials is None:
        return grpc.aio.insecure_channel(address, merged)
    return grpc.aio.secure_channel(address, credentials, merged)


async def watch_connection(channel: grpc.aio.Channel, on_lost: Callable[[], None]) -> None:
    """Call ``on_lost`` whenever ``channel`` loses its connection, also while no call runs on it. Runs until cancelled.

    The first call connects it. After each loss it is connected again at once: else the next loss would be missed.
    """
    was_ready = False
    while True:
        state = channel.get_state(try_to_connect=was_ready)
        await channel.wait_for_state_change(state)
        if state is grpc.ChannelConnectivity.READY:
            was_ready = True
            on_lost()


async def is_serving(address: str, tls: TlsConfig | None = None, *, service: str = "", timeout_s: float = 1.0) -> bool:
    """Whether ``service`` (empty: all of the server) at ``address`` says SERVING within ``timeout_s`` seconds.

    Raises:
        ConfigError: a file of ``tls`` can't be used.
    """
    channel = create_channel(address, tls)
    try:
        request = health_pb2.HealthCheckRequest(service=service)
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return False
    finally:
        await channel.close()
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """Files of one process's identity, PEM; the same for what it serves and what it dials.

    Attributes:
        ca_file: certificates that peers' certificates must lead to.
        cert_file: the own certificate chain; its URI SAN says who this process is (see ``quartet.rpc.audience``).
        key_file: the own private key.
        require_client_cert: callers must show a certificate. Without it none is asked for and every caller is a client
            (see ``Audience``): good for a router, useless for a worker, which only peers call.
        server_name: what a dialled server's certificate must be made out to. ``None``: the host that is dialled.
    """

    ca_file: Path
    cert_file: Path
    key_file: Path
    require_client_cert: bool = True
    server_name: str | None = None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials to serve with: new connections get the files as they are then."""
    served = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Threads of gRPC's ask before each handshake, one after the other; ``None`` changes nothing."""
        nonlocal served
        content = files.current()
        if content is served:
            return None
        served = content
        return _served(content)

    return grpc.dynamic_ssl_server_credentials(
        _served(served),
        changed,  # type: ignore[arg-type]  # the stub does not know of None
        require_client_authentication=files.tls.require_client_cert,
    )


def _served(content: TlsContent) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(content.key, content.cert)], root_certificates=content.ca)


@dataclass(frozen=True, kw_only=True)
class TlsContent:
    """What the files of a ``TlsConfig`` hold.

    Attributes:
        key, cert, ca: PEM.
        end: Unix time at which the first certificate in ``cert`` ends.
    """

    key: bytes
    cert: bytes
    ca: bytes
    end: float


class TlsFiles:
    """The files of a ``TlsConfig``, which may be replaced one after the other while they are used. Any thread may ask.

    Attributes:
        tls: which files.
    """

    def __init__(self, tls: TlsConfig, use: str, *, count: Callable[[bool], None] = lambda is_used: None) -> None:
        """Read them.

        Args:
            tls: which files.
            use: what they are for, in the log.
            count: is told of each change of them whether they could be used, by the thread that asks for them.

        Raises:
            ConfigError: a file can't be used; names the setting.
        """
        self.tls = tls
        self._use = use
        self._count = count
        self._lock = threading.Lock()
        self._signatures = self._poll()
        self._content = _read(tls)
        check_pair("tls", tls.cert_file, tls.key_file, tls.ca_file)

    def current(self) -> TlsContent:
        """What they hold now: the same object until that changes.

        Changed files that can't be used, or don't fit each other, are logged once, and those of before stay.
        """
        with self._lock:
            signatures = self._poll()
            if signatures != self._signatures:
                self._reread(signatures)
            return self._content

    def _reread(self, signatures: tuple[object, ...]) -> None:
        try:
            content = _read(self.tls)
            check_pair("tls", self.tls.cert_file, self.tls.key_file, self.tls.ca_file)
        except ConfigError as error:
            self._signatures = signatures
            logger.warning("%s goes on with the certificates of before: %s", self._use, error)
            self._count(False)
            return
        if self._poll() != signatures:
            return  # they are being written: what was read need not be what was checked
        self._signatures, self._content = signatures, content
        logger.info("%s with new certificates", self._use)
        self._count(True)

    def _poll(self) -> tuple[object, ...]:
        return tuple(file_signature(path) for path in (self.tls.key_file, self.tls.cert_file, self.tls.ca_file))


def check_pair(setting: str, cert_file: Path, key_file: Path, ca_file: Path | None = None) -> None:
    """Raises ``ConfigError``, naming ``setting``: the key is not the certificate's, or authorities are malformed."""
    try:
        # In a context of its own: a failure may leave half of it loaded.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without a password OpenSSL asks for one at the terminal.
        context.load_cert_chain(cert_file, key_file, password="")
        if ca_file is not None:
            context.load_verify_locations(ca_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{setting}: the files can't be used together: {error}") from error


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Credentials to dial with. Raises ``ConfigError`` naming the setting whose file can't be used."""
    return _channel_credentials(_read(tls))


def _channel_credentials(content: TlsContent) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=content.ca, private_key=content.key, certificate_chain=content.cert
    )


def _read(tls: TlsConfig) -> TlsContent:
    # gRPC notices a wrong file only at the first handshake, and then only in its own log.
    key = read_pem("tls.key_file", tls.key_file, "PRIVATE KEY-----")
    cert, end = read_certificate("tls.cert_file", tls.cert_file)
    return TlsContent(key=key, cert=cert, ca=read_pem("tls.ca_file", tls.ca_file, _CERTIFICATE), end=end)


def read_certificate(setting: str, path: Path) -> tuple[bytes, float]:
    """The PEM file of a certificate chain that ``setting`` names, and when it ends, in Unix time.

    Raises:
        ConfigError: the file can't be used; names the setting.
    """
    cert = read_pem(setting, path, _CERTIFICATE)
    try:
        return cert, certificate_end(cert)
    except ValueError as error:
        raise ConfigError(f"{setting}: {path} can't be read: {error}") from error


def read_pem(setting: str, path: Path, marker: str) -> bytes:
    """The PEM file that ``setting`` names. Raises ``ConfigError`` naming it: unreadable, or there is no ``marker``."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    if marker.encode() not in content:
        raise ConfigError(f"{setting}: {path} holds no {marker.strip('-').removeprefix('BEGIN ').lower()} in PEM form")
    return content


@dataclass(frozen=True)
class ListenAddress:
    """Where a server listens.

    Attributes:
        host: a name, or an IP address; IPv6 in brackets.
        port: 0 takes a free one.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str) -> ListenAddress:
        """Read ``host:port``. Raises ``ConfigError`` naming ``field``."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) >= 2**16:
            raise ConfigError(f"{field}: must be host:port, not {text!r}")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can reach it."""
        ip = self._ip
        return self.host == "localhost" if ip is None else ip.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all addresses of this host: it can be listened on, but not dialled."""
        # ZMQ writes an asterisk for 0.0.0.0.
        return self.host == "*" or (self._ip is not None and self._ip.is_unspecified)

    def require_loopback(self, field: str, remedy: str) -> None:
        """Refuse an address that others can reach. Raises ``ConfigError`` naming ``field`` and the ``remedy``."""
        if not self.is_loopback:
            raise ConfigError(f"{field}: {self.host}:{self.port} is not loopback: it takes {remedy}")

    @property
    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return ipaddress.ip_address(self.host.removeprefix("[").removesuffix("]"))
        except ValueError:
            return None


@contextmanager
def yielding_poller() -> Iterator[None]:
    """Run gRPC so that its poller thread does not interrupt other threads when it wakes up; use it in an event loop.

    The poller wakes up for each message to notify the event loop. By default the kernel lets it interrupt the thread on
    that core, mostly the event loop itself in the middle of its next message. Under SCHED_BATCH it waits for a free
    core, and then notifies of everything that has ended at once. A process with another policy than the default is left
    as it is.
    """
    is_default = sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER
    if is_default:
        _schedule(os.SCHED_BATCH)
    try:
        init_grpc_aio()  # the thread has its parent's policy
    finally:
        if is_default:
            _schedule(os.SCHED_OTHER)
    try:
        yield
    finally:
        shutdown_grpc_aio()


def _schedule(policy: int) -> None:
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError as error:  # a sandbox may forbid it
        logger.debug("the scheduling policy stays as it is: %s", error)
