"""Whether the end of a connection is told, each time."""

from __future__ import annotations

import asyncio

import grpc

from quartet.rpc.channels import create_channel, watch_connection

WAIT_S = 30.0


async def serve(port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, bound


class SeenChannel:
    """A channel that tells when its watcher has seen it connected."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.wait_for_state_change = channel.wait_for_state_change
        self.seen_ready = asyncio.Event()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        state = self._channel.get_state(try_to_connect)
        if state is grpc.ChannelConnectivity.READY:
            self.seen_ready.set()
        return state


async def test_each_loss_is_told_also_where_nobody_calls() -> None:
    server, port = await serve()
    lost: asyncio.Queue[None] = asyncio.Queue()
    async with asyncio.timeout(WAIT_S), create_channel(f"127.0.0.1:{port}", None) as channel:
        seen = SeenChannel(channel)
        watch = watch_connection(seen, lambda: lost.put_nowait(None))  # type: ignore[arg-type]
        watching = asyncio.create_task(watch)
        await channel.channel_ready()  # as the first call does
        for _ in range(3):
            await seen.seen_ready.wait()
            await server.stop(None)
            await lost.get()
            seen.seen_ready.clear()
            server, _ = await serve(port)
        assert lost.empty()
        watching.cancel()
        await server.stop(None)
