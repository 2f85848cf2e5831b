"""``quartet chat`` at a real terminal (a pseudo one): it streams, Ctrl-C cancels an answer, Ctrl-D leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from quartet.errors import InvalidRequestError, MediaNotAllowedError
from quartet.v1 import router_pb2
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter

TIMEOUT_S = 90.0
CTRL_C = b"\x03"
CTRL_D = b"\x04"


class Terminal:
    """A process at a pseudo-terminal."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self._process = process
        self._master = master
        self._arrived = asyncio.Event()
        self._seen = b""
        asyncio.get_running_loop().add_reader(master, self._read)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    async def interrupt_until(self, text: str) -> None:
        """Ctrl-C until ``text`` comes: CPython misses one that arrives just before it waits for keys."""
        for _ in range(10):
            self.type(CTRL_C)
            with contextlib.suppress(TimeoutError):
                return await self.expect(text, timeout_s=5.0)
        raise TimeoutError(f"{text!r} never came")

    async def expect(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait for ``text`` and forget all up to it."""
        async with asyncio.timeout(timeout_s):
            while text.encode() not in self._seen:
                self._arrived.clear()
                await self._arrived.wait()
        self._seen = self._seen.partition(text.encode())[2]

    async def exit_code(self) -> int:
        async with asyncio.timeout(TIMEOUT_S):
            return await self._process.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)

    def _read(self) -> None:
        try:
            self._seen += os.read(self._master, 4096)
        except OSError:  # no process holds the other end any more
            asyncio.get_running_loop().remove_reader(self._master)
        self._arrived.set()


StartChat = Callable[..., Awaitable[Terminal]]


@pytest.fixture
async def start_chat() -> AsyncIterator[StartChat]:
    """Starts ``quartet chat ARGUMENT...`` at the router of this address."""
    started: list[tuple[Terminal, asyncio.subprocess.Process]] = []

    async def start(address: str, *arguments: str) -> Terminal:
        master, slave = pty.openpty()
        code = (
            # Ctrl-C comes from the terminal to the session that it controls.
            "import fcntl, os, sys, termios\n"
            "os.setsid()\n"
            "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            "from cli.app import main\n"
            f"sys.argv = ['quartet', 'chat', '--router', {address!r}, '--seed', '5', *{arguments!r}]\n"
            "main()\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        terminal = Terminal(process, master)
        started.append((terminal, process))
        return terminal

    yield start
    for terminal, process in started:
        terminal.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_conversation_grows_and_ctrl_d_leaves(start_router: StartRouter, start_chat: StartChat) -> None:
    router = FakeRouter()
    terminal = await start_chat(await start_router(router), "--time")
    await terminal.expect("> ")
    terminal.type(b"Hello\n")
    await terminal.expect("one two three")
    await terminal.expect("time: transfer 125 ms (250 MB by shm 2 GB/s)")
    await terminal.expect("> ")
    terminal.type(b"And?\n")
    await terminal.expect("one two three")
    await terminal.expect("> ")
    terminal.type(CTRL_D)
    assert await terminal.exit_code() == 0
    assert [(message.role, message.content) for message in router.starts[1].chat.messages] == [
        ("user", "Hello"),
        ("assistant", "one two three"),
        ("user", "And?"),
    ]
    assert router.starts[1].seed == 5


async def test_ctrl_c_cancels_the_answer_and_only_that(start_router: StartRouter, start_chat: StartChat) -> None:
    router = FakeRouter()
    router.hold_after = 1
    terminal = await start_chat(await start_router(router))
    await terminal.expect("> ")
    terminal.type(b"Hello\n")
    await terminal.expect("one")
    async with asyncio.timeout(TIMEOUT_S):
        await router.holding.wait()
    terminal.type(CTRL_C)
    await terminal.expect("(cancelled)")
    async with asyncio.timeout(TIMEOUT_S):
        await router.dropped.wait()
    await terminal.expect("> ")
    await terminal.interrupt_until("(Ctrl-D leaves)")
    router.hold_after = None
    await terminal.expect("> ")
    terminal.type(b"Again\n")
    await terminal.expect("one two three")
    await terminal.expect("> ")
    terminal.type(CTRL_D)
    assert await terminal.exit_code() == 0


async def test_ctrl_c_after_a_call_keeps_the_call_its_result_and_what_came(
    start_router: StartRouter, start_chat: StartChat
) -> None:
    router = FakeRouter()
    call = router_pb2.ToolCallDelta(id="c", name="calculator", arguments='{"expression": "6*7"}', is_complete=True)
    router.answers = [[router_pb2.Delta(tool_calls=[call])]]
    router.hold_after = 1
    terminal = await start_chat(await start_router(router))
    await terminal.expect("> ")
    terminal.type(b"Hello\n")
    await terminal.expect("42")
    await terminal.expect("one")
    async with asyncio.timeout(TIMEOUT_S):
        await router.holding.wait()
    terminal.type(CTRL_C)
    await terminal.expect("(cancelled)")
    router.hold_after = None
    await terminal.expect("> ")
    terminal.type(b"Again\n")
    await terminal.expect("one two three")
    assert [(message.role, message.content) for message in router.starts[2].chat.messages] == [
        ("user", "Hello"),
        ("assistant", ""),
        ("tool", "42"),
        ("assistant", "one"),
        ("user", "Again"),
    ]


async def test_a_refused_message_does_not_end_the_conversation(
    start_router: StartRouter, start_chat: StartChat
) -> None:
    router = FakeRouter()
    router.error = InvalidRequestError("too long", field="chat")
    terminal = await start_chat(await start_router(router))
    await terminal.expect("> ")
    terminal.type(b"Hello\n")
    await terminal.expect("INVALID_ARGUMENT INVALID_FIELD (chat): too long")
    router.error = None
    await terminal.expect("> ")
    terminal.type(b"Hi\n")
    await terminal.expect("one two three")
    await terminal.expect("> ")
    terminal.type(CTRL_D)
    assert await terminal.exit_code() == 0
    assert len(router.starts[1].chat.messages) == 1


def pieces(message: router_pb2.ChatMessage) -> list[str | bytes]:
    """Of its text, pictures and URLs, in order."""
    return [part.text or part.media.data or part.media.url for part in message.parts]


async def test_pictures_go_with_the_next_message_and_stay_in_the_conversation(
    start_router: StartRouter, start_chat: StartChat, tmp_path: Path
) -> None:
    (tmp_path / "a b.png").write_bytes(b"first")
    (tmp_path / "c.png").write_bytes(b"second")
    router = FakeRouter()
    terminal = await start_chat(await start_router(router), "--image", str(tmp_path / "a b.png"))
    await terminal.expect("> ")
    terminal.type(b"Hello\n")
    await terminal.expect("one two three")
    for line in (f"/image {tmp_path / 'c.png'}", "/image https://example.org/d.png"):
        await terminal.expect("> ")
        terminal.type(f"{line}\n".encode())
    await terminal.expect("> ")
    terminal.type(b"And these?\n")
    await terminal.expect("one two three")
    await terminal.expect("> ")
    terminal.type(b"Why?\n")
    await terminal.expect("one two three")
    await terminal.expect("> ")
    terminal.type(CTRL_D)
    assert await terminal.exit_code() == 0
    first, _, second, _, third = router.starts[2].chat.messages
    assert pieces(first) == [b"first", "Hello"]
    assert pieces(second) == [b"second", "https://example.org/d.png", "And these?"]
    assert (third.content, len(third.parts)) == ("Why?", 0)


async def test_a_picture_that_cannot_be_used_spoils_only_its_message(
    start_router: StartRouter, start_chat: StartChat, tmp_path: Path
) -> None:
    router = FakeRouter()
    terminal = await start_chat(await start_router(router))
    for line, said in [("/image", "takes a file or a URL"), (f"/image {tmp_path}/no.png", "No such file")]:
        await terminal.expect("> ")
        terminal.type(f"{line}\n".encode())
        await terminal.expect(said)
    router.error = MediaNotAllowedError("no URLs are allowed")
    await terminal.expect("> ")
    terminal.type(b"/image https://example.org/d.png\n")
    await terminal.expect("> ")
    terminal.type(b"Look\n")
    await terminal.expect("PERMISSION_DENIED MEDIA_NOT_ALLOWED: no URLs are allowed; its pictures are dropped with it")
    router.error = None
    await terminal.expect("> ")
    terminal.type(b"Hi\n")
    await terminal.expect("one two three")
    await terminal.expect("> ")
    terminal.type(CTRL_D)
    assert await terminal.exit_code() == 0
    [message] = router.starts[1].chat.messages
    assert (message.content, len(message.parts)) == ("Hi", 0)


async def test_more_than_a_request_holds_does_not_end_the_conversation(
    start_router: StartRouter, start_chat: StartChat, tmp_path: Path
) -> None:
    with (tmp_path / "big.png").open("wb") as sparse:
        sparse.truncate(64 * 1024 * 1024)
    terminal = await start_chat(await start_router(FakeRouter()), "--image", str(tmp_path / "big.png"))
    await terminal.expect("> ")
    terminal.type(b"Look\n")
    await terminal.expect("the request is longer than 64 MiB; its pictures are dropped with it")
    await terminal.expect("> ")
    terminal.type(b"Hi\n")
    await terminal.expect("one two three")
