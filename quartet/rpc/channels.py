"""Channels as every part of the system dials them: a dead host is noticed, a restarted one is found again soon."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from quartet.rpc.tls import TlsConfig, channel_credentials

#: Bytes of the largest message at the edge; inner streams keep theirs to 1 MiB by themselves.
MAX_EDGE_MESSAGE_BYTES = 64 * 1024 * 1024

#: A host that answers no ping for ``KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS`` is dead.
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000


def create_channel(address: str, tls: TlsConfig | None, *, is_bulk: bool = False) -> grpc.aio.Channel:
    """A channel to ``address`` (``host:port``); it connects at the first call and again whenever it must.

    With ``is_bulk`` large amounts may come down quickly; else what a reader has not taken yet stays at 64 KiB a stream.

    Raises:
        ConfigError: a file of ``tls`` can't be used; names the setting.
    """
    options = _options()
    if not is_bulk:
        # By default a stream's window grows to megabytes. Seconds of tokens would lie in there, one by one, that
        # the sender merges into few messages as long as they wait on its side.
        options.append(("grpc.http2.bdp_probe", 0))
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, channel_credentials(tls), options)


async def watch_connection(channel: grpc.aio.Channel, on_lost: Callable[[], None]) -> None:
    """Call ``on_lost`` whenever ``channel`` loses its connection, calls or none on it. Runs until cancelled.

    The first call connects it. From then on it is connected again after each loss: else the next one would be missed.
    """
    was_ready = False
    while True:
        state = channel.get_state(try_to_connect=was_ready)
        await channel.wait_for_state_change(state)
        if state is grpc.ChannelConnectivity.READY:
            was_ready = True
            on_lost()


def _options() -> list[tuple[str, int | str]]:
    return [
        # Without pings a host that lost power would hang every request on it, idle streams included.
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAX_EDGE_MESSAGE_BYTES),
        ("grpc.max_send_message_length", -1),
        # The default backs off to two minutes: far longer than a worker takes to restart.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Workers are peers on one network; a proxy meant for the way out must not get in between.
        ("grpc.enable_http_proxy", 0),
    ]
