"""Channels as every part of the system dials them: a dead host is noticed, a restarted one is found again soon."""

from __future__ import annotations

import grpc

from quartet.rpc.tls import TlsConfig, channel_credentials

#: Bytes of the largest message at the edge; inner streams keep theirs to 1 MiB by themselves.
MAX_EDGE_MESSAGE_BYTES = 64 * 1024 * 1024

#: A host that answers no ping for ``KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS`` is dead.
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000


def create_channel(
    address: str, tls: TlsConfig | None, *, max_receive_message_bytes: int = MAX_EDGE_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """A channel to ``address`` (``host:port``); it connects at the first call and again whenever it must.

    Raises:
        ConfigError: a file of ``tls`` can't be used; names the setting.
    """
    options = _options(max_receive_message_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, channel_credentials(tls), options)


def _options(max_receive_message_bytes: int) -> list[tuple[str, int | str]]:
    return [
        # Without pings a host that lost power would hang every request on it, idle streams included.
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", max_receive_message_bytes),
        ("grpc.max_send_message_length", -1),
        # The default backs off to two minutes: far longer than a worker takes to restart.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Workers are peers on one network; a proxy meant for the way out must not get in between.
        ("grpc.enable_http_proxy", 0),
    ]
